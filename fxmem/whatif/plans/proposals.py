"""Plans that have been applied and analysed, and which of them is cheaper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fxmem import checkpointing
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware.step_time import step_seconds
from fxmem.planning import PlanFinder
from fxmem.records.names import Application
from fxmem.records.plan import Region
from fxmem.records.profile import Peak, Profile
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.model.fake_model import shadow_model

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
