"""`Values`: what a program is answered where it needs numbers that no kernel has computed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem.simulation.asked import known_values
from fxmem.simulation.asked.bounded_shapes import bound_result
from fxmem.simulation.asked.checks import find_passing_value
from fxmem.simulation.asked.real_reads import RealReads
from fxmem.simulation.source_lines import checking_frame, is_stepping, program_place


class Values:
    """Answers for one program, in this order: known values, checks that pass, largest shapes, what is made up."""

    takes_all_distinct = False
    """Whether `unique` is taken to find no two elements equal."""

    def __init__(self) -> None:
        self.reads: RealReads | None = None
        """Values of a real run, if there was one."""
        self.bounded: dict[tuple[str, str], None] = {}
        """Shapes that hang on data and are taken at their largest: what, and where."""
        self.passed_checks = 0
        """Conditions without values that the program read only to raise an error."""
        self.made_up_scalars = 0
        """Numbers that the optimizer read from tensors without values; each was taken to be 1."""

    def begin(self) -> None:
        """Another run of the program begins."""
        if self.reads is not None:
            self.reads.begin()

    def run_instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose kernel need not be looked at; NotImplemented for every other."""
        return NotImplemented

    def answer(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fakes: torch_common.FakeTensorMode,
        note: Callable[[Any], None],
    ) -> Any:
        """The result of an operator that hangs on values which a fake has not; NotImplemented where there is none.

        Args:
            func, args, kwargs: the operator and its arguments.
            fakes: the mode that it runs in.
            note: called with tensors that are made for it.
        """
        known, result = known_values.recover(func, args, kwargs, fakes, note)
        if known:
            return result
        if func is torch_fakes.NUMBER_OF and args[0].dtype is torch.bool:
            passes = self._find_condition()
            if passes is not None:
                return passes
        bound = bound_result(func, args, kwargs, fakes, note, distinct=self.takes_all_distinct)
        if bound is None:
            return self._make_up(func, args)
        result, what = bound
        self._note_bound(what)
        return result

    def _find_condition(self) -> bool | None:
        """The value of a condition with which the program does not raise; None where it does more than check it."""
        frame = checking_frame(sys._getframe(1))
        passed = None if frame is None else find_passing_value(frame)
        self.passed_checks += passed is not None
        return passed

    def _note_bound(self, what: str) -> None:
        """Note that a shape that hangs on data is taken at its largest."""
        self.bounded[what, program_place(sys._getframe(1))] = None

    def _make_up(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A number without a value: the optimizer's own. Adafactor scales its step by a norm it reads; no allocation
        depends on it."""
        if func is not torch_fakes.NUMBER_OF or not is_stepping(sys._getframe(1)):
            return NotImplemented
        self.made_up_scalars += 1
        return 1.0 if args[0].dtype.is_floating_point else 1
