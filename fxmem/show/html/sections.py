"""What the sections of a page contain: four numbers, a verdict, and a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from fxmem.hardware.context import room_bytes
from fxmem.records.plan import Plan
from fxmem.records.profile import Peak, Profile, Timeline
from fxmem.show import facts
from fxmem.show.html.tables import region_table
from fxmem.show.plan_facts import effect_facts, effect_table, summarize
from fxmem.show.plots import CurveDot, StepAfter, curve_svg
from fxmem.show.sections import Fact

_Views = Mapping[str, str]
"""One plot for wide and one for narrow screens: scaled down, its words could not be read."""


def draw_views(plot: Callable[[str, float], str], wide: float = 1150.0) -> _Views:
    """Draw a plot for wide and for narrow screens. It is given the size's name and a width in pixels."""
    return {size: plot(size, width) for size, width in (("wide", wide), ("narrow", 366.0))}


def numbers(profile: Profile, peak: Peak) -> Iterator[facts.PeakCount]:
    """The peak in every count; a count that is not known says why."""
    absent, process = "not modelled", "reserved and the CUDA context, whose size is not predicted"
    if profile.target.device == "cpu":
        absent = "only a card has an allocator of this kind"
        process = "what the process holds beside the step is not predicted"
    for count in facts.peak_counts(peak):
        missing = process if count.label == "Process" else absent
        yield count if count.nbytes is not None else facts.PeakCount(count.label, None, missing)


def verdict(profile: Profile, peak: Peak) -> dict[str, Any]:
    """Whether the step fits its card.

    An answer, the rest of the sentence, a mark (`yes`, `no`, or empty where it is not known), and the percent of its
    room that is taken (None where the card's memory is not known).
    """
    fit = facts.find_fit(profile, peak)
    answer = ". ".join(filter(None, [fit.verdict, fit.shortage])) + "." * bool(fit.counted)
    room = room_bytes(profile.target)
    taken = peak.reserved_bytes or peak.requested_bytes
    return {
        "answer": answer[:1].upper() + answer[1:],
        "rest": f" {fit.counted}" if fit.counted else "",
        "mark": "" if fit.is_growing else {True: "yes", False: "no", None: ""}[fit.is_fitting],
        "share": min(100 * taken / room, 100.0) if room else None,
    }


# --- a plan -----------------------------------------------------------------------------------------------------------


def plan_section(timeline: Timeline, after: StepAfter | None, plan: Plan | None) -> dict[str, Any]:
    """What a plan does: its effect, facts, regions and curves; nothing if there is no plan."""
    now = plan.after if plan is not None else after.peak if after is not None else None
    if now is None:
        return {}
    shown: dict[str, Any] = {"effect": effect_table(timeline.peak, now, plan, by_kind=True)}
    if plan is not None:
        shown["facts"] = [Fact("Plan", summarize(plan)), *effect_facts(plan)]
        shown["regions"] = region_table(plan) if any(plan.all_regions()) else None
        shown["curves"] = draw_views(partial(plan_curve, plan), wide=1100.0) if plan.curve else {}
    return {"facts": [], "regions": None, "curves": {}, **shown}


def plan_curve(plan: Plan, view: str, width: float) -> str:
    """Draw the curve of plans, for a view of this name and width in pixels."""

    def extra(flops: int | None) -> float | None:
        return None if flops is None or not plan.forward_flops else flops / plan.forward_flops

    dots = [CurveDot(0.0, plan.before.counted_bytes, "no plan", chosen=not plan.regions)]
    for point in plan.curve:
        if point.regions:
            count = len(point.regions)
            label = f"{point.strategy}, {count} region{'s' if count != 1 else ''}"
            is_chosen = point.regions == plan.regions
            dots.append(CurveDot(extra(point.extra_flops), point.peak.counted_bytes, label, chosen=is_chosen))
    measure = "requested bytes" if plan.before.allocated_bytes is None else "allocated bytes"
    return curve_svg(dots, budget_bytes=plan.budget_bytes, measure=measure, width=width, name=f"fxmem-curve-{view}")
