"""Threads of a program: the one that runs it may use the card.

The work of a thread pool is done where it is handed in, at once: libraries load the weights of a model so. So is that
of a thread which is given tensors on the card, as those are that draw or save what they are given. A thread of the
program's own that uses the card otherwise is refused, since what it would allocate, and when, cannot be observed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import AnalysisError
from fxmem.simulation.code.source_lines import program_place, user_frame, variables

_WAKE: Final[int | None] = getattr(signal, "SIGUSR2", None)
"""Not SIGINT, which programs handle, and which a shell has what it runs in the background ignore. None on
Windows, where no signal can be sent to a thread."""


class CardThread:
    """The thread that is recorded: the one that makes this."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_open = False
        """Whether the program runs; guarded by the lock, so that nothing wakes what runs after it."""
        self._refusal: AnalysisError | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """The program runs inside; it ends with what another thread was refused with."""
        with self._wakeable():
            self._is_open = True
            try:
                yield
            except BaseException:
                if self._refusal is not None:
                    raise self._refusal from None
                raise
            finally:
                with self._lock:
                    self._is_open = False
        if self._refusal is not None:
            raise self._refusal

    @contextlib.contextmanager
    def _wakeable(self) -> Iterator[None]:
        """Let another thread wake this one where it waits, by a signal: nothing else ends `queue.get()`."""
        if _WAKE is None or self._thread != threading.main_thread().ident:
            yield
            return

        def wake(*_: Any) -> None:
            if self._is_open and self._refusal is not None:
                raise self._refusal

        before = signal.signal(_WAKE, wake)
        try:
            yield
        finally:
            signal.signal(_WAKE, signal.SIG_DFL if before is None else before)

    def require(self, *_: Any, **__: Any) -> None:
        """Refuse work on the card by any other thread, and end the program.

        Raises:
            AnalysisError: another thread asks.
        """
        if threading.get_ident() == self._thread:
            return
        if self._refusal is None:
            place = program_place(sys._getframe(1))
            self._refusal = AnalysisError(
                f"expected a program whose main thread alone uses the card; {threading.current_thread().name!r} does "
                f"at {place or 'no line of its own'}. Let other threads hand over tensors of the host, and move them "
                f"to the card in the main thread."
            )
            with self._lock:
                if _WAKE is not None and self._is_open and self._thread == threading.main_thread().ident:
                    signal.pthread_kill(self._thread, _WAKE)
        raise self._refusal

    def patches(self) -> torch_common.Patches:
        """Thread pools, and threads that are given tensors on the card, work in the thread that hands work in."""

        def submit(original: Any, pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or pool._initializer is not None:
                return original(pool, function, *args, **kwargs)
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future

        def start(original: Callable[[Any], None], thread: Any) -> None:
            given = torch_common.iterate_tensors((getattr(thread, "_args", ()), getattr(thread, "_kwargs", {})))
            if threading.get_ident() == self._thread and any(isinstance(x, torch_common.FakeTensor) for x in given):
                try:
                    thread.run()
                except Exception:
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
                thread._target, thread._args, thread._kwargs = None, (), {}  # `run` has used them up
            original(thread)

        yield torch_common.wrap(concurrent.futures.ThreadPoolExecutor, "submit", submit)
        yield torch_common.wrap(threading.Thread, "start", start)


# --- the modules of a program on the card, by what the program calls them ---------------------------------------------


_PASSING_NAMES = frozenset({"self", "m", "mod", "module", "child", "layer", "x", "obj", "_"})
"""What functions call whichever module they are given."""
_TAKEN: Final = frozenset(dir(torch.nn.Module()))
"""Names that a child of a module cannot have."""


class Roots:
    """The outermost modules of a program on the target, and all that is inside them.

    Args:
        prepare: called with name and module of each before its first call.
    """

    def __init__(self, prepare: Callable[[str, torch.nn.Module], None] | None = None) -> None:
        self._prepare = prepare
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._classes: dict[str, dict[str, type[torch.nn.Module]]] = {}
        """Of each root of the round, by its name: the classes of its modules by their paths in it."""

    def begin_round(self) -> None:
        """Forget the roots that the program has dropped."""
        self._classes = {name: self._classes[name] for name in self._names.values()}

    def children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The roots of the round by their names; modules without tensors stand for those that were dropped."""
        there = {name: module for module, name in self}
        for name, classes in self._classes.items():
            yield name, there[name] if name in there else _without_tensors(classes)

    def note_move(self, module: torch.nn.Module) -> None:
        """Note that a module was moved; what it is called is found when it is first used, for then a variable has
        it."""
        if module not in self._paths:
            self._moved.add(module)

    def find_path(self, module: torch.nn.Module) -> str | None:
        """The path of a module from its root's name on; None for one that belongs to no root."""
        return self._paths.get(module)

    def adopt(self, module: torch.nn.Module) -> str:
        """Make a module a root, or the moved one that it lies in; its path."""
        holder = next((each for each in list(self._moved) if each is not module and _contains(each, module)), None)
        self._name(module if holder is None else holder)
        if module not in self._paths:  # not registered in the one that was moved
            self._name(module)
        return self._paths[module]

    def adopt_moved(self) -> None:
        """Make the modules that were moved and not called roots as well: copies that are averaged, frozen parts."""
        for module in list(self._moved):
            if module not in self._paths and not any(_contains(each, module) for each in list(self._moved)):
                self._name(_find_wrapper(module) or module)
        self._moved.clear()

    def __iter__(self) -> Iterator[tuple[torch.nn.Module, str]]:
        return iter(list(self._names.items()))

    def find_class(self, path: str) -> type[torch.nn.Module] | None:
        """The class of the module with this path, of a root of the round; None for none."""
        name, _, inner = path.partition(".")
        return self._classes.get(name, {}).get(inner)

    def _name(self, given: torch.nn.Module) -> None:
        self._moved.discard(given)
        module = torch_wrappers.wrapped_module(given) or given
        if module is not given and module in self._paths:
            self._paths[given] = self._paths[module]
            return
        wanted = _find_variable(given)
        wanted += "_" * (wanted in _TAKEN)
        names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(2)))
        name = next(each for each in names if each not in self._classes)
        self._names[module] = name
        self._classes[name] = {path: type(inner) for path, inner in module.named_modules()}
        for path, inner in module.named_modules():
            # The first root to hold it names it, as `named_modules` has it.
            self._paths.setdefault(inner, f"{name}.{path}".rstrip("."))
            self._moved.discard(inner)
        self._paths.setdefault(given, name)
        if self._prepare is not None:
            self._prepare(name, module)


def has_target_tensors(module: torch.nn.Module, device_type: str) -> bool:
    """Whether a module has fake parameters or buffers on such a device."""
    fakes = (part for each in torch_modules.all_tensors(module) for part in torch_wrappers.parts(each))
    return any(isinstance(each, torch_common.FakeTensor) and each.fake_device.type == device_type for each in fakes)


def _contains(root: torch.nn.Module, module: torch.nn.Module) -> bool:
    return root is not module and any(each is module for each in root.modules())


def _without_tensors(classes: dict[str, type[torch.nn.Module]]) -> torch.nn.Module:
    made: dict[str, torch.nn.Module] = {}
    for path, cls in classes.items():
        made[path] = cls.__new__(cls)
        torch.nn.Module.__init__(made[path])
        if path:
            parent, _, name = path.rpartition(".")
            made[parent].add_module(name, made[path])
    return made[""]


def _find_variable(module: torch.nn.Module) -> str:
    """The variable or attribute that has a module, in the nearest frame of the program; else its class's name."""
    frame = user_frame(sys._getframe(2))
    while frame is not None:
        found = _find_name(frame, module)
        if found:
            return found
        frame = frame.f_back
    return type(module).__name__.lower()


def _find_wrapper(module: torch.nn.Module) -> torch.nn.Module | None:
    """What a variable has instead of a module that it was made of, as `DistributedDataParallel`; None for nothing."""
    found, frame = None, user_frame(sys._getframe(2))
    while frame is not None:
        for value in [*variables(frame).values(), *frame.f_globals.values()]:
            if value is module:
                return None
            if found is None and isinstance(value, torch.nn.Module) and _contains(value, module):
                found = value
        frame = frame.f_back
    return found


def _find_name(frame: types.FrameType, module: torch.nn.Module) -> str:
    own = variables(frame)
    for scope in (own, frame.f_globals):
        for name, value in list(scope.items()):
            if _is_module(value, module) and name.isidentifier() and name not in _PASSING_NAMES:
                return name
    owner = own.get("self")
    if isinstance(owner, torch.nn.Module):
        return ""
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if _is_module(value, module):
            return str(name).lstrip("_")
    return ""


def _is_module(value: object, module: torch.nn.Module) -> bool:
    """Whether a value is a module, or what `torch.compile` made of it."""
    return value is module or (isinstance(value, torch.nn.Module) and torch_wrappers.wrapped_module(value) is module)
