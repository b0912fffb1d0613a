"""Advice: what each change is worth, with its code."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.records.advice import Advice, Suggestion
from fxmem.records.registry import VIEWS
from fxmem.records.units import exact_bytes, format_bytes, percent
from fxmem.show import facts
from fxmem.show.html.fragment import Code, Fragment, make_table
from fxmem.show.html.tables import PageColumn
from fxmem.show.sections import Fact
from fxmem.show.text.advice import format_extra

_COLUMNS = (
    PageColumn("Change", is_head=True),
    PageColumn("Peak", is_number=True),
    PageColumn("Saves", is_number=True),
    PageColumn("of", is_number=True),
    PageColumn("Reserved", is_number=True),
    PageColumn("FLOPs", is_number=True),
    PageColumn("Numbers"),
)


def view(advice: Advice) -> str:
    """Show what could be changed."""
    peak, together = advice.before, advice.together
    rows = [Fact("Peak", f"{exact_bytes(peak.counted_bytes)} in {peak.phase}")]
    if advice.budget_bytes is not None:
        rows.append(Fact("Budget", exact_bytes(advice.budget_bytes)))
    if together is not None:
        rows.append(Fact("Together", f"{together.title}: {exact_bytes(together.peak.counted_bytes)}"))
    table = make_table("What each change is worth", _COLUMNS, [[*_cells(advice, e)] for e in advice.suggestions])
    return Fragment(
        [*facts.header_facts(advice), *rows],
        [table] if advice.suggestions else [],
        codes=[Code(each.title, each.code, each.note) for each in advice.suggestions],
        lists=[("Not here", [f"{each.title}: {each.reason}" for each in advice.refused])],
    ).html()


def _cells(advice: Advice, each: Suggestion) -> Iterator[str]:
    yield each.title
    yield format_bytes(each.peak.counted_bytes)
    yield format_bytes(each.saved_bytes)
    yield percent(each.saved_bytes, advice.before.counted_bytes)
    yield "not modelled" if each.peak.reserved_bytes is None else format_bytes(each.peak.reserved_bytes)
    yield format_extra(advice, each)
    yield each.effect


VIEWS.register("advice", view)
