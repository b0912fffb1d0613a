"""All planners behind one door: strategy and budget in, a plan out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from fxmem.errors import ExceededError, UsageError
from fxmem.hardware import roofline
from fxmem.memory import liveness
from fxmem.planning.regions.candidates import (
    Span,
    fewer,
    frees,
    graph_cuts,
    last_needed,
    module_spans,
    norm_runs,
    siblings,
    worthwhile_cuts,
)
from fxmem.planning.regions.cost_tables import Geometry
from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.planning.regions.plan_text import described
from fxmem.records.plan import ONE_PLAN, Application, Plan, Region, Strategy
from fxmem.records.profile import Peak, Profile
from fxmem.records.units import exact_bytes

__all__ = ["STRATEGIES", "Planner", "ways_of"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_NESTED_UNITS = 128
"""Units that the nested planner tells apart; its time grows with their cube."""
_POINTS = 14
"""Budgets that a curve is made of."""


class Planner:
    """Plans for one profile and one way of applying them."""

    def __init__(self, profile: Profile, application: Application) -> None:
        self.profile, self.application = profile, application

    @cached_property
    def spans(self) -> dict[tuple[int, int], Span]:
        """Module calls whose checkpoint would free something, by their nodes; of several with the same nodes, the
        outermost."""
        found: dict[tuple[int, int], Span] = {}
        needed = last_needed(self.profile)
        for span in module_spans(self.profile):
            if frees(self.profile, span, needed):
                found.setdefault((span.first, span.last), span)
        return fewer(found)

    @cached_property
    def before(self) -> Peak:
        """The peak without a plan."""
        return liveness.timeline(self.profile).peak

    @cached_property
    def before_seconds(self) -> float | None:
        """The least time of the step without a plan."""
        return roofline.step_seconds(self.profile)

    @cached_property
    def tables(self) -> Tables:
        """Over every cut that is worth considering."""
        if self.application is Application.GRAPH:
            return self._tables(graph_cuts(self.profile))
        return self._tables([cut for span in self.spans.values() for cut in (span.first, span.last)])

    @cached_property
    def coarse(self) -> Tables:
        """The same with fewer cuts."""
        tables = self.tables
        if tables.geometry.count > _NESTED_UNITS and self.application is Application.GRAPH:
            tables = self._tables(worthwhile_cuts(self.profile))
        if tables.geometry.count <= _NESTED_UNITS:
            return tables
        crossing = {cut: float(tables.geometry.outputs()[0, index]) for index, cut in enumerate(tables.geometry.cuts)}
        inner = tables.geometry.cuts[1:-1]
        # The narrowest cut of each of as many equal stretches of kept bytes.
        kept = np.concatenate([[0.0], np.cumsum(tables.geometry.keeps)])
        stretches = np.floor(kept[1:-1] / max(kept[-1], 1) * (_NESTED_UNITS - 1)).astype(int)
        best: dict[int, int] = {}
        for cut, stretch in zip(inner, stretches, strict=True):
            if stretch not in best or crossing[cut] <= crossing[best[stretch]]:
                best[int(stretch)] = cut
        return self._tables(sorted(best.values()))

    def _tables(self, cuts: Sequence[int]) -> Tables:
        geometry = Geometry(self.profile, cuts)
        n = geometry.count
        allowed = np.zeros((n + 1, n + 1), dtype=bool)
        for i in range(n):
            lowest = np.minimum.accumulate(geometry.earliest[geometry.cuts[i] : geometry.last])
            ends = np.asarray(geometry.cuts[i + 1 :]) - geometry.cuts[i] - 1
            allowed[i, i + 1 :] = lowest[ends] >= geometry.cuts[i]
        if self.application is Application.MODULES:
            at = {cut: index for index, cut in enumerate(geometry.cuts)}
            modules = np.zeros_like(allowed)
            for first, last in self.spans:
                if first in at and last in at:
                    modules[at[first], at[last]] = True
            allowed &= modules
        return Tables(geometry, allowed)

    # --- plans --------------------------------------------------------------------------------------------------------

    def plan(self, strategy: Strategy, budget_bytes: int | None) -> Plan:
        """The cheapest plan of a strategy within a budget of requested bytes, by the planner's own tables.

        Without a budget `sqrt`, `chen` and `norms` give their one plan; the others store everything.

        Raises:
            UsageError: an unknown strategy.
            ExceededError: no plan of this strategy keeps the budget; says the smallest peak it reaches.
        """
        if strategy not in STRATEGIES:
            raise UsageError(f"expected strategy to be one of {', '.join(STRATEGIES)}; got {strategy!r}")
        if strategy in ONE_PLAN:
            return self._classic(strategy, budget_bytes)
        budget = math.inf if budget_bytes is None else float(budget_bytes)
        if budget >= self.tables.geometry.unplanned:
            return self._made(strategy, "flat", (), self.tables, budget_bytes)
        found = None if strategy == "nested" else self.tables.flat(budget)
        if found is not None:
            return self._made(
                strategy, "modules" if strategy == "modules" else "flat", found, self.tables, budget_bytes
            )
        found = None if strategy == "flat" else self.coarse.nested(budget)
        if found is not None:
            return self._made(strategy, "nested", found, self.coarse, budget_bytes, round(budget))
        least = self.tables.smallest()
        raise ExceededError(
            f"expected a plan that keeps the step within {exact_bytes(budget_bytes or 0)}; strategy {strategy} with "
            f"{self.application.value} reaches "
            f"{exact_bytes(round(least))} at the least"
        )

    def smallest(self) -> Plan:
        """The plan that reaches lowest."""
        low, high = self.tables.geometry.floor, self.tables.smallest()
        best = self._made("flat", "flat", self.tables.flat(high) or (), self.tables, None)
        for _ in range(5):
            middle = (low + high) / 2
            found = self.coarse.nested(middle, selective=False)  # what is kept only takes room
            if found is None:
                low = middle
            else:
                high, best = middle, self._made("nested", "nested", found, self.coarse, None, round(middle))
        return best

    def curve(self) -> tuple[Plan, ...]:
        """Plans of which none has both a lower peak and a lower cost than another, largest peak first; the first has no
        regions."""
        highest, lowest = self.tables.geometry.unplanned, self.tables.smallest()
        plans = [self._made("flat", "flat", (), self.tables, None)]
        for step in range(1, _POINTS + 1):
            found = self.tables.flat(highest - (highest - lowest) * step / _POINTS + 1)
            if found is not None:
                plans.append(self._made("flat", "flat", found, self.tables, None))
        smallest = self.smallest()
        return tuple({plan.regions: plan for plan in (*plans, smallest)}.values())

    def _classic(self, strategy: Strategy, budget_bytes: int | None) -> Plan:
        geometry, regions = self.tables.geometry, self.tables.regions
        if self.application is Application.GRAPH:
            pieces = [(unit, unit + 1) for unit in range(geometry.count)]
        else:
            at = {cut: index for index, cut in enumerate(geometry.cuts)}
            chain = siblings(self.profile, self.spans.values())
            pieces = [(at[span.first], at[span.last]) for span in chain if span.first in at and span.last in at]
        kept = [sum(geometry.keeps[i:j]) for i, j in pieces]
        if strategy == "norms":
            candidates = [[(i, j) for i, j in self._from_norms(geometry) if regions[i, j]]]
        elif strategy == "sqrt":
            size = max(round(math.sqrt(len(pieces))), 1)
            candidates = [self._grouped(pieces, [index // size for index in range(len(pieces))])]
        else:
            candidates = []
            for segments in sorted({max(round(len(pieces) ** power), 1) for power in np.linspace(0.2, 1.0, 12)}):
                filled = np.cumsum([0.0, *kept[:-1]]) // max(sum(kept) / segments, 1.0)
                candidates.append(self._grouped(pieces, [int(part) for part in filled]))
        plans = [
            self._made(strategy, strategy, self._legal(each, regions), self.tables, budget_bytes) for each in candidates
        ]
        if budget_bytes is None:
            return min(plans, key=lambda plan: plan.after.requested_bytes)
        fitting = [plan for plan in plans if plan.after.requested_bytes <= budget_bytes]
        if not fitting:
            least = min(plan.after.requested_bytes for plan in plans)
            raise ExceededError(
                f"expected a plan that keeps the step within {exact_bytes(budget_bytes)}; strategy {strategy} "
                f"reaches {exact_bytes(least)} at the least"
            )
        return min(fitting, key=lambda plan: plan.extra_flops or 0)

    def _from_norms(self, geometry: Geometry) -> list[tuple[int, int]]:
        """Units from one with a norm to the one that convolves next; in MODULES plans, only what is a slice of a
        Sequential."""
        at = {cut: index for index, cut in enumerate(geometry.cuts)}
        runs = norm_runs(self.profile)
        if self.application is Application.MODULES:
            return [(at[first], at[last]) for first, last in runs if first in at and last in at]
        return [(int(geometry.unit_of[first]), int(geometry.unit_of[last - 1]) + 1) for first, last in runs]

    @staticmethod
    def _grouped(pieces: Sequence[tuple[int, int]], group: Sequence[int]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for index, (i, j) in enumerate(pieces):
            if index and group[index] == group[index - 1] and found[-1][1] == i:
                found[-1] = (found[-1][0], j)
            else:
                found.append((i, j))
        return found

    @staticmethod
    def _legal(stretches: Sequence[tuple[int, int]], regions: NDArray[np.bool_]) -> tuple[Stretch, ...]:
        """The stretches, cut into as few pieces as may be regions; what may not is left stored."""
        found = []
        for i, j in stretches:
            while i < j:
                end = next((end for end in range(j, i, -1) if regions[i, end]), None)
                if end is not None:
                    found.append(Stretch(i, end))
                i = i + 1 if end is None else end
        return tuple(found)

    # --- what is said of a plan ---------------------------------------------------------------------------------------

    def _made(
        self,
        strategy: Strategy,
        chosen: Strategy,
        stretches: Sequence[Stretch],
        tables: Tables,
        budget_bytes: int | None,
        most: int | None = None,
    ) -> Plan:
        """The plan; `most` is what the planner says its peak is at most, where that is not to be had from its
        regions."""
        regions = described(tables.selection, stretches, self.spans)
        estimated = self.estimate(stretches, tables) if most is None else most
        return self.proposed(strategy, chosen, self.application, budget_bytes, regions, estimated, _run_again(regions))

    def proposed(
        self,
        strategy: Strategy,
        chosen: Strategy,
        application: Application,
        budget_bytes: int | None,
        regions: tuple[Region, ...],
        estimated: int,
        extra_flops: int | None,
    ) -> Plan:
        """A plan for the profile that has not been analysed; `estimated` is its peak."""
        profile, before = self.profile, self.before
        return Plan(
            **profile.heading(),
            strategy=strategy,
            chosen=chosen,
            application=application,
            budget_bytes=budget_bytes,
            regions=regions,
            before=before,
            after=Peak(requested_bytes=estimated, phase=before.phase, tick=before.tick, by_kind={})
            if regions
            else before,
            analysed=False,
            forward_flops=None,
            extra_flops=extra_flops,
            before_seconds=self.before_seconds,
        )

    def estimate(self, stretches: Sequence[Stretch], tables: Tables) -> int:
        """Peak of the step under one level of regions, by the tables."""
        geometry, kept, most, cut = tables.geometry, 0.0, tables.geometry.floor, 0
        for stretch in (*stretches, Stretch(geometry.count, geometry.count)):
            for unit in range(cut, stretch.first):
                most = max(most, kept + geometry.storing[unit, unit], kept + geometry.running[unit, unit])
                kept += geometry.keeps[unit]
            if stretch.first < stretch.last:
                offer = tables.offers[stretch.level]
                most = max(most, kept + offer.need[stretch.first, stretch.last])
                kept += offer.kept[stretch.first, stretch.last]
            cut = stretch.last
        return round(most)


def _run_again(regions: Sequence[Region]) -> int | None:
    """FLOPs of recomputing regions, those within them included; None where an op has no formula."""
    extra = [flops for region in regions for flops in (region.extra_flops, _run_again(region.regions))]
    return None if None in extra else sum(flops or 0 for flops in extra)


def ways_of(
    strategy: Strategy, application: Application | str | None, *, regions_only: bool = False
) -> list[Application]:
    """How plans of a strategy may be applied, the cheapest way first; of them the one that is asked for, if any.

    Args:
        regions_only: leaves single operators out, so that there may be none.

    Raises UsageError where strategy and application do not go together.
    """
    may: dict[Strategy, list[Application]] = {"auto": [Application.OPERATORS, Application.MODULES, Application.GRAPH]}
    may |= {"mincut": [Application.OPERATORS], "modules": [Application.MODULES]}
    found = may.get(strategy, [Application.MODULES, Application.GRAPH])
    if application is not None:
        if application not in found:
            raise UsageError(
                f"expected application {' or '.join(map(repr, map(str, found)))} with strategy {strategy!r}, got "
                f"{str(application)!r}"
            )
        found = [Application(application)]
    return [way for way in found if not (regions_only and way is Application.OPERATORS)]
