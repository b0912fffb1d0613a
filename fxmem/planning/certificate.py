"""A lower bound on the cost of every plan within a peak, proved by CP-SAT.

What is bounded, and why it is a bound, stands in `fxmem.planning.lower_bound`. The search is OR-tools' CP-SAT on one
thread with a fixed seed, ended by deterministic work and not by the clock.
"""

from __future__ import annotations

import math
from importlib import metadata
from typing import Any

from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.planning import tuning
from fxmem.planning.lower_bound import Relaxation, relax
from fxmem.records.names import EFFORT, Application
from fxmem.records.plan import Certificate, Plan
from fxmem.records.profile import Profile


def certify(profile: Profile, plan: Plan, effort: float = EFFORT) -> Certificate:
    """Bound from below the extra FLOPs of any plan that keeps this plan's budget. Without a budget its own peak counts.

    Args:
        profile: of the unplanned step that the plan is for.
        plan: from any planner.
        effort: limit of the search, in units of CP-SAT's deterministic time.

    The budget is taken to bound requested bytes. Where it bounds allocated bytes, as on a card, that is less than it
    asks for, and the bound lower.

    Raises:
        UsageError: a plan of another step, or no positive effort.
        EnvironmentLacksError: OR-tools is not installed.
    """
    if not 0 < effort < math.inf:
        raise UsageError(f"expected a positive effort for a certificate, got {effort:g}")
    if any(getattr(plan, name) != getattr(profile, name) for name in ("model", "inputs", "step", "target")):
        raise UsageError(
            f"expected the profile that the plan was made from; the plan is of {plan.model} for {plan.target.name}, "
            f"or of another step of it"
        )
    if plan.application is Application.OPERATORS:
        raise UsageError(
            "expected a plan of regions, which certificates speak of; got one of single operators (--application "
            "graph, or modules, gives one)"
        )
    cp_model, version = cp_sat()
    budget = plan.after.requested_bytes if plan.budget_bytes is None else plan.budget_bytes
    program = relax(profile, budget, plan.application)
    bound, complete = (None, True) if program.short else _least(program, budget, effort, cp_model)
    gap = None if bound is None or plan.extra_flops is None else plan.extra_flops - bound
    if gap is not None and gap < 0 and not plan.analysed:
        gap = None
    return Certificate(
        budget_bytes=budget,
        application=plan.application,
        lower_bound_flops=bound,
        gap_flops=gap,
        optimal=gap == 0,
        complete=complete,
        effort=effort,
        solver=f"OR-tools {version}, CP-SAT",
    )


def cp_sat() -> tuple[Any, str]:
    """Import OR-tools' CP-SAT; return the module and its release. It takes a second and brings pandas.

    Raises:
        EnvironmentLacksError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise EnvironmentLacksError(
            "a certificate needs OR-tools, which is not installed: pip install 'fxmem[opt]'"
        ) from error
    return cp_model, metadata.version("ortools")


def _least(program: Relaxation, budget_bytes: int, effort: float, cp_model: Any) -> tuple[int | None, bool]:
    """A lower bound on the program's cost, None if it has no solution; and whether it is the least cost itself."""
    model = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in range(program.variables)]

    def literal(number: int) -> Any:
        return variables[number - 1] if number > 0 else variables[-number - 1].negated()

    for clause in program.clauses:
        model.add_bool_or([literal(number) for number in clause])
    for parts, whole in program.sums:
        model.add(sum(literal(part) for part in parts) == literal(whole))
    step = max(budget_bytes // tuning.CERTIFICATE_STEPS, 1)
    for load in program.loads:
        model.add(sum(nbytes // step * literal(held) for nbytes, held in load.held) <= load.room // step)
    total = sum(flops for flops, _ in program.costs)
    unit = max(math.gcd(*(flops for flops, _ in program.costs)), 1)
    if total // unit > tuning.CERTIFICATE_MOST_COST:
        unit = total // tuning.CERTIFICATE_MOST_COST
    model.minimize(sum(flops // unit * literal(caused) for flops, caused in program.costs))

    solver = cp_model.CpSolver()
    solver.parameters.random_seed = 1
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2  # cuts: with the default, the bound of a ResNet-50 stays near 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, True
    return max(math.ceil(solver.best_objective_bound - 1e-6), 0) * unit, status == cp_model.OPTIMAL
