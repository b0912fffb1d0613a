"""Advice: what each change is worth, with its code."""

from __future__ import annotations

from fxmem.records.advice import Advice
from fxmem.show.html.page import fragment
from fxmem.show.text.advice import advice_sections


def view(advice: Advice) -> str:
    """Show what could be changed."""
    codes = [(each.title, each.code, each.note) for each in advice.suggestions]
    refused = [f"{each.title}: {each.reason}" for each in advice.refused]
    return fragment(*advice_sections(advice, _WIDTH), codes=codes, lists=[("Not here", refused)])


_WIDTH = 200
"""Columns of text at which no column of the table is left out."""
