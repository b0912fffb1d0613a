"""Advice as text: a ranked table, then each change's code."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap

from rich.console import RenderableType
from rich.text import Text

from fxmem.records.advice import Advice, Suggestion
from fxmem.records.units import exact_bytes, format_bytes, percent, printable
from fxmem.show.facts import header_facts
from fxmem.show.sections import Fact, Section, Table, TableColumn, make_table
from fxmem.show.text.tables import fit, grid, label_content, lay_out_sections, render


def table(advice: Advice, *, width: int = 100, color: bool = False) -> str:
    """The advice as text whose lines are at most `width` columns wide (at least 60)."""
    width = max(width, 60)
    parts = list(lay_out_sections(advice_sections(advice, width)))
    if advice.suggestions:
        parts.append(label_content("Code", _code(advice)))
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
    over = 0 if budget is None else peak.counted_bytes - budget
    if budget is not None:
        verdict = f"{format_bytes(over)} too much" if over > 0 else "kept as it is"
        head.append(Fact("Budget", f"{exact_bytes(budget)}: {verdict}"))
    yield Section(facts=head)
    judged = "training = another optimisation" if advice.step.generation is None else "output = other tokens"
    notes = [f"Numbers: none = the same results; rounding = another precision; {judged}."]
    if advice.suggestions:
        yield Section(_ranking(advice, width), notes=notes)
    else:
        yield Section(notes=["Nothing that was tried frees memory.", *notes])
    if together is not None:
        used = together.peak.counted_bytes
        worth = f"{exact_bytes(used)}, {format_bytes((budget or 0) - used)} to spare"
        cost = f"FLOPs {format_extra(advice, together)}; numbers: {together.effect}"
        yield Section(facts=[Fact("Together", together.title, tone="good"), Fact("", f"{worth}; {cost}", tone="good")])
    elif over > 0:
        missing = "no set of these changes keeps the budget; try a smaller batch (fxmem max-batch)"
        yield Section(facts=[Fact("Together", missing, tone="bad")])


def _ranking(advice: Advice, width: int) -> Table:
    is_wide, is_wider = width >= 72, advice.before.reserved_bytes is not None and width >= 90
    columns = [
        *_numbers(("Peak", 9), ("Saves", 9)),
        *(_numbers(("of", 7)) if is_wide else []),
        *(_numbers(("Reserved", 9)) if is_wider else []),
        *_numbers(("FLOPs", 8)),
        TableColumn("Numbers", width=8),
    ]
    room = width - sum((column.width or 0) + 2 for column in columns) - 1

    def cells(number: int, each: Suggestion) -> Iterator[str]:
        yield f"{number}. {each.title}"
        yield format_bytes(each.peak.counted_bytes)
        yield format_bytes(each.saved_bytes)
        if is_wide:
            yield percent(each.saved_bytes, advice.before.counted_bytes)
        if is_wider:
            yield format_bytes(each.peak.reserved_bytes)
        yield format_extra(advice, each)
        yield each.effect

    heads = TableColumn("Change", is_head=True, width=room, wraps=True)
    return make_table("What each change is worth", [heads, *columns], starmap(cells, enumerate(advice.suggestions, 1)))


def _numbers(*columns: tuple[str, int]) -> list[TableColumn]:
    return [TableColumn(heading, is_number=True, width=width) for heading, width in columns]


def format_extra(advice: Advice, each: Suggestion) -> str:
    """FLOPs beyond the unchanged step's, as a share of them."""
    if each.extra_flops is None or not advice.before_flops:
        return "unknown"
    share = 100 * each.extra_flops / advice.before_flops
    return "same" if abs(share) < 0.05 else f"{share:+.1f} %"


def _code(advice: Advice) -> RenderableType:
    listed = grid(-3, None)
    for number, each in enumerate(advice.suggestions, 1):
        code, note = Text("\n".join(map(printable, each.code.splitlines()))), printable(each.note)
        listed.add_row(f"{number}.", code.append(f"\n{note}" if note else "", style="dim"))
    return listed
