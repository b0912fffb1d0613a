"""Batches of different lengths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from fxmem.records.parts import LongestBatch
from fxmem.records.profile import Assumption, ProgramRun, Round
from fxmem.records.units import STEPS
from fxmem.simulation.run.listeners import register
from fxmem.simulation.run.longest_batch import RecordedLengths, explain_longest, find_longest
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.round_listener import RoundListener, RoundOver


class LengthsWatch(RoundListener):
    """Finds the batch that decides, where the loader's batches have different lengths.

    Args:
        parts: of the program.
    """

    def __init__(self, parts: ProgramParts) -> None:
        self._loaders, self._recording, self._machine = parts.loaders, parts.recording, parts.machine
        self._longest: LongestBatch | None = None
        self._rounds: list[Round] = []

    def note_round(self, over: RoundOver) -> None:
        """Note its peak."""
        if over.number and over.is_whole:
            self._rounds.append(over.record)

    def finish(self) -> None:
        """Find it."""
        watch, memory, (found, per_step) = self._loaders, self._machine.memory, self._loaders.find_training()
        if watch.epoch is None or found is None:
            return
        self._longest = find_longest(
            RecordedLengths(
                watch.epoch,
                watch.handed(found),
                per_step,
                STEPS,
                self._machine.trace.rounds[:-1],  # the last is not over
                self._rounds,
                self._recording.collector,
                self._recording.target,
                dict(os.environ if memory is None else memory.environ),
            )
        )

    def describe(self, *, is_over: bool) -> dict[str, Any]:
        """The batch."""
        return {"longest": self._longest}

    def assume(self, run: ProgramRun, peak_bytes: int) -> Iterator[Assumption]:
        """That the epoch is like those to come."""
        if run.longest is not None:
            yield from (Assumption(topic="lengths", text=text) for text in explain_longest(run.longest))


register("lengths", LengthsWatch)
