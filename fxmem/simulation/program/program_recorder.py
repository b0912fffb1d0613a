"""Runs a program's operators on the target, and answers where they need values."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.profile import Kind
from fxmem.simulation import known_values
from fxmem.simulation.observe.assertions import find_going_on_value
from fxmem.simulation.observe.op_recorder import OpRecorder, OpTraits
from fxmem.simulation.observe.source_lines import optimizer_frame
from fxmem.simulation.program.border import Border
from fxmem.simulation.program.card_memory import CardMemory
from fxmem.simulation.program.made_up import MadeUpNotes
from fxmem.simulation.program.program_log import ProgramLog

aten = torch.ops.aten

_UNSCALE: Final[Any] = aten._amp_foreach_non_finite_check_and_unscale_.default
"""Writes in place and allocates nothing. All numbers are taken to be finite, so that `found_inf` stays what it was."""
_FALLS: Final = 1e-4
"""By how much of the first one made-up fraction is smaller than the one before."""


class ProgramRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """An `OpRecorder` that leaves the host's operators alone.

    Args:
        border: decides whose an operator is.
        notes: of what is made up.
        memory: the card's; None for the CPU.
        further: those of `OpRecorder`.
    """

    _log: ProgramLog
    _takes_all_distinct = True
    _frames_to_caller = 2

    def __init__(self, border: Border, notes: MadeUpNotes, memory: CardMemory | None, *further: Any) -> None:
        super().__init__(*further)
        self._memory = memory
        self._maker = torch_fakes.Maker(self._fakes)
        self._border = border
        self._notes = notes
        self._fractions = 0
        """Made up so far."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch_fakes.DEVICE_OF:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if any(map(torch_wrappers.is_wrapper_type, types)):
            return NotImplemented  # it takes itself apart; what it then calls comes here
        if not self._border.is_targets(func, types, args, kwargs):
            if torch_common.is_composite(func):
                with self:  # under inference_mode `x.to("cuda")` comes whole, and says where by position
                    return func.decompose(*args, **kwargs)
            return self._run_on_host(func, args, kwargs)
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

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator for real. Where the CPU is the target, what it allocates counts: integers are real there."""
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        begin = self._log.tick
        result = func(*args, **kwargs)
        if self._memory is None and not self._border.loading:
            self._log.note_tensors(result)
            if self._log.tick > begin:
                self._log.note_op(str(func), begin, 0)
        return result

    def _run(self, op: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = op.func
        if func is _UNSCALE:
            return None
        if func is aten._to_copy.default and (moved := self._move(args[0], kwargs)) is not None:
            known_values.follow(func, args, kwargs, moved)
            return moved
        try:
            return super()._run(op, args, kwargs)
        except torch_common.DATA_DEPENDENT:
            if func is torch_fakes.NUMBER_OF:
                self._notes.note("read", str(args[0].dtype)[6:])
                return self._number_like(args[0])
            raise

    def _note_bound(self, what: str) -> None:
        self._notes.note("shape", what)

    def _move(self, tensor: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor | None:
        """A real tensor on the card; None where it may be laid out anew.

        FakeTensorMode's own way there takes as long as several kernels.
        """
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
        if not plain or "memory_format" in settings or settings.get("device") is None:
            return None
        device, dtype = torch.device(settings["device"]), settings.get("dtype") or tensor.dtype
        if device.index is None:
            device = torch.device(device.type, 0 if device.type == "cuda" else None)
        return self._maker.empty(tuple(tensor.shape), tensor.stride(), dtype, device)

    def _number_like(self, tensor: torch.Tensor) -> bool | int | float:
        """What a number without a value is taken to be: a fraction is a little smaller each time, as a loss that falls,
        so that nothing takes two for equal and stops."""
        if tensor.dtype is torch.bool:
            return False
        if not tensor.dtype.is_floating_point:
            return 0
        self._fractions += 1
        return 1.0 / (1.0 + _FALLS * (self._fractions - 1))

    def _is_scalar_of_optimizer(self, func: Any) -> bool:
        return False  # made up as any other, so that LBFGS does not take two losses for equal

    def _condition_that_passes(self) -> bool | None:
        frame = optimizer_frame(sys._getframe(1))
        if frame is None:
            return super()._condition_that_passes()
        going_on = find_going_on_value(frame)
        if going_on is not None:
            self._notes.note("decided", "a condition of the optimizer's own: it goes on")
        return going_on
