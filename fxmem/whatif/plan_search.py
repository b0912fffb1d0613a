"""The search for the cheapest plan whose analysis keeps a budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from fxmem import checkpointing
from fxmem.errors import AnalysisError, ExceededError, FxmemError, UsageError
from fxmem.hardware.context import room_bytes
from fxmem.hardware.step_time import step_seconds
from fxmem.memory import liveness
from fxmem.memory.budget import Budget, find_least_budget
from fxmem.memory.liveness import shorten_step
from fxmem.planning import STRATEGIES, PlanFinder, tuning
from fxmem.records.pause_gc import pause_gc
from fxmem.records.plan import CurvePoint, Plan, Region
from fxmem.records.profile import Assumption, Kind, Peak, Phase, Profile
from fxmem.records.units import Application, exact_bytes, format_bytes, sum_known, to_words
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.fake_model import shadow_model

# --- plans that have been applied and analysed, and which of them is cheaper ------------------------------------------


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


# --- the search for the cheapest that keeps a budget ------------------------------------------------------------------


_FIXED = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE, Kind.GRADIENT)
"""What no plan frees."""


@dataclass(frozen=True)
class _Question:
    """What one way's planner is asked for by one strategy, and what it proposes first."""

    index: int
    """Of the way."""
    way: PlannedWay
    strategy: str
    first: Plan | None
    hoped: Plan | None = None
    """The cheapest that may come of asking again once the first has been analysed."""
    bracket: BudgetBracket | None = None
    """Of the budget, where the strategy follows it."""

    @property
    def rank(self) -> tuple[bool, float, int, bool]:
        """What a question that should be answered earlier has less of: `Proposal.cost` by estimate."""
        is_graph = self.way.application is Application.GRAPH
        if self.first is None:
            return True, 0, 0, is_graph
        return False, round(self.first.after_seconds or 0, tuning.SECONDS_DIGITS), self.first.extra_flops or 0, is_graph


@dataclass
class PlanSearch:
    """The search for one plan. Searches for several budgets may share `seen`, what was analysed before."""

    analysis: ProfiledStep
    """The step as it is."""
    apply: Callable[[tuple[Region, ...], Application], ProfiledStep]
    """Analyses the same step with regions checkpointed."""
    parameters: int | None
    """How many elements the parameters of the model have."""
    strategy: str
    budget: Budget | None
    ways: tuple[PlannedWay, ...]
    tell: Callable[[str], None]
    seen: dict[tuple[Application, tuple[tuple[object, ...], ...]], Proposal] = field(default_factory=dict)
    _report: CountedProgress = field(init=False)

    def __post_init__(self) -> None:
        self._report = CountedProgress(self.tell)

    def propose_nothing(self, chosen: str = "flat") -> Proposal:
        """The step as it is."""
        return Proposal(self.ways[0], chosen, (), self.analysis)

    def keeps(self, analysis: ProfiledStep) -> bool:
        """Whether a step keeps the budget."""
        return self.budget is None or self.budget.keeps(analysis.profile, analysis.peak)

    def analyse(self, way: PlannedWay, proposed: Plan) -> Proposal:
        """Apply what a planner proposes, and analyse it; no plan is analysed twice."""
        regions = tuple(_name_nodes(region, way.names) for region in proposed.regions)
        parts = (
            (r.first_node, r.last_node, r.keeps, r.remakes, r.holds, r.frees, r.offloads)
            for r in proposed.all_regions()
        )
        key = way.application, tuple(parts)
        if key not in self.seen:
            self._report(f"analysing the step with plan {len(self.seen) + 1} ({way.application.value})")
            analysed = self.apply(regions, way.application)
            self.seen[key] = Proposal(way, proposed.chosen, regions, analysed, proposed.host_bytes)
        return self.seen[key]

    @pause_gc()
    def run(self, remedies: Callable[[Shortfall], str] = lambda shortfall: "") -> Plan:
        """The plan: the cheapest that keeps the budget; without one, the strategy's own or the curve of all.

        Args:
            remedies: called where no plan keeps the budget; what would help besides, in words.

        Raises:
            UsageError, AnalysisError: no application goes with the model.
            ExceededError: no plan keeps the budget.
        """
        if self.budget is None and STRATEGIES.get(self.strategy).has_curve:
            return self.along_the_curve()
        if self.budget is not None and self.keeps(self.analysis):
            return self.finish(self.propose_nothing(self.strategy))
        best = self.cheapest()
        if best is None:
            shortfall = self._find_shortfall()
            raise ExceededError(self._describe(shortfall) + remedies(shortfall))
        return self.finish(best)

    @property
    def _limit(self) -> float:
        """The budget in bytes."""
        return math.inf if self.budget is None else self.budget.nbytes

    # --- within a budget ----------------------------------------------------------------------------------------------

    @pause_gc()
    def cheapest(self) -> Proposal | None:
        """The cheapest proposal that keeps the budget; None if there is none.

        Raises:
            UsageError, AnalysisError: no application goes with the model.
        """
        if self._find_floor() is not None:
            return None  # no plan keeps it, so none needs to be tried
        best: Proposal | None = None
        refused: dict[int, FxmemError] = {}
        for question in self._report.steps(self._ask_all(refused)):
            if question.index not in refused:
                try:
                    best = find_cheaper(best, self._answer(question, best))
                except REFUSALS as error:
                    refused[question.index] = error
        if best is None and len(refused) == len(self.ways):
            raise refused[len(self.ways) - 1]
        return best or find_cheaper(*map(self._if_kept, self._analyse_smallest(tuning.OVERESTIMATED * self._limit)))

    def find_any(self) -> Proposal | None:
        """A proposal that keeps the budget, the soonest found; None if there is none."""
        if self.keeps(self.analysis):
            return self.propose_nothing()
        if self.budget is None or self._find_floor() is not None:
            return None
        quick = (way for way in self.ways if way.planner.is_quick)
        for found in filter(None, (self._try_once(way, self.budget.nbytes) for way in quick)):
            return found
        return next(filter(None, map(self._if_kept, self._analyse_smallest(tuning.OVERESTIMATED * self._limit))), None)

    def _try_once(self, way: PlannedWay, nbytes: int) -> Proposal | None:
        """What a way's planner proposes first for so many bytes, if it keeps the budget."""
        try:
            plan = way.planner.find(self.strategy, self._open_bracket(way, nbytes).ask)
            return None if plan is None else self._if_kept(self.analyse(way, plan))
        except REFUSALS:
            return None

    def _ask_all(self, refused: dict[int, FxmemError]) -> list[_Question]:
        """The first proposals of all ways and strategies, the quickest by their planners' estimates first.

        Most that follow it cost more by estimate alone, and need no analysis. Ways that cannot be planned are put into
        `refused`.
        """
        found: list[_Question] = []
        asked = [
            (index, way, strategy)
            for index, way in enumerate(self.ways)
            for strategy in (self.strategy, *way.planner.other_strategies(self.strategy))
        ]
        for index, way, strategy in self._report.steps(asked):
            try:
                found.append(self._ask(index, way, strategy))
            except REFUSALS as error:
                refused[index] = error
        return sorted(found, key=lambda each: each.rank)

    def _ask(self, index: int, way: PlannedWay, strategy: str) -> _Question:
        if self.budget is None or not STRATEGIES.get(self.strategy).follows_budget:
            return _Question(index, way, strategy, way.planner.plan(strategy, None))
        bracket = self._open_bracket(way, self.budget.nbytes)
        first = hoped = self._propose(way, strategy, bracket.ask)
        if not way.planner.is_exact and first is not None and first.regions:
            hoped = way.planner.find(strategy, round(tuning.HOPED * bracket.ask))
        return _Question(index, way, strategy, first, hoped, bracket)

    def _answer(self, question: _Question, rival: Proposal | None) -> Proposal | None:
        """The cheapest proposal of one way and strategy that keeps the budget; None also where all cost more than the
        rival."""
        if question.bracket is not None:
            return self._find_cheapest(question, question.bracket, rival)
        return None if question.first is None else self._if_kept(self.analyse(question.way, question.first))

    def _if_kept(self, proposal: Proposal) -> Proposal | None:
        return proposal if self.keeps(proposal.analysis) else None

    def _open_bracket(self, way: PlannedWay, nbytes: int) -> BudgetBracket:
        peak = self.analysis.peak
        overhead = peak.counted_bytes - peak.requested_bytes
        return BudgetBracket.open(nbytes, peak.requested_bytes, overhead, exact=way.planner.is_exact)

    def _find_cheapest(self, question: _Question, bracket: BudgetBracket, rival: Proposal | None) -> Proposal | None:
        """The cheapest proposal of one strategy; where the analysis disagrees with the planner, it is asked again."""
        way, strategy, proposed = question.way, question.strategy, question.first
        best: Proposal | None = None
        for attempt in range(tuning.ATTEMPTS if STRATEGIES.get(strategy).has_curve else 1):
            if attempt:
                proposed = self._propose(way, strategy, bracket.ask)
            if proposed is None and rival is not None and strategy != "flat":
                return best  # what is dearer in bytes than was estimated is seldom quicker than a plan that is there
            if proposed is None:
                bracket = bracket.after_refusal(way.planner.least(strategy))
            elif self._costs_more(proposed if attempt else question.hoped or proposed, rival):
                return best
            else:
                proposal = self.analyse(way, proposed)
                spare = bracket.budget - proposal.peak_bytes
                if not self.keeps(proposal.analysis):
                    bracket = bracket.after_excess(-spare)
                else:
                    best = find_cheaper(best, proposal)
                    unused = bracket.ask - proposed.after.requested_bytes  # which the planner has no use for
                    if not proposal.regions or spare - max(unused, 0) <= bracket.tolerance:
                        break
                    bracket = bracket.after_success(spare)
            if bracket.is_closed:
                break
        return best

    def _propose(self, way: PlannedWay, strategy: str, nbytes: int) -> Plan | None:
        """The planner's plan within so many requested bytes; None if it has none."""
        self._report(f"looking for a plan ({way.application.value}, {strategy}) within {format_bytes(nbytes)}")
        return way.planner.find(strategy, nbytes)

    def _costs_more(self, proposed: Plan, rival: Proposal | None) -> bool:
        """Whether a proposal is dearer than another, by its planner's own estimate."""
        if rival is None:
            return False
        if proposed.after_seconds is not None and rival.seconds is not None:
            return round(proposed.after_seconds, tuning.SECONDS_DIGITS) >= round(rival.seconds, tuning.SECONDS_DIGITS)
        extra = proposed.extra_flops
        return extra is not None and extra > (count_extra_flops(self.analysis, rival.analysis) or 0)

    # --- what a failed search reached ---------------------------------------------------------------------------------

    def _find_floor(self) -> Peak | None:
        """The peak that no plan changes, the optimizer's, where it alone is above the budget."""
        peak = liveness.peak_in_phase(self.analysis.profile, Phase.OPTIMIZER)
        return peak if peak is not None and peak.requested_bytes > self._limit else None

    def _find_shortfall(self) -> Shortfall:
        """What a search without success comes down to, the plans that free most included."""
        floor = self._find_floor()
        if floor is not None:
            return Shortfall(floor, None)
        self._analyse_smallest()
        tried = sorted((self.propose_nothing(), *self.seen.values()), key=lambda each: each.peak_bytes)
        least = math.inf
        for each in tried:  # one with a higher peak whose reserved bytes are fewer may keep a smaller budget
            if each.regions and each.peak_bytes < least:
                least = min(least, find_least_budget(each.analysis.profile, each.analysis.peak))
        return Shortfall(tried[0].analysis.peak, tried[0], None if least == math.inf else int(least))

    def _analyse_smallest(self, most: float = math.inf) -> list[Proposal]:
        """The plans of each way that may be lowest, by its estimates; none where the strategy is not stood in for.

        They are those that `along_the_curve` finds, but where estimates are exact the one that frees most.

        Args:
            most: bytes of an estimate, above which a plan is not analysed.
        """
        if not STRATEGIES.get(self.strategy).falls_back:
            return []
        points = [each for each in self._list_points(only_lowest=True) if _estimate_bytes(each[1]) <= most]
        return self._analyse_least(points, _estimate_bytes, _peak_bytes, tuning.OVERESTIMATED)

    def _describe(self, shortfall: Shortfall) -> str:
        """Describe the smallest peak that was reached or may be, and what bounds it."""
        peak, budget = shortfall.peak, 0 if self.budget is None else self.budget.nbytes
        target = self.analysis.profile.target
        is_room = self.budget is not None and self.budget.asked_bytes is not None
        whose = f", the room on {target.name} beside a CUDA context" if is_room else ""
        least = exact_bytes(peak.counted_bytes)
        kept = [f"{to_words(kind)} {format_bytes(peak.by_kind[kind])}" for kind in _FIXED if peak.by_kind.get(kind)]
        message = (
            f"expected a plan that keeps the step within {exact_bytes(budget)}{whose}; "
            + (
                f"no plan takes less than {least}"
                if shortfall.reached is None
                else f"strategy {self.strategy} reaches {least} at the least"
            )
            + f" (without a plan {format_bytes(self.analysis.peak.counted_bytes)}). That peak is in {peak.phase.value}"
            f"{f' at {peak.node}' if peak.node else ''}; of it no plan can free: {', '.join(kept) or 'nothing'}"
        )
        if peak.counted_bytes <= budget:
            message += (
                "; it is the reserved bytes that are too many: in a loop the allocator's free memory is in pieces "
                "(PYTORCH_ALLOC_CONF=expandable_segments:True may help)"
            )
        if shortfall.least_bytes is not None:
            least = exact_bytes(shortfall.least_bytes)
            why = ", as the allocator's segments for it take more" if shortfall.least_bytes > peak.counted_bytes else ""
            message += f"; the least budget that a plan keeps is {least}{why}"
            room = room_bytes(target)
            fits = room is None or shortfall.least_bytes <= room
            message += f": --budget {shortfall.least_bytes} gives it" if fits else f", and {target.name} has less"
        return message

    # --- without a budget ---------------------------------------------------------------------------------------------

    @pause_gc()
    def along_the_curve(self, *, only_ends: bool = False) -> Plan:
        """The curve of peak against FLOPs, and the plan with the smallest product of both.

        Args:
            only_ends: of the curve only that plan and the one that reaches lowest are wanted; what by its planner's
                estimate is neither, however far such estimates are off, is not analysed.
        """
        points = self._list_points()
        nothing = self.propose_nothing()
        proposals = [nothing]
        if only_ends:
            flops = nothing.cost[1]
            factor = tuning.OVERESTIMATED * tuning.HOPED
            proposals += self._analyse_least(points, lambda each: _estimate_product(each, flops), _product, factor)
            proposals += self._analyse_least(points, _estimate_bytes, _peak_bytes, tuning.OVERESTIMATED)
        else:
            proposals += self._analyse_least(points, lambda _: 0, _peak_bytes, 1)
        front: list[Proposal] = []
        for proposal in sorted(proposals, key=lambda each: (each.cost, each.peak_bytes)):
            if not front or front[-1].peak_bytes > proposal.peak_bytes:
                front.append(proposal)
        best = min(front, key=lambda each: (each.analysis.peak.fits is False, _product(each)))
        return self.finish(best).model_copy(update={"curve": tuple(map(self._point, front))})

    def _list_points(self, *, only_lowest: bool = False) -> list[tuple[PlannedWay, Plan]]:
        """The plans on each way's curve, at most so many; none where it cannot be planned."""
        found: list[tuple[PlannedWay, Plan]] = []
        for way in self._report.steps(self.ways):
            self._report(f"looking for plans of every budget ({way.application.value})")
            with contextlib.suppress(*REFUSALS):
                plans = (way.planner.smallest(),) if only_lowest and way.planner.is_exact else way.planner.curve()
                found += [(way, each) for each in _thin(plans, tuning.ANALYSED_CURVE_POINTS) if each.regions]
        return found

    def _analyse_least(
        self,
        points: Sequence[tuple[PlannedWay, Plan]],
        estimate: Callable[[Plan], float],
        measure: Callable[[Proposal], float],
        factor: float,
    ) -> list[Proposal]:
        """Analyse the plans that may have least of something, by estimates that are at most so many times too high."""
        found: list[Proposal] = []
        least, refused = math.inf, set[int]()
        for way, point in self._report.steps(sorted(points, key=lambda each: estimate(each[1]))):
            if estimate(point) > factor * least:
                break
            if id(way) not in refused:
                try:
                    found.append(self.analyse(way, point))
                    least = min(least, measure(found[-1]))
                except REFUSALS:
                    refused.add(id(way))
        return found

    def _point(self, proposal: Proposal) -> CurvePoint:
        return CurvePoint(
            strategy=proposal.chosen,
            application=proposal.way.application,
            regions=proposal.regions,
            peak=proposal.analysis.peak,
            extra_flops=count_extra_flops(self.analysis, proposal.analysis),
            step_seconds=proposal.seconds,
        )

    def finish(self, proposal: Proposal) -> Plan:
        """Make the plan of a proposal."""
        before, after = self.analysis.profile, proposal.analysis.profile
        is_taped = proposal.way.application is Application.OPERATORS
        notes = {way.note for way in ([proposal.way] if is_taped else self.ways) if way.note}
        return Plan(
            **before.heading(),
            strategy=self.strategy,
            chosen=proposal.chosen,
            application=proposal.way.application,
            budget_bytes=None if self.budget is None else self.budget.stated_bytes,
            regions=proposal.regions,
            before=self.analysis.peak,
            after=proposal.analysis.peak,
            analysed=True,
            forward_flops=sum_known(op.flops for op in before.ops if op.phase is Phase.FORWARD),
            extra_flops=count_extra_flops(self.analysis, proposal.analysis),
            before_seconds=step_seconds(before),
            after_seconds=proposal.seconds,
            host_bytes=proposal.host_bytes,
            planned=shorten_step(after, before) if proposal.regions else None,
            parameters=self.parameters,
            operators=dict(proposal.way.planner.operators) if proposal.regions else {},
            assumptions=(*(Assumption(topic="plan", text=note) for note in sorted(notes)), *after.assumptions),
        )


def _name_nodes(region: Region, names: tuple[str | None, ...]) -> Region:
    """The region, its nodes named as in the graph that it is applied to."""
    if not names:
        return region
    nodes = tuple(name for name in names[region.first_node : region.last_node] if name is not None)
    inner = tuple(_name_nodes(each, names) for each in region.regions)
    return region.model_copy(update={"nodes": nodes, "regions": inner})


def _peak_bytes(proposal: Proposal) -> float:
    return proposal.peak_bytes


def _product(proposal: Proposal) -> float:
    """Of a plan's peak and its time; where that is not known, its FLOPs."""
    return proposal.peak_bytes * (proposal.seconds or proposal.cost[1])


def _estimate_bytes(plan: Plan) -> float:
    return plan.after.requested_bytes


def _estimate_product(plan: Plan, flops: int) -> float:
    """As `_product`, by a planner's estimate; `flops` are the unplanned step's."""
    return plan.after.requested_bytes * (plan.after_seconds or flops + (plan.extra_flops or 0))


def _thin(plans: Sequence[Plan], count: int) -> Sequence[Plan]:
    """At most `count` of them, evenly spread, first and last included."""
    return plans if len(plans) <= count else [plans[round(i * (len(plans) - 1) / (count - 1))] for i in range(count)]
