"""The tree of modules behind a report, and the fold of equal siblings.

A node belongs to the module it calls (`call_module`); any other call belongs to the module whose code made it, under
the function's name and together with the other calls of that name. Tables, layers, the comparison and the icicle are
made from this tree: each adds the nodes it shows, then reads rows or parts from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from fxmem.records.profile import Kind, Node, Profile, Storage

BranchKind = Literal["module", "call", "step"]
"""`step`: the loss or the optimizer, which a step runs outside the model."""


@dataclass(eq=False)
class Branch:
    """A module, or its own code's calls of one name, with all below it."""

    kind: BranchKind
    label: str
    """Last segment of the path, or the function's name. Untrusted text."""
    path: str = ""
    """Of the module; of calls, that of the module whose code made them."""
    type: str = ""
    """Class of a module."""
    depth: int = 0
    """Modules above it."""
    nodes: list[int] = field(default_factory=list)
    """Indices of its own nodes."""
    storages: list[Storage] = field(default_factory=list)
    """Its own parameters and buffers, or what of it no node reads."""
    children: dict[tuple[BranchKind, str], Branch] = field(default_factory=dict)

    def child(self, kind: BranchKind, label: str, path: str = "", type_name: str = "") -> Branch:
        """Return the branch below it of this kind and name, made on first use."""
        key = (kind, label)
        if key not in self.children:
            self.children[key] = Branch(kind, label, path, type_name, self.depth + 1)
        return self.children[key]


class ModuleTree:
    """The branches of a profile's model, in the order they are first asked for."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._ran = Counter(each.module for each in profile.calls)
        self.root = Branch("module", profile.model, type=profile.modules.get("", ""))

    def find(self, path: str) -> Branch:
        """Return the branch of a module, made on first use with those above it."""
        branch = self.root
        for label in filter(None, path.split(".")):
            below = f"{branch.path}.{label}" if branch.path else label
            branch = branch.child("module", label, below, self.profile.modules.get(below, ""))
        return branch

    def count_calls(self, branch: Branch) -> int:
        """How often a leaf was called, or a module of which some calls are a node each; 0 for one that only contains
        others."""
        ran = self._ran[branch.path] if branch.kind == "module" else 0
        return len(branch.nodes) + ran if branch.nodes else 0

    def add_nodes(self, nodes: Iterable[int]) -> None:
        """Add nodes, by their indices, each to its branch."""
        for index in nodes:
            node = self.profile.nodes[index]
            branch = self.find(node.module)
            if node.module:
                branch.type = node.module_type or branch.type
            if node.op in ("loss", "optimizer"):
                branch = self.root.child("step", node.name)
            elif node.op != "call_module":
                branch = branch.child("call", call_name(node), branch.path)
            branch.nodes.append(index)

    def add_parameters(self) -> None:
        """Add parameters and buffers, each to the module that has it first. They are there before the step."""
        for storage in self.profile.storages:
            if storage.kind in (Kind.PARAMETER, Kind.BUFFER) and storage.birth == 0 and storage.name:
                self.find(storage.name.rpartition(".")[0]).storages.append(storage)


def call_name(node: Node) -> str:
    """Name of what was called: the function's own name, a parameter's for `get_attr`, an argument's for a
    placeholder."""
    target = node.target.partition("[")[0] if node.op == "get_attr" else node.target  # of a list, the list
    return target.rsplit(".", 1)[-1] or node.name


def describe(node: Node) -> str:
    """Describe a node: the path of a module, or the function and the module that called it."""
    if node.op == "call_module":
        return node.module or node.name
    if node.op in ("loss", "optimizer"):
        return node.op if node.target in ("", node.op) else f"{node.op} ({node.target})"
    return f"{call_name(node)} in {node.module}" if node.module else call_name(node)


_Tree = TypeVar("_Tree")
_Row = TypeVar("_Row")


def preorder(
    tree: _Tree, children: Callable[[_Tree], Iterable[_Tree]], row: Callable[[_Tree, list[_Row]], _Row]
) -> list[_Row]:
    """One row for each part of a tree, parents before children.

    Args:
        tree: its root.
        children: of a part.
        row: makes the row of a part from the rows of its children, which hold the sums of what is below them.
    """
    below = [preorder(child, children, row) for child in children(tree)]
    return [row(tree, [rows[0] for rows in below]), *(each for rows in below for each in rows)]


# --- the fold of equal siblings ---------------------------------------------------------------------------------------


def find_runs(
    keys: Sequence[Hashable],
    *,
    longest: int = 1,
    is_same: Callable[[int, int, int], bool] = lambda first, other, length: True,
    is_worth: Callable[[int, int, int], bool] = lambda start, length, times: True,
) -> Iterator[tuple[int, int, int]]:
    """Split siblings into runs of equal repeats: start, siblings in a repeat, number of repeats.

    Of the runs that may start at a place, the one that saves most siblings is taken, of equal ones that with the
    shortest repeat. A sibling that nothing repeats is a run of one.

    Args:
        keys: one for each sibling; equal for siblings that may stand for one another.
        longest: siblings in one repeat at most.
        is_same: whether two repeats of equal keys, by their starts and their length, are equal in all else, too.
        is_worth: whether a run, as it would be returned, is worth folding.
    """
    start = 0
    while start < len(keys):
        best, most = (1, 1), 0
        for length in range(1, min(longest, (len(keys) - start) // 2) + 1):
            if keys[start] != keys[start + length]:
                continue
            times, following = 1, start + length
            repeat = keys[start:following]
            while keys[following : following + length] == repeat and is_same(start, following, length):
                times, following = times + 1, following + length
            if length * (times - 1) > most and is_worth(start, length, times):
                best, most = (length, times), length * (times - 1)
        yield (start, *best)
        start += best[0] * best[1]


def mask_numbers(name: str) -> str:
    """The same for names that differ in their numbers only: `layers.#.mlp`."""
    return re.sub(r"\d+", "#", name)


def name_alike(names: Sequence[str]) -> str:
    """Names that differ in their numbers only as one: `layers.0-31.mlp`; `layers.0.mlp and 2 alike` with gaps."""
    first, last = (re.split(r"(\d+)", name) for name in (names[0], names[-1]))
    differ = [index for index, (one, other) in enumerate(zip(first, last, strict=True)) if one != other]
    if not differ:
        return names[0]
    if len(differ) > 1 or int(last[differ[0]]) - int(first[differ[0]]) != len(names) - 1:
        return f"{names[0]} and {len(names) - 1} alike"
    first[differ[0]] += f"-{last[differ[0]]}"
    return "".join(first)


class HasDepth(Protocol):
    """A row of a tree that is listed in preorder."""

    @property
    def depth(self) -> int:
        """Rows above it."""


_Deep = TypeVar("_Deep", bound=HasDepth)


@dataclass(frozen=True)
class FoldedRow(Generic[_Deep]):
    """A row to show, which may stand for several siblings."""

    rows: tuple[_Deep, ...]
    """Every row at its place, those below siblings that are folded included; the first is the one to show."""
    label: str
    """`0-31` for a run of numbered siblings."""
    count: int
    """How many siblings it stands for."""


def fold(
    rows: Sequence[_Deep], *, label: Callable[[_Deep], str], likeness: Callable[[_Deep], Hashable]
) -> Iterator[FoldedRow[_Deep]]:
    """Fold runs of numbered siblings that are alike, they and everything below them.

    Args:
        rows: a tree in preorder.
        label: last segment of a row's path. Siblings fold if their labels are numbers that count up by one.
        likeness: equal for rows that may stand for one another; leaves out what tells siblings apart, the label too.
    """
    # Every row once, not once for each level above it.
    keys = {id(row): (row.depth, likeness(row)) for row in rows}

    def key(index: int, subtree: Sequence[_Deep]) -> Hashable:
        head, *below = subtree
        # A number of 20 digits counts nothing.
        number = int(label(head)) - index if label(head).isdecimal() and len(label(head)) < 20 else None
        inside = tuple((keys[id(row)], label(row)) for row in below)
        return (index,) if number is None else (number, keys[id(head)], inside)

    def fold_places(places: Sequence[Sequence[_Deep]]) -> Iterator[FoldedRow[_Deep]]:
        """Fold the siblings of several places that are equal throughout, as one."""
        siblings = list(zip(*map(_subtrees, places), strict=True))
        for start, _, count in find_runs([key(index, same[0]) for index, same in enumerate(siblings)]):
            alike = [subtree for same in siblings[start : start + count] for subtree in same]
            first, last = label(alike[0][0]), label(alike[-1][0])
            yield FoldedRow(tuple(each[0] for each in alike), f"{first}-{last}" if count > 1 else first, count)
            yield from fold_places([subtree[1:] for subtree in alike])

    yield from fold_places([rows])


def _subtrees(rows: Sequence[_Deep]) -> Iterator[Sequence[_Deep]]:
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index].depth <= rows[start].depth:
            yield rows[start:index]
            start = index
