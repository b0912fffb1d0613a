"""Checkpoint plans whose peak is verified: each is applied to a stand-in of the model and analysed again.

A planner knows only its own model of memory. So its proposals are applied and analysed as any model is, and compared
with the budget; where the analysis finds more bytes than the planner estimated, the planner is asked again for less.
The result is the cheapest proposal that kept the budget, with the numbers of its analysis.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxmem import checkpointing
from fxmem.errors import FxmemError, UsageError
from fxmem.hardware.links import host_bytes_per_second
from fxmem.hardware.step_time import has_rates
from fxmem.memory.budget import Budget, BudgetLike, parse_budget, parse_bytes
from fxmem.planning import (
    STRATEGIES,
    HostLink,
    OffloadPlanner,
    OperatorCall,
    OperatorPlanner,
    OperatorValue,
    Planner,
    allowed_applications,
)
from fxmem.records.names import STEPS, Application
from fxmem.records.plan import Plan
from fxmem.records.profile import Kind, Phase
from fxmem.records.units import format_bytes
from fxmem.simulation.analysis import Analysis
from fxmem.simulation.model.fake_model import shadow_model
from fxmem.simulation.observe.fx_tracer import named_arguments
from fxmem.simulation.profiled_step import ProfiledStep
from fxmem.simulation.request import OptimizerSpec
from fxmem.simulation.step import in_backward
from fxmem.whatif import max_batch
from fxmem.whatif.plan_search import REFUSALS, PlannedWay, PlanSearch, Shortfall, apply_regions, check_training
from fxmem.whatif.program_plan import plan_program
from fxmem.whatif.program_step import record_function
from fxmem.whatif.resize import find_resizing

_OF_NO_BATCH = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""What any batch takes as much of."""
_OF_THE_BATCH = (Kind.INPUT, Kind.OUTPUT, Kind.SAVED)
"""What a smaller batch takes less of, however the optimizer works."""

Survey = tuple[Sequence[OperatorCall], Sequence[OperatorValue]]
"""What a model's forward comes down to: its calls of operators, and what they make."""


def plan(
    analysis: Analysis | Callable[[], Any],
    strategy: str = "auto",
    budget: BudgetLike | None = None,
    *,
    application: Application | str | None = None,
    regions_only: bool = False,
    host_memory: int | str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """Plan activation checkpoints that keep a training step within a budget at the least recomputation.

    Args:
        analysis: of the training step, from `analyze`; or a function that trains as a script does, which runs inside
            `fxmem.record` once for each plan that is tried. The plan of a function is of modules of its model.
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
        host_memory: pinned memory of the host, in bytes or as "64GiB", where results of single operators may wait
            between forward and backward instead of being recomputed; they are copied while the card computes. None:
            nothing leaves the card.
        progress: called with a few words on what is being done.
        options: of `fxmem.record` for a function, whose `steps` are 3 unless given.

    Raises:
        UsageError: not a training step, an unknown strategy or budget, a model that cannot be rewritten as asked.
        ExceededError: no plan keeps the budget; says the smallest peak that was reached and what bounds it.
    """
    if not isinstance(analysis, Analysis):
        if host_memory is not None:
            raise UsageError("expected no host_memory: plans of a program are about its modules")
        run = functools.partial(record_function, analysis, {"steps": STEPS, **options})
        return plan_program(run, strategy, budget, application=application, progress=progress)[0]
    if options:
        raise UsageError(f"expected no {', '.join(options)}: the analysis has its settings")
    check_training(analysis)
    limit = None if budget is None else parse_budget(budget).resolve(analysis.peak.counted_bytes)
    link = _find_host_link(analysis, strategy, application, host_memory, regions_only)
    surveyed = functools.cache(functools.partial(survey, analysis))

    def make_search(step: Analysis) -> PlanSearch:
        ways = _ways(step, strategy, application, regions_only, link, surveyed)
        return _search(step, strategy, limit, tuple(ways), progress)

    search = make_search(analysis)
    return search.run(
        lambda shortfall: (
            _describe_optimizer(analysis, search, shortfall, make_search) + _describe_batch(analysis, search, shortfall)
        )
    )


def plan_budgets(
    analysis: Analysis,
    budgets_bytes: Iterable[int],
    *,
    host_memory: int | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[dict[int, tuple[Plan, ProfiledStep]], int]:
    """Plan for each of several budgets; return the plans, the planned steps and the number of plans analysed.

    As `plan` for each, but what was analysed for one budget is not analysed again for another. A budget that no plan
    keeps is left out, and so are all below it, which are not searched: there is only less to have.

    Raises:
        UsageError: not a training step, or host memory for a card whose rates are not known.
    """
    check_training(analysis)
    link = _find_host_link(analysis, "auto", None, host_memory, False)
    first = _search(analysis, "auto", None, tuple(_ways(analysis, "auto", None, link=link)), progress)
    found: dict[int, tuple[Plan, ProfiledStep]] = {}
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


def _search(
    analysis: Analysis,
    strategy: str,
    limit: Budget | None,
    ways: tuple[PlannedWay, ...],
    progress: Callable[[str], None] | None,
) -> PlanSearch:
    return PlanSearch(
        analysis,
        functools.partial(apply_regions, analysis),
        sum(parameter.numel() for parameter in analysis.model.parameters()),
        strategy,
        limit,
        ways,
        progress or (lambda _: None),
    )


def _find_host_link(
    analysis: Analysis,
    strategy: str,
    application: Application | str | None,
    host_memory: int | str | None,
    regions_only: bool,
) -> HostLink | None:
    """The link to so much host memory; None if none is to be used."""
    if host_memory is None:
        return None
    size = parse_bytes(host_memory, "host memory")
    if Application.OPERATORS not in allowed_applications(strategy, application, regions_only=regions_only):
        raise UsageError("expected host memory with application 'operators': it is for results of single operators")
    target = analysis.profile.target
    rate = host_bytes_per_second(target)
    if rate is None or not has_rates(target):
        raise UsageError(
            f"expected a card whose rates are known: copies to the host's memory are planned by time; {target.name} "
            "has none (`fxmem cards` lists cards)"
        )
    return HostLink(size.nbytes, rate)


def _describe_copies(link: HostLink) -> str:
    return (
        f"copies between the card and pinned memory of the host go at {link.bytes_per_second / 1e9:.3g} GB/s, with "
        "nothing else on that link, and take nothing from the card's own memory traffic"
    )


def _ways(
    analysis: Analysis,
    strategy: str,
    application: Application | str | None,
    regions_only: bool = False,
    link: HostLink | None = None,
    surveyed: Callable[[], Survey] | None = None,
) -> Iterator[PlannedWay]:
    """The ways of applying plans to a step; `surveyed` is the survey of one with the same forward."""
    wanted = allowed_applications(strategy, application, regions_only=regions_only)
    if not wanted:
        asked = f"strategy {strategy!r}" if application is None else f"application {str(application)!r}"
        raise UsageError(
            f"expected a plan of regions, got {asked}, which is about single operators; application 'graph' or "
            f"'modules' gives one"
        )
    note = ""
    planner = OperatorPlanner(analysis.profile, surveyed or functools.partial(survey, analysis))
    if Application.OPERATORS in wanted:
        yield PlannedWay(Application.OPERATORS, planner)
        if link is not None:
            yield PlannedWay(Application.OPERATORS, OffloadPlanner(planner, link), note=_describe_copies(link))
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
            yield PlannedWay(Application.GRAPH, planner.regions, names)
            if strategy == "norms" and application is None:
                # modules are seldom a norm with its convolution: their plan is the cheaper one because it does less
                return
    if Application.MODULES in wanted:
        yield PlannedWay(Application.MODULES, Planner(analysis.profile, Application.MODULES), note=note)


def survey(analysis: Analysis) -> Survey:
    """What the model's forward comes down to: an `OperatorPlanner` needs it."""
    model = shadow_model(analysis.model)
    found = checkpointing.record_survey(model)
    analysis.repeat_forward(model)
    return found.finish()


# --- what helps besides -----------------------------------------------------------------------------------------------


def _describe_optimizer(
    analysis: Analysis, search: PlanSearch, shortfall: Shortfall, make_search: Callable[[Analysis], PlanSearch]
) -> str:
    """Describe the form of the same optimizer that keeps the budget: no checkpoint frees what an optimizer takes, nor
    gradients.

    Fused and for-loop are tried where the peak is in the optimizer; then within backward, which some loops refuse. Each
    by itself and with a plan, unless what it leaves alone is too much.
    """
    spec, limit, peak = analysis.request.optimizer, search.budget.nbytes if search.budget else 0, shortfall.peak
    gradients, in_step = peak.by_kind.get(Kind.GRADIENT, 0), peak.phase is Phase.OPTIMIZER
    if spec is None or not (in_step or gradients >= peak.counted_bytes - limit):
        return ""
    fixed = sum(peak.by_kind.get(kind, 0) for kind in _OF_NO_BATCH)
    forms: list[dict[str, OptimizerSpec]] = []
    if isinstance(spec, str) and ":" not in spec and in_step and fixed + gradients <= limit:
        # For-loop takes no less than fused does: it is for optimizers that have no fused form.
        forms.append({f"optimizer {form}": form for form in (f"{spec}:fused", f"{spec}:forloop")})
    if fixed <= limit:
        forms.append({"the same optimizer within backward (fxmem.release_gradients)": in_backward(spec)})
    for words, varied in filter(None, (_vary_optimizer(analysis, search, each) for each in forms)):
        found = replace(make_search(varied), tell=lambda _: None).find_any()
        if found is not None:
            how = "a plan with " if found.regions else ""
            return f"; {how}{words} takes {format_bytes(found.peak_bytes)}, which is within it"
    return ""


def _vary_optimizer(
    analysis: Analysis, search: PlanSearch, forms: Mapping[str, OptimizerSpec]
) -> tuple[str, Analysis] | None:
    """The same step with the first of these optimizers that it can have.

    Returns:
        That one's words, and the step; None if it can have none.
    """
    for words, form in forms.items():
        search.tell(f"trying {words}")
        with contextlib.suppress(FxmemError):
            return words, analysis.vary(optimizer=form)
    return None


def _describe_batch(analysis: Analysis, search: PlanSearch, shortfall: Shortfall) -> str:
    """Describe how large a batch keeps the budget with the plan that reaches lowest."""
    if search.budget is None or not STRATEGIES.get(search.strategy).falls_back:
        return ""
    search.tell("looking for the largest batch that fits")
    reached, by_kind = shortfall.reached or search.propose_nothing(), shortfall.peak.by_kind
    regions, application = reached.regions, reached.way.application
    # Where no plan changes the peak, it is the optimizer's, which takes as much of its own for any batch.
    fixed = set(by_kind) - set(_OF_THE_BATCH) if shortfall.reached is None else set(_OF_NO_BATCH)
    try:
        varied = find_resizing(named_arguments(analysis.model, analysis.request.args, analysis.request.kwargs), "batch")
        largest = None
        if sum(by_kind.get(kind, 0) for kind in fixed) <= search.budget.nbytes:
            largest = max_batch.find_smaller(
                analysis,
                reached.analysis,
                varied,
                search.budget.nbytes,
                lambda sized: apply_regions(sized, regions, application),
            )
    except FxmemError:
        return ""
    how = "with that plan " if regions else ""
    return f"; {how}a batch of {largest} fits" if largest else "; no batch fits, not even of 1"
