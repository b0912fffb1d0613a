"""Advice: what each change is worth, with its code."""

from __future__ import annotations

from fxmem.records.advice import Advice
from fxmem.records.registry import VIEWS
from fxmem.show.html.fragment import Code, Fragment
from fxmem.show.text.advice import advice_sections


def view(advice: Advice) -> str:
    """Show what could be changed."""
    return Fragment(
        list(advice_sections(advice, _WIDTH)),
        codes=[Code(each.title, each.code, each.note) for each in advice.suggestions],
        lists=[("Not here", [f"{each.title}: {each.reason}" for each in advice.refused])],
    ).html()


_WIDTH = 200
"""Columns of text at which no column of the table is left out."""
VIEWS.register("advice", view)
