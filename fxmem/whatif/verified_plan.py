"""Checkpoint plans whose peak is a promise: each is carried out on a stand-in of the model and analysed again.

A planner knows its own model of memory only. So what it proposes is applied, analysed as any model is, and held against
the budget; where the analysis says more than the planner did, the planner is asked again for less. What is returned is
the cheapest proposal that kept the budget, with the analysis's numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fxmem import checkpointing
from fxmem.errors import AnalysisError, ExceededError, FxmemError, UsageError
from fxmem.hardware import roofline
from fxmem.memory.budget import Budget, BudgetLike, parse_budget
from fxmem.planning import STRATEGIES, OperatorPlanner, Planner, ways_of
from fxmem.planning.operators.choices import Call, Value
from fxmem.planning.regions.cost_tables import Geometry
from fxmem.records.plan import ONE_PLAN, Application, CurvePoint, Plan, Region, Strategy
from fxmem.records.profile import Assumption, Kind, Peak, Phase, Profile
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.simulation.analysis import Analysis
from fxmem.simulation.model.fake_model import shadow_model
from fxmem.simulation.observe.fx_tracer import named_arguments
from fxmem.whatif import max_batch
from fxmem.whatif.resize import resizing_of

__all__ = ["applied", "check_training", "plan", "plans_within", "survey", "with_plan"]

_REFUSALS = (UsageError, AnalysisError)
"""What a way of applying plans raises where it does not go with the model, which for some only the planned step itself
shows."""
_ATTEMPTS = 8
"""Times a planner is asked for less before its proposals count as not reaching the budget."""
_CLOSE = 200
"""A budget is used up when less than this part of it is left."""
_EXACT = 50
"""By what part of a budget a plan for single operators may turn out to take less than was estimated: four times as much
as has been seen."""
_PIECES = 16
"""What part of a budget is asked for less when the allocator runs out of it by fragmentation."""
_POINTS = 12
"""Plans on a curve that are analysed, at most, for each way to apply them."""


def plan(
    analysis: Analysis,
    strategy: Strategy = "auto",
    budget: BudgetLike | None = None,
    *,
    application: Application | str | None = None,
    regions_only: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Where to put activation checkpoints so that a training step stays within a budget, at the least recomputation.

    Args:
        analysis: of the training step, from `analyze`. strategy: see `fxmem.records.plan.Strategy`. budget: bytes,
        "8GiB", a share of the unplanned peak (0.6, "60%"), or None. It bounds the peak of allocated bytes
            (`torch.cuda.max_memory_allocated()`; requested bytes for the CPU). A budget given in bytes for a card
            bounds the allocator, too: a loop over the step has to run where the driver gives it no more than that.
            None: `sqrt`, `chen` and `norms` give their one plan; the others the whole curve of peak against extra
            FLOPs, and the plan on it with the smallest product of peak and FLOPs of the step.
        application: "operators" (the program runs once, as it is; results of single operators are made again),
        "modules" (whole modules run
            again), "graph" (regions may begin and end anywhere; needs a model that `torch.fx.symbolic_trace` accepts),
            or None for whichever is cheapest.
        regions_only: leaves "operators" out: certificates, for one, speak of regions.
        progress: told in a few words what is being done.

    Raises:
        UsageError: not a training step, an unknown strategy or budget, a model that cannot be rewritten as asked.
        ExceededError: no plan keeps the budget; says the smallest peak that was reached and what bounds it.
    """
    check_training(analysis)
    if strategy not in STRATEGIES:
        raise UsageError(f"expected strategy to be one of {', '.join(STRATEGIES)}; got {strategy!r}")
    search = _Search(
        analysis,
        strategy,
        None if budget is None else parse_budget(budget).resolve(analysis.peak.counted_bytes),
        tuple(_applications(analysis, strategy, application, regions_only)),
        progress or (lambda _: None),
    )
    if budget is not None and search.kept(analysis):
        return search.finished(_Proposal(search.ways[0], strategy, (), analysis))
    if budget is None and strategy not in ONE_PLAN:
        return search.along_the_curve()
    return search.cheapest()


def plans_within(
    analysis: Analysis, budgets_bytes: Iterable[int], *, progress: Callable[[str], None] | None = None
) -> tuple[dict[int, tuple[Plan, Analysis]], int]:
    """For each of several budgets the plan with the least recomputation that keeps it, and the step with it; and how
    many plans were analysed.

    As `plan` for each, but what was analysed for one budget is not analysed again for another. A budget that no plan
    keeps is left out, and so are all below it, which are not searched: there is only less to have.

    Raises:
        UsageError: not a training step.
    """
    check_training(analysis)
    first = _Search(
        analysis,
        "auto",
        None,
        tuple(_applications(analysis, "auto", None)),
        progress or (lambda _: None),
    )
    found: dict[int, tuple[Plan, Analysis]] = {}
    for nbytes in sorted(set(budgets_bytes), reverse=True):
        search = replace(first, limit=Budget(nbytes))  # with the same planners and the same proposals seen
        try:
            best = search.best()
        except _REFUSALS:
            best = None
        if best is None:
            break
        found[nbytes] = search.finished(best), best.analysis
    return found, len(first.seen)


def applied(analysis: Analysis, regions: Iterable[Region], application: Application) -> Analysis:
    """The analysis of the same step with these regions checkpointed; the model that was analysed is left alone."""
    return analysis.again(checkpointing.apply(shadow_model(analysis.model), tuple(regions), application))


def with_plan(plan: Plan) -> Callable[[Analysis], Analysis]:
    """The same plan for the step at other sizes, say: from an analysis to that of the step with the plan's regions.

    The function raises UsageError if the plan was made for another model.
    """
    return lambda analysis: applied(analysis, plan.regions, plan.application)


def check_training(analysis: Analysis) -> None:
    """Raise UsageError where there is nothing to checkpoint."""
    if analysis.profile.step.mode != "train":
        raise UsageError(
            "expected the analysis of a training step: at inference nothing is saved for backward, so there is "
            "nothing to checkpoint"
        )


@dataclass(frozen=True)
class _Way:
    """One way of applying plans, and the planner for it."""

    application: Application
    planner: Planner | OperatorPlanner
    names: tuple[str | None, ...] = ()
    """What the symbolic graph calls each node of the profile; of a GRAPH only."""
    note: str = ""


@dataclass(frozen=True)
class _Proposal:
    """A plan that has been carried out and analysed."""

    way: _Way
    chosen: Strategy
    regions: tuple[Region, ...]
    analysis: Analysis


def _applications(
    analysis: Analysis, strategy: Strategy, application: Application | str | None, regions_only: bool = False
) -> Iterable[_Way]:
    wanted = ways_of(strategy, application, regions_only=regions_only)
    if not wanted:
        asked = f"strategy {strategy!r}" if application is None else f"application {str(application)!r}"
        raise UsageError(
            f"expected a plan of regions, got {asked}, which is about single operators; application 'graph' or "
            f"'modules' gives one"
        )
    note = ""
    if Application.OPERATORS in wanted:
        yield _Way(Application.OPERATORS, OperatorPlanner(analysis.profile, functools.partial(survey, analysis)))
    if Application.GRAPH in wanted:
        try:
            names = checkpointing.graph_names(
                analysis.model, analysis.profile, analysis.call.args, analysis.call.kwargs
            )
        except UsageError as refused:
            if application is not None:
                raise
            note = f"regions are whole modules: {refused}"
        else:
            yield _Way(Application.GRAPH, Planner(analysis.profile, Application.GRAPH), names)
            if strategy == "norms" and application is None:
                # modules are seldom a norm with its convolution: their plan is the cheaper one because it does less
                return
    if Application.MODULES in wanted:
        yield _Way(Application.MODULES, Planner(analysis.profile, Application.MODULES), note=note)


def survey(analysis: Analysis) -> tuple[list[Call], list[Value]]:
    """What the model's forward comes down to: an `OperatorPlanner` needs it."""
    model = shadow_model(analysis.model)
    found = checkpointing.surveyed(model)
    analysis.again(model)
    return found.found()


@dataclass
class _Search:
    """The search for one plan."""

    analysis: Analysis
    strategy: Strategy
    limit: Budget | None
    ways: tuple[_Way, ...]
    tell: Callable[[str], None]
    seen: dict[tuple[Application, tuple[tuple[object, ...], ...]], _Proposal] = field(default_factory=dict)

    def kept(self, analysis: Analysis) -> bool:
        """Whether a step keeps the limit."""
        return self.limit is None or self.limit.keeps(analysis.profile, analysis.peak)

    def carried_out(self, way: _Way, proposed: Plan) -> _Proposal:
        """What a planner proposes, applied and analysed."""
        regions = tuple(_named(region, way.names) for region in proposed.regions)
        key = (
            way.application,
            tuple(
                (each.first_node, each.last_node, each.keeps, each.remakes, each.holds) for each in _flattened(regions)
            ),
        )
        if key not in self.seen:
            self.tell(f"analysing the step with plan {len(self.seen) + 1} ({way.application.value})")
            self.seen[key] = _Proposal(way, proposed.chosen, regions, applied(self.analysis, regions, way.application))
        return self.seen[key]

    def cheapest(self) -> Plan:
        """The plan with the least recomputation that keeps the limit."""
        best = self.best()
        if best is None:
            raise ExceededError(self._out_of_reach(0 if self.limit is None else self.limit.nbytes))
        return self.finished(best)

    def best(self) -> _Proposal | None:
        """The proposal with the least recomputation that keeps the limit; None if there is none."""
        if self.limit is not None and Geometry(self.analysis.profile, ()).floor > self.limit.nbytes:
            return None  # of which no plan needs to be tried
        best: _Proposal | None = None
        refused: list[FxmemError] = []
        for way in self.ways:
            try:
                found = self._within(way, best)
            except _REFUSALS as error:
                refused.append(error)
                continue
            best = found if best is None or (found is not None and _cost(found) < _cost(best)) else best
        if best is None and len(refused) == len(self.ways):
            raise refused[-1]
        return best

    def _within(self, way: _Way, rival: _Proposal | None) -> _Proposal | None:
        """The cheapest proposal that keeps the limit."""
        if self.limit is None or self.strategy in ("sqrt", "norms"):
            only = self.carried_out(way, way.planner.plan(self.strategy, None))
            return only if self.kept(only.analysis) else None
        best = self._asked(way, rival, self.strategy, self.limit.nbytes)
        if self.strategy == "auto" and isinstance(way.planner, Planner) and (best is None or best.chosen == "nested"):
            # Where one level seems to do with a little more, "auto" is one level; of several, the estimate is the
            # budget, and the peak may be well below.
            several = self._asked(way, rival, "nested", self.limit.nbytes)
            best = min((each for each in (best, several) if each is not None), key=_cost, default=None)
        if best is None and self.strategy not in ("flat", "chen"):
            smallest = self.carried_out(way, way.planner.smallest())
            return smallest if self.kept(smallest.analysis) else None
        return best

    def _asked(self, way: _Way, rival: _Proposal | None, strategy: Strategy, nbytes: int) -> _Proposal | None:
        """The same of one strategy. Where the analysis disagrees with the planner, it is asked again, for so much less
        or more."""
        ask, unplanned = (
            nbytes - (self.analysis.peak.counted_bytes - self.analysis.peak.requested_bytes),
            self.analysis.peak.requested_bytes,
        )
        # Asked for as much as `below` or less, a plan keeps the limit or there is none; for as much as `above` or more,
        # none keeps it.
        below, above, best = 0, unplanned if nbytes < unplanned else 2 * nbytes, None
        if isinstance(way.planner, OperatorPlanner):
            above = min(above, ask + ask // _EXACT)
        for _ in range(_ATTEMPTS):
            self.tell(f"looking for a plan ({way.application.value}) within {format_bytes(ask)}")
            try:
                proposed = way.planner.plan(strategy, ask)
            except ExceededError:
                below, proposed = ask, None
            if proposed is not None:
                if (
                    rival is not None
                    and proposed.extra_flops is not None
                    and proposed.extra_flops > (_extra(self.analysis, rival.analysis) or 0)
                ):
                    return best  # the planner's FLOPs are exact; only its bytes are an estimate
                proposal = self.carried_out(way, proposed)
                spare = nbytes - proposal.analysis.peak.counted_bytes
                if self.kept(proposal.analysis):
                    best, below = min((p for p in (best, proposal) if p is not None), key=_cost), ask
                    if not proposal.regions or spare <= nbytes // _CLOSE:
                        break
                else:
                    # Where the bytes are few enough and the allocator still runs out, pieces of free memory are the
                    # reason.
                    above, spare = ask, min(spare, -(nbytes // _CLOSE)) if spare < 0 else -(nbytes // _PIECES)
                ask += spare
            if above - below <= nbytes // _CLOSE:
                break
            if proposed is None or not below < ask < above:
                ask = (below + above) // 2
        return best

    def along_the_curve(self) -> Plan:
        """The curve, and the plan on it with the smallest product of peak and FLOPs."""
        proposals = [_Proposal(self.ways[0], "flat", (), self.analysis)]
        for way in self.ways:
            with contextlib.suppress(*_REFUSALS):
                proposals += [
                    self.carried_out(way, point) for point in _thinned(way.planner.curve(), _POINTS) if point.regions
                ]
        proposals.sort(key=lambda p: (_cost(p), p.analysis.peak.counted_bytes))
        front: list[_Proposal] = []
        for proposal in proposals:
            if not front or front[-1].analysis.peak.counted_bytes > proposal.analysis.peak.counted_bytes:
                front.append(proposal)
        best = min(front, key=lambda p: p.analysis.peak.counted_bytes * _total_flops(p.analysis.profile)[0])
        curve = tuple(
            CurvePoint(
                strategy=p.chosen,
                application=p.way.application,
                regions=p.regions,
                peak=p.analysis.peak,
                extra_flops=_extra(self.analysis, p.analysis),
                step_seconds=roofline.step_seconds(p.analysis.profile),
            )
            for p in front
        )
        return self.finished(best).model_copy(update={"curve": curve})

    def finished(self, proposal: _Proposal) -> Plan:
        """The plan of a proposal."""
        profile = self.analysis.profile
        notes = {way.note for way in self.ways if way.note and proposal.way.application is not Application.OPERATORS}
        return Plan(
            **profile.heading(),
            strategy=self.strategy,
            chosen=proposal.chosen,
            application=proposal.way.application,
            budget_bytes=None if self.limit is None else self.limit.nbytes,
            regions=proposal.regions,
            before=self.analysis.peak,
            after=proposal.analysis.peak,
            analysed=True,
            forward_flops=_forward_flops(profile),
            extra_flops=_extra(self.analysis, proposal.analysis),
            before_seconds=roofline.step_seconds(profile),
            after_seconds=roofline.step_seconds(proposal.analysis.profile),
            assumptions=(
                *(Assumption(topic="plan", text=note) for note in sorted(notes)),
                *proposal.analysis.profile.assumptions,
            ),
        )

    def _largest_batch(self, reached: _Proposal) -> str:
        """With the plan that reaches lowest, how large a batch keeps the limit."""
        if self.limit is None or self.strategy in (*ONE_PLAN, "flat"):
            return ""
        self.tell("looking for the largest batch that fits")
        regions, way = reached.regions, reached.way.application
        try:
            varied = resizing_of(
                named_arguments(self.analysis.model, self.analysis.call.args, self.analysis.call.kwargs), "batch"
            )
            curve = max_batch.curve_of(
                self.analysis,
                budget=self.limit,
                limit=varied.size,
                change=lambda sized: applied(sized, regions, way),
            )
        except FxmemError:
            return ""
        how = "with that plan " if regions else ""
        return f"; {how}a batch of {curve.largest} fits" if curve.largest else "; no batch fits, not even of 1"

    def _only_in_pieces(self, peak: Peak) -> bool:
        return self.limit is not None and peak.counted_bytes <= self.limit.nbytes

    def _out_of_reach(self, nbytes: int) -> str:
        if self.strategy not in (*ONE_PLAN, "flat"):
            for way in self.ways:
                with contextlib.suppress(*_REFUSALS):
                    self.carried_out(way, way.planner.smallest())
        unplanned = _Proposal(self.ways[0], "flat", (), self.analysis)
        reached = min((unplanned, *self.seen.values()), key=lambda p: p.analysis.peak.counted_bytes)
        peak = reached.analysis.peak
        fixed = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE, Kind.GRADIENT)
        held = ", ".join(
            f"{kind.value.replace('_', ' ')} {format_bytes(peak.by_kind[kind])}"
            for kind in fixed
            if peak.by_kind.get(kind)
        )
        where = f"{peak.phase.value}{f' at {peak.node}' if peak.node else ''}"
        return (
            f"expected a plan that keeps the step within {exact_bytes(nbytes)}; strategy "
            f"{self.strategy} reaches "
            f"{exact_bytes(peak.counted_bytes)} at the least (without a plan "
            f"{format_bytes(self.analysis.peak.counted_bytes)}). "
            f"That peak is in {where}; of it no plan can free: {held or 'nothing'}"
            + self._largest_batch(reached)
            + (
                (
                    "; in a loop the allocator runs out nevertheless, its free memory being in pieces "
                    "(PYTORCH_ALLOC_CONF=expandable_segments:True may help)"
                )
                if self._only_in_pieces(peak)
                else ""
            )
        )


# --- small parts ------------------------------------------------------------------------------------------------------


def _named(region: Region, names: tuple[str | None, ...]) -> Region:
    """The region with the names that the graph it is applied to has for its nodes."""
    if not names:
        return region
    nodes = tuple(name for name in names[region.first_node : region.last_node] if name is not None)
    return region.model_copy(
        update={"nodes": nodes, "regions": tuple(_named(inner, names) for inner in region.regions)}
    )


def _flattened(regions: Iterable[Region]) -> Iterator[Region]:
    for region in regions:
        yield region
        yield from _flattened(region.regions)


def _thinned(plans: Sequence[Plan], count: int) -> Sequence[Plan]:
    """At most `count` of them, evenly spread, first and last included."""
    if len(plans) <= count:
        return plans
    return [plans[round(i * (len(plans) - 1) / (count - 1))] for i in range(count)]


def _total_flops(profile: Profile) -> tuple[int, int]:
    """FLOPs of all ops that have a formula, and how many ops have none."""
    return sum(op.flops or 0 for op in profile.ops), sum(op.flops is None for op in profile.ops)


def _forward_flops(profile: Profile) -> int | None:
    counted = [op.flops for op in profile.ops if op.phase is Phase.FORWARD]
    return None if None in counted else sum(flops or 0 for flops in counted)


def _extra(before: Analysis, after: Analysis) -> int | None:
    """What is run again; None if an op without a formula is among it."""
    (least, unknown), (most, still_unknown) = _total_flops(before.profile), _total_flops(after.profile)
    return most - least if unknown == still_unknown else None


def _cost(proposal: _Proposal) -> tuple[int, int, bool]:
    """What a cheaper plan has less of: FLOPs, then ops; of equals, one that leaves the model the user's."""
    return (
        _total_flops(proposal.analysis.profile)[0],
        len(proposal.analysis.profile.ops),
        proposal.way.application is Application.GRAPH,
    )
