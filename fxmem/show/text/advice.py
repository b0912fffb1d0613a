"""Advice as text: a ranked table, then each change's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from fxmem.records.advice import Advice, Suggestion
from fxmem.records.units import exact_bytes, format_bytes, percent, printable
from fxmem.show.facts import header_facts, target_facts
from fxmem.show.plan_facts import list_findings
from fxmem.show.run_facts import growth_facts
from fxmem.show.sections import Fact, Section, Table, TableColumn, make_table
from fxmem.show.text.tables import Column, fit, grid, label_content, lay_out_sections, render

_WORTH_A_ROW: Final = 100
"""A change that frees less than one such part of the peak is named in one line with its like; the record has it."""
_MEANING: Final = {"rounding": ": gradients differ by rounding", "training": ": another optimisation"}
"""Of other operators in backward, by the effect of what changes them."""


def table(advice: Advice, *, width: int = 100, color: bool = False) -> str:
    """The advice as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    parts = list(lay_out_sections(advice_sections(advice, width)))
    if rows := _list_rows(advice):
        parts.append(label_content("Code", _code(rows)))
    if advice.refused:
        refused = grid(24, None)
        for each in advice.refused:
            refused.add_row(Text(fit(each.key, 24)), Text(printable(each.reason)))
        parts.append(label_content("Not here", refused))
    return render(parts, width, color)


def advice_sections(advice: Advice, width: int) -> Iterator[Section]:
    """What each change is worth, and several together; in text of this width."""
    peak, together, budget = advice.before, advice.together, advice.budget_bytes
    head = [*header_facts(advice), Fact("Peak", f"{exact_bytes(peak.counted_bytes)} in {peak.phase.value}")]
    head += target_facts(advice, peak)
    if _only_runs(advice):
        host, moved = map(format_bytes, (advice.before_host_bytes, advice.before_link_bytes))
        head.append(Fact("Host", f"{host}; {moved} moved between it and the card"))
    head += [*growth_facts(advice.step), *list_findings(advice.findings)]
    over = 0 if budget is None else peak.counted_bytes - budget
    if budget is not None:
        verdict = f"{format_bytes(over)} too much" if over > 0 else "kept as it is"
        head.append(Fact("Budget", f"{exact_bytes(budget)}: {verdict}"))
    rows = _list_rows(advice)
    if rows:
        # The first that leaves the task as it is; the first where none does.
        best = next((each for each in rows if each.effect in ("none", "rounding")), rows[0])
        head.append(Fact("Next", f"change {rows.index(best) + 1}: {best.title}", tone="good"))
    if advice.interrupted:
        head.append(Fact("Cut short", "interrupted: what was found by then; what was not tried is said below"))
    yield Section(facts=head)
    judged = "training = another optimisation" if advice.step.generation is None else "output = other tokens"
    notes = [f"Numbers: none = the same results; rounding = another precision; {judged}."]
    little = [each for each in advice.suggestions if each not in rows]
    if rows:
        yield Section(_ranking(advice, rows, width), notes=notes)
    else:
        yield Section(notes=[f"Nothing that was tried frees {'1 % of the peak' if little else 'memory'}.", *notes])
    if little:
        yield Section(facts=[Fact("Under 1 %", "; ".join(_describe_little(advice, each) for each in little))])
    if advice.patched is not None:
        yield Section(facts=list(_describe_patch(advice, advice.patched)))
    if together is not None:
        used = together.peak.counted_bytes
        worth = f"{exact_bytes(used)}, {format_bytes((budget or 0) - used)} to spare"
        cost = f"FLOPs {format_extra(advice, together)}; numbers: {together.effect}"
        yield Section(facts=[Fact("Together", together.title, tone="good"), Fact("", f"{worth}; {cost}", tone="good")])
    elif over > 0:
        missing = "no set of these changes keeps the budget; try a smaller batch (fxmem max-batch)"
        yield Section(facts=[Fact("Together", missing, tone="bad")])


def _only_runs(advice: Advice) -> bool:
    """Whether it is of a program that trains nothing: who has one asks what else a change takes, and not for the
    operators that are run again."""
    return advice.step.mode == "infer" and advice.step.program is not None


def _describe_patch(advice: Advice, patched: Suggestion) -> Iterator[Fact]:
    """What a patch is of, and what the program takes with it."""
    lines = patched.patch.splitlines()
    files = sum(each.startswith("+++ ") for each in lines)
    added, removed = (sum(each.startswith(sign) for each in lines) - files for sign in "+-")
    short = f", still too much for {advice.target.name}" if patched.peak.fits is False else ""
    short = ", still above the budget" if 0 < (advice.budget_bytes or 0) < patched.peak.counted_bytes else short
    worth = f"the peak is {format_bytes(patched.peak.counted_bytes)} with it{short}"
    if patched.growth_bytes is not None:
        worth += f", and grows by {patched.growth_bytes:,} bytes a step"
    if patched.same_backward:
        extra = patched.extra_flops or 0
        more = ", beside what it recomputes" * (extra > 0) + ", but for gradients that nothing reads" * (extra < 0)
        worth += f"; backward runs the same operators on the same shapes{more}"
    elif patched.same_backward is not None:
        worth += f"; backward runs other operators{_MEANING.get(patched.effect, '')}"
    yield Fact("Patch", patched.title, tone="bad" if short else "good")
    yield Fact("", f"{files} {'file' if files == 1 else 'files'}, +{added} -{removed} lines: {worth}")


def _list_rows(advice: Advice) -> list[Suggestion]:
    """The changes that have a row of their own: what grows less, or lowers what is allocated or reserved by 1 %."""
    before = advice.before

    def is_worth_a_row(each: Suggestion) -> bool:
        freed = max(each.saved_bytes, _less_reserved(advice, each))
        return each.growth_bytes is not None or freed * _WORTH_A_ROW >= before.counted_bytes

    return [each for each in advice.suggestions if is_worth_a_row(each)]


def _less_reserved(advice: Advice, each: Suggestion) -> int:
    return (advice.before.reserved_bytes or 0) - (each.peak.reserved_bytes or 0)


def _describe_little(advice: Advice, each: Suggestion) -> str:
    title, _, _ = each.title.partition(": ")
    if each.saved_bytes:
        return f"{title} ({format_bytes(each.saved_bytes)})"
    return f"{title} ({format_bytes(_less_reserved(advice, each))} less reserved)"


def _ranking(advice: Advice, suggestions: Sequence[Suggestion], width: int) -> Table:
    figures: list[Column[Suggestion]] = [
        Column("Peak", 9, lambda each: format_bytes(each.peak.counted_bytes)),
        Column("Saves", 9, lambda each: format_bytes(each.saved_bytes)),
        Column("of", 7, lambda each: percent(each.saved_bytes, advice.before.counted_bytes)),
        Column("Reserved", 9, lambda each: format_bytes(each.peak.reserved_bytes)),
        Column("FLOPs", 8, lambda each: format_extra(advice, each)),
        Column("Host", 9, lambda each: format_bytes(each.host_bytes)),
        Column("Moved", 9, lambda each: format_bytes(each.link_bytes)),
        Column("Numbers", 8, lambda each: each.effect, "left"),
        Column("Fits", 4, lambda each: "yes" if each.peak.fits else "no", "left"),
    ]
    left_out = {"of"} if width < 72 or _only_runs(advice) else set()
    left_out |= {"FLOPs"} if _only_runs(advice) else {"Host", "Moved"}
    left_out |= set() if advice.before.fits is False else {"Fits"}
    left_out |= {"Reserved"} if advice.before.reserved_bytes is None or width < 90 else set()
    shown = [each for each in figures if each.heading not in left_out]
    heads = TableColumn("Change", is_head=True, width=width - sum(each.width + 2 for each in shown) - 1, wraps=True)
    columns = [TableColumn(each.heading, is_number=each.justify == "right", width=each.width) for each in shown]
    rows = (
        [f"{number}. {each.title}", *(column.cell(each) for column in shown)]
        for number, each in enumerate(suggestions, 1)
    )
    return make_table("What each change is worth", [heads, *columns], rows)


def format_extra(advice: Advice, each: Suggestion) -> str:
    """FLOPs beyond the unchanged step's, as a share of them."""
    if each.extra_flops is None or not advice.before_flops:
        return "unknown"
    share = 100 * each.extra_flops / advice.before_flops
    return "same" if abs(share) < 0.05 else f"{share:+.1f} %"


def _code(suggestions: Sequence[Suggestion]) -> RenderableType:
    listed = grid(-3, None)
    for number, each in enumerate(suggestions, 1):
        code, note = Text("\n".join(map(printable, each.code.splitlines()))), printable(each.note)
        listed.add_row(f"{number}.", code.append(f"\n{note}" if note else "", style="dim"))
    return listed
