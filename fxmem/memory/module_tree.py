"""The tree of modules behind a report: nodes summed up along module paths, equal siblings folded.

A node is a leaf of the tree: a `call_module` stands at the path of the module it calls, any other call in the module
whose code made it, under the function's name and together with the other calls of that name. `params`, `output`,
`saved`, `at_peak` and FLOPs of a row are sums over its nodes; `scratch` and `live` are the largest of them, because
nodes run one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from fxmem.records.profile import Kind, Node, Profile, Storage, Timeline
from fxmem.records.units import format_shape

__all__ = ["Figures", "Flops", "Row", "call_name", "module_tree", "step_rows", "sum_figures", "total_row", "visible"]


@dataclass(frozen=True)
class Flops:
    """A sum of FLOPs, and how many calls in it have no formula."""

    known: int = 0
    unknown_calls: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.known + other.known, self.unknown_calls + other.unknown_calls)


@dataclass(frozen=True)
class Figures:
    """What a row's nodes amount to; bytes unless it says FLOPs."""

    params: int = 0
    output: int = 0
    saved: int = 0
    at_peak: int = 0
    """Of the bytes alive at the peak, those the row's nodes brought."""
    scratch: int = 0
    live: int = 0
    forward: Flops = Flops()
    backward: Flops = Flops()

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            params=self.params + other.params,
            output=self.output + other.output,
            saved=self.saved + other.saved,
            at_peak=self.at_peak + other.at_peak,
            scratch=max(self.scratch, other.scratch),
            live=max(self.live, other.live),
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
        )

    @property
    def largest(self) -> int:
        """The largest of the byte counts a row can be interesting for."""
        return max(self.params, self.output, self.saved, self.at_peak, self.scratch)


@dataclass(frozen=True)
class Row:
    """A module, or the calls of one name in a module."""

    kind: Literal["module", "call", "step"]
    label: str
    """Last segment of the path, or the function's name; `1-31` for a folded run."""
    type_name: str = ""
    """Class of a module; empty where it only repeats the label."""
    figures: Figures = Figures()
    calls: int = 0
    """How often a leaf was called; 0 for a module that only holds others."""
    shapes: tuple[str, ...] = ()
    """Shape of the first output, once per different one among the calls."""
    dtypes: tuple[str, ...] = ()
    children: tuple[Row, ...] = ()
    alike: int = 1
    """How many siblings with equal figures the row stands for; its figures are those of each."""

    @property
    def title(self) -> str:
        """The label, and how many siblings or calls the row stands for. Untrusted text."""
        if self.alike > 1:
            return f"{self.label} x{self.alike}"
        return f"{self.label}, {self.calls} calls" if self.calls > 1 else self.label


def module_tree(profile: Profile, timeline: Timeline) -> Row:
    """The model as a tree of rows; the root is the model itself, its calls in the order they were first made."""
    at_peak = _bytes_at_peak(profile, timeline)
    class_name = profile.modules.get("", "")
    root = _Branch(profile.model, type_name=class_name if class_name != profile.model else "")
    for node, nbytes in zip(profile.nodes, at_peak, strict=True):
        if node.op in ("loss", "optimizer"):
            continue
        branch = root
        segments = [segment for segment in node.module.split(".") if segment]
        for depth, segment in enumerate(segments, start=1):
            branch = branch.child("module", segment)
            branch.type_name = branch.type_name or profile.modules.get(".".join(segments[:depth]), "")
        if segments:
            branch.type_name = node.module_type or branch.type_name
        if node.op != "call_module":
            branch = branch.child("call", call_name(node))
        branch.nodes.append((node, nbytes))
    return root.freeze()


def step_rows(profile: Profile, timeline: Timeline) -> tuple[Row, ...]:
    """What the step does outside the model (loss, optimizer), and what is alive at the peak without belonging to a
    node."""
    at_peak = _bytes_at_peak(profile, timeline)
    rows = [
        Row("step", node.name, node.target if node.target != node.name else "", _figures(node, nbytes), calls=1)
        for node, nbytes in zip(profile.nodes, at_peak, strict=True)
        if node.op in ("loss", "optimizer")
    ]
    by_kind: dict[Kind, int] = {}
    for storage, owner in _owners_at_peak(profile, timeline):
        if owner is None:
            by_kind[storage.kind] = by_kind.get(storage.kind, 0) + storage.nbytes
    return (
        *rows,
        *(
            Row("step", kind.value.replace("_", " "), "of no node", Figures(at_peak=nbytes))
            for kind, nbytes in by_kind.items()
        ),
    )


def total_row(rows: Iterable[Row]) -> Row:
    """The sum of rows, for the foot of a table."""
    return Row("step", "total", figures=sum((row.figures for row in rows), Figures()))


def sum_figures(nodes: Iterable[Node]) -> Figures:
    """The sum over nodes; its `at_peak` is left at 0."""
    return sum((_figures(node, 0) for node in nodes), Figures())


def visible(row: Row, *, depth: int | None, worth: int, level: int = 0) -> Iterator[tuple[int, Row]]:
    """Rows to show, with their levels (the given row's first), parents before children.

    Modules down to level `depth` (None: all), and of the calls there those that hold at least `worth` bytes.
    """
    yield level, row
    if depth is not None and level >= depth:
        return
    for child in row.children:
        if child.kind == "module" or child.figures.largest >= worth:
            yield from visible(child, depth=depth, worth=worth, level=level + 1)


def call_name(node: Node) -> str:
    """What the user called: the function's own name, the parameter's for `get_attr`, the argument's for a
    placeholder."""
    return node.target.rsplit(".", 1)[-1] or node.name


@dataclass
class _Branch:
    """A row while its nodes are being collected."""

    label: str
    kind: Literal["module", "call"] = "module"
    type_name: str = ""
    nodes: list[tuple[Node, int]] = field(default_factory=list)
    children: dict[tuple[str, str], _Branch] = field(default_factory=dict)

    def child(self, kind: Literal["module", "call"], label: str) -> _Branch:
        return self.children.setdefault((kind, label), _Branch(label, kind))

    def freeze(self) -> Row:
        children = [child.freeze() for child in self.children.values()]
        outputs = [node.outputs[0] for node, _ in self.nodes if node.outputs]
        own = sum((_figures(node, nbytes) for node, nbytes in self.nodes), Figures())
        return Row(
            kind=self.kind,
            label=self.label,
            type_name=self.type_name,
            figures=sum((child.figures for child in children), own),
            calls=len(self.nodes),
            shapes=tuple(dict.fromkeys(format_shape(output.shape) for output in outputs)),
            dtypes=tuple(dict.fromkeys(output.dtype for output in outputs)),
            children=tuple(_fold(children)),
        )


def _figures(node: Node, at_peak: int) -> Figures:
    return Figures(
        params=node.params_bytes,
        output=node.output_bytes,
        saved=node.saved_bytes,
        at_peak=at_peak,
        scratch=node.scratch_bytes.max,
        live=node.live_bytes.max,
        forward=_flops(node.forward_flops, ran=node.op not in ("placeholder", "get_attr", "output")),
        backward=_flops(node.backward_flops, ran=node.live_bytes.backward is not None),
    )


def _flops(count: int | None, *, ran: bool) -> Flops:
    """None is an unknown count only for what ran at all."""
    if count is None:
        return Flops(unknown_calls=1) if ran else Flops()
    return Flops(known=count)


def _bytes_at_peak(profile: Profile, timeline: Timeline) -> list[int]:
    nbytes = [0] * len(profile.nodes)
    for storage, owner in _owners_at_peak(profile, timeline):
        if owner is not None:
            nbytes[owner] += storage.nbytes
    return nbytes


def _owners_at_peak(profile: Profile, timeline: Timeline) -> Iterator[tuple[Storage, int | None]]:
    """What is alive at the peak, and the node it counts for; optimizer state, there before any op, counts for the
    optimizer."""
    optimizer = next((index for index, node in enumerate(profile.nodes) if node.op == "optimizer"), None)
    for storage in (profile.storages[index] for index in timeline.alive):
        yield storage, optimizer if storage.node is None and storage.kind is Kind.OPTIMIZER_STATE else storage.node


def _fold(rows: Sequence[Row]) -> Iterator[Row]:
    """Runs of numbered siblings with equal figures become one row. Live bytes may differ: they grow from block to
    block."""

    def likeness(place: tuple[int, Row]) -> tuple[int | None, Row]:
        index, row = place
        numbered = row.kind == "module" and row.label.isdecimal()
        return int(row.label) - index if numbered else None, _without_live(row, name=not numbered)

    for _, run in groupby(enumerate(rows), key=likeness):
        alike = [row for _, row in run]
        if len(alike) > 1:
            yield replace(_largest_live(alike), label=f"{alike[0].label}-{alike[-1].label}", alike=len(alike))
        else:
            yield from alike


def _without_live(row: Row, *, name: bool = True) -> Row:
    return replace(
        row,
        label=row.label if name else "",
        figures=replace(row.figures, live=0),
        children=tuple(_without_live(child) for child in row.children),
    )


def _largest_live(rows: Sequence[Row]) -> Row:
    first = rows[0]
    children = tuple(_largest_live(same) for same in zip(*(row.children for row in rows), strict=True))
    return replace(first, figures=replace(first.figures, live=max(row.figures.live for row in rows)), children=children)
