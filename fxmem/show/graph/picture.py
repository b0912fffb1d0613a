"""What is drawn of a profile: boxes, the frames around them and the edges between them, before any of it has a
place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fxmem.memory.module_tree import Figures, sum_figures
from fxmem.records.names import Heat
from fxmem.records.plan import Plan
from fxmem.records.profile import Node, Phase, Profile, Timeline
from fxmem.show.graph.checkpoints import Checkpoint, checkpoints
from fxmem.show.graph.depth import checkpoints_in, choose_depth, count, is_one_box, is_region
from fxmem.show.graph.folded_tree import Item, Leaf, Place, Run, Visit, all_nodes, graph_tree, level, module_of, places

__all__ = ["Box", "BoxKind", "Edge", "Frame", "Picture", "heat_value", "known_as", "picture"]

BoxKind = Literal["call", "alias", "input", "output", "module", "group", "step"]

_MOST_READERS = 6
"""Boxes that lines are drawn to from one box; beyond, all but the first name it instead."""
_LONGEST_EDGE = 150
"""Ranks that a line spans at most. The time Graphviz takes grows with long edges, not with boxes."""
_OUTSIDE_THE_MODEL = ("placeholder", "output", "loss", "optimizer")


@dataclass(frozen=True)
class Box:
    """One or more nodes in one place."""

    kind: BoxKind
    nodes: tuple[int, ...]
    """What it sums up: the nodes of one repeat, in order."""
    shown: tuple[int, ...]
    """Of these, the calls; the others are parameters."""
    module: str
    """Path of the module it is, or that it is in."""
    frame: int | None
    """Index of the innermost frame around it."""
    figures: Figures
    """Sums over `nodes`; `live` and `scratch` are the largest, `live` of all repeats."""
    times: int = 1
    """How many equal boxes it stands for, runs around it included."""
    alike: int = 1
    """How many of these stand side by side in its own place."""
    first: str = ""
    """What the first of several equal ones, or of a group, is known as; empty for one alone."""
    last: str = ""
    """The same for the last."""
    peak: bool = False
    """Whether the node that runs at the peak is one of `nodes`."""
    references: tuple[int, ...] = ()
    """Nodes that it reads and that no line is drawn from."""
    checkpoints: tuple[tuple[Checkpoint, int], ...] = ()
    """Checkpointed regions within it, each with how often it is there."""


@dataclass(frozen=True)
class Frame:
    """A visit of a module, a checkpointed region, or a run of equal ones, drawn around what is in it."""

    module: str
    parent: int | None
    figures: Figures
    """Sums over one repeat."""
    alike: int = 1
    """How many repeats it stands for."""
    first: str = ""
    """What the first of several repeats is known as, or starts with; empty for one alone."""
    last: str = ""
    """What the last is known as, or ends with."""
    checkpoint: Checkpoint | None = None
    """None: a module's."""
    whole: bool = True
    """Whether all of the region's nodes are drawn."""


@dataclass(frozen=True)
class Edge:
    """From one box to another that comes later (indices): `data` goes that way, or only time does; `hidden` holds a
    place."""

    tail: int
    head: int
    kind: Literal["data", "order", "hidden"] = "data"


@dataclass(frozen=True)
class Picture:
    """All that is drawn, boxes in the order they run."""

    profile: Profile
    timeline: Timeline
    heat: Heat
    boxes: tuple[Box, ...]
    frames: tuple[Frame, ...]
    edges: tuple[Edge, ...]
    focus: str
    """The module that is drawn; empty for the whole model."""
    depth: int
    """Levels of modules below it that are told apart."""
    peak_node: int | None
    in_place: frozenset[int]
    """Nodes that write where they read: one of their operators has a name that ends in an underscore."""
    plan: Plan | None = None
    """Whose regions are drawn."""
    homes: tuple[int | None, ...] = ()
    """The box that stands for each node of the profile; None for one that is not drawn."""


def picture(
    profile: Profile,
    timeline: Timeline,
    *,
    heat: Heat,
    fold: bool,
    depth: int | None,
    focus: str,
    max_boxes: int,
    plan: Plan | None = None,
) -> Picture:
    """Choose what to draw.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
        heat: the quantity that colours the boxes.
        fold: whether equal siblings are drawn once, and views in a row as one box.
        depth: levels of modules told apart below the one in focus; None for as many as about `max_boxes` boxes allow.
        focus: path of the module to draw; empty for the whole model.
        max_boxes: see `depth`.
        plan: whose regions are drawn, beside those of the program itself; its errors are those of `checkpoints`.
    """
    peak = None if timeline.peak.op is None else profile.ops[timeline.peak.op].node
    nodes = _drawn_nodes(profile, focus, peak)
    root = graph_tree(profile, nodes, peak=peak, fold=fold, regions=checkpoints(profile, plan))
    base = level(focus)
    size = 1
    if depth is None:
        depth, size = choose_depth(root, base, max_boxes)
    drafts = _Drafts(profile, frozenset(nodes), base + depth, size, peak)
    drafts.inside(_unwrapped(root, focus), frame=None, times=1)
    where = places(root, nodes)
    box_of = {node: index for index, box in enumerate(drafts.boxes) for node in box.nodes if where[node].node == node}
    home = {node: box_of[where[node].node] for node in nodes}
    boxes, edges = _connect(profile, where, home, drafts.boxes)
    homes = tuple(home.get(node) for node in range(len(profile.nodes)))
    return Picture(
        profile,
        timeline,
        heat,
        tuple(boxes),
        tuple(drafts.frames),
        tuple(edges),
        focus,
        depth,
        peak,
        _in_place(profile),
        plan,
        homes,
    )


def heat_value(heat: Heat, figures: Figures) -> int | None:
    """The quantity that colours a box: bytes, or FLOPs forward and backward. None if no call in it has a formula."""
    if heat == "flops":
        both = figures.forward + figures.backward
        return None if both.unknown_calls and not both.known else both.known
    return {
        "saved": figures.saved,
        "output": figures.output,
        "params": figures.params,
        "live": figures.live,
        "scratch": figures.scratch,
    }[heat]


def known_as(node: Node) -> str:
    """What a node is called where it stands alone: the path of the module it calls, or its own name."""
    return node.module or node.name if node.op == "call_module" else node.name


def _in_place(profile: Profile) -> frozenset[int]:
    return frozenset(
        op.node
        for op in profile.ops
        if op.phase is Phase.FORWARD and op.name.split(".")[1:2] and op.name.split(".")[1].endswith("_")
    )


# --- which nodes ------------------------------------------------------------------------------------------------------


def _drawn_nodes(profile: Profile, focus: str, peak: int | None) -> list[int]:
    if focus:
        return [
            index
            for index, node in enumerate(profile.nodes)
            if node.module == focus or node.module.startswith(f"{focus}.")
        ]
    running = {op.node for op in profile.ops}
    trains = profile.step.mode == "train"

    def happens(index: int, node: Node) -> bool:
        """The rows for loss and optimizer are there even where a step has neither."""
        return (
            node.op not in ("loss", "optimizer") or index in running or index == peak or (trains and node.op == "loss")
        )

    return [index for index, node in enumerate(profile.nodes) if happens(index, node)]


def _unwrapped(root: Visit, focus: str) -> Visit:
    """The visit in focus, where it is one; what leads to it needs no frame."""
    while (
        focus
        and root.module != focus
        and len(root.items) == 1
        and isinstance(root.items[0], Visit)
        and root.items[0].checkpoint is None
    ):
        root = root.items[0]
    return root


# --- boxes and frames -------------------------------------------------------------------------------------------------


class _Drafts:
    """Boxes and frames, written down while the tree is walked."""

    def __init__(self, profile: Profile, drawn: frozenset[int], depth: int, size: int, peak: int | None) -> None:
        self.boxes: list[Box] = []
        self.frames: list[Frame] = []
        self._profile = profile
        self._drawn = drawn
        self._depth = depth
        self._size = size
        self._peak = peak

    def inside(self, item: Visit | Run, *, frame: int | None, times: int) -> None:
        """Draw what is in a visit or a repeat."""
        for group in self._groups(item.items):
            if len(group) == 1:
                self._draw(group[0], frame=frame, times=times)
            else:
                nodes = [node for each in group for node in all_nodes(each)]
                within = tuple(pair for each in group for pair in checkpoints_in(each))
                ends = (group[0], group[-1])
                self._box(
                    "group",
                    nodes,
                    self._calls(nodes),
                    module=module_of(group[0]),
                    frame=frame,
                    times=times,
                    ends=ends,
                    within=within,
                )

    def _groups(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        """Siblings that share a box: `size` calls or modules that follow one another, regions of fewer among them."""
        group: list[Item] = []
        held = 0
        for item in items:
            boxes = count(item, self._depth)
            small = boxes < self._size if is_region(item) else is_one_box(item, self._depth)
            joins = self._size > 1 and small and not self._stands_alone(item)
            if group and not (joins and held + boxes <= self._size):
                yield group
                group, held = [], 0
            if joins:
                group.append(item)
                held += boxes
            else:
                yield [item]
        if group:
            yield group

    def _stands_alone(self, item: Item) -> bool:
        return any(node == self._peak or self._profile.nodes[node].op in _OUTSIDE_THE_MODEL for node in all_nodes(item))

    def _draw(self, item: Item, *, frame: int | None, times: int) -> None:
        if isinstance(item, Leaf) or is_one_box(item, self._depth):
            self._single(item, frame=frame, times=times)
        elif isinstance(item, Run):
            self._run(item, frame=frame, times=times)
        elif len(item.items) == 1 and not isinstance(item.items[0], Leaf) and item.checkpoint is None:
            self._draw(item.items[0], frame=frame, times=times)
        else:
            self.inside(item, frame=self._frame(item, list(all_nodes(item)), item.module, frame), times=times)

    def _run(self, run: Run, *, frame: int | None, times: int) -> None:
        alike, only = len(run.repeats), run.items[0]
        if len(run.items) == 1 and is_one_box(only, self._depth):
            self._single(only, frame=frame, times=times, alike=alike, last=run.last)
            return
        visit = only if len(run.items) == 1 and isinstance(only, Visit) else None
        outside = "" if frame is None else self.frames[frame].module
        around = self._frame(run, list(run.repeats[0]), outside if visit is None else visit.module, frame, alike=alike)
        self.inside(run if visit is None else visit, frame=around, times=times * alike)

    def _frame(self, item: Item, nodes: Sequence[int], module: str, parent: int | None, *, alike: int = 1) -> int:
        only = item.items[0] if isinstance(item, Run) and len(item.items) == 1 else item
        checkpoint = only.checkpoint if isinstance(only, Visit) else None
        first, last = "", ""
        if isinstance(item, Run) or checkpoint is not None:
            first, last = self._known_as(item), self._known_as(item, end=True)
        whole = checkpoint is None or all(
            node in self._drawn for node in range(checkpoint.first_node, checkpoint.last_node)
        )
        figures = sum_figures(self._profile.nodes[node] for node in nodes)
        self.frames.append(Frame(module, parent, figures, alike, first, last, checkpoint, whole))
        return len(self.frames) - 1

    def _calls(self, nodes: Sequence[int]) -> Sequence[int]:
        return [node for node in nodes if self._profile.nodes[node].op != "get_attr"] or nodes

    def _known_as(self, item: Item, *, end: bool = False) -> str:
        """What an item is called where it stands alone; of several, the first is, or the last."""
        if isinstance(item, Leaf):
            return known_as(self._profile.nodes[item.calls[-1]])
        if isinstance(item, Visit) and item.checkpoint is None:
            return item.module
        if isinstance(item, Run):
            return self._known_as(item.last if end else item.items[0], end=end)
        return self._known_as(item.items[-1 if end else 0], end=end)

    def _single(self, item: Item, *, frame: int | None, times: int, alike: int = 1, last: Item | None = None) -> None:
        nodes = list(all_nodes(item))
        if isinstance(item, Leaf):
            shown: Sequence[int] = item.calls
            op = self._profile.nodes[shown[0]].op
            kind: BoxKind = "alias" if item.alias else "call"
            if op in _OUTSIDE_THE_MODEL:
                kind = "input" if op == "placeholder" else "output" if op == "output" else "step"
        else:
            shown, kind = self._calls(nodes), "module"
        ends = None if last is None else (item, last)
        within = tuple(checkpoints_in(item))
        self._box(
            kind, nodes, shown, module=module_of(item), frame=frame, times=times, alike=alike, ends=ends, within=within
        )

    def _box(
        self,
        kind: BoxKind,
        nodes: Sequence[int],
        shown: Sequence[int],
        *,
        module: str,
        frame: int | None,
        times: int,
        alike: int = 1,
        ends: tuple[Item, Item] | None = None,
        within: tuple[tuple[Checkpoint, int], ...] = (),
    ) -> None:
        figures = sum_figures(self._profile.nodes[node] for node in nodes)
        first, last = ("", "") if ends is None else (self._known_as(ends[0]), self._known_as(ends[1], end=True))
        peak = self._peak in nodes
        self.boxes.append(
            Box(
                kind,
                tuple(nodes),
                tuple(shown),
                module,
                frame,
                figures,
                times * alike,
                alike,
                first,
                last,
                peak,
                checkpoints=within,
            )
        )


# --- edges ------------------------------------------------------------------------------------------------------------


def _connect(
    profile: Profile, where: Mapping[int, Place], home: Mapping[int, int], drafts: Sequence[Box]
) -> tuple[list[Box], list[Edge]]:
    """The boxes with what they read, and the lines to draw; `home` is the box of each node."""
    live = [0] * len(drafts)
    reads: list[dict[int, int]] = [{} for _ in drafts]
    named: list[dict[int, None]] = [{} for _ in drafts]
    for node, head in home.items():
        live[head] = max(live[head], profile.nodes[node].live_bytes.max)
        for source in profile.nodes[node].inputs:
            if source not in home:
                if where[node].node == node:
                    named[head][source] = None
            elif home[source] < head and _in_one_repeat(where[source].turns, where[node].turns):
                reads[head].setdefault(home[source], source)
    drawn = _without_long(_without_fans(reads))
    for head, sources in enumerate(reads):
        named[head].update(dict.fromkeys(source for tail, source in sources.items() if (tail, head) not in drawn))
    boxes = [
        replace(box, figures=replace(box.figures, live=most), references=tuple(sorted(others)))
        for box, most, others in zip(drafts, live, named, strict=True)
    ]
    return boxes, [*(Edge(tail, head) for tail, head in sorted(drawn)), *_holding(boxes, drawn)]


def _in_one_repeat(turns: dict[int, int], others: dict[int, int]) -> bool:
    """What one repeat reads of another is no line inside the one that is drawn."""
    return all(others.get(run, turn) == turn for run, turn in turns.items())


def _without_fans(reads: Sequence[dict[int, int]]) -> set[tuple[int, int]]:
    """Pairs of boxes, tail and head; of a box that many read only the one to the first of them."""
    readers: dict[int, list[int]] = {}
    for head, sources in enumerate(reads):
        for tail in sources:
            readers.setdefault(tail, []).append(head)
    return {
        (tail, head)
        for tail, heads in readers.items()
        for head in (heads if len(heads) <= _MOST_READERS else heads[:1])
    }


def _without_long(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those that span few ranks; a box's rank is one more than the highest among what it reads."""
    rank: dict[int, int] = {}
    # By head: every tail comes before its heads, so its own rank is final by then.
    for tail, head in sorted(pairs, key=lambda pair: pair[1]):
        rank[head] = max(rank.get(head, 0), rank.get(tail, 0) + 1)
    return {(tail, head) for tail, head in pairs if rank[head] - rank.get(tail, 0) <= _LONGEST_EDGE}


def _holding(boxes: Sequence[Box], drawn: set[tuple[int, int]]) -> Iterator[Edge]:
    """Edges from the box before to one that no line holds in its place."""
    heads = {head for _, head in drawn}
    joined = heads | {tail for tail, _ in drawn}
    for index in range(1, len(boxes)):
        box = boxes[index]
        if index not in heads and (box.references or index not in joined) and box.kind != "input":
            yield Edge(index - 1, index, "order" if box.kind == "step" else "hidden")
