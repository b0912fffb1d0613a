"""What follows the epoch of a program, which is ended so that it runs."""

from __future__ import annotations

from typing import Any, Final

import torch

from fxmem.simulation.run.evaluations import Evaluations
from fxmem.simulation.run.loader_watch import LoaderWatch
from fxmem.simulation.run.round_listener import RoundListener, RoundOver

_MOST_OPERATORS: Final = 20_000
"""That may follow an epoch; a program whose steps have many may have four times as many as one of these."""
_MOST_SECONDS: Final = 60.0
"""Time that it may take."""


class AfterEpoch(RoundListener):
    """Ends the epoch after the rounds that were asked for, and the program after what follows it.

    Args:
        loaders: of the program.
        evaluations: the passes over them that follow.
    """

    def __init__(self, loaders: LoaderWatch, evaluations: Evaluations) -> None:
        self._loaders, self._evaluations = loaders, evaluations
        self._operators: int | None = None
        """Of the last round."""
        self.has_evaluated = False
        """Whether a model was called after the epoch was ended."""

    @property
    def is_done(self) -> bool:
        """Whether nothing came between the epochs."""
        return self._loaders.has_begun_again and not self.has_evaluated

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
        if not self._loaders.is_after or self._operators is None:
            return False
        most = max(_MOST_OPERATORS, 4 * self._operators) + self._evaluations.whole_operators
        seconds = _MOST_SECONDS + self._evaluations.whole_seconds
        return operators > most or self._loaders.seconds_after > seconds

    def begin_call(self, module: torch.nn.Module) -> None:
        """After the epoch it evaluates."""
        if self._loaders.is_after and (self._loaders.has_another_pass or not module.training):
            self.has_evaluated = True
            self._evaluations.note_call()

    def end_step(self) -> bool:
        """A step after the evaluation is the last."""
        if self.has_evaluated:
            self._evaluations.note_step()
        else:
            self._loaders.end_round()
        return self.has_evaluated

    def note_round(self, over: RoundOver) -> None:
        """Note how much is usual."""
        self._operators = over.record.operators if over.number else None

    def goes_on(self, number: int) -> bool:
        """Whether the epoch is ended, and what follows it runs."""
        return self._loaders.end_epoch(number)

    def describe(self, *, is_over: bool) -> dict[str, Any]:
        """The passes that follow."""
        return {"evaluations": tuple(self._evaluations.passes)}
