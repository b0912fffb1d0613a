"""Code that a command line names: import it, run it without weights, say where it failed, leave the process as it was.

A reference is `pkg.mod:name` or `path/to/file.py:name`; `name` may be dotted (`Outer.build`). The code behind it is
trusted, the reference is not: nothing is evaluated and no shell sees it.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import random
import re
import socket
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

import fxmem
from fxmem.errors import AnalysisError, EnvironmentLacksError, FxmemError, UsageError

__all__ = [
    "chain",
    "closest",
    "construct",
    "construct_with_values",
    "failure",
    "importable",
    "is_file_reference",
    "is_reference",
    "load",
    "one_line",
    "process_unchanged",
    "without_network",
]

_REFERENCE = re.compile(r"(?P<where>.+):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        *(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(torch.__file__),
        os.path.dirname(fxmem.__file__),
    }
)


def is_reference(text: str) -> bool:
    """Whether `text` has the form `pkg.mod:name` or `path/to/file.py:name`."""
    match = _REFERENCE.fullmatch(text)
    return match is not None and (_is_path(match["where"]) or _is_module_name(match["where"]))


def is_file_reference(text: str) -> bool:
    """Whether `text` has the form `path/to/file.py:name`."""
    match = _REFERENCE.fullmatch(text)
    return match is not None and _is_path(match["where"])


def closest(name: str, names: Iterable[str], *, otherwise: str = "") -> str:
    """`; closest: a, b, c` for an error message: at most three of `names` that look like `name`, whatever their
    case."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.55)
    return f"; closest: {', '.join(by_lower[match] for match in found)}" if found else otherwise


def one_line(error: BaseException) -> str:
    """`ValueError: its text`, in one line of at most 400 characters."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    return line if len(line) <= 400 else line[:397] + "..."


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and everything it was raised from or while handling, outermost first."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            pending += [link.__context__, link.__cause__]


def failure(error: BaseException, what: str) -> FxmemError:
    """The error to raise when `what` raised `error`: its text and the innermost line that is no library's.

    An `EnvironmentLacksError` if a package is missing (transformers says so by an `ImportError` that names no module),
    else an `AnalysisError`.
    """
    line = _user_line(error)
    at = f" at {line[0]}:{line[1]}" if line else ""
    if isinstance(error, ModuleNotFoundError) or (isinstance(error, ImportError) and error.name is None):
        return EnvironmentLacksError(f"{what} needs something that is not installed{at}: {one_line(error)}")
    if isinstance(error, SystemExit):
        return AnalysisError(f"{what} called sys.exit{at}; keep what a script runs under `if __name__ == '__main__':`")
    return AnalysisError(f"{what} raised{at}: {one_line(error)}")


def load(reference: str) -> Any:
    """The object that `reference` names, its module imported if need be.

    A file is imported anew at each call, under a name private to its path. Call it inside `process_unchanged` and
    `importable(reference)`, which undo what an import may leave behind, and outside any device context: a
    module's global tensors keep the device they were made on.

    Raises:
        UsageError: no such file, module or name; the file is not Python.
        EnvironmentLacksError: it imports something that is not installed.
        AnalysisError: it raises while being imported.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None or not is_reference(reference):
        raise UsageError(f"expected pkg.mod:name or file.py:name, got {reference!r}")
    where = match["where"]
    try:
        found: Any = _import_file(where) if _is_path(where) else _import_module(where)
        for part in match["name"].split("."):
            if not hasattr(found, part):
                public = [name for name in dir(found) if not name.startswith("_")]
                raise UsageError(f"{where} has no {match['name']!r}{closest(part, public)}")
            found = getattr(found, part)
    except FxmemError:
        raise
    except (Exception, SystemExit) as error:
        raise failure(error, f"importing {where}") from error
    return found


@contextlib.contextmanager
def importable(reference: str) -> Iterator[None]:
    """The directory of the file that `reference` names, or the working directory for a module, leads `sys.path`."""
    before = list(sys.path)
    where = reference.rpartition(":")[0]
    directory = str(_file(where).parent) if _is_path(where) else os.getcwd()
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def process_unchanged() -> Iterator[None]:
    """What building a model or a batch may touch is put back: random states, default dtype and device, grad mode,
    `sys.path`.

    Random states are those of Python, NumPy (if it is imported) and torch, CUDA's only if CUDA is already in use.
    Meanwhile standard output goes to standard error, because standard output carries the result.
    """
    path = list(sys.path)
    python_state = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    default_dtype, default_device = torch.get_default_dtype(), torch.get_default_device()
    grad_enabled = torch.is_grad_enabled()
    try:
        with torch.random.fork_rng(devices=devices), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        if torch.get_default_device() != default_device:
            torch.set_default_device(None if default_device.type == "cpu" else default_device)
        torch.set_default_dtype(default_dtype)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        random.setstate(python_state)
        sys.path[:] = path


@contextlib.contextmanager
def without_network() -> Iterator[None]:
    """This thread can resolve no host name, and huggingface_hub, if it is installed, is in its offline mode.

    Both are undone at the end; the environment is not touched. What is refused raises a `ConnectionError`.
    """
    thread, resolve = threading.get_ident(), socket.getaddrinfo

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise ConnectionError("fxmem downloads nothing")
        return resolve(*args, **kwargs)

    hub: Any = None
    with contextlib.suppress(ImportError):
        hub = importlib.import_module("huggingface_hub.constants")
    offline = getattr(hub, "HF_HUB_OFFLINE", None)
    socket.getaddrinfo = refuse
    if hub is not None:
        hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        socket.getaddrinfo = resolve
        if hub is not None:
            hub.HF_HUB_OFFLINE = offline


# --- running a constructor without weights ----------------------------------------------------------------------------


def construct(make: Callable[[], object]) -> tuple[object, Literal["meta", "cpu"], tuple[str, ...]]:
    """Call `make` under meta or, if it reads values, on the CPU; what it made, where it was made, and notes on that.

    On the CPU in-place initialisers are left out, so that parameters stay as `torch.empty` made them and the operating
    system never backs them with memory; then the module's parameters and buffers move to meta too.

    What `make` raises for reasons of its own goes through. The process is unchanged, as by `process_unchanged`.
    """
    try:
        with process_unchanged(), _On("meta"), _registered_on_meta():
            made = make()
    except Exception as error:
        if not _wants_values(error):
            raise
        reason = one_line(error)
    else:
        real = isinstance(made, torch.nn.Module) and any(not p.is_meta for p in made.parameters())
        return (
            made,
            "cpu" if real else "meta",
            ("its parameters were allocated before fxmem saw the module",) if real else (),
        )
    with process_unchanged(), _On("cpu"), _SkipInitialisers():
        made = make()
    if isinstance(made, torch.nn.Module):
        _move_to_meta(made)
    return made, "cpu", (f"built on the CPU and moved to meta, because its constructor reads values ({reason})",)


def construct_with_values(make: Callable[[], object]) -> object:
    """Call `make` on the CPU, values and all. The process is unchanged, as by `process_unchanged`."""
    with process_unchanged(), _On("cpu"):
        return make()


def _wants_values(error: BaseException) -> bool:
    """Whether a constructor failed for being on meta: torch names the device in every such message."""
    return any("meta" in str(link).lower() for link in chain(error))


class _On(TorchFunctionMode):
    """What `with torch.device(device)` does, also when the code inside sets a default device of its own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with self.device:
            return func(*args, **(kwargs or {}))


class _SkipInitialisers(TorchFunctionMode):
    """Leaves out in-place writes to parameters: they set values, and touching the pages is what costs memory."""

    _WRITES = re.compile(
        "(add|bernoulli|cauchy|clamp|constant|copy|div|erfinv|exponential|fill|kaiming_uniform|"
        "log_normal|mul|normal|ones|random|sub|uniform|zero|zeros)_"
    )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._WRITES.fullmatch(getattr(func, "__name__", "")):
            written = args[0] if args else kwargs.get("tensor")
            if isinstance(written, torch.nn.Parameter):
                return written
        return func(*args, **kwargs)


@contextlib.contextmanager
def _registered_on_meta() -> Iterator[None]:
    """What a module registers goes to meta: `torch.Tensor(n)` and `torch.from_numpy` know no default device."""
    moved: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def move(
        module: torch.nn.Module, name: str, tensor: torch.Tensor | None
    ) -> Any:  # what it returns is registered instead
        if tensor is None or tensor.is_meta or is_lazy(tensor):
            return None
        known = moved.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        moving = tensor.detach().to("meta")
        new = torch.nn.Parameter(moving, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moving
        moved[id(tensor)] = weakref.ref(tensor), new
        return new

    hooks = register_module_parameter_registration_hook(move), register_module_buffer_registration_hook(move)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _move_to_meta(module: torch.nn.Module) -> None:
    """What `module.to("meta")` does, but tied parameters stay tied."""
    with _registered_on_meta():
        for part in module.modules():
            own: dict[str, torch.Tensor] = dict(part.named_parameters(recurse=False, remove_duplicate=False))
            own |= part.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in own.items():
                setattr(part, name, tensor)


# --- finding it -------------------------------------------------------------------------------------------------------


def _is_path(where: str) -> bool:
    return where.endswith(".py") or "/" in where or os.sep in where


def _is_module_name(where: str) -> bool:
    return all(part.isidentifier() for part in where.split("."))


def _file(where: str) -> Path:
    try:
        return Path(where).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; ~ of nobody; a null character
        raise UsageError(f"no file {where}: {one_line(error)}") from error


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"no module {name!r} in the working directory or on sys.path") from error
        raise


def _import_file(where: str) -> ModuleType:
    path = _file(where)
    if not os.path.isfile(path):
        raise UsageError(f"no file {where}")
    if path.suffix != ".py":
        raise UsageError(f"expected a .py file, got {where}")
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UsageError(f"{where} is not Python: line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise UsageError(f"{where} is not Python: {error}") from error
    name = f"_fxmem_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # a .py suffix always has one
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


def _user_line(error: BaseException) -> tuple[str, int] | None:
    """Where the innermost line lies that is neither a library's nor fxmem's own."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno
    found = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<") and not os.path.realpath(name).startswith(_LIBRARIES):
            found = name, trace.tb_lineno
        trace = trace.tb_next
    return found
