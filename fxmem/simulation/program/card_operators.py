"""Runs a program's operators on the target or on the host, and makes up the numbers that the target would have."""

from __future__ import annotations

import sys
import types
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.profile import Kind
from fxmem.simulation.asked import known_values
from fxmem.simulation.asked.checks import find_going_on_value
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.asked.values import Values
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.observe.op_recorder import OpRecorder, Run
from fxmem.simulation.program.border import Border
from fxmem.simulation.program.card_memory import CardMemory
from fxmem.simulation.source_lines import optimizer_frame

aten = torch.ops.aten

_UNSCALE: Final[Any] = aten._amp_foreach_non_finite_check_and_unscale_.default
"""Writes in place and allocates nothing. All numbers are taken to be finite, so that `found_inf` stays what it was."""
_FALLS: Final = 1e-4
"""By how much of the first one made-up fraction is smaller than the one before."""


class CardOperators:
    """Leaves the host's operators alone, and gives those of the target to the recorder.

    Args:
        border: decides whose an operator is.
        memory: the card's; None for the CPU.
    """

    log: StepLog
    """Of the program."""

    def __init__(self, border: Border, memory: CardMemory | None) -> None:
        self._border = border
        self._memory = memory

    def run(
        self,
        recorder: OpRecorder,
        run: Run,
        func: Any,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: types.FrameType,
    ) -> Any:
        """Run an operator where it belongs."""
        if func is torch_fakes.DEVICE_OF:
            return run(func, types, args, kwargs, caller)
        if any(map(torch_wrappers.is_wrapper_type, types)):
            return NotImplemented  # it takes itself apart; what it then calls comes here
        if not self._border.is_targets(func, types, args, kwargs):
            if torch_common.is_composite(func):
                with recorder:  # under inference_mode `x.to("cuda")` comes whole, and says where by position
                    return func.decompose(*args, **kwargs)
            return self._run_on_host(func, args, kwargs)
        if func is aten.copy_.default and not isinstance(args[0], torch_common.FakeTensor):
            self._border.write_to_host(args[1], args[0])
            return args[0]
        log = self.log
        first = len(log.storages)
        try:
            result = run(func, types, args, kwargs, caller)
            if self._memory is not None:
                self._memory.run_operator()
        except torch.cuda.OutOfMemoryError:
            log.discard(first)
            raise
        if result is NotImplemented:
            return result
        if func is aten._to_copy.default and not isinstance(args[0], torch_common.FakeTensor):
            log.rename(result, "", Kind.INPUT)
        return self._border.bring_back(result, args)

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator for real. Where the CPU is the target, what it allocates counts: integers are real there."""
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        log = self.log
        begin = log.tick
        result = func(*args, **kwargs)
        if self._memory is None and not self._border.loading:
            log.note_tensors(result)
            if log.tick > begin:
                log.note_op(str(func), begin, 0)
        return result


class MadeUpValues(Values):
    """Answers of a program on the target: what nobody knows is made up and noted, so that the program goes on.

    Args:
        notes: of what is made up.
    """

    takes_all_distinct = True

    def __init__(self, notes: MadeUpNotes) -> None:
        super().__init__()
        self._notes = notes
        self._fractions = 0
        """Made up so far."""
        self.maker: torch_fakes.Maker
        """Makes tensors of the mode the program runs in."""

    def run_instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose kernel need not be looked at; NotImplemented for every other."""
        if func is _UNSCALE:
            return None
        if func is aten._to_copy.default and (moved := self._move(args[0], kwargs)) is not None:
            known_values.follow(func, args, kwargs, moved)
            return moved
        return NotImplemented

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
        return self.maker.empty(tuple(tensor.shape), tensor.stride(), dtype, device)

    def _note_bound(self, what: str) -> None:
        self._notes.note("shape", what)

    def _make_up(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A number that no kernel has computed.

        A fraction is a little smaller each time, as a loss that falls, so that nothing takes two for equal and stops:
        LBFGS would.
        """
        if func is not torch_fakes.NUMBER_OF:
            return NotImplemented
        tensor = args[0]
        self._notes.note("read", str(tensor.dtype)[6:])
        if tensor.dtype is torch.bool:
            return False
        if not tensor.dtype.is_floating_point:
            return 0
        self._fractions += 1
        return 1.0 / (1.0 + _FALLS * (self._fractions - 1))

    def _find_condition(self) -> bool | None:
        frame = optimizer_frame(sys._getframe(1))
        if frame is None:
            return super()._find_condition()
        going_on = find_going_on_value(frame)
        if going_on is not None:
            self._notes.note("decided", "a condition of the optimizer's own: it goes on")
        return going_on
