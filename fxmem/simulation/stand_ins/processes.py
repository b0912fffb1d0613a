"""Processes that a program starts for its cards, of which one runs here: `torch.multiprocessing.spawn`, `Process`."""

from __future__ import annotations

import functools
import inspect
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.queues
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch.multiprocessing

from fxmem._torch import common as torch_common
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.code.source_lines import is_own_code
from fxmem.simulation.ranks.world import World

_OF_CARDS: Final = frozenset(("cuda", "init_process_group"))
"""What code names that is a rank's or uses a card."""
_TALKING: Final = (
    multiprocessing.connection.Connection,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
)
"""What one process waits at for another."""


def started_patches(notes: MadeUpNotes, world: World | None) -> torch_common.Patches:
    """Run the process of this rank's card here, in the place where the program starts it, and no other of its kind."""
    per_machine = sys.maxsize if world is None else world.per_machine
    local = 0 if world is None else world.rank % per_machine
    which = "the first runs here, alone" if world is None else "number {} runs here"

    def start_processes(
        original: Callable[..., Any],
        fn: Any,
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        *further: Any,
        **settings: Any,
    ) -> Any:
        if getattr(fn, "__module__", "").startswith("torch."):  # torchrun's agent, which hears of each of its processes
            notes.unfollowed.add("torch.distributed.elastic")
            return original(fn, args, nprocs, join, *further, **settings)
        number = min(local, nprocs - 1)
        notes.note("answered", f"torch.multiprocessing.spawn of {nprocs}: {which.format(number)}")
        code = _run(lambda: fn(number, *args))
        if code or (number and any(isinstance(each, _TALKING) for each in args)):
            sys.exit(code)  # who started it may wait for another one's message
        return None if join else _Started()

    def start(original: Callable[[Any], None], process: Any) -> None:
        if _OF_CARDS.isdisjoint(_find_names(process._target)):
            original(process)
            return
        number = _find_number(process)
        if number is None:
            notes.unfollowed.add(getattr(process._target, "__name__", "a function"))
            original(process)
            return
        code = 0
        if number % per_machine == local:
            notes.note("answered", f"multiprocessing.Process: {which.format(number)}")
            code = _run(process.run)
        process._Popen = lambda _: _Over(code)
        original(process)

    for name in ("spawn", "start_processes"):
        yield torch_common.wrap(torch.multiprocessing, name, start_processes)
    yield torch_common.wrap(multiprocessing.process.BaseProcess, "start", start)


def _run(work: Callable[[], object]) -> int:
    """The exit code of a process that does this."""
    try:
        work()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def _find_number(process: Any) -> int | None:
    """The number that a process for a card is given first; None where it has none, or waits for messages of others."""
    args = (*process._args, *process._kwargs.values())
    if not args or type(args[0]) is not int or process.daemon or any(isinstance(each, _TALKING) for each in args):
        return None
    number: int = args[0]
    return number


def _find_names(target: Any) -> Iterator[str]:
    """The names in a function of the program's own, and in what it names of its own: functions, classes, modules."""
    pending, seen = [target], set[int]()
    while pending:
        found = pending.pop()
        while isinstance(found, (functools.partial, types.MethodType)):
            found = found.func if isinstance(found, functools.partial) else found.__func__
        if isinstance(found, type):
            pending += [each for each in vars(found).values() if isinstance(each, types.FunctionType)]
        if not isinstance(found, types.FunctionType) or id(found) in seen or not is_own_code(found):
            continue
        function = inspect.unwrap(found)
        seen.add(id(found))
        codes, names = [function.__code__], set[str]()
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            names.update(code.co_names, (each.partition(":")[0] for each in code.co_consts if isinstance(each, str)))
        yield from names
        around = [function.__globals__[name] for name in names if name in function.__globals__]
        modules = [vars(each) for each in around if isinstance(each, types.ModuleType)]
        pending += [*around, *(each[name] for each in modules for name in names if name in each)]


class _Over:
    """What `multiprocessing` asks of a process that was started: this one is over."""

    pid = None

    def __init__(self, code: int) -> None:
        self.returncode = code
        self.sentinel, theirs = os.pipe()
        os.close(theirs)  # so that it can be read at once
        weakref.finalize(self, os.close, self.sentinel)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, at once."""
        return self.returncode

    def poll(self, flag: int = 0) -> int:
        """Its exit code."""
        return self.returncode

    def terminate(self) -> None:
        """Nothing: it is over."""

    kill = close = terminate


class _Started:
    """What `spawn(join=False)` returns of processes that are over."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True: all have ended."""
        return True

    def pids(self) -> list[int]:
        """Of none."""
        return []
