"""A checkpoint plan from a saved report: an estimate, without a model and without torch."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.errors import ExceededError, UsageError
from fxmem.memory.budget import BudgetLike, parse_budget
from fxmem.planning import STRATEGIES, Planner, allowed_applications
from fxmem.records.names import Application
from fxmem.records.plan import CurvePoint, Plan
from fxmem.records.profile import Assumption, Peak, Profile


def estimate(
    profile: Profile,
    peak: Peak,
    strategy: str,
    budget: BudgetLike | None,
    application: Application | str | None = None,
) -> Plan:
    """Return the plan a planner proposes for a profile. Its peak is the planner's estimate; `analysed` is False.

    Args as for `fxmem.whatif.verified_plan.plan`; `peak` is the profile's. Only the requested bytes are estimated; what
    the allocator adds to them is taken to stay what it is without a plan.

    Raises:
        UsageError: not a training step, or a budget that cannot be understood.
        ExceededError: no plan keeps the budget.
    """
    if profile.step.mode != "train":
        raise UsageError(
            "expected the report of a training step: at inference nothing is saved for backward, so there is "
            "nothing "
            "to checkpoint"
        )
    limit = None if budget is None else parse_budget(budget).resolve(peak.counted_bytes).nbytes
    overhead = peak.counted_bytes - peak.requested_bytes
    plans = list(_plans(profile, strategy, None if limit is None else limit - overhead, application))
    chosen = min(plans, key=lambda plan: plan.extra_flops or 0)
    note = "the plan has not been applied and analysed again; give fxmem the model for a peak that is a promise"
    if chosen.application is Application.GRAPH:
        note += ". It presumes a model that torch.fx.symbolic_trace accepts; --application modules does not"
    assumptions = (Assumption(topic="plan", text=note), *chosen.assumptions)
    return chosen.model_copy(
        update={"strategy": strategy, "budget_bytes": limit, "before": peak, "assumptions": assumptions}
    )


def _plans(
    profile: Profile, strategy: str, nbytes: int | None, application: Application | str | None
) -> Iterator[Plan]:
    wanted = allowed_applications(strategy, application, regions_only=True)
    if not wanted:
        raise UsageError(
            "expected a model to plan single operators of; a report does not say what each operator reads. Other "
            "strategies do with it"
        )
    refused: list[ExceededError] = []
    for way in wanted:
        planner = Planner(profile, way)
        if nbytes is None and STRATEGIES.get(strategy).has_curve:
            curve = planner.curve()
            best = min(
                curve,
                key=lambda plan: (
                    plan.after.requested_bytes * (sum(op.flops or 0 for op in profile.ops) + (plan.extra_flops or 0))
                ),
            )
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
