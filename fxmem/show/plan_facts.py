"""What a plan does to a step and what it costs: as data, and in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from fxmem.errors import UsageError
from fxmem.hardware.step_time import has_rates
from fxmem.memory.findings import Finding, find
from fxmem.records.findings import BytesOf
from fxmem.records.parts import ANEW
from fxmem.records.plan import Plan
from fxmem.records.profile import Headed, Kind, Peak, Profile, Record, Timeline
from fxmem.records.units import exact_bytes, format_bytes, format_flops, format_seconds, percent, printable, to_words
from fxmem.show.facts import compare_with_target, describe_inputs, target_facts
from fxmem.show.sections import Cell, Fact, Facts, Table, TableColumn, make_printable, make_table, numbers


def check_same_step(plan: Plan, profile: Profile) -> None:
    """Refuse a plan that is for another step than the profile is of.

    Raises:
        UsageError: it names what differs.
    """
    theirs, ours = _describe_step(plan), _describe_step(profile)
    both = ((name, theirs.get(name), ours.get(name)) for name in {**ours, **theirs})
    differ = [_describe_difference(name, one, other) for name, one, other in both if one != other]
    nodes = len(profile.nodes)
    if not differ and any(each.first_node < 0 or each.last_node > nodes for each in plan.all_regions()):
        differ = [f"another model than {profile.model}, of more than its {nodes} nodes"]
    if differ:
        raise UsageError(printable(f"expected a plan for this step; it is for {'; '.join(differ)}: plan it anew"))


def _describe_step(about: Headed) -> dict[str, Any]:
    """What a plan and a step have to have in common, by its name."""
    step = {name.replace("_", " "): value for name, value in about.step if name != "program"}
    program = "a model" if about.step.program is None else "a program"
    return {"target": about.target.name, "inputs": describe_inputs(about.inputs), "the step of": program, **step}


def _describe_difference(name: str, one: Any, other: Any) -> str:
    """Whole records by their name alone."""
    if any(isinstance(each, Record) for each in (one, other)):
        return f"no {name}" if one is None else f"another {name}" if other is not None else f"a step with {name}"
    one, other = ("none" if each in (None, "") else each for each in (one, other))
    return f"{name} {one}, not {other}"


def effect_table(before: Peak, after: Peak, plan: Plan | None, *, by_kind: bool = False) -> Table:
    """The step before and after a plan; without one, its peak. With `by_kind` also what is alive at the peak."""
    rows = []
    for count in ("requested", "allocated", "reserved"):
        was, now = (getattr(peak, f"{count}_bytes") for peak in (before, after))
        rows.append(_effect_row(f"Peak {count}", was, now, format_bytes))
    for kind in Kind if by_kind else ():
        if kind in before.by_kind or kind in after.by_kind:
            was, now = (peak.by_kind.get(kind, 0) for peak in (before, after))
            rows.append(_effect_row(to_words(kind), was, now, format_bytes))
    if plan is not None:
        flops, extra = plan.forward_flops, plan.extra_flops
        with_plan = None if flops is None or extra is None else flops + extra
        rows.append(_effect_row("Forward FLOPs", flops, with_plan, format_flops))
        rows.append(_effect_row("Step time", plan.before_seconds or None, plan.after_seconds or None, format_seconds))
        if plan.host_bytes:
            rows.append(["Host memory", format_bytes(0), format_bytes(plan.host_bytes), "pinned"])
    columns = [TableColumn(is_head=True), *numbers("Before", "After", "Change")]
    return make_table("The step before and after the plan", columns, filter(None, rows))


def _effect_row(name: str, before: Any, after: Any, write: Callable[[Any], str]) -> list[str | Cell]:
    """Nothing where one of both is not known."""
    if before is None or after is None:
        return []
    sign = "-" if after < before else "+"
    more = (f"{sign}{write(abs(after - before))}",) if after != before else ()
    return [name, write(before), write(after), Cell(format_change(before, after), notes=more)]


def format_change(before: float, after: float) -> str:
    """`+12.3 %`; nothing of nothing."""
    return f"{100 * (after - before) / before:+.1f} %" if before else ""


def summarize(plan: Plan) -> str:
    """Which plan it is, and how much it recomputes."""
    if not plan.regions:
        is_kept = plan.budget_bytes is not None and plan.after.counted_bytes <= plan.budget_bytes
        return "none needed: the step keeps the budget as it is" if is_kept else "no checkpoints"
    strategy = plan.chosen if plan.chosen == plan.strategy else f"{plan.strategy}: {plan.chosen}"
    return f"{strategy}, {plan.extent}"


def describe_saving(plan: Plan) -> str:
    """What a plan saves and costs."""
    before, after = plan.before.counted_bytes, plan.after.counted_bytes
    if not plan.analysed:
        before, after = plan.before.requested_bytes, plan.after.requested_bytes
    time = "" if has_rates(plan.target) else f", time not known, as {plan.target.name} has no known rates"
    if plan.before_seconds and plan.after_seconds:
        time = f", {format_change(plan.before_seconds, plan.after_seconds)} time"
    about = "" if plan.analysed else "; an estimate, which fxmem plan checks"
    return f"saves {format_bytes(before - after)}, {percent(before - after, before)}{time}; the same results{about}"


def effect_facts(plan: Plan) -> Iterator[Fact]:
    """What else is to be said of a plan's effect."""
    if plan.extra_flops is None and plan.regions:
        yield Fact("Extra", "FLOPs unknown: an operator that runs again has no formula")
    if plan.budget_bytes is not None:
        spare = plan.budget_bytes - plan.after.counted_bytes
        kept = f"kept, {format_bytes(spare)} to spare" if spare >= 0 else "exceeded"
        yield Fact("Budget", f"{exact_bytes(plan.budget_bytes)}: {kept}", tone="good" if spare >= 0 else "bad")
    if plan.analysed or compare_with_target(plan, plan.after)[0] is False:  # an estimate lacks what is reserved
        yield from target_facts(plan, plan.after)
    if not plan.analysed:
        yield Fact("Note", "an estimate from the report: the plan has not been applied and analysed again")


def plan_words(plan: Plan) -> str:
    """What a plan does to the peak, and what it costs."""
    if not plan.regions:
        return "no checkpoints"
    allocated = plan.before.allocated_bytes is not None and plan.after.allocated_bytes is not None
    before, after = (peak.counted_bytes if allocated else peak.requested_bytes for peak in (plan.before, plan.after))
    change = f" ({format_change(before, after)})" if before else ""
    share = "" if plan.extra_fraction is None else f", {100 * plan.extra_fraction:.1f} % of the forward's"
    flops = "an unknown number of FLOPs" if plan.extra_flops is None else f"{format_flops(plan.extra_flops)} FLOPs"
    measure = f"{'allocated' if allocated else 'requested'}{'' if plan.analysed else ', an estimate'}"
    peak = f"peak {format_bytes(before)} -> {format_bytes(after)}{change} {measure}"
    return f"{plan.extent} ({plan.chosen}); {peak}; {flops} run again{share}"


# --- what is wrong with a step, in words: the cause, its line, its bytes and the change -------------------------------


MOST: Final = 3
"""Findings that are listed."""
_OF: Final[dict[BytesOf, str]] = {
    "peak": "at the peak",
    "step": "a step",
    "optimizer": ANEW,
    "batch": "a batch",
    "pass": "a pass",
    "reserved": "reserved and not allocated",
    "host": "on the host",
}


def finding_facts(profile: Profile, timeline: Timeline) -> Facts:
    """The largest findings, a line each."""
    return list_findings(find(profile, timeline))


def list_findings(found: Sequence[Finding]) -> Facts:
    """The first of these, a line each."""
    facts = [Fact("" if index else "Found", describe(each), "found") for index, each in enumerate(found[:MOST])]
    if len(found) > MOST:
        facts.append(Fact("", f"{len(found) - MOST} more in --json", "found"))
    return make_printable(facts)


def describe(about: Finding) -> str:
    """`train.py:14: preds keeps more after each step, 8.00 MiB a step. To do: .cpu() of what is kept (not tried)`."""
    if about.of == "reserved":
        freed = "" if about.saved_bytes is None else f" frees {format_bytes(about.saved_bytes)}"
        return f"{format_bytes(about.nbytes)} of {about.text}; {about.change}{freed}"
    place = f"{about.place}: " if about.place else ""
    size = f"{format_bytes(about.nbytes)} {_OF[about.of]}"
    return f"{place}{about.text}, {size}. To do: {about.change} ({_describe_trial(about)})"


def describe_worth(about: Finding) -> str:
    """`8.00 MiB a step; not tried`."""
    return f"{format_bytes(about.nbytes)} {_OF[about.of]}; {_describe_trial(about)}"


def _describe_trial(about: Finding) -> str:
    if about.saved_bytes is None:
        return "not tried"
    return f"tried: {format_bytes(about.saved_bytes)} less {'reserved' if about.of == 'reserved' else 'at the peak'}"
