"""The fold of equal siblings, by pencil."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from fxmem.memory.module_tree import FoldedRow, ModuleTree, find_runs, fold, name_alike
from fxmem.records.profile import Kind, Node, Storage
from tests.profiles import make_profile


class Row(NamedTuple):
    depth: int
    label: str
    figure: int


def fold_rows(*rows: tuple[int, str, int]) -> list[FoldedRow[Row]]:
    return list(fold([Row(*row) for row in rows], label=lambda row: row.label, likeness=lambda row: row.figure))


def folded(*rows: tuple[int, str, int]) -> list[str]:
    return [f"{row.label} x{row.count}" for row in fold_rows(*rows)]


def test_folding() -> None:
    assert folded((0, "0", 1), (1, "a", 2), (0, "1", 1), (1, "a", 2), (0, "2", 1), (1, "a", 3)) == [
        "0-1 x2",
        "a x1",
        "2 x1",
        "a x1",
    ]
    assert folded((0, "0", 1), (0, "2", 1), (0, "3", 1)) == ["0 x1", "2-3 x2"]
    assert folded((0, "a", 1), (0, "b", 1)) == ["a x1", "b x1"]
    assert folded((0, "0", 1), (1, "x", 1), (0, "1", 1), (1, "y", 1)) == ["0 x1", "x x1", "1 x1", "y x1"]
    assert folded() == []
    assert folded((0, "9" * 5000, 1), (0, "9" * 5000, 1)) == [f"{'9' * 5000} x1"] * 2  # more digits than `int` reads


def test_a_folded_row_has_every_row_at_its_place() -> None:
    block = [(1, "0", 2), (1, "1", 2)]
    outer, inner = fold_rows((0, "0", 1), *block, (0, "1", 1), *block, (0, "2", 1), *block)
    assert (outer.label, outer.count, len(outer.rows)) == ("0-2", 3, 3)
    assert (inner.label, inner.count, len(inner.rows)) == ("0-1", 2, 6)


def test_runs() -> None:
    assert list(find_runs("aabcc")) == [(0, 1, 2), (2, 1, 1), (3, 1, 2)]
    assert list(find_runs("xababab", longest=2)) == [(0, 1, 1), (1, 2, 3)]
    assert list(find_runs("aaaa", longest=2)) == [(0, 1, 4)]  # the shorter repeat saves more
    assert list(find_runs("abab")) == [(at, 1, 1) for at in range(4)]
    assert list(find_runs("aaa", is_worth=lambda start, length, times: times > 3)) == [(at, 1, 1) for at in range(3)]
    assert list(find_runs("aaa", is_same=lambda first, other, length: other < 2)) == [(0, 1, 2), (2, 1, 1)]
    assert list(find_runs("")) == []


@pytest.mark.parametrize(
    ("names", "one"),
    [
        (["a.0.b"], "a.0.b"),
        (["a.7.b", "a.8.b", "a.9.b"], "a.7-9.b"),
        (["a.0", "a.2"], "a.0 and 1 alike"),
        (["a.0.0", "a.1.1"], "a.0.0 and 1 alike"),
    ],
)
def test_names_that_differ_in_numbers_are_one(names: list[str], one: str) -> None:
    assert name_alike(names) == one


def test_the_tree_of_a_profile() -> None:
    profile = make_profile(
        ticks=1,
        nodes=[
            Node(name="c", op="call_module", target="a.c", module="a.c", module_type="Conv2d"),
            Node(name="relu", op="call_function", target="torch.relu", module="a", module_type="Block"),
            Node(name="loss", op="loss", target="loss"),
        ],
        storages=[Storage(nbytes=4, kind=Kind.PARAMETER, birth=0, death=1, name="a.c.weight")],
        modules={"": "Net", "a": "Block"},
    )
    tree = ModuleTree(profile)
    tree.add_nodes(range(3))
    tree.add_parameters()
    block, loss = tree.root.children.values()
    conv, relu = block.children.values()
    assert [
        (each.kind, each.label, each.path, each.type, each.depth, each.nodes) for each in (block, conv, relu, loss)
    ] == [
        ("module", "a", "a", "Block", 1, []),
        ("module", "c", "a.c", "Conv2d", 2, [0]),
        ("call", "relu", "a", "", 2, [1]),
        ("step", "loss", "", "", 1, [2]),
    ]
    assert tree.find("a.c") is conv
    assert [storage.name for storage in conv.storages] == ["a.c.weight"]
