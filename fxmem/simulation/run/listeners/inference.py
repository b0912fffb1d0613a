"""The loops of a program that trains nothing: frames of a film, denoising steps, items of a data set."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import torch

from fxmem.records.profile import Assumption, Phase, ProgramRun
from fxmem.records.units import package_path
from fxmem.simulation.run.listeners import register
from fxmem.simulation.run.loops import FrameMark, Loop
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.round_listener import RoundListener, RoundOver


class Inference(RoundListener):
    """Follows the outermost loop that has calls of models in each pass, until the program trains.

    Args:
        parts: of the program.
    """

    def __init__(self, parts: ProgramParts) -> None:
        self._loops, self._evaluations, self._repeats = parts.loops, parts.evaluations, parts.repeats
        self._ends = parts.loaders.gives
        self._trains = self._is_settled = False
        self._followed: FrameMark | None = None
        """The mark of the frame whose loop is followed."""
        self._loop: Loop | None = None
        """That loop."""
        self._passes = 0
        """Of it that are over."""

    def note_optimizer(self) -> None:
        """Its steps are the rounds."""
        self._trains = True

    def note_round(self, over: RoundOver) -> None:
        """A round after set-up is a step, or the whole program."""
        if not self._trains and over.number:
            self._end_loop(is_over=over.is_whole or over.is_over)
        self._trains |= over.number > 0
        if Phase.BACKWARD in over.record.phases:
            self._evaluations.passes = [each for each in self._evaluations.passes if not each.is_loop]

    def begin_call(self, module: torch.nn.Module) -> None:
        """Perhaps in another pass of a loop."""
        if self._trains:
            return
        if (found := self._loops.find_passed(sys._getframe(1), self._followed)) is not None:
            self._note_pass(*found)
        self._evaluations.note_call(is_loop=True)

    def _note_pass(self, frame: FrameMark, loops: Sequence[Loop]) -> None:
        """A pass of the innermost of a function's loops is over: of the one that is followed, of one within it, or of
        one around it, which has calls of its own."""
        loop, last = loops[-1], self._loop if frame == self._followed else None
        if last is not None and any(each.first == last.first for each in loops[:-1]):
            return
        if last is None or loop.first != last.first:
            self._end_loop()
            if last is not None and loop.first <= last.first <= last.last <= loop.last:
                self._evaluations.drop_loop()
            self._followed, self._loop, self._passes, self._is_settled = frame, loop, 1, False
            self._evaluations.begin(1)
            return
        self._passes += 1
        if self._is_settled:
            return
        turns = [each.turns for each in loops]
        batches = None if None in turns else math.prod(each or 0 for each in turns)
        place = f"{package_path(loop.file)}:{loop.head}"
        self._is_settled = not self._evaluations.note_batch(place, batches, self._passes, is_loop=True)

    def _end_loop(self, *, is_over: bool = True) -> None:
        if self._loop is not None:
            self._evaluations.end_loop(self._passes + is_over, is_over=is_over)

    def takes_long(self, operators: int) -> bool:
        """Whether the other passes would take long, and are known to be like those that ran."""
        return self._is_settled and self._ends and not self._trains and self._evaluations.is_cut

    def assume(self, run: ProgramRun, peak_bytes: int) -> Iterator[Assumption]:
        """That calls which are alike stay so."""
        if self._repeats.made:
            share = f"{self._repeats.made:,} of {self._repeats.made + self._repeats.ran:,} calls of models"
            text = f"{share} without gradients were made of those that ran and were alike"
            text += (kind := self._repeats.differs) and f"; a later one of {kind} was not: --until end runs all"
            yield Assumption(topic="calls", text=text)


register("inference", Inference)
