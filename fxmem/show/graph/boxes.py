"""Boxes and frames of a tree of module visits, and how deep it is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxmem.memory.figures import sum_figures
from fxmem.records.profile import Profile
from fxmem.show.graph.checkpoints import Checkpoint
from fxmem.show.graph.folded_tree import FoldedRun, Item, Leaf, Visit, all_nodes, inner_items, item_module, level
from fxmem.show.graph.picture import Box, BoxKind, Frame, display_name

_OUTSIDE_THE_MODEL = ("placeholder", "output", "loss", "optimizer")
_TOO_COARSE = 12
"""A picture of fewer boxes is not worth having where there is more to see."""


def choose_depth(root: Visit, base: int, max_boxes: int) -> tuple[int, int]:
    """The most levels with at most `max_boxes` boxes, or one whose siblings share boxes. The second number
    is how many share one."""
    deepest = max(max((level(visit.module) - base for visit in _find_visits(root)), default=0) + 1, 1)
    counts = {depth: count_boxes(root, base + depth) for depth in range(1, deepest + 1)}
    depth = next((depth for depth in range(deepest, 0, -1) if counts[depth] <= max_boxes), 0)
    if depth == 0 or (depth < deepest and counts[depth] < min(_TOO_COARSE, max_boxes)):
        return depth + 1, -(-counts[depth + 1] // max_boxes)
    return depth, 1


def _find_visits(item: Item) -> Iterator[Visit]:
    if isinstance(item, Visit):
        yield item
    for inner in inner_items(item):
        yield from _find_visits(inner)


def count_boxes(item: Item, depth: int) -> int:
    """Boxes that an item is drawn as."""
    if isinstance(item, Leaf) or is_one_box(item, depth):
        return 1
    return sum(count_boxes(inner, depth) for inner in inner_items(item))


def is_one_box(item: Item, depth: int) -> bool:
    """Whether an item is drawn as one box. It is a call, a module too deep, or a module of one call."""
    if isinstance(item, Visit):
        return item.checkpoint is None and (
            (level(item.module) >= depth and item.module != "")
            or (len(item.items) == 1 and isinstance(item.items[0], Leaf))
        )
    return isinstance(item, Leaf)


def is_region(item: Item) -> bool:
    """Whether it is a checkpointed region, which is drawn as a frame."""
    return isinstance(item, Visit) and item.checkpoint is not None


def find_checkpoints(item: Item, times: int = 1) -> Iterator[tuple[Checkpoint, int]]:
    """Regions within an item, each with how often it is there."""
    if isinstance(item, Visit) and item.checkpoint is not None:
        yield item.checkpoint, times
    for inner in inner_items(item):
        yield from find_checkpoints(inner, times * len(item.repeats) if isinstance(item, FoldedRun) else times)


# --- boxes and frames -------------------------------------------------------------------------------------------------


class Drafts:
    """The boxes and frames of a tree, collected while it is walked."""

    def __init__(self, profile: Profile, drawn: frozenset[int], depth: int, size: int, peak: int | None) -> None:
        self.boxes: list[Box] = []
        self.frames: list[Frame] = []
        self._profile = profile
        self._drawn = drawn
        self._depth = depth
        self._size = size
        self._peak = peak

    def add_items(self, item: Visit | FoldedRun, *, frame: int | None, times: int) -> None:
        """Add what is in a visit or a repeat."""
        for group in self._groups(item.items):
            if len(group) == 1:
                self._add(group[0], frame=frame, times=times)
            else:
                self._add_box("group", group, None, frame=frame, times=times, ends=(group[0], group[-1]))

    def _groups(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Siblings that share a box. They are `size` calls or modules in a row, with smaller regions among them."""
        group: list[Item] = []
        size = 0
        for item in items:
            boxes = count_boxes(item, self._depth)
            small = boxes < self._size if is_region(item) else is_one_box(item, self._depth)
            joins = self._size > 1 and small and not self._is_alone(item)
            if group and not (joins and size + boxes <= self._size):
                yield group
                group, size = [], 0
            if joins:
                group.append(item)
                size += boxes
            else:
                yield [item]
        if group:
            yield group

    def _is_alone(self, item: Item) -> bool:
        return any(node == self._peak or self._profile.nodes[node].op in _OUTSIDE_THE_MODEL for node in all_nodes(item))

    def _add(self, item: Item, *, frame: int | None, times: int) -> None:
        if isinstance(item, Leaf) or is_one_box(item, self._depth):
            self._add_single(item, frame=frame, times=times)
        elif isinstance(item, FoldedRun):
            self._add_run(item, frame=frame, times=times)
        elif len(item.items) == 1 and not isinstance(item.items[0], Leaf) and item.checkpoint is None:
            self._add(item.items[0], frame=frame, times=times)
        else:
            around = self._add_frame(item, list(all_nodes(item)), item.module, frame)
            self.add_items(item, frame=around, times=times)

    def _add_run(self, run: FoldedRun, *, frame: int | None, times: int) -> None:
        alike, only = len(run.repeats), run.items[0]
        if len(run.items) == 1 and is_one_box(only, self._depth):
            self._add_single(only, frame=frame, times=times, alike=alike, last=run.last)
            return
        visit = only if len(run.items) == 1 and isinstance(only, Visit) else None
        module = visit.module if visit is not None else "" if frame is None else self.frames[frame].module
        around = self._add_frame(run, list(run.repeats[0]), module, frame, alike=alike)
        self.add_items(run if visit is None else visit, frame=around, times=times * alike)

    def _add_frame(self, item: Item, nodes: Sequence[int], module: str, parent: int | None, *, alike: int = 1) -> int:
        only = item.items[0] if isinstance(item, FoldedRun) and len(item.items) == 1 else item
        checkpoint = only.checkpoint if isinstance(only, Visit) else None
        first, last = "", ""
        if isinstance(item, FoldedRun) or checkpoint is not None:
            first, last = self._item_name(item), self._item_name(item, end=True)
        whole = checkpoint is None or all(
            node in self._drawn for node in range(checkpoint.first_node, checkpoint.last_node)
        )
        figures = sum_figures(self._profile.nodes[node] for node in nodes)
        self.frames.append(Frame(module, parent, figures, alike, first, last, checkpoint, whole))
        return len(self.frames) - 1

    def _item_name(self, item: Item, *, end: bool = False) -> str:
        """The name of an item that stands alone. Of several, it is that of the first, or of the last."""
        if isinstance(item, Leaf):
            return display_name(self._profile.nodes[item.calls[-1]])
        if isinstance(item, Visit) and item.checkpoint is None:
            return item.module
        if isinstance(item, FoldedRun):
            return self._item_name(item.last if end else item.items[0], end=end)
        return self._item_name(item.items[-1 if end else 0], end=end)

    def _add_single(
        self, item: Item, *, frame: int | None, times: int, alike: int = 1, last: Item | None = None
    ) -> None:
        kind: BoxKind = "module"
        if isinstance(item, Leaf):
            op = self._profile.nodes[item.calls[0]].op
            kind = "alias" if item.alias else "call"
            if op in _OUTSIDE_THE_MODEL:
                kind = "input" if op == "placeholder" else "output" if op == "output" else "step"
        shown = item.calls if isinstance(item, Leaf) else None
        ends = None if last is None else (item, last)
        self._add_box(kind, [item], shown, frame=frame, times=times, alike=alike, ends=ends)

    def _add_box(
        self,
        kind: BoxKind,
        items: Sequence[Item],
        shown: Sequence[int] | None,
        *,
        frame: int | None,
        times: int,
        alike: int = 1,
        ends: tuple[Item, Item] | None = None,
    ) -> None:
        """Add one box for consecutive items; `shown` None: all of their calls."""
        nodes = tuple(node for item in items for node in all_nodes(item))
        if shown is None:
            shown = [node for node in nodes if self._profile.nodes[node].op != "get_attr"] or nodes
        box = Box(
            kind=kind,
            nodes=nodes,
            shown=tuple(shown),
            module=item_module(items[0]),
            frame=frame,
            figures=sum_figures(self._profile.nodes[node] for node in nodes),
            times=times * alike,
            alike=alike,
            first="" if ends is None else self._item_name(ends[0]),
            last="" if ends is None else self._item_name(ends[1], end=True),
            peak=self._peak in nodes,
            checkpoints=tuple(pair for item in items for pair in find_checkpoints(item)),
        )
        self.boxes.append(box)
