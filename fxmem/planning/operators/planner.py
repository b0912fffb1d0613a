"""Plans for single results of operators."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from fxmem.planning import tuning
from fxmem.planning.operators.choices import OperatorCall, OperatorValue, RecomputeChoice
from fxmem.planning.operators.min_cut import Cutter
from fxmem.planning.operators.offloads import Offloads
from fxmem.planning.operators.reruns import RegionChoices, RerunCutter
from fxmem.planning.plan_finder import PlanFinder
from fxmem.planning.regions.dynamic_programs import Stretch
from fxmem.planning.regions.planner import Planner
from fxmem.records.plan import Plan, Region, Result
from fxmem.records.profile import Profile
from fxmem.records.units import Application, group, sum_known


class Choice(NamedTuple):
    """What is recomputed, and what waits in the host's memory."""

    cutter: Cutter
    """Of the step as the card sees it."""
    recomputed: RecomputeChoice
    offloads: Offloads | None = None


class OperatorPlanner(PlanFinder):
    """Plans of single operators for one profile: a `PlanFinder`.

    Args:
        profile: of the unplanned step.
        survey: gives the calls of its forward and what they make, when that is first needed; whatever it raises is
            passed on.
    """

    application = Application.OPERATORS
    is_exact = True

    def __init__(
        self, profile: Profile, survey: Callable[[], tuple[Sequence[OperatorCall], Sequence[OperatorValue]]]
    ) -> None:
        self.profile, self.survey = profile, functools.cache(survey)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self.profile, *self.survey())

    @property
    def operators(self) -> dict[str, int]:
        return dict(sorted({call.name: call.number + 1 for call in self._cutter.calls}.items()))

    @cached_property
    def regions(self) -> Planner:
        """Plans for regions anywhere in the same step."""
        return Planner(self.profile, Application.GRAPH)

    def find(self, strategy: str, budget_bytes: int | None) -> Plan | None:
        cutter = self._cutter
        if budget_bytes is None or budget_bytes >= cutter.units.unplanned_peak:
            return self._make_plan(strategy, Choice(cutter, cutter.choose(())), budget_bytes)
        plans = [self._make_plan(strategy, found, budget_bytes) for found in self._find_choices(budget_bytes)]
        return min(plans, key=lambda plan: (plan.after_seconds or 0.0, plan.extra_flops or 0), default=None)

    def _find_choices(self, budget: float) -> list[Choice]:
        """Choices that keep a budget; none if there are none.

        Calls run more than once only where no choice without that keeps it.
        """
        if self._may_keep(self._least_of_one_run, budget):
            found = self._find_choice(self._cutter, budget)
            if found is not None:
                return [Choice(self._cutter, found)]
        least = self._least_of_reruns
        return self._find_reruns(budget) if least is not None and self._may_keep(least, budget) else []

    def _may_keep(self, least: Choice, budget: float) -> bool:
        """Whether single changes of the choice that reaches lowest may keep a budget."""
        return least.recomputed.peak <= tuning.IN_REACH * budget

    def _find_choice(self, cutter: Cutter, budget: float) -> RecomputeChoice | None:
        as_it_is = cutter.choose(())
        if as_it_is.peak <= budget:
            return as_it_is
        tried = (cutter.solve(budget, self._seeds(budget * share for share in shares)) for shares in tuning.SEED_SHARES)
        return next((found for found in tried if found is not None), None)

    def least(self, strategy: str) -> int:
        return round(self._least.recomputed.peak)

    lowest_peak = least

    def smallest(self) -> Plan:
        return self._make_plan("mincut", self._least, None)

    def curve(self) -> tuple[Plan, ...]:
        highest, lowest = self._cutter.units.unplanned_peak, self._least.recomputed.peak
        points = tuning.OPERATOR_CURVE_POINTS
        budgets = [highest - (highest - lowest) * step / points for step in range(points + 1)]
        plans = (self._make_plan("mincut", each, None) for each in self._choices_of_all(budgets))
        return tuple({plan.regions: plan for plan in plans}.values())

    def _choices_of_all(self, budgets: Sequence[float]) -> Iterator[Choice]:
        for found in self._cutter.front(self._seeds(budgets)):
            yield Choice(self._cutter, found)
        for budget in budgets:
            if budget < self._least_of_one_run.recomputed.peak:
                yield from self._find_reruns(budget)

    @cached_property
    def _least(self) -> Choice:
        once, again = self._least_of_one_run, self._least_of_reruns
        return once if again is None or again.recomputed.peak >= once.recomputed.peak else again

    @cached_property
    def _least_of_one_run(self) -> Choice:
        return self._find_least(self._cutter, self.regions.tables.smallest)

    def _find_least(self, cutter: Cutter, lowest: float) -> Choice:
        return Choice(cutter, min(cutter.front(self._seeds([lowest])), key=lambda choice: choice.peak))

    def _seeds(self, budgets: Iterable[float]) -> Iterator[set[int]]:
        """The calls that plans of regions within these budgets run again."""
        tables = self.regions.tables
        found = (self._region_choices.find(tables, tables.flat(budget) or ()).calls for budget in budgets)
        return (calls for calls in found if calls)

    @cached_property
    def _region_choices(self) -> RegionChoices:
        return RegionChoices(self._cutter)

    # --- results that are recomputed more than once -------------------------------------------------------------------

    def _find_reruns(self, budget: float) -> list[Choice]:
        """Choices within regions within regions that keep a budget; none if there are none.

        Those are regions for about that budget by the tables, and those that reach lowest, within which single results
        are kept again: they need less than the tables tell.
        """
        tables = self.regions.coarse
        within = [tables.nested(share * budget) or () for share in tuning.NESTED_SHARES[self._cutter.is_large]]
        within += [] if tables.smallest_nested is None else [tables.smallest_nested[1]]
        tried = (self._find_rerun(stretches, budget) for stretches in dict.fromkeys(within))
        return [choice for choice in tried if choice is not None]

    def _find_rerun(self, stretches: Sequence[Stretch], budget: float) -> Choice | None:
        """The cheapest choice within these regions that keeps a budget; None if there is none, or no call runs twice:
        such choices have been looked for."""
        calls, paths = self._region_choices.find(self.regions.coarse, stretches)
        if not paths:
            return None
        cutter, lowest = RerunCutter(self._cutter, paths), self._lowest_of_one_run
        choice = cutter.solve(budget, [calls, lowest, calls | lowest, *self._seeds([budget])])
        return None if choice is None else Choice(cutter, choice)

    @cached_property
    def _lowest_of_one_run(self) -> frozenset[int]:
        """The calls of the cheapest choice with about the lowest peak, where each runs once."""
        found = self._find_choice(self._cutter, tuning.NEARLY_LOWEST * self._least_of_one_run.recomputed.peak)
        return frozenset() if found is None else found.recomputed

    @cached_property
    def _least_of_reruns(self) -> Choice | None:
        """The choice with the lowest peak within regions within regions; None if there are none."""
        tables = self.regions.coarse
        if tables.smallest_nested is None:
            return None
        calls, paths = self._region_choices.find(tables, tables.smallest_nested[1])
        cutter = RerunCutter(self._cutter, paths)
        return Choice(cutter, min(cutter.front([calls]), key=lambda choice: choice.peak))

    # --- what is said of a plan ---------------------------------------------------------------------------------------

    def _make_plan(self, strategy: str, found: Choice, budget_bytes: int | None) -> Plan:
        cutter, choice, offloads = found
        regions = self._describe_regions(found)
        node_of = [self.profile.ops[op].node for op in cutter.ops]
        return self.regions.make_plan(
            regions,
            round(choice.peak),
            strategy=strategy,
            chosen="mincut",
            application=self.application,
            budget_bytes=budget_bytes,
            extra_flops=cutter.flops(choice),
            after_seconds=self.regions.estimate_seconds(
                ((node_of[asked], cutter.ops[call]) for call, asked in cutter.find_runs(choice)),
                taped=bool(regions),
                copied=None if offloads is None else offloads.copied,
            ),
            **({} if offloads is None else {"host_bytes": offloads.host_bytes}),
        )

    def _describe_regions(self, found: Choice) -> tuple[Region, ...]:
        """Make a region of each run of chosen calls in one part of the model.

        They are those that are recomputed, and those whose results are offloaded.
        """
        cutter, choice, offloads = found
        fetched = [] if offloads is None else offloads.fetched
        profile, order = self.profile, {number: index for index, number in enumerate(fetched)}
        all_dropped, all_held = cutter.find_dropped(choice), cutter.find_kept(choice)
        if not all_dropped and not cutter.offloaded:
            return ()
        runs = Counter(call for call, _ in cutter.find_runs(choice))
        held: set[int] = set()
        regions = []
        for part, members in self._parts(choice.recomputed | {cutter.values[each].call for each in cutter.offloaded}):
            calls = [call for call in members if call in choice.recomputed]
            nodes = sorted({profile.ops[cutter.ops[call]].node for call in members})
            sources = {source for call in calls for source in cutter.calls[call].sources if source in all_held} - held
            held |= sources
            dropped = [number for call in calls for number in cutter.calls[call].values if number in all_dropped]
            sent = [number for call in members for number in cutter.calls[call].values if number in cutter.offloaded]
            more = [number for number in sources if not cutter.values[number].saved]
            regions.append(
                Region(
                    first_node=nodes[0],
                    last_node=nodes[-1] + 1,
                    nodes=tuple(profile.nodes[node].name for node in nodes),
                    source=profile.nodes[nodes[0]].source,
                    freed_bytes=max(round(float(cutter.sizes[dropped + sent].sum() - cutter.sizes[more].sum())), 0),
                    extra_flops=sum_known(
                        profile.ops[cutter.ops[call]].flops for call in calls for _ in range(runs[call])
                    ),
                    within=part,
                    remakes=self._results(dropped),
                    holds=self._results(sources),
                    frees=self._freed(cutter, calls),
                    offloads=self._results(sent, order),
                )
            )
        return tuple(regions)

    def _parts(self, calls: Collection[int]) -> list[tuple[str, list[int]]]:
        """Group calls by the part of the model they are for; parts share no node."""
        cutter, profile = self._cutter, self.profile
        found: list[tuple[str, list[int]]] = []
        parents = {path.rpartition(".")[0] for path in (node.module for node in profile.nodes)}
        last = -1
        for call in sorted(calls):
            node = profile.ops[cutter.ops[call]].node
            part = _part(profile.nodes[node].module, parents)
            if found and (found[-1][0] == part or node <= last):
                found[-1][1].append(call)
            else:
                found.append((part, [call]))
            last = max(last, node)
        return found

    def _freed(self, cutter: Cutter, calls: Sequence[int]) -> tuple[Result, ...]:
        """What is freed again where it is recomputed for another stretch; each stretch of a call has its own result."""
        by_call = (
            (call, cutter.stretches.get(value, ()), value) for call in calls for value in cutter.calls[call].values
        )
        stretches = group(((call, path), value) for call, path, value in sorted(by_call) if path)
        return tuple(
            result.model_copy(update={"stretch": path})
            for (_, path), values in stretches.items()
            for result in self._results(values)
        )

    def _results(self, values: Iterable[int], order: Mapping[int, int] | None = None) -> tuple[Result, ...]:
        calls, made = self._cutter.calls, self._cutter.values
        return tuple(
            Result(
                operator=calls[call].name,
                number=calls[call].number,
                outputs=tuple(made[value].position for value in found),
                fetched=() if order is None else tuple(order[value] for value in found),
            )
            for call, found in group((made[value].call, value) for value in sorted(values)).items()
        )


def _part(module: str, parents: Collection[str]) -> str:
    """Return the block that a module is in: its path up to the last of the first numbered names (`layer1.0`,
    `denseblock1.denselayer2`), or its outermost ancestor.

    Args:
        parents: modules that have others within them; one that is numbered and has none is a block only if its name is
            nothing but a number.
    """
    names = module.split(".")
    numbered = [
        bool(name) and name[-1].isdigit() and (name.isdigit() or ".".join(names[: index + 1]) in parents)
        for index, name in enumerate(names)
    ]
    if True not in numbered:
        return names[0]
    last = [*numbered, False].index(False, numbered.index(True))
    return ".".join(names[:last])
