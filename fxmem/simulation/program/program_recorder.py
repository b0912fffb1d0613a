"""Runs a program's operators on the target, and answers where they need values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem.records.profile import Kind
from fxmem.simulation import known_values
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.observe.op_recorder import OpRecorder
from fxmem.simulation.program.border import Border
from fxmem.simulation.program.card_memory import CardMemory
from fxmem.simulation.program.made_up import MadeUpNotes
from fxmem.simulation.program.program_log import ProgramLog

aten = torch.ops.aten

_UNSCALE: Final[Any] = aten._amp_foreach_non_finite_check_and_unscale_.default
"""Writes in place and allocates nothing. All numbers are taken to be finite, so that `found_inf` stays what it was."""


class ProgramRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """An `OpRecorder` that leaves the host's operators alone.

    Args:
        border: decides whose an operator is.
        notes: of what is made up.
        memory: the card's; None for the CPU.
        further: those of `OpRecorder`.
    """

    _log: ProgramLog

    def __init__(self, border: Border, notes: MadeUpNotes, memory: CardMemory | None, *further: Any) -> None:
        super().__init__(*further)
        self._memory = memory
        self._maker = torch_fakes.Maker(self._fakes)
        self._border = border
        self._notes = notes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch_fakes.DEVICE_OF:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if not self._border.is_targets(func, types, args, kwargs):
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        if func is aten.copy_.default and not isinstance(args[0], torch_common.FakeTensor):
            self._border.write_to_host(args[1], args[0])
            return args[0]
        first = len(self._log.nbytes)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self._memory is not None:
                self._memory.run_operator()
        except torch.cuda.OutOfMemoryError:
            self._log.discard(first)
            raise
        if result is NotImplemented:
            return result
        if func is aten._to_copy.default and not isinstance(args[0], torch_common.FakeTensor):
            self._log.rename(result, "", Kind.INPUT)
        return self._border.bring_back(result, args)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _UNSCALE:
            return None
        if func is aten._to_copy.default and (moved := self._move(args[0], kwargs)) is not None:
            known_values.follow(func, args, kwargs, moved)
            return moved
        try:
            return super()._run(func, args, kwargs)
        except torch_common.DATA_DEPENDENT:
            if func is torch_fakes.NUMBER_OF:
                self._notes.note("read", str(args[0].dtype)[6:])
                return _number_like(args[0])
            bound = _BOUNDS.get(func)
            if bound is None:
                raise
            with self._fakes:
                made, how = bound(self._log, *args, **kwargs)
            self._notes.note("shape", how)
            self._log.note_tensors(made)
            return made

    def _move(self, tensor: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor | None:
        """A real tensor on the card, without FakeTensorMode's way there, which takes as long as several kernels.

        None where it may be laid out anew.
        """
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
        if not plain or "memory_format" in settings or settings.get("device") is None:
            return None
        device, dtype = torch.device(settings["device"]), settings.get("dtype") or tensor.dtype
        if device.index is None:
            device = torch.device(device.type, 0 if device.type == "cuda" else None)
        return self._maker.empty(tuple(tensor.shape), tensor.stride(), dtype, device)


def _number_like(tensor: torch.Tensor) -> bool | int | float:
    """What a number without a value is taken to be."""
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 0


# --- shapes that hang on data: everything is picked ------------------------------------------------------------------


def _nonzero(log: StepLog, tensor: torch.Tensor) -> tuple[Any, str]:
    places = torch.empty(tensor.dim(), tensor.numel(), dtype=torch.int64, device=tensor.device).t()
    return places, "nonzero: every place"


def _masked_select(log: StepLog, tensor: torch.Tensor, mask: torch.Tensor) -> tuple[Any, str]:
    count = tensor.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).numel()  # type: ignore[no-untyped-call]
    return torch.empty(count, dtype=tensor.dtype, device=tensor.device), "masked_select: every element"


def _index(log: StepLog, tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> tuple[Any, str]:
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
            continue
        found = [torch.empty(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.dim())]
        log.note_tensors(found)
        places += found
    return aten.index.Tensor(tensor, places), "x[mask]: every element"


def _unique(log: StepLog, tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, str]:
    count, device = tensor.numel(), tensor.device
    values = torch.empty(count, dtype=tensor.dtype, device=device)
    inverse = torch.empty(tensor.shape, dtype=torch.int64, device=device)
    counts = torch.empty(count, dtype=torch.int64, device=device)
    return (values, inverse, counts), "unique: no two elements equal"


def _unique_dim(log: StepLog, tensor: torch.Tensor, dim: int, *_: Any, **__: Any) -> tuple[Any, str]:
    count, device = tensor.shape[dim], tensor.device
    rows = torch.empty(count, dtype=torch.int64, device=device)
    return (torch.empty_like(tensor), rows, torch.empty_like(rows)), "unique: no two rows equal"


def _bincount(log: StepLog, tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> tuple[Any, str]:
    dtype = torch.int64 if weights is None else torch.float64
    return torch.empty(max(minlength, 1), dtype=dtype, device=tensor.device), "bincount: as long as minlength"


_BOUNDS: Final[dict[Any, Callable[..., tuple[Any, str]]]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_dim,
    aten.bincount.default: _bincount,
}
