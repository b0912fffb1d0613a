"""What would help a step besides, where no plan keeps its budget: the optimizer's form, a smaller batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from fxmem.errors import FxmemError
from fxmem.planning import STRATEGIES
from fxmem.records.profile import Kind, Phase
from fxmem.records.units import format_bytes
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import OptimizerSpec
from fxmem.simulation.step.step import in_backward
from fxmem.whatif import max_batch
from fxmem.whatif.plan_search import PlanSearch
from fxmem.whatif.proposals import Shortfall, apply_regions
from fxmem.whatif.source import find_resizing

_OF_NO_BATCH = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER_STATE)
"""What any batch takes as much of."""
_OF_THE_BATCH = (Kind.INPUT, Kind.OUTPUT, Kind.SAVED)
"""What a smaller batch takes less of, however the optimizer works."""


def describe(
    analysis: Analysis, search: PlanSearch, open_search: Callable[[Analysis], PlanSearch], shortfall: Shortfall
) -> str:
    """What would help a model's step besides a plan, in words."""
    return _describe_optimizer(analysis, search, open_search, shortfall) + _describe_batch(analysis, search, shortfall)


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
