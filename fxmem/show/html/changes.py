"""The best changes to a step, each with what it is worth and its code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fxmem.memory.findings import Finding, find
from fxmem.records.advice import Advice
from fxmem.records.plan import Edit, Plan
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes, format_flops, package_path, percent
from fxmem.show.finding_facts import describe_worth
from fxmem.show.plan_facts import describe_saving

_MOST = 3
_WORTH = 100
"""What saves less than such a part of the peak is left out."""


class Change(NamedTuple):
    """A change to a program, for a reader who may make it."""

    title: str
    worth: str
    code: str
    """What to write; or, where that is no code, what to do."""
    is_code: bool
    rank: tuple[bool, bool, int]
    """Less for what is better."""


def best_changes(profile: Profile, timeline: Timeline, plan: Plan | None, advice: Advice | None) -> list[Change]:
    """At most three: what grows, then what frees most and leaves the results as they are.

    They are those of the advice and of the plan, and what is found in the record.
    """
    found = [_from_finding(each) for each in find(profile, timeline)]
    if advice is not None:
        found += _from_advice(advice)
    if plan is not None and plan.after.requested_bytes < plan.before.requested_bytes:
        found.append(_from_plan(plan))
    return sorted(found, key=lambda each: each.rank)[:_MOST]


def _from_finding(each: Finding) -> Change:
    place = f"{each.place}: " if each.place else ""
    saved = each.nbytes if each.saved_bytes is None else each.saved_bytes
    rank = (each.of not in ("step", "batch"), False, -saved)
    return Change(place + each.text, describe_worth(each), each.change, False, rank)


def _from_advice(advice: Advice) -> Iterator[Change]:
    whole = advice.before.counted_bytes
    for each in advice.suggestions:
        if each.saved_bytes * _WORTH < whole and each.growth_bytes is None:
            continue
        effect = "the same results" if each.effect == "none" else f"numbers: {each.effect}"
        extra = f", {format_flops(each.extra_flops)} FLOPs more" if (each.extra_flops or 0) > 0 else ""
        worth = f"saves {format_bytes(each.saved_bytes)}, {percent(each.saved_bytes, whole)}{extra}; {effect}"
        rank = (each.growth_bytes is None, each.effect in ("training", "output"), -each.saved_bytes)
        code = "\n".join(filter(None, [each.code, each.note and f"# {each.note}"]))
        yield Change(each.title, worth, code, True, rank)


def _from_plan(plan: Plan) -> Change:
    """The plan's edits, where they are all of it and of the user's own lines; else what applies or writes it."""
    found = [region.edit for region in plan.all_regions()]
    edits = dict.fromkeys(each for each in found if each is not None)
    is_own = all(package_path(each.source.file) == each.source.file for each in edits)
    code = "fxmem plan --code analyses it and writes its edits"
    if is_own and None not in found:
        code = "\n".join(line for edit in edits for line in _list_lines(edit))
    elif plan.analysed:
        code = "import fxmem\n# plan.json: what fxmem plan --json wrote, this plan"
        code += '\nmodel = fxmem.checkpoint(model, fxmem.load_plan("plan.json"))'
    freed = plan.before.counted_bytes - plan.after.counted_bytes
    is_code = plan.analysed or (is_own and None not in found)
    return Change(f"checkpoints: {plan.extent}", describe_saving(plan), code, is_code, (True, False, -freed))


def _list_lines(edit: Edit) -> Iterator[str]:
    yield f"- {edit.source.code}  # {edit.source.place}"
    yield from (f"+ {line}" for line in edit.after.splitlines())
