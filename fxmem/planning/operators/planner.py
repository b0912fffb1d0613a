"""Plans for single results of operators."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from fxmem.errors import ExceededError
from fxmem.planning import tuning
from fxmem.planning.operators.calls import OperatorCall, OperatorValue
from fxmem.planning.operators.choices import RecomputeChoice
from fxmem.planning.operators.min_cut import Cutter
from fxmem.planning.operators.offloads import Offloads
from fxmem.planning.operators.region_choices import RegionChoices
from fxmem.planning.operators.reruns import RerunCutter
from fxmem.planning.regions.dynamic_programs import Stretch
from fxmem.planning.regions.planner import Planner
from fxmem.records.names import Application
from fxmem.records.plan import Plan, Region, Result
from fxmem.records.profile import Profile
from fxmem.records.units import exact_bytes


class Choice(NamedTuple):
    """What is recomputed, and what waits in the host's memory."""

    cutter: Cutter
    """Of the step as the card sees it."""
    recomputed: RecomputeChoice
    offloads: Offloads | None = None


class OperatorPlanner:
    """Plans of single operators for one profile: a `PlanFinder`.

    Args:
        profile: of the unplanned step.
        survey: gives the calls of its forward and what they make, when that is first needed; whatever it raises is
            passed on.
    """

    is_exact = True
    is_quick = False

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

    def other_strategies(self, strategy: str) -> tuple[str, ...]:
        return ()

    def plan(self, strategy: str, budget_bytes: int | None) -> Plan:
        found = self.find(strategy, budget_bytes)
        if found is None:
            raise ExceededError(
                f"expected a plan that keeps the step within {exact_bytes(budget_bytes or 0)}; strategy {strategy} "
                f"with {Application.OPERATORS.value} reaches {exact_bytes(self.least(strategy))} at the least"
            )
        return found

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

    def smallest(self) -> Plan:
        return self._make_plan("mincut", self._least, None)

    def curve(self) -> tuple[Plan, ...]:
        highest, lowest = self._cutter.units.unplanned_peak, self._least.recomputed.peak
        budgets = [
            highest - (highest - lowest) * step / tuning.OPERATOR_CURVE_POINTS
            for step in range(tuning.OPERATOR_CURVE_POINTS + 1)
        ]
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
        """Yield the calls that plans of regions within these budgets run again."""
        tables = self.regions.tables
        for budget in budgets:
            found = self._region_choices.find(tables, tables.flat(budget) or ()).calls
            if found:
                yield found

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
        shares = tuning.NESTED_SHARES[self._cutter.is_large]
        within = [tables.nested(share * budget) or () for share in shares]
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
        budget = tuning.NEARLY_LOWEST * self._least_of_one_run.recomputed.peak
        found = self._find_choice(self._cutter, budget)
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
        plan = self.regions.make_plan(
            strategy,
            "mincut",
            Application.OPERATORS,
            budget_bytes,
            regions,
            round(choice.peak),
            cutter.flops(choice),
            self.regions.estimate_seconds(
                ((node_of[asked], cutter.ops[call]) for call, asked in cutter.find_runs(choice)),
                taped=bool(regions),
                copied=None if offloads is None else offloads.copied,
            ),
        )
        return plan if offloads is None else plan.model_copy(update={"host_bytes": offloads.host_bytes})

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
            known = [profile.ops[cutter.ops[call]].flops for call in calls for _ in range(runs[call])]
            regions.append(
                Region(
                    first_node=nodes[0],
                    last_node=nodes[-1] + 1,
                    nodes=tuple(profile.nodes[node].name for node in nodes),
                    source=profile.nodes[nodes[0]].source,
                    freed_bytes=max(round(float(cutter.sizes[dropped + sent].sum() - cutter.sizes[more].sum())), 0),
                    extra_flops=None if None in known else sum(flops or 0 for flops in known),
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
        by_call = ((call, cutter.stretches.get(value), value) for call in calls for value in cutter.calls[call].values)
        found = sorted((call, path, value) for call, path, value in by_call if path)
        return tuple(
            result.model_copy(update={"stretch": path})
            for (_, path), group in groupby(found, key=lambda each: each[:2])
            for result in self._results(value for _, _, value in group)
        )

    def _results(self, values: Iterable[int], order: Mapping[int, int] | None = None) -> tuple[Result, ...]:
        cutter = self._cutter
        found = []
        for call, group in groupby(sorted(values), key=lambda number: cutter.values[number].call):
            numbers = list(group)
            found.append(
                Result(
                    operator=cutter.calls[call].name,
                    number=cutter.calls[call].number,
                    outputs=tuple(cutter.values[number].position for number in numbers),
                    fetched=() if order is None else tuple(order[number] for number in numbers),
                )
            )
        return tuple(found)


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
    first = numbered.index(True)
    last = next((index for index in range(first, len(names)) if not numbered[index]), len(names))
    return ".".join(names[:last])
