"""What is told of a program's rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fxmem.records.profile import Assumption, ProgramRun, Round, SourceLine


class RoundOver(NamedTuple):
    """A round that is over."""

    number: int
    """From 1; 0 for set-up."""
    is_whole: bool
    """Whether it came to its own end."""
    is_over: bool
    """Whether the program did."""
    record: Round
    sizes: Counter[int]
    """How often each number of bytes was allocated."""
    forward_sizes: Counter[int]
    """The same before the first backward."""
    lines: Sequence[SourceLine | None]
    """Of its nodes, the program's."""
    calls: Sequence[SourceLine | None]
    """Those of its calls of modules."""


class RoundListener:
    """Follows the rounds of a program; a subclass does what it wants of this.

    Calls come in this order: set-up's `note_round`; for each round `begin_call`s, `end_step`, `note_round`; where as
    many have run as were asked for, `note_last`; `finish`, `describe`. Any of them may be the last.
    """

    def ends_before(self, module: torch.nn.Module) -> bool:
        """Whether the program is ended before a call of a model."""
        return False

    @property
    def may_show_more(self) -> bool:
        """Whether another round would show more than those that are over."""
        return False

    @property
    def keeps_acts(self) -> bool:
        """Whether what the last round has allocated and freed is looked at later."""
        return False

    def takes_long(self, operators: int) -> bool:
        """Whether a round of so many operators is ended, as it takes long."""
        return False

    def note_optimizer(self) -> None:
        """The program has made an optimizer."""

    def begin_call(self, module: torch.nn.Module) -> None:
        """A model is about to be called."""

    def end_step(self) -> bool:
        """A step is over, of which no round is made yet. Whether the program is ended with it."""
        return False

    def goes_beyond(self) -> bool:
        """Whether a program that is to end with a step runs on nevertheless, without further ones."""
        return False

    def note_round(self, over: RoundOver) -> None:
        """A round or set-up is over."""

    def note_last(self, number: int) -> None:
        """As many rounds have run as were asked for."""

    def goes_on(self, number: int) -> bool:
        """Whether the program runs on after so many rounds, which were enough."""
        return False

    def finish(self) -> None:
        """The program is over."""

    def describe(self, *, is_over: bool) -> dict[str, Any]:
        """Its fields of `ProgramRun`.

        Args:
            is_over: whether the program came to its own end.
        """
        return {}

    def assume(self, run: ProgramRun, peak_bytes: int) -> Iterator[Assumption]:
        """What is taken for granted of what it has found.

        Args:
            run: the record that all listeners have described.
            peak_bytes: the most that a round has requested.
        """
        yield from ()
