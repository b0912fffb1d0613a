"""Plans that have been applied and analysed, and which of them is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from fxmem import checkpointing
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware.step_time import step_seconds
from fxmem.planning import PlanFinder, tuning
from fxmem.records.plan import Region
from fxmem.records.profile import Peak, Profile
from fxmem.records.units import Application
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.fake_model import shadow_model

REFUSALS = (UsageError, AnalysisError)
"""What applying a plan raises where its application does not go with the model; some only the planned step shows."""


def apply_regions(analysis: Analysis, regions: Iterable[Region], application: Application, **changes: Any) -> Analysis:
    """Analyse the same step with these regions checkpointed; the analysed model itself stays as it is.

    `changes` are those of `Analysis.vary`.
    """
    return analysis.vary(checkpointing.apply(shadow_model(analysis.model), tuple(regions), application), **changes)


def check_training(step: ProfiledStep) -> None:
    """Raise UsageError where there is nothing to checkpoint."""
    if step.profile.step.mode != "train":
        raise UsageError(
            "expected the analysis of a training step: at inference nothing is saved for backward, so there is "
            "nothing to checkpoint"
        )


@dataclass(frozen=True)
class PlannedWay:
    """A way of applying plans, and the planner for it."""

    application: Application
    planner: PlanFinder
    names: tuple[str | None, ...] = ()
    """The names of the profile's nodes in the symbolic graph; of a GRAPH only."""
    note: str = ""


@dataclass(frozen=True)
class Proposal:
    """A plan that has been applied and analysed."""

    way: PlannedWay
    chosen: str
    regions: tuple[Region, ...]
    analysis: ProfiledStep
    host_bytes: int = 0
    """As `Plan.host_bytes`."""

    @property
    def peak_bytes(self) -> int:
        """The bytes that a budget bounds."""
        return self.analysis.peak.counted_bytes

    @cached_property
    def seconds(self) -> float | None:
        """The estimated time of the step; None where the card's rates are not known."""
        taped = bool(self.regions) and self.way.application is Application.OPERATORS
        return step_seconds(self.analysis.profile, taped=taped)

    @cached_property
    def cost(self) -> tuple[float, int, int, bool]:
        """What a cheaper plan has less of: time where that is known, then FLOPs, then ops; of equals, one that keeps
        the user's program is cheaper."""
        profile = self.analysis.profile
        flops, is_graph = _count_flops(profile)[0], self.way.application is Application.GRAPH
        return self.seconds or 0, flops, len(profile.ops), is_graph


class Shortfall(NamedTuple):
    """Why no plan keeps a budget."""

    peak: Peak
    """The lowest that was reached; where no plan was tried, the lowest that any could."""
    reached: Proposal | None
    """What has that peak; None: no plan was tried, as none changes it."""
    least_bytes: int | None = None
    """The smallest budget that a plan keeps; None: none was tried."""


def count_extra_flops(before: ProfiledStep, after: ProfiledStep) -> int | None:
    """FLOPs of what is recomputed; None if an op without a formula is among it."""
    (least, unknown), (most, still_unknown) = _count_flops(before.profile), _count_flops(after.profile)
    return most - least if unknown == still_unknown else None


def _count_flops(profile: Profile) -> tuple[int, int]:
    """FLOPs of all ops that have a formula, and how many ops have none."""
    return sum(op.flops or 0 for op in profile.ops), sum(op.flops is None for op in profile.ops)


def find_cheaper(*proposals: Proposal | None) -> Proposal | None:
    """The cheapest of them; of equals, the first."""
    return min((each for each in proposals if each is not None), key=lambda each: each.cost, default=None)


# --- which budget to ask a planner for next, after its last plan was analysed -----------------------------------------
# A planner bounds requested bytes by its own model of memory; the budget bounds what the analysis counts. The two
# differ by little, so the next question moves by as much as the last plan missed the budget by, and by bisection
# where that leads out of the bracket.


@dataclass(frozen=True)
class BudgetBracket:
    """The requested bytes to ask a planner for, between two bounds."""

    budget: int
    """The bytes that the analysed peak has to keep."""
    ask: int
    """The requested bytes to ask for next."""
    below: int
    """Asked for this much or less, a plan keeps the budget or there is none."""
    above: int
    """Asked for this much or more, no plan keeps it."""

    @classmethod
    def open(cls, budget: int, requested: int, overhead: int, *, exact: bool) -> BudgetBracket:
        """Begin a search.

        Args:
            budget: bytes that the analysed peak has to keep.
            requested: bytes requested at the peak without a plan.
            overhead: bytes the allocator adds to them.
            exact: whether the planner's estimates are exact but for a fiftieth.
        """
        ask = budget - overhead
        above = requested if budget < requested else 2 * budget
        return cls(budget, ask, 0, min(above, ask + ask // tuning.EXACT_ERROR) if exact else above)

    @property
    def is_closed(self) -> bool:
        """Whether the bounds are so close that another question is not worth it."""
        return self.above - self.below <= self.tolerance

    @property
    def tolerance(self) -> int:
        """Bytes of the budget that may stay unused."""
        return self.budget // tuning.USED_UP

    def after_refusal(self, least: int = 0) -> BudgetBracket:
        """The planner had no plan.

        Args:
            least: the fewest bytes for which it has one.
        """
        return self._narrow(max(self.ask, least - 1), self.above, max(self.ask, least))

    def after_success(self, spare: int) -> BudgetBracket:
        """The plan keeps the budget, with so many bytes to spare."""
        return self._narrow(self.ask, self.above, self.ask + spare)

    def after_excess(self, excess: int) -> BudgetBracket:
        """The plan does not keep the budget.

        Args:
            excess: by how many bytes; where there is none, free memory in pieces is the reason.
        """
        less = max(excess, self.tolerance) if excess > 0 else self.budget // tuning.FRAGMENT
        return self._narrow(self.below, self.ask, self.ask - less)

    def _narrow(self, below: int, above: int, ask: int) -> BudgetBracket:
        inside = below < ask < above
        return BudgetBracket(self.budget, ask if inside else (below + above) // 2, below, above)


# --- what is being done, and which part of the work that is -----------------------------------------------------------


_Part = TypeVar("_Part")


class CountedProgress:
    """Reports what is being done, with the number of the part that it belongs to.

    Args:
        tell: called with the words.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._done, self._count = tell, 0, 0

    def __call__(self, what: str) -> None:
        """Report what is being done."""
        self._tell(f"{min(self._done + 1, self._count)} of {self._count}, {what}" if self._count else what)

    def steps(self, parts: Sequence[_Part], of: int = 1) -> Iterator[_Part]:
        """Iterate over parts of the work, each of so many steps."""
        self._count = of * len(parts)
        for index, part in enumerate(parts):
            self._done = of * index
            yield part
        self._done = self._count

    def within(self, steps: Iterable[_Part]) -> Iterator[_Part]:
        """Iterate over the steps of the part that is being done."""
        for step in steps:
            yield step
            self._done += 1
