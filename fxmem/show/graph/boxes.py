"""A tree of visits as parts that can be folded, and which are open."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from fxmem.memory.figures import sum_figures
from fxmem.records.profile import Profile
from fxmem.show.graph.checkpoints import Checkpoint
from fxmem.show.graph.folded_tree import FoldedRun, Item, Leaf, Visit, all_nodes, inner_items, item_module, level
from fxmem.show.graph.picture import Box, BoxKind, Frame, display_name

_OUTSIDE_THE_MODEL = ("placeholder", "output", "loss", "optimizer")
_SMALL = 100
"""Siblings in a row that each have less than this part of all bytes share a box."""
_SMALL_TOGETHER = 30
"""What shares a box has less than this part of all bytes together."""


@dataclass(frozen=True, eq=False)
class View:
    """What is drawn as one box, or as a frame around its parts."""

    box: Box
    nodes: tuple[int, ...]
    """Every node it sums up, all repeats included."""
    frame: Frame | None = None
    parts: tuple[View, ...] = ()
    level: int | None = None
    """Levels of its module below the model; None for what a depth does not fold."""
    is_alone: bool = False
    """Whether it never shares a box: the peak is in it, or it is outside the model."""

    @property
    def is_run(self) -> bool:
        """Whether it is a run of equal repeats that has parts."""
        return self.frame is not None and self.frame.alike > 1

    @property
    def is_region(self) -> bool:
        """Whether it is a checkpointed region."""
        return self.frame is not None and self.frame.checkpoint is not None

    @property
    def weight(self) -> int:
        """Bytes by which parts compete for being opened: parameters, and what is saved or produced."""
        figures = self.box.figures
        return (max(figures.saved, figures.output) + figures.params) * self.box.times


IsOpen = Callable[[View], bool]


# --- which are open ---------------------------------------------------------------------------------------------------


def open_to_depth(depth: int) -> IsOpen:
    """Everything is open but modules at this level or deeper."""
    return lambda part: part.level is None or part.level < depth


def open_heaviest(parts: Sequence[View], max_boxes: int, *, runs: bool, worth: int = 0) -> IsOpen:
    """The heaviest are open, as long as there are fewer than `max_boxes` boxes.

    Args:
        parts: outermost ones.
        max_boxes: how many boxes there may be.
        runs: whether runs of equal repeats may be opened.
        worth: bytes from which a part is opened; what holds the peak or a region is opened whatever it weighs.
    """
    opened: set[int] = set()
    number = len(parts)
    waiting: list[tuple[bool, int, int, View]] = []

    def wait(inner: Sequence[View]) -> None:
        for part in inner:
            is_worth = part.is_alone or part.box.checkpoints or part.weight >= worth
            if part.parts and is_worth and (runs or not part.is_run) and not part.box.gathered:
                heapq.heappush(waiting, (not part.box.checkpoints, -part.weight, part.nodes[0], part))

    wait(parts)
    while waiting:
        *_, part = heapq.heappop(waiting)
        if number + len(part.parts) > max_boxes:
            break  # what is lighter stays folded as well, so that equal things look equal
        number += len(part.parts) - 1
        opened.add(id(part))
        wait(part.parts)
    return lambda part: id(part) in opened


def count_boxes(parts: Sequence[View], *, runs: bool) -> int:
    """Boxes of all parts opened; with `runs` False, a run of equal repeats is one."""
    return sum(count_boxes(part.parts, runs=runs) if part.parts and (runs or not part.is_run) else 1 for part in parts)


def flatten(parts: Sequence[View], is_open: IsOpen) -> tuple[list[Box], list[Frame]]:
    """The boxes and frames that are drawn."""
    boxes: list[Box] = []
    frames: list[Frame] = []

    def add(inner: Sequence[View], around: int | None, times: int) -> None:
        for part in inner:
            if part.frame is not None and part.parts and is_open(part):
                frames.append(replace(part.frame, parent=around))
                add(part.parts, len(frames) - 1, times * part.frame.alike)
            else:
                boxes.append(replace(part.box, frame=around, times=times * part.box.alike))

    add(parts, None, 1)
    return boxes, frames


# --- what shares a box ------------------------------------------------------------------------------------------------


def gather(parts: Sequence[View], max_boxes: int, profile: Profile) -> tuple[View, ...]:
    """The parts with small siblings gathered, and long rows of siblings divided, at every level."""
    whole = sum(part.weight for part in parts)

    def inside(siblings: Sequence[View], times: int) -> tuple[View, ...]:
        found: list[View] = []
        below = [replace(part, parts=inside(part.parts, times * part.box.alike)) for part in siblings]

        def is_small(part: View) -> bool:
            return not part.is_alone and not part.box.checkpoints and part.weight * times * _SMALL < whole

        for small, run in groupby(below, is_small):
            row = list(run)
            together = sum(part.weight for part in row) * times * _SMALL_TOGETHER
            joins = small and 1 < len(row) < len(below) and together < whole
            found += [_join(row, profile, small=True)] if joins else row
        return tuple(_divide(_absorb_views(found), max_boxes, profile))

    return inside(parts, 1)


def _absorb_views(parts: Sequence[View]) -> list[View]:
    """The parts, with a view that stands alone in the box of what comes next, where that is one box too."""
    found: list[View] = []
    for part in parts:
        is_one = part.box.kind in ("call", "module") and not part.parts and part.box.alike == 1
        if is_one and found and found[-1].box.kind == "alias" and found[-1].box.alike == 1:
            nodes = (*found.pop().nodes, *part.nodes)
            found.append(replace(part, box=replace(part.box, nodes=nodes), nodes=nodes))
        else:
            found.append(part)
    return found


def _divide(parts: Sequence[View], max_boxes: int, profile: Profile) -> Sequence[View]:
    """Of more than two thirds of `max_boxes`, about a quarter, the others inside them."""
    most = max(max_boxes // 4, 2)
    few = sum(part.is_region for part in parts) <= most // 2

    def stays(part: View) -> bool:
        return part.is_alone or (few and part.is_region)

    number = sum(not stays(part) for part in parts)
    if number <= max(max_boxes * 2 // 3, 2):
        return parts
    size = -(-number // most)
    found: list[View] = []
    for alone, run in groupby(parts, stays):
        row, step = list(run), 1 if alone else size
        for chunk in (row[at : at + step] for at in range(0, len(row), step)):
            found.append(chunk[0] if len(chunk) == 1 else _join(_divide(chunk, max_boxes, profile), profile))
    return found


def _join(row: Sequence[View], profile: Profile, *, small: bool = False) -> View:
    """One part of several siblings."""
    nodes = tuple(node for part in row for node in part.nodes)
    figures = sum_figures(profile.nodes[node] for node in nodes)
    first, last = row[0].box, row[-1].box
    calls = tuple(node for node in nodes if profile.nodes[node].op != "get_attr") or nodes
    found = tuple(pair for part in row for pair in part.box.checkpoints)
    shown = (first.first or first.name, last.last or last.name)
    gathered = len(calls) if small else 0
    box = Box("group", nodes, calls, first.module, None, figures, 1, 1, *shown, checkpoints=found, gathered=gathered)
    frame = Frame(first.module, None, figures, 1, *shown, gathered=max(gathered, 1))
    return View(box, nodes, frame, tuple(row), is_alone=any(part.is_alone for part in row))


def find_checkpoints(item: Item, times: int = 1) -> Iterator[tuple[Checkpoint, int]]:
    """Regions within an item, each with how often it is there."""
    if isinstance(item, Visit) and item.checkpoint is not None:
        yield item.checkpoint, times
    for inner in inner_items(item):
        yield from find_checkpoints(inner, times * len(item.repeats) if isinstance(item, FoldedRun) else times)


# --- parts of a tree --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ViewMaker:
    """Makes the parts of a tree of visits.

    Args:
        profile: what was predicted.
        drawn: the nodes that are drawn.
        peak: the node that runs at the peak.
    """

    profile: Profile
    drawn: frozenset[int]
    peak: int | None
    _around: list[str] = field(default_factory=lambda: [""])
    """Modules of the frames around what is made."""

    def parts(self, items: Sequence[Item]) -> tuple[View, ...]:
        """The parts of siblings."""
        return tuple(map(self._part, items))

    def _part(self, item: Item) -> View:
        if isinstance(item, FoldedRun):
            return self._run(item)
        if isinstance(item, Leaf) or (item.checkpoint is None and _is_one_call(item)):
            return self._single(item)
        if len(item.items) == 1 and not isinstance(item.items[0], Leaf) and item.checkpoint is None:
            inner = self._part(item.items[0])
            if inner.is_run or inner.frame is None or inner.frame.checkpoint is not None:
                return inner
            return replace(inner, box=self._box("module", [item], None))
        return self._framed(item, item, list(all_nodes(item)), item.module)

    def _run(self, run: FoldedRun) -> View:
        alike, only = len(run.repeats), run.items[0]
        visit = only if len(run.items) == 1 and isinstance(only, Visit) else None
        if len(run.items) == 1 and (isinstance(only, Leaf) or (visit and not visit.checkpoint and _is_one_call(visit))):
            return self._single(only, alike=alike, last=run.last)
        module = self._around[-1] if visit is None else visit.module
        return self._framed(run, run if visit is None else visit, list(run.repeats[0]), module, alike=alike)

    def _framed(self, item: Item, inside: Visit | FoldedRun, nodes: list[int], module: str, *, alike: int = 1) -> View:
        """A part with parts: a visit, a region, or a run of several items or of one such visit."""
        checkpoint = inside.checkpoint if isinstance(inside, Visit) else None
        is_module = isinstance(inside, Visit) and checkpoint is None
        first, last = "", ""
        if isinstance(item, FoldedRun) or not is_module:
            first, last = self._item_name(item), self._item_name(item, end=True)
        region = range(0) if checkpoint is None else range(checkpoint.first_node, checkpoint.last_node)
        whole = self.drawn.issuperset(region)
        figures = sum_figures(self.profile.nodes[node] for node in nodes)
        self._around.append(module)
        parts = self.parts(inside.items)
        self._around.pop()
        items: Sequence[Item] = inside.items if isinstance(inside, FoldedRun) else [inside]
        box = self._box("module" if is_module else "group", items, None, alike=alike, ends=(first, last))
        frame = Frame(module, None, figures, alike, first, last, checkpoint, whole)
        depth = level(module) if is_module and module else None
        return View(box, tuple(all_nodes(item)), frame, parts, depth, is_alone=self._is_alone(item))

    def _single(self, item: Item, *, alike: int = 1, last: Item | None = None) -> View:
        kind: BoxKind = "module"
        if isinstance(item, Leaf):
            op = self.profile.nodes[item.calls[0]].op
            kind = "alias" if item.alias else "call"
            if op in _OUTSIDE_THE_MODEL:
                kind = "input" if op == "placeholder" else "output" if op == "output" else "step"
        shown = item.calls if isinstance(item, Leaf) else None
        ends = ("", "") if last is None else (self._item_name(item), self._item_name(last, end=True))
        box = self._box(kind, [item], shown, alike=alike, ends=ends)
        return View(box, box.nodes, is_alone=self._is_alone(item))

    def _box(
        self,
        kind: BoxKind,
        items: Sequence[Item],
        shown: Sequence[int] | None,
        *,
        alike: int = 1,
        ends: tuple[str, str] = ("", ""),
    ) -> Box:
        """One box for consecutive items; `shown` None: all of their calls."""
        nodes = tuple(node for item in items for node in all_nodes(item))
        if shown is None:
            shown = [node for node in nodes if self.profile.nodes[node].op != "get_attr"] or nodes
        return Box(
            kind=kind,
            nodes=nodes,
            shown=tuple(shown),
            module=item_module(items[0]),
            frame=None,
            figures=sum_figures(self.profile.nodes[node] for node in nodes),
            times=alike,
            alike=alike,
            first=ends[0],
            last=ends[1],
            name=self._item_name(items[0]),
            peak=self.peak in nodes,
            checkpoints=tuple(pair for item in items for pair in find_checkpoints(item)),
        )

    def _is_alone(self, item: Item) -> bool:
        return any(node == self.peak or self._stands_apart(node) for node in all_nodes(item))

    def _stands_apart(self, index: int) -> bool:
        """Whether a node is outside the model, and neither its output nor a loss that nothing computes."""
        node = self.profile.nodes[index]
        is_idle = node.op == "output" or (node.op == "loss" and not (node.saved_bytes or node.forward_flops))
        return node.op in _OUTSIDE_THE_MODEL and not is_idle

    def _item_name(self, item: Item, *, end: bool = False) -> str:
        """The name of an item that stands alone. Of several, it is that of the first, or of the last."""
        if isinstance(item, Leaf):
            return display_name(self.profile.nodes[item.calls[-1]])
        if isinstance(item, Visit) and item.checkpoint is None:
            return item.module
        if isinstance(item, FoldedRun):
            return self._item_name(item.last if end else item.items[0], end=end)
        return self._item_name(item.items[-1 if end else 0], end=end)


def _is_one_call(visit: Visit) -> bool:
    return len(visit.items) == 1 and isinstance(visit.items[0], Leaf)
