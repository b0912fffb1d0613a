"""A lower bound on the cost of every plan within a peak, proved by CP-SAT.

What is bounded, and why it is a bound, stands in `benchmarks.planning.lower_bound`. The search is OR-tools' CP-SAT on
one thread with a fixed seed, ended by deterministic work and not by the clock.
"""

from __future__ import annotations

import dataclasses
import math
from importlib import metadata
from typing import Any, Final

from benchmarks.planning.lower_bound import Relaxation, relax
from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.records.plan import Plan
from fxmem.records.profile import Profile
from fxmem.records.units import Application

EFFORT: Final = 4.0
"""Deterministic work of the search, unless another is given."""
_STEPS: Final = 1 << 20
"""Steps that a budget is divided into; what is kept is rounded down to them, so that the bound stays one. Chosen, not
measured."""
_MOST_COST: Final = 1 << 40
"""FLOPs are counted in steps so large that all together are no more than this. Chosen, not measured."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How much cheaper a plan of checkpoints could be at most: no plan within `budget_bytes` runs fewer FLOPs again
    than `lower_bound_flops`."""

    budget_bytes: int
    """Peak of requested bytes within which every bounded plan stays."""
    application: Application
    """The bounded plans: all plans applied like this one, with regions and regions within regions of any number and
    depth, that begin and end at any node (GRAPH), or that are calls of modules or of consecutive children of an
    `nn.Sequential` (MODULES), and that keep any of their products' results, or none."""
    lower_bound_flops: int | None
    """Extra FLOPs that each of them needs at least; operators without a formula count as 0. None: no plan keeps
    the budget."""
    gap_flops: int | None
    """Most FLOPs that the plan may recompute needlessly. None where either is unknown, and where the plan's peak is an
    estimate that the bound contradicts."""
    optimal: bool
    """Whether the plan is proven to need the fewest FLOPs: the gap is 0."""
    complete: bool
    """Whether the bound is the relaxation's exact optimum; otherwise the search ended at its limit, and more of it
    might raise the bound."""
    effort: float
    """Limit of the search, in CP-SAT's units of deterministic work: the same answer on every machine."""
    solver: str
    """What found the bound, with its version."""


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
            "a certificate needs OR-tools, which is not installed: pip install ortools"
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
    step = max(budget_bytes // _STEPS, 1)
    for load in program.loads:
        model.add(sum(nbytes // step * literal(held) for nbytes, held in load.held) <= load.room // step)
    total = sum(flops for flops, _ in program.costs)
    unit = max(math.gcd(*(flops for flops, _ in program.costs)), 1)
    if total // unit > _MOST_COST:
        unit = total // _MOST_COST
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
