"""A model layer by layer: parameters, output shape, multiply-adds, FLOPs, and the memory of activations.

A row is a module, or the calls of one function in a module's own code; a module's figures are the sums of what is below
it, its own parameters included. Rows sum to the model's, the first row.

- *Parameters* are elements of parameters, a parameter shared by several modules counted once, for the module that has
  it first.
- *FLOPs* count a multiply-add as 2 and every other operation as 1 (see `fxmem.simulation.recording.flops` for each
  operator's formula).
- *MACs* are multiply-adds of matrix products, convolutions and attention, half their FLOPs, and nothing else: a ReLU or
  a normalisation has none. Biases are additions and not counted. Recurrent layers are counted in FLOPs only: their MACs
  are unknown.
- *Output* is new memory that results bring; a view or an in-place result brings none. It is what activations take
  without backward, each until Python frees it. *Saved* is what is kept for backward, each storage for the first
  node that keeps it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from fxmem.hardware.op_classes import MAC_OPS, UNKNOWN_MAC_OPS
from fxmem.hardware.tensor_layouts import ITEM_BYTES
from fxmem.memory.figures import (
    NO_FIGURES,
    Figures,
    Flops,
    HasProfile,
    bytes_at_peak,
    find_module,
    holdings_at_peak,
    owners_at_peak,
    read_profile,
    sum_figures,
    sum_flops,
)
from fxmem.memory.module_tree import Branch, ModuleTree, fold, preorder
from fxmem.records.breakdown import Layer, LayerReport
from fxmem.records.profile import Kind, Phase, Profile, Storage, Timeline
from fxmem.records.units import format_shape, group

_CALLS = ("call_module", "call_function", "call_method")


def by_layer(step: Profile | HasProfile) -> LayerReport:
    """A step layer by layer; `step` is an `Analysis`, a report, or a profile. Loss and optimizer are left out: they are
    no layers."""
    profile = read_profile(step)
    tree = ModuleTree(profile)
    tree.add_nodes(index for index, node in enumerate(profile.nodes) if node.op in _CALLS)
    tree.add_parameters()
    macs = _macs(profile)
    layers = preorder(
        tree.root, lambda branch: branch.children.values(), lambda branch, below: _layer(tree, macs, branch, below)
    )
    trained = {storage.name for storage in profile.storages if storage.kind is Kind.GRADIENT}
    parameters = [storage for storage in profile.storages if storage.kind is Kind.PARAMETER and storage.birth == 0]
    return LayerReport(
        **profile.heading(),
        layers=tuple(layers),
        trained_params=None
        if profile.step.mode == "infer"
        else sum(_elements(s) for s in parameters if f"{s.name}.grad" in trained),
        input_bytes=sum(storage.nbytes for storage in profile.storages if storage.kind is Kind.INPUT),
    )


def layer_likeness(layer: Layer) -> Hashable:
    """Equal for layers that differ in nothing but their place."""
    return tuple(layer.model_copy(update={"path": "", "name": ""}).__dict__.values())


# --- the tree ---------------------------------------------------------------------------------------------------------


def _layer(tree: ModuleTree, counts: Sequence[Flops], branch: Branch, below: list[Layer]) -> Layer:
    nodes = [tree.profile.nodes[index] for index in branch.nodes]
    macs = sum((counts[index] for index in branch.nodes), Flops())
    forward = sum_flops(node.forward_flops for node in nodes)
    backward = sum_flops(node.backward_flops for node in nodes if node.live_bytes.backward is not None)
    first = next((node.outputs[0] for node in nodes if node.outputs), None)
    parameters = [storage for storage in branch.storages if storage.kind is Kind.PARAMETER]
    own = {
        "params": sum(map(_elements, parameters)),
        "params_bytes": sum(storage.nbytes for storage in parameters),
        "buffers_bytes": sum(storage.nbytes for storage in branch.storages if storage.kind is Kind.BUFFER),
        "macs": macs.known,
        "macs_unknown": macs.unknown_calls,
        "forward_flops": forward.known,
        "forward_flops_unknown": forward.unknown_calls,
        "backward_flops": backward.known,
        "backward_flops_unknown": backward.unknown_calls,
        "output_bytes": sum(node.output_bytes for node in nodes),
        "saved_bytes": sum(node.saved_bytes for node in nodes),
    }
    return Layer(
        path=branch.path,
        name=branch.label,
        type=branch.type,
        kind="call" if branch.kind == "call" else "module",
        depth=branch.depth,
        calls=tree.count_calls(branch),
        output_shape=None if first is None else first.shape,
        output_dtype="" if first is None else first.dtype,
        **{name: figure + sum(getattr(row, name) for row in below) for name, figure in own.items()},
    )


# --- counts -----------------------------------------------------------------------------------------------------------

_ITEM_BYTES = {**ITEM_BYTES, "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4}


def _elements(storage: Storage) -> int:
    """How many numbers it holds. Not its shape's: several parameters of a recurrent layer are views of one buffer, and
    it has the first one's."""
    item = 1 if storage.dtype.startswith("float8") else _ITEM_BYTES.get(storage.dtype)
    return prod(storage.shape) if item is None else storage.nbytes // item


def _macs(profile: Profile) -> list[Flops]:
    """For each node its forward's multiply-adds, and its operators without a formula."""
    counts = [Flops()] * len(profile.nodes)
    for op in profile.ops:
        if op.phase is not Phase.FORWARD:
            continue
        name = op.name.split(".")[1] if op.name.startswith("aten.") else ""
        if name in UNKNOWN_MAC_OPS or (name in MAC_OPS and op.flops is None):
            counts[op.node] += Flops(unknown_calls=1)
        elif name in MAC_OPS:
            counts[op.node] += Flops(known=(op.flops or 0) // 2)
    return counts


# --- the module tree as rows of a table, and as parts of the peak -----------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A module, the calls of one name in a module, or work outside the model."""

    kind: Literal["module", "call", "step"]
    label: str
    """Last segment of the path, or the function's name; `1-31` for a folded run."""
    type_name: str = ""
    """Class of a module; of the model itself, empty where it only repeats the label."""
    figures: Figures = NO_FIGURES
    depth: int = 0
    calls: int = 0
    """How often a leaf was called; 0 for a module that only contains others."""
    shapes: tuple[str, ...] = ()
    """Shape of the first output, once per different one among the calls."""
    dtypes: tuple[str, ...] = ()
    alike: int = 1
    """How many siblings with equal figures the row stands for; its figures are those of each."""

    @property
    def title(self) -> str:
        """The label, and how many siblings or calls the row stands for. Untrusted text."""
        if self.alike > 1:
            return f"{self.label} x{self.alike}"
        return f"{self.label}, {self.calls} calls" if self.calls > 1 else self.label


def module_rows(profile: Profile, timeline: Timeline) -> list[Row]:
    """The model as rows in preorder, the model itself first. Calls are in the order they were first made.

    Numbered siblings with equal figures are one row. Their live bytes may differ, because they grow from block to
    block: the row has the largest.
    """
    at_peak = bytes_at_peak(profile, timeline)
    tree = ModuleTree(profile)
    tree.add_nodes(index for index, node in enumerate(profile.nodes) if node.op not in ("loss", "optimizer"))
    for storage, owner in owners_at_peak(profile, timeline):
        if owner is None and (path := find_module(profile, storage)) is not None:
            tree.find(path).storages.append(storage)

    def row(branch: Branch, below: list[Row]) -> Row:
        nodes = [profile.nodes[index] for index in branch.nodes]
        outputs = [node.outputs[0] for node in nodes if node.outputs]
        own = sum_figures(nodes, (at_peak[index] for index in branch.nodes)) + _unread_figures(branch.storages)
        return Row(
            kind=branch.kind,
            label=branch.label,
            type_name="" if branch is tree.root and branch.type == branch.label else branch.type,
            figures=sum((child.figures for child in below), own),
            depth=branch.depth,
            calls=tree.count_calls(branch),
            shapes=tuple(dict.fromkeys(format_shape(output.shape) for output in outputs)),
            dtypes=tuple(dict.fromkeys(output.dtype for output in outputs)),
        )

    rows = preorder(tree.root, lambda branch: branch.children.values(), row)
    return [
        replace(
            each.rows[0],
            label=each.label,
            alike=each.count,
            figures=replace(each.rows[0].figures, live=max(row.figures.live for row in each.rows)),
        )
        for each in fold(rows, label=lambda row: row.label, likeness=_likeness)
    ]


def _unread_figures(storages: Iterable[Storage]) -> Figures:
    """Figures of what a module has and no node reads."""
    figures = NO_FIGURES
    for each in storages:
        params = 0 if each.birth or each.kind is Kind.GRADIENT else each.nbytes
        figures += Figures(params=params, buffers=params if each.kind is Kind.BUFFER else 0, at_peak=each.nbytes)
    return figures


def _likeness(row: Row) -> Hashable:
    return replace(row, label="", figures=replace(row.figures, live=0))


def step_rows(profile: Profile, timeline: Timeline) -> list[Row]:
    """Rows of the loss, the optimizer, and what the peak has beside nodes and modules."""
    rows = [
        Row("step", node.name, "" if node.target == node.name else node.target, sum_figures([node], [nbytes]), calls=1)
        for node, nbytes in zip(profile.nodes, bytes_at_peak(profile, timeline), strict=True)
        if node.op in ("loss", "optimizer")
    ]
    held = holdings_at_peak(profile, timeline)
    return rows + [Row("step", each.label, each.note, Figures(at_peak=each.nbytes)) for each in held]


def total_row(rows: Iterable[Row]) -> Row:
    """The sum of rows, for the foot of a table."""
    return Row("step", "total", figures=sum((row.figures for row in rows), NO_FIGURES))


def select_rows(rows: Sequence[Row], *, depth: int | None, worth: int) -> list[Row]:
    """Select modules down to `depth` (None: all), and calls there of at least `worth` bytes."""
    return [
        row
        for row in rows
        if (depth is None or row.depth <= depth) and (row.kind == "module" or row.figures.largest >= worth)
    ]


def fold_small(rows: Sequence[Row], worth: int) -> list[Row]:
    """Fold siblings side by side that have less than `worth` bytes each, with all below them, into a row.

    One alone stays as it is.
    """
    found: list[Row] = []
    small: list[Row] = []
    for row in (*rows, None):
        if row is not None and small and row.depth > small[-1].depth:
            continue  # within the row before it
        is_small = row is not None and row.figures.largest < worth
        if small and (row is None or not is_small or row.depth != small[-1].depth):
            found.append(small[0] if len(small) == 1 else _fold(small))
            small = []
        if row is not None:
            (small if is_small else found).append(row)
    return found


def _fold(rows: Sequence[Row]) -> Row:
    figures = sum((row.figures for row in rows for _ in range(row.alike)), NO_FIGURES)
    return Row("step", f"{sum(row.alike for row in rows)} more of less than 1 %", figures=figures, depth=rows[0].depth)


# --- parts of the peak ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The bytes at the peak of a module, or of its calls of one name."""

    label: str
    """Last segment of the path, or the function's name. Untrusted text."""
    module: str
    """Path of the module; of a call, of the module whose code made it."""
    by_kind: Counter[Kind]
    children: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """All kinds together."""
        return self.by_kind.total()


class _Weights:
    """The nodes that first read the weights of a step."""

    def __init__(self, profile: Profile) -> None:
        weights = [each for each in profile.storages if each.kind is Kind.PARAMETER and each.birth == 0]
        self._by_name = {each.name: each.node for each in weights if each.name}
        self._by_shape = group((tuple(each.shape or ()), each.node) for each in weights)
        self._dealt: Counter[tuple[int, ...]] = Counter()

    def reader(self, storage: Storage, otherwise: int) -> int:
        """The node that reads the weight a storage is for."""
        if storage.kind is Kind.OPTIMIZER_STATE:
            found = self._by_name.get(storage.name.rpartition(".")[0])
            return otherwise if found is None else found
        shape = tuple(storage.shape or ())
        alike = self._by_shape.get(shape, []) if shape and storage.kind is Kind.TEMPORARY else []
        if not alike:
            return otherwise
        self._dealt[shape] += 1
        found = alike[(self._dealt[shape] - 1) % len(alike)]
        return otherwise if found is None else found


def parts_at_peak(profile: Profile, timeline: Timeline) -> Part:
    """The peak as a tree of parts, in the order of their first node.

    Optimizer state is part of the module whose weight it is for, by its name. So is a temporary of the optimizer that
    has the shape of a weight: an optimizer makes them in the order of its weights. What is for no weight stays with
    the optimizer.
    """
    by_node: dict[int, Counter[Kind]] = {}
    of_module: dict[str, Counter[Kind]] = {}
    of_weight = _Weights(profile)
    for storage, owner in sorted(owners_at_peak(profile, timeline), key=lambda pair: pair[0].birth):
        if owner is not None and profile.nodes[owner].op == "optimizer":
            owner = of_weight.reader(storage, owner)
        if owner is not None:
            by_node.setdefault(owner, Counter())[storage.kind] += storage.nbytes
        elif (path := find_module(profile, storage)) is not None:
            of_module.setdefault(path, Counter())[storage.kind] += storage.nbytes
    tree = ModuleTree(profile)
    tree.add_nodes(sorted(by_node))
    unread = {id(tree.find(path)): by_kind for path, by_kind in of_module.items()}

    def part(branch: Branch) -> Part:
        children = tuple(map(part, branch.children.values()))
        own = (*(by_node[index] for index in branch.nodes), unread.get(id(branch), Counter()))
        return Part(branch.label, branch.path, sum((*own, *(child.by_kind for child in children)), Counter()), children)

    model = part(tree.root)
    rest = [
        Part(each.label if each.owner else f"{each.label} of no node", "", Counter({each.kind: each.nbytes}))
        for each in holdings_at_peak(profile, timeline)
    ]
    return replace(
        model, by_kind=sum((each.by_kind for each in rest), model.by_kind), children=(*model.children, *rest)
    )
