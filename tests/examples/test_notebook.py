"""The notebook runs from its first cell to its last, and what each cell ends with shows itself."""

from __future__ import annotations

import ast
import json
from html.parser import HTMLParser

import pytest

from tests import ROOT

pytestmark = pytest.mark.truth

CELLS = [
    "".join(cell["source"])
    for cell in json.loads((ROOT / "examples" / "memory.ipynb").read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
_VOID = {"meta", "br", "img", "rect", "path", "circle", "line"}


class Fragment(HTMLParser):
    """Checks that elements are closed in turn, and notes ids, table cells and what is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href")]
        assert tag != "script"

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attributes if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())


@pytest.fixture(scope="module")
def shown() -> list[Fragment]:
    """What a notebook shows below each cell."""
    names: dict[str, object] = {}
    found = []
    for number, cell in enumerate(CELLS):
        tree = ast.parse(cell, f"cell {number}")
        last = tree.body.pop()
        assert isinstance(last, ast.Expr)
        exec(compile(tree, f"cell {number}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        found.append(Fragment(value._repr_html_()))
    return found


def test_every_cell_shows_a_table_that_loads_nothing(shown: list[Fragment]) -> None:
    assert len(shown) == 7
    for fragment in shown:
        assert fragment.words
        assert not [name for name in fragment.loaded if not name.startswith("#")]
    ids = [name for fragment in shown for name in fragment.ids]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (1, ["Requested", "Reserved", "The peak by kind", "saved"]),
        (2, ["Node", "Saved", "Scratch", "FLOPs"]),
        (3, ["The step before and after the plan", "Checkpointed regions", "Edits of your source"]),
        (4, ["What each change is worth", "bfloat16 autocast", "Not here"]),
        (5, ["Cards", "rtx4090", "l40s", "yes"]),
        (6, ["Sizes that were analysed", "Largest", "4096"]),
    ],
)
def test_a_cell_shows_what_was_found(shown: list[Fragment], cell: int, words: list[str]) -> None:
    for word in words:
        assert word in " | ".join(shown[cell].words)
