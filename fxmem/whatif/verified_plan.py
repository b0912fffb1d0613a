"""Checkpoint plans whose peak is verified: each is applied to a stand-in of the model and analysed again.

A planner knows only its own model of memory. So its proposals are applied and analysed as any model is, and compared
with the budget; where the analysis finds more bytes than the planner estimated, the planner is asked again for less.
The result is the cheapest proposal that kept the budget, with the numbers of its analysis.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from fxmem import checkpointing
from fxmem.errors import ExceededError, FxmemError, UsageError
from fxmem.memory.budget import Budget, BudgetLike, parse_budget
from fxmem.planning import STRATEGIES, OperatorCall, OperatorPlanner, OperatorValue, Planner, allowed_applications
from fxmem.records.names import Application
from fxmem.records.plan import Plan
from fxmem.records.profile import Kind, Phase
from fxmem.records.units import exact_bytes, format_bytes, to_words
from fxmem.simulation.analysis import Analysis
from fxmem.simulation.model.fake_model import shadow_model
from fxmem.simulation.observe.fx_tracer import named_arguments
from fxmem.whatif import max_batch
from fxmem.whatif.plan_search import REFUSALS, PlannedWay, PlanSearch, Proposal, apply_regions
from fxmem.whatif.resize import find_resizing


def plan(
    analysis: Analysis,
    strategy: str = "auto",
    budget: BudgetLike | None = None,
    *,
    application: Application | str | None = None,
    regions_only: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan activation checkpoints that keep a training step within a budget at the least recomputation.

    Args:
        analysis: of the training step, from `analyze`.
        strategy: a name of `fxmem.planning.STRATEGIES`.
        budget: bytes, "8GiB", a share of the unplanned peak (0.6, "60%"), or None. It bounds the peak of allocated
            bytes (`torch.cuda.max_memory_allocated()`; requested bytes for the CPU). A budget given in bytes for a card
            bounds the allocator, too: a loop over the step has to run where the driver gives it no more than that.
            None: `sqrt`, `chen` and `norms` give their one plan; the others the whole curve of peak against extra
            FLOPs, and the plan on it with the smallest product of peak and FLOPs of the step.
        application: "operators" (the program runs once; results of single operators are recomputed), "modules" (whole
            modules run again), "graph" (regions may begin and end anywhere; needs a model that
            `torch.fx.symbolic_trace` accepts), or None for whichever is cheapest.
        regions_only: leaves "operators" out: certificates are about regions.
        progress: called with a few words on what is being done.

    Raises:
        UsageError: not a training step, an unknown strategy or budget, a model that cannot be rewritten as asked.
        ExceededError: no plan keeps the budget; says the smallest peak that was reached and what bounds it.
    """
    check_training(analysis)
    registered = STRATEGIES.get(strategy)
    search = PlanSearch(
        analysis,
        strategy,
        None if budget is None else parse_budget(budget).resolve(analysis.peak.counted_bytes),
        tuple(_ways(analysis, strategy, application, regions_only)),
        progress or (lambda _: None),
    )
    if search.budget is None and registered.has_curve:
        return search.along_the_curve()
    if search.budget is not None and search.keeps(analysis):
        return search.finish(search.propose_nothing(strategy))
    best = search.cheapest()
    if best is None:
        raise ExceededError(_describe_shortfall(search))
    return search.finish(best)


def plan_budgets(
    analysis: Analysis, budgets_bytes: Iterable[int], *, progress: Callable[[str], None] | None = None
) -> tuple[dict[int, tuple[Plan, Analysis]], int]:
    """Plan for each of several budgets; return the plans, the planned steps and the number of plans analysed.

    As `plan` for each, but what was analysed for one budget is not analysed again for another. A budget that no plan
    keeps is left out, and so are all below it, which are not searched: there is only less to have.

    Raises:
        UsageError: not a training step.
    """
    check_training(analysis)
    first = PlanSearch(analysis, "auto", None, tuple(_ways(analysis, "auto", None)), progress or (lambda _: None))
    found: dict[int, tuple[Plan, Analysis]] = {}
    for nbytes in sorted(set(budgets_bytes), reverse=True):
        search = replace(first, budget=Budget(nbytes))  # with the same planners and the same proposals seen
        try:
            best = search.cheapest()
        except REFUSALS:
            best = None
        if best is None:
            break
        found[nbytes] = search.finish(best), best.analysis
    return found, len(first.seen)


def apply_plan(plan: Plan) -> Callable[[Analysis], Analysis]:
    """Return a function from an analysis, at another size perhaps, to its planned step.

    It raises UsageError if the plan was made for another model.
    """
    return lambda analysis: apply_regions(analysis, plan.regions, plan.application)


def check_training(analysis: Analysis) -> None:
    """Raise UsageError where there is nothing to checkpoint."""
    if analysis.profile.step.mode != "train":
        raise UsageError(
            "expected the analysis of a training step: at inference nothing is saved for backward, so there is "
            "nothing to checkpoint"
        )


def _ways(
    analysis: Analysis, strategy: str, application: Application | str | None, regions_only: bool = False
) -> Iterator[PlannedWay]:
    wanted = allowed_applications(strategy, application, regions_only=regions_only)
    if not wanted:
        asked = f"strategy {strategy!r}" if application is None else f"application {str(application)!r}"
        raise UsageError(
            f"expected a plan of regions, got {asked}, which is about single operators; application 'graph' or "
            f"'modules' gives one"
        )
    note = ""
    if Application.OPERATORS in wanted:
        yield PlannedWay(Application.OPERATORS, OperatorPlanner(analysis.profile, functools.partial(survey, analysis)))
    if Application.GRAPH in wanted:
        try:
            names = checkpointing.graph_names(
                analysis.model, analysis.profile, analysis.request.args, analysis.request.kwargs
            )
        except UsageError as refused:
            if application is not None:
                raise
            note = f"regions are whole modules: {refused}"
        else:
            yield PlannedWay(Application.GRAPH, Planner(analysis.profile, Application.GRAPH), names)
            if strategy == "norms" and application is None:
                # modules are seldom a norm with its convolution: their plan is the cheaper one because it does less
                return
    if Application.MODULES in wanted:
        yield PlannedWay(Application.MODULES, Planner(analysis.profile, Application.MODULES), note=note)


def survey(analysis: Analysis) -> tuple[list[OperatorCall], list[OperatorValue]]:
    """What the model's forward comes down to: an `OperatorPlanner` needs it."""
    model = shadow_model(analysis.model)
    found = checkpointing.record_survey(model)
    analysis.vary(model)
    return found.finish()


# --- what a failed search reached -------------------------------------------------------------------------------------


def _describe_shortfall(search: PlanSearch) -> str:
    """Describe the smallest peak reached, what bounds it, and the largest batch that would fit."""
    if STRATEGIES.get(search.strategy).falls_back:
        for way in search.ways:
            with contextlib.suppress(*REFUSALS):
                search.analyse(way, way.planner.smallest())
    reached = min((search.propose_nothing(), *search.seen.values()), key=lambda each: each.peak_bytes)
    peak = reached.analysis.peak
    budget = 0 if search.budget is None else search.budget.nbytes
    fixed = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OPTIMIZER_STATE, Kind.GRADIENT)
    kept = [f"{to_words(kind)} {format_bytes(peak.by_kind[kind])}" for kind in fixed if peak.by_kind.get(kind)]
    message = (
        f"expected a plan that keeps the step within {exact_bytes(budget)}; strategy {search.strategy} reaches "
        f"{exact_bytes(reached.peak_bytes)} at the least (without a plan "
        f"{format_bytes(search.analysis.peak.counted_bytes)}). That peak is in {peak.phase.value}"
        f"{f' at {peak.node}' if peak.node else ''}; of it no plan can free: {', '.join(kept) or 'nothing'}"
        f"{_describe_optimizer(search, reached)}{_describe_batch(search, reached)}"
    )
    if reached.peak_bytes <= budget:
        message += (
            "; in a loop the allocator runs out nevertheless, its free memory being in pieces "
            "(PYTORCH_ALLOC_CONF=expandable_segments:True may help)"
        )
    return message


def _describe_optimizer(search: PlanSearch, reached: Proposal) -> str:
    """Describe the least form of the same optimizer where the peak is in it.

    No checkpoint helps there.
    """
    spec = search.analysis.request.optimizer
    if reached.analysis.peak.phase is not Phase.OPTIMIZER or not isinstance(spec, str) or ":" in spec:
        return ""
    found: list[tuple[int, str]] = []
    for form in ("fused", "forloop"):
        with contextlib.suppress(FxmemError):
            peak = reached.analysis.vary(optimizer=f"{spec}:{form}").peak
            found.append((peak.counted_bytes, form))
    if not found or min(found)[0] >= reached.peak_bytes:
        return ""
    nbytes, form = min(found)
    within = search.budget is not None and nbytes <= search.budget.nbytes
    return f"; optimizer {spec}:{form} takes {format_bytes(nbytes)}{', which is within it' if within else ''}"


def _describe_batch(search: PlanSearch, reached: Proposal) -> str:
    """Describe how large a batch keeps the budget with the plan that reaches lowest."""
    if search.budget is None or not STRATEGIES.get(search.strategy).falls_back:
        return ""
    search.tell("looking for the largest batch that fits")
    analysis, regions, application = search.analysis, reached.regions, reached.way.application
    try:
        varied = find_resizing(named_arguments(analysis.model, analysis.request.args, analysis.request.kwargs), "batch")
        curve = max_batch.measure_curve(
            analysis,
            budget=search.budget,
            limit=varied.size,
            change=lambda sized: apply_regions(sized, regions, application),
        )
    except FxmemError:
        return ""
    how = "with that plan " if regions else ""
    return f"; {how}a batch of {curve.largest} fits" if curve.largest else "; no batch fits, not even of 1"
