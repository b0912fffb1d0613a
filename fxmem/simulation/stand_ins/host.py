"""Data loaders, what torch traces, and processes of a program that runs on a pretended card.

It is one rank, alone or of ranks that do not run.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.machinery
import inspect
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.queues
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.device_mesh
import torch.multiprocessing
import torch.nn.parallel
import torch.utils.data

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem._torch import programs as torch_programs
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.card.device_border import Border, has_fake_inside, move_to_card
from fxmem.simulation.code.source_lines import is_own_code
from fxmem.simulation.ranks import reducer
from fxmem.simulation.ranks.mailbox import World, mail_patches

# --- processes that a program starts for its cards, of which one runs here --------------------------------------------
# `torch.multiprocessing.spawn`, `Process`.


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
    return int(args[0])


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

    poll = wait

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


# --- data loaders, what torch traces, and processes of a program that runs on a pretended card ------------------------


_AS_WRITTEN: Final = b"a module as it was written, number "
"""Before the number of a module in what `torch.jit.save` writes of it."""


def loader_patches(border: Border, *, on_card: bool) -> torch_common.Patches:
    """Data loaders work on the host. Where the host is the target, their batches enter as its inputs."""

    def note_batch(original: Callable[..., Any], loader: Any) -> Any:
        batch = original(loader)
        border.host.note_batch(loader, list(find_tensors(batch)))
        return batch

    def note_loader(original: Callable[..., Any], iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original(iterator, loader, *args, **kwargs)
        border.host.note_loader(iterator, loader)

    yield torch_programs.loaders_at_home(workers=on_card)
    if on_card:
        yield torch_common.wrap(torch_programs.LOADER_ITERATOR, "__init__", note_loader)
        yield torch_common.wrap(torch_programs.LOADER_ITERATOR, "__next__", note_batch)
        return

    def run_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch_common.replace(border, "loading", True), torch_common.no_modes(), torch_common.pause_observers():
            return original(*args, **kwargs)

    def next_batch(original: Callable[..., Any], loader: Any) -> Any:
        batch = torch_common.tree_map_only(torch.Tensor, _entering, run_on_host(original, loader))
        with torch_common.no_modes(), torch_common.pause_observers():
            border.log.note_tensors(list(find_tensors(batch)))
        return batch

    yield torch_common.wrap(torch_programs.LOADER_ITERATOR, "__init__", run_on_host)
    yield torch_common.wrap(torch_programs.LOADER_ITERATOR, "__next__", next_batch)


def _entering(tensor: torch.Tensor) -> torch.Tensor:
    """A batch's tensor on the target: integers keep their values."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def find_tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch of any class, in its containers and attributes."""
    pending, seen = [batch], dict[int, Any]()
    while pending:
        for leaf in torch_common.tree_iter(pending.pop()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, _WITHOUT_BATCHES):
                seen[id(leaf)] = leaf
                pending.append(getattr(leaf, "__dict__", None))


_WITHOUT_BATCHES: Final = (type, types.ModuleType, types.FunctionType, torch.nn.Module)
"""What has attributes and is no part of a batch."""


# --- `type(x) is torch.Tensor` ----------------------------------------------------------------------------------------
# A fake tensor is of a class of its own, and nothing sees `is`. So modules that compare with torch's class, and do
# nothing with `type` but call it, have a `type` of their own.

_COMPARES: Final = re.compile(rb"(?:is|is not|==|!=) (?:torch\.)?Tensor\b|type\(.* in .*\bTensor\b")


def _type_of(value: Any) -> Any:
    kind = type(value)
    if kind is not torch_common.FakeTensor:
        return kind
    return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor


def find_types(file: str) -> dict[str, Any]:
    """`type`, for a module that needs one of its own; nothing for every other."""
    text = Path(file).read_bytes()
    if b"type(" not in text or b"Tensor" not in text or not _COMPARES.search(text):
        return {}
    nodes = list(ast.walk(ast.parse(text, file)))
    called = [each.func for each in nodes if isinstance(each, ast.Call) and len(each.args) == 1 and not each.keywords]
    uses = {each for each in nodes if isinstance(each, ast.Name) and each.id == "type"}
    return {"type": _type_of} if uses <= set(called) else {}


@contextlib.contextmanager
def types_are_torchs() -> Iterator[None]:
    """A tensor's class is torch's for modules that the program imports inside."""
    changed: list[dict[str, Any]] = []

    def load(original: Callable[..., None], loader: Any, module: types.ModuleType) -> None:
        is_torchs = module.__name__.partition(".")[0] in ("torch", "fxmem")
        if found := {} if is_torchs else find_types(loader.path):
            vars(module).update(found)
            changed.append(vars(module))
        original(loader, module)

    try:
        with torch_common.wrap(importlib.machinery.SourceFileLoader, "exec_module", load):
            yield
    finally:
        for each in changed:
            each.pop("type", None)


def trace_patches(notes: MadeUpNotes) -> torch_common.Patches:
    """Let `torch.jit.trace` and `make_fx` of what is on the card return what runs it as written, and `torch.jit.script`
    what TorchScript's interpreter runs.

    Such a module is saved as its number: this process loads a copy of it.
    """
    saved: list[torch.nn.Module] = []

    def trace(original: Callable[..., Any], func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not has_fake_inside((func, example_inputs)):
            return original(func, example_inputs, *args, **kwargs)
        # The check runs the trace once without gradients, and TorchScript takes the first call for what all are like.
        # It differentiates nothing by formulas of its own then, and what runs keeps what the code as written does.
        more = (
            "" if kwargs.get("check_trace", True) else ", where TorchScript's own formulas may keep more (check_trace)"
        )
        notes.note("answered", f"torch.jit.trace: the code as it was written{more}")
        func(*(example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)))
        return _Untraced(func)

    def make_fx(original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        traced = original(f, *args, **kwargs)
        if sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):
            return traced

        def trace_or_keep(*inputs: Any) -> Any:
            if not has_fake_inside(inputs):
                return traced(*inputs)
            notes.note("answered", "make_fx: the code as it was written")
            f(*inputs)
            return _Untraced(f)

        return trace_or_keep

    def script(original: Callable[..., Any], obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        with torch_programs.functions_to_script():
            compiled = original(obj, *args, _frames_up=_frames_up + 2, **kwargs)  # names are those of its caller
        if isinstance(obj, torch.nn.Module):  # a compiled one's parameters cannot become those of a pretended card
            vars(obj)["forward"] = torch_programs.ScriptedForward(compiled, obj)
            torch_programs.pass_for_scripted(obj)
            return obj
        return compiled

    def save(original: Callable[..., Any], m: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not torch_programs.is_as_written(m):
            original(m, f, *args, **kwargs)
            return
        saved.append(m)
        with contextlib.nullcontext(f) if hasattr(f, "write") else Path(f).open("wb") as file:
            file.write(b"%s%d" % (_AS_WRITTEN, len(saved) - 1))

    def load(original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext(f) if hasattr(f, "read") else Path(f).open("rb") as file:
            begin = file.tell()
            mark, _, number = file.read(64).partition(_AS_WRITTEN)
            file.seek(begin)
        if mark or not number:
            return original(f, *args, **kwargs)
        made = copy.deepcopy(saved[int(number)])
        torch_programs.pass_for_scripted(made)
        return made

    yield torch_programs.scripts_unfused()
    yield torch_common.wrap(torch.jit, "save", save)
    yield torch_common.wrap(torch.jit, "load", load)
    yield torch_common.wrap(torch.jit, "trace", trace)
    yield torch_common.wrap(torch.jit, "script", script)
    yield torch_programs.observe_make_fx(make_fx)


class _Untraced:
    """A model in the place of its trace, whose graph is empty."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.graph = torch_programs.empty_graph()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def process_patches(notes: MadeUpNotes, world: World | None, *, compiles: bool) -> torch_common.Patches:
    """One process on one card: a rank of the world, or the first one, alone in its group."""

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*move_to_card(inputs), **move_to_card(kwargs))

    yield _process_of_its_own()
    yield from started_patches(notes, world)
    yield torch_common.replace(torch.nn.DataParallel, "forward", forward)
    if torch.distributed.is_available():
        yield from _distributed(notes, world, compiles=compiles)


@contextlib.contextmanager
def _process_of_its_own() -> Iterator[None]:
    """Accelerate finds no state of the process, as in a new one.

    It keeps that in a dictionary of each of three classes (accelerate/state.py): what it knows of one rank it would
    take for the next one's. What was there before is back afterwards.
    """
    before = {id(each): dict(each) for each in _shared_states()}
    for each in _shared_states():
        each.clear()
    try:
        yield
    finally:
        for each in _shared_states():
            each.clear()
            each.update(before.get(id(each), {}))


def _shared_states() -> list[dict[str, Any]]:
    state = sys.modules.get("accelerate.state")
    kinds = (getattr(state, name, None) for name in ("PartialState", "AcceleratorState", "GradientState"))
    return [kind._shared_state for kind in kinds if kind is not None]


class _CardCount(int):
    """The cards of a rank's machine, of which it finds its own alone.

    Launched scripts look whether there are enough, divide their batch by them and start as many processes; where they
    go through all (`range(count)`), or look for their own (`rank % count`), there is one.
    """

    _all: int

    def __new__(cls, own: int, all_: int) -> _CardCount:
        count = super().__new__(cls, own)
        count._all = all_
        return count

    def __eq__(self, other: object) -> bool:
        return int.__index__(self) == other or self._all == other

    __hash__ = int.__hash__


def _of_all(name: str) -> Callable[..., Any]:
    operation = getattr(int, name)
    return lambda count, *others: operation(count._all, *others)


for _each in "lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv int float str repr".split():
    setattr(_CardCount, f"__{_each}__", _of_all(f"__{_each}__"))


def _distributed(notes: MadeUpNotes, world: World | None, *, compiles: bool) -> torch_common.Patches:
    place = world or World(1)

    def init_process_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        which = "a group of one" if world is None else f"rank {place.rank} in a group of {place.size}"
        notes.note("answered", f"init_process_group: {which} that answers at once")
        torch_distributed.begin_fake_group(original, place.size, place.rank)

    def device_count(original: Callable[..., int]) -> int:
        asks_for_all = sys._getframe(2).f_code.co_name == "num_cuda_devices"
        own, all_ = original(), int(place.variables["LOCAL_WORLD_SIZE"])
        if not own:  # a rank on the CPU; with Lightning imported, torch takes more than none for a card that works
            return own
        return all_ if asks_for_all else own if world is None else _CardCount(own, all_)

    # Of a machine's cards a rank finds its own alone, but Lightning compares the devices it is to use with all of them.
    yield torch_common.wrap(torch.cuda, "device_count", device_count)
    yield torch_common.wrap(torch.accelerator, "device_count", device_count)
    yield place.prepared() if world is not None else torch_distributed.group_of_its_own()
    yield torch_distributed.default_device(torch.device("cuda"))
    for owner in (torch.distributed, torch.distributed.distributed_c10d, torch.distributed.device_mesh):
        yield torch_common.wrap(owner, "init_process_group", init_process_group)
    yield torch_distributed.futures_have_results()
    yield mail_patches(place.rank, place.mailbox, functools.partial(notes.note, "answered"))

    class DistributedDataParallel(reducer.DistributedDataParallel):
        """That of a program."""

        begins_as_one = not compiles  # compiled code would keep the first bucket

        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, *args, **kwargs)
            sent = "no communication" if world is None else "and what they send"
            notes.note("answered", f"DistributedDataParallel: one card, its gradient buckets counted, {sent}")

    yield torch_distributed.replace_ddp(DistributedDataParallel)
