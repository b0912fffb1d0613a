"""The epoch of a program is ended, so that what follows it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from fxmem.records.profile import Assumption, ProgramRun
from fxmem.simulation.run.evaluations import explain_evaluations
from fxmem.simulation.run.listeners import register
from fxmem.simulation.run.program_parts import ProgramParts
from fxmem.simulation.run.round_listener import RoundListener, RoundOver

_MOST_OPERATORS: Final = 20_000
"""That may follow an epoch; a program whose steps have many may have four times as many as one of these."""
_MOST_SECONDS: Final = 60.0
"""Time that it may take."""


class AfterEpoch(RoundListener):
    """Ends the epoch after the rounds that were asked for, and the program after what follows it.

    Args:
        parts: of the program.
    """

    def __init__(self, parts: ProgramParts) -> None:
        self._loaders, self._evaluations = parts.loaders, parts.evaluations
        self._taken = parts.branches.taken
        self._operators: int | None = None
        """Of the last round."""

    def ends_before(self, module: torch.nn.Module) -> bool:
        """Whether nothing came between the epochs, not even what comes much later."""
        return self._loaders.has_begun_again and not (self._evaluations.have_begun or self._taken)

    @property
    def may_show_more(self) -> bool:
        """Whether the next batch shows how sizes follow lengths."""
        return self._loaders.may_go_on

    @property
    def keeps_acts(self) -> bool:
        """Whether the lengths of batches are compared."""
        return self._loaders.keeps_steps

    def takes_long(self, operators: int) -> bool:
        """Whether what follows the epoch has taken long."""
        if not self._loaders.is_beyond or self._operators is None:
            return False
        most = max(_MOST_OPERATORS, 4 * self._operators) + self._evaluations.whole_operators
        return operators > most or self._loaders.seconds_after > _MOST_SECONDS + self._evaluations.whole_seconds

    def begin_call(self, module: torch.nn.Module) -> None:
        """After the epoch it evaluates."""
        if self._loaders.is_beyond and (self._loaders.has_another_pass or not module.training):
            self._evaluations.note_call()

    def end_step(self) -> bool:
        """A step after the evaluation is the last."""
        if self._evaluations.have_begun:
            self._evaluations.note_step()
            return True
        self._loaders.end_round()
        return False

    def note_round(self, over: RoundOver) -> None:
        """Note how much is usual."""
        self._operators = over.record.operators if over.number else None

    def goes_on(self, number: int) -> bool:
        """Whether the epoch is ended, and what follows it runs."""
        return self._loaders.end_epoch(number)

    def describe(self, *, is_over: bool) -> dict[str, Any]:
        """The passes that follow."""
        return {"evaluations": tuple(self._evaluations.passes)}

    def assume(self, run: ProgramRun, peak_bytes: int) -> Iterator[Assumption]:
        """That its passes were cut short."""
        yield from (Assumption(topic="evaluation", text=text) for text in explain_evaluations(run.evaluations))


register("after-epoch", AfterEpoch)
