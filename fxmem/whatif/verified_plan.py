"""Checkpoint plans whose peak is verified: each is applied to a stand-in of the model and analysed again.

A planner knows only its own model of memory. So its proposals are applied and analysed as any model is, and compared
with the budget; where the analysis finds more bytes than the planner estimated, the planner is asked again for less.
The result is the cheapest proposal that kept the budget, with the numbers of its analysis.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fxmem import checkpointing
from fxmem.errors import AnalysisError, ExceededError, FxmemError, UsageError
from fxmem.hardware.catalogue import host_bytes_per_second
from fxmem.hardware.context import room_bytes
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
    estimate,
)
from fxmem.records.plan import BudgetPoint, CompilePlan, Plan, Region
from fxmem.records.profile import Kind, Phase
from fxmem.records.units import Application, exact_bytes, format_bytes
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.fake_model import shadow_model
from fxmem.simulation.step.request import OptimizerSpec
from fxmem.simulation.step.step import in_backward
from fxmem.whatif import max_batch
from fxmem.whatif.plan_search import REFUSALS, PlannedWay, PlanSearch, Shortfall, apply_regions, check_training
from fxmem.whatif.program_step import ProgramStep, take_step
from fxmem.whatif.source import find_resizing

# --- what would help a step besides, where no plan keeps its budget: the optimizer's form, a smaller batch ------------


_OF_NO_BATCH = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""What any batch takes as much of."""
_OF_THE_BATCH = (Kind.INPUT, Kind.OUTPUT, Kind.SAVED)
"""What a smaller batch takes less of, however the optimizer works."""


def _describe_optimizer(
    analysis: Analysis, search: PlanSearch, open_search: Callable[[Analysis], PlanSearch], shortfall: Shortfall
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
        found = replace(open_search(varied), budget=search.budget, tell=lambda _: None).find_any()
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


# --- a plan that keeps a budget, and its verification -----------------------------------------------------------------


Survey = tuple[Sequence[OperatorCall], Sequence[OperatorValue]]
"""What a model's forward comes down to: its calls of operators, and what they make."""


def plan(
    analysis: ProfiledStep | Callable[[], Any],
    strategy: str = "auto",
    budget: BudgetLike | None = None,
    *,
    application: Application | str | None = None,
    regions_only: bool = False,
    edits_only: bool = False,
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
            bounds the allocator, too: a loop over the step has to run where the driver gives it no more than that, and
            no more than a CUDA context leaves of the card. None: `sqrt`, `chen` and `norms` give their one plan; the
            others the whole curve of peak against extra FLOPs, and the plan on it with the smallest product of peak and
            FLOPs of the step, of those that fit the card if any does.
        application: "operators" (the program runs once; results of single operators are recomputed), "modules" (whole
            modules run again), "graph" (regions may begin and end anywhere; needs a model that
            `torch.fx.symbolic_trace` accepts), or None for whichever is cheapest.
        regions_only: leaves "operators" out.
        edits_only: leaves out all but modules that an edit of your own source checkpoints (`Plan.to_code`).
        host_memory: pinned memory of the host, in bytes or as "64GiB", where results of single operators may wait
            between forward and backward instead of being recomputed; they are copied while the card computes. None:
            nothing leaves the card.
        progress: called with a few words on what is being done.
        options: of `fxmem.record` for a function, whose `steps` are 3 unless given.

    Raises:
        UsageError: not a training step, an unknown strategy or budget, a model that cannot be rewritten as asked.
        ExceededError: no plan keeps the budget; says the smallest peak that was reached and what bounds it.
    """
    tell = progress or (lambda _: None)
    analysis = take_step(analysis, tell, options)
    asked = None if budget is None else parse_budget(budget)
    open_search = functools.partial(
        _open_search,
        strategy=strategy,
        application=application,
        tell=tell,
        regions_only=regions_only,
        edits_only=edits_only,
        host_memory=host_memory,
        surveyed=functools.cache(functools.partial(survey, analysis)) if isinstance(analysis, Analysis) else None,
    )
    search = open_search(analysis)
    if asked is not None:
        limit = asked.resolve(analysis.peak.counted_bytes)
        search = replace(search, budget=limit.bound(room_bytes(analysis.profile.target)))
    if isinstance(analysis, Analysis):
        what = analysis, search
        return search.run(lambda of: _describe_optimizer(*what, open_search, of) + _describe_batch(*what, of))
    return estimate.name_in_model(search.run())


def plan_ends(
    step: ProfiledStep, *, host_memory: int | str | None = None, progress: Callable[[str], None] | None = None
) -> Plan:
    """As `plan` without a budget, but its curve has no more than that plan and the one that reaches lowest."""
    search = _open_search(step, "auto", None, progress or (lambda _: None), host_memory=host_memory)
    made = search.along_the_curve(only_ends=True)
    return made if isinstance(step, Analysis) else estimate.name_in_model(made)


def plan_budgets(
    analysis: ProfiledStep,
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
    first = _open_search(analysis, "auto", None, progress or (lambda _: None), host_memory=host_memory)
    found: dict[int, tuple[Plan, ProfiledStep]] = {}
    for nbytes in sorted(set(budgets_bytes), reverse=True):
        search = replace(first, budget=Budget(nbytes))  # with the same planners and the same proposals seen
        try:
            best = search.cheapest()
        except REFUSALS:
            best = None
        if best is None:
            break
        made = search.finish(best)
        found[nbytes] = made if isinstance(analysis, Analysis) else estimate.name_in_model(made), best.analysis
    return found, len(first.seen)


def apply_plan(plan: Plan) -> Callable[[Analysis], Analysis]:
    """Return a function from an analysis, at another size perhaps, to its planned step.

    It raises UsageError if the plan was made for another model.
    """
    return lambda analysis: apply_regions(analysis, plan.regions, plan.application)


def _open_search(
    step: ProfiledStep,
    strategy: str,
    application: Application | str | None,
    tell: Callable[[str], None],
    *,
    regions_only: bool = False,
    edits_only: bool = False,
    host_memory: int | str | None = None,
    surveyed: Callable[[], Survey] | None = None,
) -> PlanSearch:
    """The search for a plan, yet without a budget; `surveyed` is the survey of a step with the same forward."""
    if isinstance(step, ProgramStep):
        if host_memory is not None:
            raise UsageError("expected no host_memory: plans of a program are about its modules")
        wanted = allowed_applications(strategy, estimate.check_program_application(application))
        check_training(step)
        planned = (PlannedWay(way, Planner(step.profile, way, edits_only=edits_only)) for way in wanted)
        return PlanSearch(step, functools.partial(_run_planned, step), None, strategy, None, tuple(planned), tell)
    check_training(step)
    if not isinstance(step, Analysis):
        raise UsageError("expected a model or a program to plan: what there is of the step is a record")
    if edits_only:
        application = Application.MODULES
    link = _find_host_link(step, strategy, application, host_memory, regions_only)
    ways = tuple(_ways(step, strategy, application, regions_only, link, surveyed, edits_only=edits_only))
    parameters = sum(parameter.numel() for parameter in step.model.parameters())
    return PlanSearch(step, functools.partial(apply_regions, step), parameters, strategy, None, ways, tell)


def _run_planned(step: ProgramStep, regions: tuple[Region, ...], _: Application) -> ProgramStep:
    """Run a program with modules of one of its models checkpointed."""
    planned = step.vary(replace(step.edits, regions=regions))
    if regions and not planned.profile.recomputed_ops:
        raise AnalysisError(f"the program, run again, did not recompute {estimate.find_root(regions)}")
    return planned


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
    *,
    edits_only: bool = False,
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
        planner_of_modules = Planner(analysis.profile, Application.MODULES, edits_only=edits_only)
        yield PlannedWay(Application.MODULES, planner_of_modules, note=note)


def survey(analysis: Analysis) -> Survey:
    """What the model's forward comes down to: an `OperatorPlanner` needs it."""
    model = shadow_model(analysis.model)
    found = checkpointing.record_survey(model)
    analysis.repeat_forward(model)
    return found.finish()


# --- the `activation_memory_budget` with which a compiled step keeps a budget in bytes --------------------------------
# torch's setting is a share of what its partitioner estimates that could be freed, within each graph. What the step
# takes at its peak does not follow from it, and may rise where less is kept: what is recomputed at once has to be
# somewhere. So each share that is tried is compiled and analysed, from the largest down.


_PARTS: Final = 32
"""Shares are whole numbers of this part."""
_STRIDE: Final = 4
"""Tried at first are those so many parts apart; then, by bisection, those above the first that keeps the budget."""


def plan_compiled(
    analysis: Analysis, budget: BudgetLike, progress: Callable[[str], None] = lambda _: None
) -> CompilePlan:
    """Find the largest `activation_memory_budget` whose true peak keeps the budget.

    Args:
        analysis: of a compiled training step.
        budget: bytes, or a share of the peak of the compiled step as it is.
        progress: called with a few words before each analysis.

    Raises:
        UsageError: not a compiled training step.
        ExceededError: none keeps it; says what the least is.
    """
    settings = analysis.request.compile
    if settings is None or settings.as_is or analysis.profile.step.mode != "train":
        raise UsageError("expected a training step that is compiled as a whole: --compile, with --mode train")
    limit = parse_budget(budget).resolve(analysis.peak.counted_bytes).bound(room_bytes(analysis.profile.target))
    analyses = {_PARTS: analysis}

    def keeps(share: int) -> bool:
        if share not in analyses:
            progress(f"compiling with activation_memory_budget={share / _PARTS:g}")
            changed = settings.model_copy(update={"activation_memory_budget": share / _PARTS})
            analyses[share] = analysis.vary(compile=changed)
        found = analyses[share]
        return limit.keeps(found.profile, found.peak, os.environ)

    chosen = next(filter(keeps, range(_PARTS, -1, -_STRIDE)), None)
    if chosen is None:
        least = min(analyses, key=lambda share: analyses[share].peak.counted_bytes)
        raise ExceededError(
            f"expected a compiled step within {exact_bytes(limit.nbytes)}; the least, with "
            f"activation_memory_budget={least / _PARTS:g}, is {exact_bytes(analyses[least].peak.counted_bytes)}: "
            "a smaller batch, or fxmem plan without --compile"
        )
    above = min(chosen + _STRIDE, _PARTS)
    while above - chosen > 1:
        middle = (chosen + above) // 2
        chosen, above = (middle, above) if keeps(middle) else (chosen, middle)
    progress("analysing and planning the step that is not compiled")
    eager = analysis.vary(compile=None)
    points = [
        BudgetPoint(activation_memory_budget=share / _PARTS, peak=analyses[share].peak)
        for share in sorted(analyses, reverse=True)
    ]
    return CompilePlan(
        **analysis.profile.heading(),
        budget_bytes=limit.stated_bytes,
        eager=eager.peak,
        plan=_plan_eager(eager, limit, progress),
        chosen=chosen / _PARTS,
        points=tuple(points),
        assumptions=analyses[chosen].profile.assumptions,
    )


def _plan_eager(eager: Analysis, limit: Budget, progress: Callable[[str], None]) -> Plan | None:
    try:
        return plan(eager, "auto", limit, progress=progress)
    except REFUSALS:
        return None
