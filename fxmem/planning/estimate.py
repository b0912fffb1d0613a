"""A checkpoint plan from a saved report: an estimate, without a model and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxmem.errors import ExceededError, UsageError
from fxmem.hardware.context import room_bytes
from fxmem.memory.budget import BudgetLike, parse_budget
from fxmem.planning import STRATEGIES, Planner, allowed_applications
from fxmem.records.plan import CurvePoint, Plan, Region
from fxmem.records.profile import Assumption, Peak, Profile
from fxmem.records.units import Application


def estimate(
    profile: Profile,
    peak: Peak,
    strategy: str,
    budget: BudgetLike | None,
    application: Application | str | None = None,
    *,
    edits_only: bool = False,
) -> Plan:
    """Return the plan a planner proposes for a profile. Its peak is the planner's estimate; `analysed` is False.

    A program's plan is of modules of one of its models, named as that model names them, for `fxmem.checkpoint(model,
    plan)` in the program.

    Args as for `fxmem.whatif.verified_plan.plan`; `peak` is the profile's. Only the requested bytes are estimated; what
    the allocator adds to them is taken to stay what it is without a plan.

    Raises:
        UsageError: not a training step, or a budget that cannot be understood.
        ExceededError: no plan keeps the budget.
    """
    if profile.step.mode != "train":
        raise UsageError(
            "expected the report of a training step: at inference nothing is saved for backward, so there is nothing "
            "to checkpoint"
        )
    limit = (
        None if budget is None else parse_budget(budget).resolve(peak.counted_bytes).bound(room_bytes(profile.target))
    )
    overhead = peak.counted_bytes - peak.requested_bytes
    if profile.step.program is not None:
        application = check_program_application(application)
    nbytes = None if limit is None else limit.nbytes - overhead
    plans = list(_plans(profile, strategy, nbytes, application, edits_only=edits_only))
    chosen = min(plans, key=lambda plan: (plan.after_seconds or 0, plan.extra_flops or 0))
    note = "the plan has not been applied and analysed again; give fxmem the model for a peak that is a promise"
    if profile.step.program is not None:
        note = "the plan has not been applied; fxmem plan --run with the program applies it"
        chosen = name_in_model(chosen)
    if chosen.application is Application.GRAPH:
        note += ". It presumes a model that torch.fx.symbolic_trace accepts; --application modules does not"
    assumptions = (Assumption(topic="plan", text=note), *chosen.assumptions)
    asked = None if limit is None else limit.stated_bytes
    return chosen.model_copy(
        update={"strategy": strategy, "budget_bytes": asked, "before": peak, "assumptions": assumptions}
    )


def check_program_application(application: Application | str | None) -> Application:
    """How a program's plan is applied. Raises UsageError: another way is asked for."""
    if application not in (None, Application.MODULES):
        raise UsageError(
            f"expected application 'modules' for a program, got {str(application)!r}, which needs the model and its "
            f"inputs"
        )
    return Application.MODULES


def name_in_model(plan: Plan) -> Plan:
    """A program's plan with paths that begin within its model. Raises UsageError: its regions are in several models."""
    find_root(region for regions in (plan.regions, *(point.regions for point in plan.curve)) for region in regions)
    curve = tuple(point.model_copy(update={"regions": strip_root(point.regions)}) for point in plan.curve)
    return plan.model_copy(update={"regions": strip_root(plan.regions), "curve": curve})


def find_root(regions: Iterable[Region]) -> str | None:
    """The name of the model that a program's regions are in; None for no regions.

    Raises:
        UsageError: they are in several models.
    """
    roots = {path.partition(".")[0] for region in regions for path in region.modules}
    if len(roots) > 1:
        raise UsageError(
            f"expected a program with one model to checkpoint; regions would be in {', '.join(sorted(roots))}, and a "
            f"plan is for one"
        )
    return next(iter(roots), None)


def strip_root(regions: Iterable[Region]) -> tuple[Region, ...]:
    """A program's regions with paths that begin within their model."""
    found = []
    for region in regions:
        modules = tuple(path.partition(".")[2] for path in region.modules)
        found.append(region.model_copy(update={"modules": modules, "regions": strip_root(region.regions)}))
    return tuple(found)


def _plans(
    profile: Profile, strategy: str, nbytes: int | None, application: Application | str | None, *, edits_only: bool
) -> Iterator[Plan]:
    wanted = allowed_applications(strategy, application, regions_only=True)
    if not wanted:
        raise UsageError(
            "expected a model to plan single operators of; a report does not say what each operator reads. Other "
            "strategies do with it"
        )
    refused: list[ExceededError] = []
    for way in wanted:
        planner = Planner(profile, way, edits_only=edits_only)
        if nbytes is None and STRATEGIES.get(strategy).has_curve:
            curve, flops = planner.curve(), sum(op.flops or 0 for op in profile.ops)
            best = min(curve, key=lambda plan: plan.after.requested_bytes * (flops + (plan.extra_flops or 0)))
            yield best.model_copy(update={"curve": tuple(_point(plan) for plan in curve)})
            continue
        try:
            yield planner.plan(strategy, nbytes)
        except ExceededError as error:
            refused.append(error)
    if len(refused) == len(wanted):
        raise refused[0]


def _point(plan: Plan) -> CurvePoint:
    return CurvePoint(
        strategy=plan.chosen,
        application=plan.application,
        regions=plan.regions,
        peak=plan.after,
        extra_flops=plan.extra_flops,
        step_seconds=plan.after_seconds,
    )
