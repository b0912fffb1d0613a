"""What is described once says the same in text, in HTML and in Markdown."""

from __future__ import annotations

import html
import re

import pytest

from fxmem.show.export.markdown_parts import write_table
from fxmem.show.html.page import fragment
from fxmem.show.plan_facts import effect_facts, effect_table
from fxmem.show.sections import Cell, Fact, Section, TableColumn, make_table, numbers
from fxmem.show.text.plan import table
from fxmem.show.text.tables import render_sections
from tests.show.text.test_plan import peak, plan

SECTION = Section(
    make_table(
        "Cards",
        [TableColumn("Card", is_head=True), *numbers("Memory"), TableColumn("Fits"), TableColumn(is_plotted=True)],
        [["a \x1b[31m<b>", "9 MiB", Cell("no", tone="bad", notes=("by 1 MiB",)), "####|"]],
    ),
    [Fact("Budget", "kept", tone="good"), Fact("", "with \x07 to spare")],
    ["Fits: within <memory>."],
    label="Cards",
)


def words(text: str) -> str:
    """HTML without its elements and their spaces."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL)))


def test_a_section_as_text() -> None:
    text = render_sections([SECTION], 80, color=False)
    assert [line.split() for line in text.splitlines() if line][0::2] == [
        ["Cards", "Card", "Memory", "Fits"],
        ["a", "\\x1b[31m<b>", "9", "MiB", "no", "####|"],
        ["with", "\\x07", "to", "spare"],
    ]
    assert text.endswith("\n\n            Fits: within <memory>.\n")
    colored = render_sections([SECTION], 80, color=True)
    assert "\x1b[1;31mno" in colored
    assert "\x1b[32mkept" in colored


def test_the_same_section_as_html() -> None:
    text = fragment(SECTION)
    assert "<b>" not in text.partition("</style>")[2].replace('<b class="head">', "")
    found = words(text)
    assert "Cards Card Memory Fits a \\x1b[31m<b> 9 MiB no by 1 MiB Budget kept with \\x07 to spare" in found
    assert "Fits: within <memory>." in found
    assert "####" not in found


def test_a_table_as_markdown() -> None:
    rows = make_table("", [TableColumn("Node"), *numbers("bytes")], [["`a`", "1"], ["`b`", "2"]])
    assert write_table(rows) == "| Node | bytes |\n| :--- | ---: |\n| `a` | 1 |\n| `b` | 2 |"


@pytest.mark.parametrize("analysed", [True, False])
def test_a_notebook_says_of_a_plan_what_the_terminal_says(analysed: bool) -> None:
    made = plan(analysed=analysed, host_bytes=1 << 30)
    text, shown = " ".join(table(made, width=160).split()), words(made._repr_html_())
    for row in effect_table(peak(6), peak(2.5), made).rows:
        assert " ".join(cell.text for cell in row.cells) in text
        assert all(cell.text in shown for cell in row.cells)
    for fact in effect_facts(made):
        assert f"{fact.label} {fact.text}" in text
        assert f"{fact.label} {fact.text}" in shown
