"""Running the constructor of a model, or a function that makes a batch, without weights."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fxmem.errors import linked_errors, one_line
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.step.given import ignore_moves


def construct(make: Callable[[], object]) -> tuple[object, Literal["meta", "cpu"], tuple[str, ...]]:
    """Call `make` under meta, or on the CPU if it reads values; return what it made, where, and notes.

    On the CPU in-place initialisers are left out, so that parameters stay as `torch.empty` made them and the operating
    system never backs them with memory; then the module's parameters and buffers move to meta too.

    What `make` raises for reasons of its own goes through. The process is unchanged, as by `process_unchanged`.
    """
    try:
        with process_unchanged(), _DeviceMode("meta"), _register_on_meta(), ignore_moves():
            made = make()
    except Exception as error:
        # Torch names the device in every message of a constructor that failed for being on meta.
        if not any("meta" in str(link).lower() for link in linked_errors(error)):
            raise
        reason = one_line(error)
    else:
        if isinstance(made, torch.nn.Module) and any(not p.is_meta for p in made.parameters()):
            return made, "cpu", ("its parameters were allocated before fxmem saw the module",)
        return made, "meta", ()
    with process_unchanged(), _DeviceMode("cpu"), _SkipInitialisers(), ignore_moves():
        made = make()
    if isinstance(made, torch.nn.Module):
        _move_to_meta(made)
    return made, "cpu", (f"built on the CPU and moved to meta, because its constructor reads values ({reason})",)


def construct_with_values(make: Callable[[], object]) -> object:
    """Call `make` on the CPU, values and all. The process is unchanged, as by `process_unchanged`."""
    with process_unchanged(), _DeviceMode("cpu"), ignore_moves():
        return make()


class _DeviceMode(TorchFunctionMode):
    """`torch.device(device)`, which holds also where the code inside sets another default device."""

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
def _register_on_meta() -> Iterator[None]:
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
    with _register_on_meta():
        for part in module.modules():
            own: dict[str, torch.Tensor] = dict(part.named_parameters(recurse=False, remove_duplicate=False))
            own |= part.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in own.items():
                setattr(part, name, tensor)
