"""What to draw of a step: nodes, the boxes they share, and the lines between."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fxmem.errors import UsageError
from fxmem.records.profile import Phase, Profile, Timeline
from fxmem.show.graph.boxes import IsOpen, View, ViewMaker, count_boxes, flatten, gather, open_heaviest, open_to_depth
from fxmem.show.graph.checkpoints import apply_plan, checkpoints, find_recomputed
from fxmem.show.graph.folded_tree import Place, Visit, graph_tree, level, places
from fxmem.show.graph.picture import Box, DrawingOptions, Edge, Frame, Picture

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
        return parts, open_to_depth(base + options.depth)
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
    readers: dict[int, list[int]] = {}
    for head, sources in enumerate(reads):
        for tail in sources:
            readers.setdefault(tail, []).append(head)
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
