"""How a program is run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxmem.records.names import MAX_OPERATORS, STEADY, STEPS
from fxmem.simulation.asked.routing import BALANCED, Rule
from fxmem.simulation.program.rounds import FinishedRound


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How long a program runs, and how."""

    steps: int | None = None
    """Optimizer steps after which it is ended; `STEPS` where nothing is said, or up to `GROWING` while it grows."""
    until: str | None = None
    """"steady" ends it when a step allocates no more than the one before and leaves as much alive, at the latest after
    `steps` (`STEADY` where nothing is said); "end" never does; None after so many steps."""
    out_of_memory: str = "raise"
    """"raise" or "continue", as of `record`."""
    max_operators: int = MAX_OPERATORS
    """Operators of one round after which it is ended."""
    compile: str | None = None
    """"as-is" compiles what it compiles; None runs that as eager code."""
    prepare: Callable[[str, torch.nn.Module], None] | None = None
    """Called with name and module of each of its models before the first call."""
    given: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Values that it reads, by line (`train.py:41`), where they would be made up."""
    rule: Rule = BALANCED
    """How tokens are shared out among experts."""
    host_bytes: int | None = None
    """The host's memory; None where it is not known."""
    measures_host: bool = True
    """Whether what the process has there is measured, which differs a little from run to run."""
    reads_epoch: bool = False
    """Whether an epoch of its loader's batches is read, where they have different lengths."""
    explains: bool = True
    """Whether the report says what is found; see `ProfiledStep.report`."""
    watch: Callable[[Callable[[], str]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What the program runs inside; called with what says how far it is, which another thread may ask."""

    @property
    def most_steps(self) -> int | None:
        """After how many steps it is ended at the latest; None for never."""
        return None if self.until == "end" else self.steps or (STEADY if self.until == "steady" else STEPS)

    def is_enough(self, rounds: Sequence[FinishedRound]) -> bool:
        """Whether the program has run long enough, asked after each round with all of them."""
        is_steady = self.until == "steady" and len(rounds) > 1 and rounds[-1].repeats(rounds[-2])
        if rounds[-1].may_show_more and not (self.steps or self.until):
            return False
        return is_steady or (self.most_steps is not None and len(rounds) >= self.most_steps)
