"""A tree of visits as parts that can be folded, and which are open."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from fxmem.errors import UsageError
from fxmem.memory.figures import sum_figures
from fxmem.records.profile import Phase, Profile, Timeline
from fxmem.records.units import group
from fxmem.show.graph.checkpoints import Checkpoint, apply_plan, checkpoints, find_recomputed
from fxmem.show.graph.folded_tree import (
    FoldedRun,
    Item,
    Leaf,
    Place,
    Visit,
    all_nodes,
    graph_tree,
    inner_items,
    item_module,
    level,
    places,
)
from fxmem.show.graph.picture import Box, BoxKind, DrawingOptions, Edge, Frame, Picture, display_name

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


# --- what to draw of a step: nodes, the boxes they share, and the lines between ---------------------------------------


_MOST_READERS = 6
"""Boxes that lines are drawn to from one box; beyond, all but the first name it instead."""
_LONGEST_EDGE = 150
"""Ranks that a line spans at most; beyond, what it reads is named."""
RUNS_OPEN_FROM = 60
"""Boxes from which a run of equal layers may be opened; in a smaller picture it is one box with the sum."""
_WORTH = 25
"""In such a smaller picture, what has less than this part of all bytes stays folded."""


def compose(profile: Profile, timeline: Timeline, options: DrawingOptions) -> Picture:
    """Choose the boxes, frames and edges of a picture.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
        options: what of it to draw.

    Raises:
        UsageError: no module in focus has that path; or the plan is not for this profile.
    """
    hierarchy = make_hierarchy(profile, timeline, options)
    drafts, frames = flatten(hierarchy.views, hierarchy.is_open)
    home = hierarchy.homes(drafts)
    boxes, edges = _connect(hierarchy.profile, hierarchy.where, home, drafts)
    return hierarchy.picture(boxes, frames, edges, home)


@dataclass(frozen=True)
class Hierarchy:
    """All that a picture of a step can show, folded or open."""

    profile: Profile
    timeline: Timeline
    options: DrawingOptions
    focus: str
    peak: int | None
    where: Mapping[int, Place]
    """Where each node that is drawn stands in the tree."""
    views: tuple[View, ...]
    is_open: IsOpen
    """What is open at first."""
    recomputed: frozenset[int] = frozenset()
    """Nodes of which backward runs something again."""
    unplanned: Profile | None = None
    """The step without the plan, where profile and timeline are those with it."""

    def homes(self, boxes: Sequence[Box]) -> dict[int, int]:
        """The box of each node that is drawn."""
        box_of = {node: index for index, box in enumerate(boxes) for node in box.nodes if self.where[node].node == node}
        return {node: box_of[place.node] for node, place in self.where.items()}

    def picture(
        self, boxes: Sequence[Box], frames: Sequence[Frame], edges: Sequence[Edge], home: Mapping[int, int]
    ) -> Picture:
        """A picture of these boxes, frames and edges."""
        return Picture(
            profile=self.profile,
            timeline=self.timeline,
            heat=self.options.heat,
            boxes=tuple(boxes),
            frames=tuple(frames),
            edges=tuple(edges),
            focus=self.focus,
            peak_node=self.peak,
            in_place=frozenset(
                op.node
                for op in self.profile.ops
                if op.phase is Phase.FORWARD and "".join(op.name.split(".")[1:2]).endswith("_")
            ),
            plan=self.options.plan,
            is_after=self.unplanned is not None,
            recomputed=self.recomputed,
            homes=tuple(home.get(node) for node in range(len(self.profile.nodes))),
        )


def make_hierarchy(profile: Profile, timeline: Timeline, options: DrawingOptions) -> Hierarchy:
    """Decide what there is to draw, and what of it is open at first. Arguments and errors are those of `compose`."""
    plan, unplanned = options.plan, profile
    regions = checkpoints(profile, plan)
    recomputed = find_recomputed(profile, plan)
    if plan is not None and not options.before:
        profile, timeline = apply_plan(profile, timeline, plan)
    peak = None if timeline.peak.op is None else profile.ops[timeline.peak.op].node
    focus = _find_focus(profile, options.focus, peak)
    nodes = _drawn_nodes(profile, focus, peak)
    root = graph_tree(profile, nodes, peak=peak, fold=options.fold, regions=regions, recomputed=recomputed)
    made = ViewMaker(profile, frozenset(nodes), peak).parts(_unwrap(root, focus).items)
    views, is_open = _choose(profile, made, options, level(focus))
    found = places(root, nodes)
    before = None if profile is unplanned else unplanned
    return Hierarchy(profile, timeline, options, focus, peak, found, views, is_open, recomputed, before)


def _choose(
    profile: Profile, parts: tuple[View, ...], options: DrawingOptions, base: int
) -> tuple[tuple[View, ...], IsOpen]:
    """Decide what is folded: by depth where one is given, else by bytes."""
    if options.depth is not None:
        return parts, lambda part: part.level is None or part.level < base + options.depth
    runs = options.max_boxes >= RUNS_OPEN_FROM
    worth = 0
    if count_boxes(parts, runs=runs) > options.max_boxes:
        parts = gather(parts, options.max_boxes, profile)
        worth = 0 if runs else sum(part.weight for part in parts) // _WORTH
    return parts, open_heaviest(parts, options.max_boxes, runs=runs, worth=worth)


# --- which nodes ------------------------------------------------------------------------------------------------------


def _find_focus(profile: Profile, focus: str | None, peak: int | None) -> str:
    """The path of the module to draw; empty for the whole model."""
    if not focus:
        return ""
    if focus == "peak":
        node = None if peak is None else profile.nodes[peak]
        module = "" if node is None else node.module
        return module.rpartition(".")[0] if node is not None and node.op == "call_module" else module
    known = {path for node in profile.nodes for path in accumulate(node.module.split("."), "{}.{}".format)} - {""}
    if focus in known:
        return focus
    near = difflib.get_close_matches(focus, sorted(known), n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    raise UsageError(f"expected focus to be a module that runs, or peak; got {focus!r}{hint}")


def _drawn_nodes(profile: Profile, focus: str, peak: int | None) -> list[int]:
    if focus:
        return [index for index, node in enumerate(profile.nodes) if f"{node.module}.".startswith(f"{focus}.")]
    happens = {peak, *(op.node for op in profile.ops)}
    # The rows for loss and optimizer are there even where a step has neither.
    absent = ("optimizer",) if profile.step.mode == "train" else ("loss", "optimizer")
    return [index for index, node in enumerate(profile.nodes) if node.op not in absent or index in happens]


def _unwrap(root: Visit, focus: str) -> Visit:
    """The visit in focus, where it is one; what leads to it needs no frame."""
    while focus and root.module != focus and len(root.items) == 1:
        (only,) = root.items
        if not isinstance(only, Visit) or only.checkpoint is not None:
            break
        root = only
    return root


# --- edges ------------------------------------------------------------------------------------------------------------


def _connect(
    profile: Profile, where: Mapping[int, Place], home: Mapping[int, int], drafts: Sequence[Box]
) -> tuple[list[Box], list[Edge]]:
    """The boxes with what they read, and the lines. `home` is the box of each node."""
    live = [0] * len(drafts)
    named: list[dict[int, None]] = [{} for _ in drafts]
    for node, head in home.items():
        live[head] = max(live[head], profile.nodes[node].live_bytes.max)
        if where[node].node == node:
            named[head].update(dict.fromkeys(source for source in profile.nodes[node].inputs if source not in home))
    reads = find_reads(profile, where, home, len(drafts))
    drawn = _drop_long(_drop_fans(reads))
    for head, sources in enumerate(reads):
        named[head].update(dict.fromkeys(source for tail, source in sources.items() if (tail, head) not in drawn))
    boxes = [
        replace(box, figures=replace(box.figures, live=most), references=tuple(sorted(others)))
        for box, most, others in zip(drafts, live, named, strict=True)
    ]
    return boxes, [*(Edge(tail, head) for tail, head in sorted(drawn)), *_ordering_edges(boxes, drawn)]


def find_reads(
    profile: Profile, where: Mapping[int, Place], home: Mapping[int, int], number: int
) -> list[dict[int, int]]:
    """What each of so many boxes reads: boxes, and the node read there."""
    reads: list[dict[int, int]] = [{} for _ in range(number)]
    for node, head in home.items():
        for source in profile.nodes[node].inputs:
            if source in home and home[source] < head:
                turns, others = where[source].turns, where[node].turns
                # What one repeat reads of another is no line inside the one that is drawn.
                if all(others.get(run, turn) == turn for run, turn in turns.items()):
                    reads[head].setdefault(home[source], source)
    return reads


def _drop_fans(reads: Sequence[dict[int, int]]) -> set[tuple[int, int]]:
    """Pairs of boxes, tail and head. Of a box with many readers only the line to the first remains."""
    readers = group((tail, head) for head, sources in enumerate(reads) for tail in sources)
    few = ((tail, heads if len(heads) <= _MOST_READERS else heads[:1]) for tail, heads in readers.items())
    return {(tail, head) for tail, heads in few for head in heads}


def _drop_long(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pairs that span few ranks. A box's rank is one more than the highest among what it reads."""
    rank: dict[int, int] = {}
    # By head: every tail comes before its heads, so its own rank is final by then.
    for tail, head in sorted(pairs, key=lambda pair: pair[1]):
        rank[head] = max(rank.get(head, 0), rank.get(tail, 0) + 1)
    return {(tail, head) for tail, head in pairs if rank[head] - rank.get(tail, 0) <= _LONGEST_EDGE}


def _ordering_edges(boxes: Sequence[Box], drawn: set[tuple[int, int]]) -> Iterator[Edge]:
    """Edges from the box before to one that no line keeps in its place."""
    heads = {head for _, head in drawn}
    joined = heads | {tail for tail, _ in drawn}
    for index in range(1, len(boxes)):
        box = boxes[index]
        if index not in heads and (box.references or index not in joined) and box.kind != "input":
            yield Edge(index - 1, index, "order" if box.kind == "step" else "hidden")
