"""All planners behind one door: strategy and budget in, a plan out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fxmem.errors import UsageError
from fxmem.hardware.op_classes import is_product
from fxmem.hardware.step_time import step_seconds
from fxmem.memory import liveness
from fxmem.planning import tuning
from fxmem.planning.lookups import find_reads, last_needed, ops_by_node
from fxmem.planning.plan_finder import PlanFinder
from fxmem.planning.regions.candidates import (
    Span,
    frees,
    graph_cuts,
    limit_spans,
    module_spans,
    worthwhile_cuts,
    writes_in_place,
)
from fxmem.planning.regions.cost_tables import CostTables, OpCosts
from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.planning.regions.plan_text import Lines, describe_regions, find_lines, has_edit, write_edits
from fxmem.planning.regions.strategies import STRATEGIES, Strategy
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Peak, Phase, Profile
from fxmem.records.units import Application, group, sum_known


class Planner(PlanFinder):
    """Plans of regions for one profile and one way of applying them: a `PlanFinder`.

    With `edits_only`, regions are modules that an edit of a line checkpoints, each by itself.
    """

    is_quick = True

    def __init__(self, profile: Profile, application: Application, *, edits_only: bool = False) -> None:
        self.profile, self.application, self._edits_only = profile, application, edits_only

    @cached_property
    def lines(self) -> Lines:
        """The modules that each line of the source calls."""
        return find_lines(self.profile)

    @cached_property
    def spans(self) -> dict[tuple[int, int], Span]:
        """Module calls whose checkpoint would free something, by their nodes. Of several with the same nodes, the
        outermost."""
        found: dict[tuple[int, int], Span] = {}
        needed = last_needed(self.profile, find_reads(self.profile))
        for span in module_spans(self.profile):
            if frees(self.profile, span, needed) and (not self._edits_only or has_edit(span, self.lines)):
                found.setdefault((span.first, span.last), span)
        return limit_spans(found)

    @cached_property
    def before(self) -> Peak:
        """The peak without a plan."""
        return liveness.timeline(self.profile).peak

    @cached_property
    def before_seconds(self) -> float | None:
        """The least time of the step without a plan."""
        return step_seconds(self.profile)

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
        if tables.units.count > tuning.NESTED_UNITS and self.application is Application.GRAPH:
            tables = self._tables(worthwhile_cuts(self.profile))
        if tables.units.count <= tuning.NESTED_UNITS:
            return tables
        crossing = dict(zip(tables.units.cuts, tables.units.outputs[0].tolist(), strict=True))
        # The narrowest cut of each of as many equal stretches of kept bytes.
        kept = np.concatenate([[0.0], np.cumsum(tables.units.keeps)])
        stretches = np.floor(kept[1:-1] / max(kept[-1], 1) * (tuning.NESTED_UNITS - 1)).astype(int)
        by_stretch = group(zip(stretches.tolist(), tables.units.cuts[1:-1], strict=True))
        # Of equal ones, the last.
        return self._tables(sorted(min(reversed(cuts), key=crossing.__getitem__) for cuts in by_stretch.values()))

    def _tables(self, cuts: Sequence[int]) -> Tables:
        units = CostTables(self.profile, cuts)
        n = units.count
        allowed = np.zeros((n + 1, n + 1), dtype=bool)
        for i in range(n):
            lowest = np.minimum.accumulate(units.earliest[units.cuts[i] : units.last])
            ends = np.asarray(units.cuts[i + 1 :]) - units.cuts[i] - 1
            allowed[i, i + 1 :] = lowest[ends] >= units.cuts[i]
        if self.application is not Application.MODULES:
            return Tables(units, allowed)
        modules = np.zeros_like(allowed)
        for first, last in self.spans:
            if first in units.cut_at and last in units.cut_at:
                modules[units.cut_at[first], units.cut_at[last]] = True
        return Tables(units, allowed & modules, tuple(self.spans.values()))

    # --- plans --------------------------------------------------------------------------------------------------------

    def other_strategies(self, strategy: str) -> tuple[str, ...]:
        return STRATEGIES.get(strategy).weighs

    def lowest_peak(self, strategy: str) -> int:
        asked = STRATEGIES.get(strategy)
        if asked.has_curve or asked.propose is None:
            return round(self.tables.smallest)
        return self.tables.estimate(asked.propose(self.tables, math.inf) or ())

    def find(self, strategy: str, budget_bytes: int | None) -> Plan | None:
        asked = STRATEGIES.get(strategy)
        budget = math.inf if budget_bytes is None else float(budget_bytes)
        if asked.has_curve and budget >= self.tables.units.unplanned_peak:
            return self._plan(strategy, "flat", (), self.tables, budget_bytes)
        tried = (
            self._propose(strategy, STRATEGIES.get(name), budget, budget_bytes) for name in asked.tries or (strategy,)
        )
        return next((plan for plan in tried if plan is not None), None)

    def _propose(self, asked_for: str, strategy: Strategy, budget: float, budget_bytes: int | None) -> Plan | None:
        """The plan that a strategy proposes, if that keeps the budget."""
        tables = self.coarse if strategy.nests else self.tables
        stretches = self._spend(strategy, tables, budget)
        if stretches is None:
            return None
        for stretch in stretches:
            if not tables.regions[stretch.first, stretch.last]:
                raise UsageError(
                    f"expected strategy {strategy.name} to propose stretches that may be regions, got units "
                    f"{stretch.first} to {stretch.last - 1}, which may not"
                )
        if not strategy.has_curve and tables.estimate(stretches) > budget:
            return None
        return self._plan(asked_for, strategy.name, stretches, tables, budget_bytes, budget)

    def _spend(self, strategy: Strategy, tables: Tables, budget: float) -> Sequence[Stretch] | None:
        """What a strategy proposes within a budget; where it is found in steps of memory, it is asked for what those
        leave unused as well."""
        if strategy.propose is None:
            return None
        found, asked = strategy.propose(tables, budget), budget
        if found is None and strategy.nests:
            found = strategy.propose(tables, tuning.IN_STEPS * budget)
            return found if found is not None and tables.estimate(found) <= budget else None
        for _ in range(tuning.ASKED_AGAIN if found and strategy.has_curve else 0):
            spare = budget - tables.estimate(found or ())
            if spare <= budget / tuning.USED_UP:
                break
            asked += spare
            more = strategy.propose(tables, asked)
            if more is None or tables.estimate(more) > budget:
                break
            found = more
        return found

    def least(self, strategy: str) -> int:
        asked = STRATEGIES.get(strategy)
        found = [self.least(name) for name in asked.tries if name != strategy]
        if asked.nests and self.coarse.smallest_nested is not None:
            found.append(math.ceil(self.coarse.smallest_nested[0]))
        elif asked.has_curve and not asked.nests:
            found.append(math.ceil(self.tables.smallest))
        return min(found, default=0)

    def smallest(self) -> Plan:
        lowest, nested = self.tables.smallest, self.coarse.smallest_nested
        if nested is not None and nested[0] < lowest:
            return self._plan("nested", "nested", nested[1], self.coarse, None, nested[0])
        return self._plan("flat", "flat", self.tables.flat(lowest) or (), self.tables, None)

    def curve(self) -> tuple[Plan, ...]:
        highest, lowest = self.tables.units.unplanned_peak, self.tables.smallest
        steps = range(1, tuning.REGION_CURVE_POINTS + 1)
        budgets = (highest - (highest - lowest) * step / tuning.REGION_CURVE_POINTS + 1 for step in steps)
        found = ((), *(self.tables.flat(budget) for budget in budgets))
        plans = [self._plan("flat", "flat", each, self.tables, None) for each in found if each is not None]
        return tuple({plan.regions: plan for plan in (*plans, self.smallest())}.values())

    # --- what is said of a plan ---------------------------------------------------------------------------------------

    def _plan(
        self,
        strategy: str,
        chosen: str,
        stretches: Sequence[Stretch],
        tables: Tables,
        budget_bytes: int | None,
        most: float = math.inf,
    ) -> Plan:
        """Make the plan of these stretches. `most` is an upper bound on its peak."""
        regions = write_edits(describe_regions(tables.selection, stretches, self.spans), self.lines)
        return self.make_plan(
            regions,
            round(min(tables.estimate(stretches), most)),
            strategy=strategy,
            chosen=chosen,
            application=self.application,
            budget_bytes=budget_bytes,
            extra_flops=_recompute_flops(regions),
            after_seconds=self.estimate_seconds(self._recomputed(tables.units.ops, regions)),
        )

    def _recomputed(self, ops: OpCosts, regions: Iterable[Region]) -> Iterator[tuple[int, int]]:
        """The last node of each region with each op that is recomputed before its backward."""
        for region in regions:
            products = 0
            for op in ops.recomputed(region.first_node, region.last_node):
                is_kept = is_product(self.profile.ops[op].name)
                if is_kept:
                    is_kept, products = products in region.keeps, products + 1
                if not is_kept and not self._updates_statistics(op):
                    yield region.last_node - 1, op
            yield from self._recomputed(ops, region.regions)

    def _updates_statistics(self, op: int) -> bool:
        """Whether an op counts the batches of a batch norm, which recomputation leaves alone."""
        one = self.profile.ops[op]
        return "BatchNorm" in self.profile.nodes[one.node].module_type and writes_in_place(one.name)

    def make_plan(self, regions: tuple[Region, ...], estimated: int, **fields: Any) -> Plan:
        """A plan for the profile that has not been analysed.

        Args:
            regions: of the plan.
            estimated: its peak.
            fields: what else a `Plan` says that does not follow from the profile.
        """
        before = self.before
        after = Peak(requested_bytes=estimated, phase=before.phase, tick=before.tick, by_kind={}) if regions else before
        fields |= {"regions": regions, "before": before, "after": after, "before_seconds": self.before_seconds}
        return Plan(**self.profile.heading(), analysed=False, forward_flops=None, **fields)

    def estimate_seconds(
        self,
        recomputed: Iterable[tuple[int, int]],
        *,
        taped: bool = False,
        copied: Mapping[int, Sequence[int]] | None = None,
    ) -> float | None:
        """The time of a planned step.

        Args:
            recomputed: each op that is, with the node before whose backward.
            taped: whether the plan is one of operators.
            copied: as for `step_seconds`.
        """
        again = group((self._backward_begins[node], op) for node, op in sorted(recomputed))
        return step_seconds(self.profile, taped=taped, recomputed=again, copied=copied)

    @cached_property
    def _backward_begins(self) -> list[int]:
        """By node, the first op of its backward. A node without one has that of the nearest node before it."""
        backward = ops_by_node(self.profile, Phase.BACKWARD)
        found, last = [], len(self.profile.ops)
        for node in range(len(self.profile.nodes)):
            last = backward.get(node, [last])[0]
            found.append(last)
        return found


def _recompute_flops(regions: Sequence[Region]) -> int | None:
    """FLOPs of recomputing regions, those within them included; None where an op has no formula."""
    return sum_known(flops for region in regions for flops in (region.extra_flops, _recompute_flops(region.regions)))
