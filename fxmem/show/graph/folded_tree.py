"""A profile's nodes as a tree of module visits, with equal siblings folded into runs.

A *visit* of a module is a stretch of the run, without a gap, spent in the module and those below it: a module called at
two places is visited twice. Visits are therefore intervals of the order in which nodes ran, and whatever stands for a
visit, or for several that follow one another, can be drawn without a cycle.

A *run* is a group of items repeated without a gap, each repeat equal to the first in everything a reader would look at
(operators, classes, shapes, dtypes, bytes, FLOPs, wiring inside) but for the numbers in its name and the bytes alive
while it runs. A repeat that holds the peak equals no other, which splits the run there.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile

from fxmem.memory.module_tree import call_name, find_runs
from fxmem.records.profile import Node, Profile
from fxmem.records.units import group
from fxmem.show.graph.checkpoints import Checkpoint, checkpoints

_WORTH_FOLDING = 4
"""Boxes that a run of single calls has to save; a run of modules is folded for any."""
_LONGEST_REPEAT = 64
"""Items in one repeat of a run at most."""
_DEEPEST = 64
"""Levels of modules that are drawn apart."""


@dataclass(frozen=True)
class Leaf:
    """One call with the parameters that it reads first, or a row of views."""

    nodes: tuple[int, ...]
    """In the order they ran."""
    calls: tuple[int, ...]
    """Of these, those that are shown; the others are parameters."""
    module: str
    """Path of the module called, or of the one whose code made the call."""
    alias: bool = False
    """Whether it is a call of no module that brings no memory and keeps none."""


@dataclass(frozen=True)
class Visit:
    """One stretch of the run inside a module, or a checkpointed region."""

    module: str
    """Of a region, the module it stands in."""
    items: tuple[Item, ...]
    checkpoint: Checkpoint | None = None
    """None: a module's."""


@dataclass(frozen=True)
class FoldedRun:
    """Equal repeats, one after another."""

    items: tuple[Item, ...]
    """Those of the first repeat."""
    repeats: tuple[tuple[int, ...], ...]
    """Nodes of every repeat, the first included; equal places hold equal nodes."""
    last: Item
    """What the last repeat ends with."""


Item = Leaf | Visit | FoldedRun


@dataclass(frozen=True)
class Place:
    """Where a node is drawn."""

    node: int
    """The node of a first repeat that stands for it; itself outside all runs."""
    turns: dict[int, int]
    """For each run around it, from a number of the run's own, which of its repeats the node is in."""


def graph_tree(
    profile: Profile,
    nodes: Sequence[int],
    *,
    peak: int | None,
    fold: bool,
    regions: Sequence[Checkpoint] | None = None,
    recomputed: frozenset[int] = frozenset(),
) -> Visit:
    """The tree of these nodes of a profile (indices, in the order they ran).

    Args:
        profile: what was predicted.
        nodes: the nodes to draw.
        peak: the node that runs at the peak, which is not folded into any other.
        fold: whether to fold equal siblings, and to draw a row of views as one.
        regions: what is checkpointed, as from `checkpoints`. None: what the program itself checkpoints.
        recomputed: nodes that run again in backward, which are not folded into others.
    """
    if regions is None:
        regions = checkpoints(profile)
    leaves = _leaves(profile, nodes, regions, peak=peak, merge_views=fold)
    entries = list(zip(leaves, _paths(profile, leaves, regions), strict=True))
    return _visit(entries, regions, _Repeats(profile, peak, recomputed) if fold else None)


def all_nodes(item: Item) -> Iterator[int]:
    """Every node of an item, all repeats included, in an order that equal items share."""
    if isinstance(item, Leaf):
        yield from item.nodes
    elif isinstance(item, Visit):
        for inner in item.items:
            yield from all_nodes(inner)
    else:
        for repeat in item.repeats:
            yield from repeat


def inner_items(item: Item) -> tuple[Item, ...]:
    """What is drawn inside an item; nothing in a leaf."""
    return () if isinstance(item, Leaf) else item.items


def item_module(item: Item) -> str:
    """Path of the module an item belongs to; of a run, that of its first item."""
    return item_module(item.items[0]) if isinstance(item, FoldedRun) else item.module


def level(module: str) -> int:
    """Levels below the model at which a module stands."""
    return len(_segments(module))


def places(root: Visit, nodes: Sequence[int]) -> dict[int, Place]:
    """Where each of the nodes of a tree is drawn."""
    stands_for = {node: node for node in nodes}
    turns: dict[int, dict[int, int]] = {node: {} for node in nodes}
    pending: list[Item] = [root]
    runs = 0
    while pending:
        item = pending.pop()
        if isinstance(item, FoldedRun):
            for turn, repeat in enumerate(item.repeats):
                for node, first in zip(repeat, item.repeats[0], strict=True):
                    stands_for[node] = first
                    turns[node][runs] = turn
            runs += 1
        pending.extend(inner_items(item))
    return {node: _place(node, stands_for, turns) for node in nodes}


def _place(node: int, stands_for: dict[int, int], turns: dict[int, dict[int, int]]) -> Place:
    """Follow a node from the outermost run inwards.

    Only the first repeat of a run has the runs inside it."""
    at, found = node, dict(turns[node])
    while stands_for[at] != at:
        at = stands_for[at]
        found = {**turns[at], **found}
    return Place(at, found)


# --- leaves -----------------------------------------------------------------------------------------------------------


def _leaves(
    profile: Profile, nodes: Sequence[int], regions: Sequence[Checkpoint], *, peak: int | None, merge_views: bool
) -> list[Leaf]:
    """One leaf per call, in order; a parameter that something reads joins the first that does."""
    borders = sorted({border for region in regions for border in (region.first_node, region.last_node)})
    readers = _readers(profile, nodes)
    parameters = (node for node in nodes if profile.nodes[node].op == "get_attr" and node != peak)
    joins = {node: readers[node][0] for node in parameters if readers[node]}
    held = group((reader, parameter) for parameter, reader in joins.items())
    leaves: list[Leaf] = []
    for index in nodes:
        if index in joins:
            continue
        node = profile.nodes[index]
        own = (*held.get(index, ()), index)
        leaf = Leaf(own, (index,), node.module, index != peak and len(own) == 1 and _is_alias(node))
        if merge_views and leaves and _extends_views(profile, leaves[-1], leaf, readers, borders):
            before = leaves.pop()
            leaf = Leaf((*before.nodes, index), (*before.calls, index), node.module, alias=True)
        leaves.append(leaf)
    return leaves


def _readers(profile: Profile, nodes: Sequence[int]) -> dict[int, list[int]]:
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    for reader in nodes:
        for source in profile.nodes[reader].inputs:
            if source in readers:
                readers[source].append(reader)
    return readers


def _is_alias(node: Node) -> bool:
    scratch = node.scratch_bytes.forward
    brings = any((node.output_bytes, node.saved_bytes, node.params_bytes, scratch, node.forward_flops))
    return node.view_of is not None and node.op in ("call_method", "call_function") and not brings


def _extends_views(
    profile: Profile, before: Leaf, leaf: Leaf, readers: dict[int, list[int]], borders: Sequence[int]
) -> bool:
    last, first = before.calls[-1], leaf.calls[0]
    crosses = bisect_right(borders, last) != bisect_right(borders, first)
    if crosses or not (before.alias and leaf.alias) or before.module != leaf.module:
        return False
    return profile.nodes[first].inputs == (last,) and readers[last] == [first]


# --- paths ------------------------------------------------------------------------------------------------------------

_Segment = str | int
"""A step down: the name of a module in the one around it, or the index of a region."""


def _paths(profile: Profile, leaves: Sequence[Leaf], regions: Sequence[Checkpoint]) -> list[list[_Segment]]:
    """The way from the root to each leaf."""
    called = [profile.nodes[leaf.calls[0]] for leaf in leaves]
    # The call of a module is drawn in its parent.
    modules = [_segments(node.module)[: -1 if node.op == "call_module" else None] for node in called]
    begins = [leaf.calls[0] for leaf in leaves]
    # What each leaf's path has in common with that of the one before; with nothing, before the first and after the
    # last.
    common = [0, *(_count_common(before, after) for before, after in pairwise(modules)), 0]
    everywhere = min(common[1:-1], default=len(modules[0]) if modules else 0)
    around: list[list[tuple[int, int]]] = [[] for _ in leaves]
    for index, region in enumerate(regions):
        first, last = bisect_left(begins, region.first_node), bisect_left(begins, region.last_node)
        if first == last:
            continue
        throughout = min(common[first + 1 : last], default=len(modules[first]))
        # A module that goes on before or after the region holds more than the region.
        depth = max(min(throughout, max(common[first], common[last])), everywhere)
        for leaf in range(first, last):
            around[leaf].append((depth, index))
    return [_insert_regions(segments, inner) for segments, inner in zip(modules, around, strict=True)]


def _insert_regions(modules: list[str], around: Sequence[tuple[int, int]]) -> list[_Segment]:
    path: list[_Segment] = []
    at = 0
    for depth, region in around:
        path += [*modules[at:depth], region]
        at = depth
    return [*path, *modules[at:]]


def _count_common(one: Sequence[_Segment], other: Sequence[_Segment]) -> int:
    """Count the segments that two paths begin with in common."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


# --- visits -----------------------------------------------------------------------------------------------------------


def _visit(
    entries: Sequence[tuple[Leaf, list[_Segment]]],
    regions: Sequence[Checkpoint],
    repeats: _Repeats | None,
    depth: int = 0,
    module: str = "",
    checkpoint: Checkpoint | None = None,
) -> Visit:
    """The visit of leaves whose paths have their first `depth` segments in common."""
    items: list[Item] = []
    for segment, run in groupby(entries, lambda entry: entry[1][depth] if depth < len(entry[1]) else None):
        inside = list(run)
        if segment is None:
            items += [leaf for leaf, _ in inside]
        elif isinstance(segment, int):
            items.append(_visit(inside, regions, repeats, depth + 1, module, regions[segment]))
        else:
            items.append(_visit(inside, regions, repeats, depth + 1, f"{module}.{segment}" if module else segment))
    return Visit(module, tuple(items if repeats is None else repeats.fold(items)), checkpoint)


def _segments(module: str) -> list[str]:
    return module.split(".", _DEEPEST - 1) if module else []


# --- folding ----------------------------------------------------------------------------------------------------------


class _Repeats:
    """Finds repeats among siblings. Equal fingerprints mean equal in all but names' numbers, live bytes and wiring."""

    def __init__(self, profile: Profile, peak: int | None, recomputed: frozenset[int]) -> None:
        self._profile = profile
        self._peak = peak
        self._recomputed = recomputed
        self._fingerprints: dict[Hashable, int] = {}
        self._by_item: dict[int, tuple[Item, int]] = {}

    def fold(self, items: list[Item]) -> Iterator[Item]:
        """Replace every run of repeats by one item."""

        def is_same(first: int, other: int, length: int) -> bool:
            return self._wiring(items[first : first + length]) == self._wiring(items[other : other + length])

        def is_worth(start: int, length: int, times: int) -> bool:
            modules = all(isinstance(item, Visit) for item in items[start : start + length])
            return modules or length * (times - 1) >= _WORTH_FOLDING

        prints = [self._fingerprint(item) for item in items]
        for start, length, times in find_runs(prints, longest=_LONGEST_REPEAT, is_same=is_same, is_worth=is_worth):
            if times == 1:
                yield items[start]
                continue
            each = [items[begin : begin + length] for begin in range(start, start + length * times, length)]
            repeats = tuple(tuple(node for item in repeat for node in all_nodes(item)) for repeat in each)
            yield FoldedRun(tuple(each[0]), repeats, each[-1][-1])

    def _wiring(self, items: Sequence[Item]) -> list[tuple[int | None, ...]]:
        """For each node, the places of what it reads: inside, counted from the first; outside, None."""
        nodes = [node for item in items for node in all_nodes(item)]
        place = {node: index for index, node in enumerate(nodes)}
        return [tuple(place.get(source) for source in self._profile.nodes[node].inputs) for node in nodes]

    def _fingerprint(self, item: Item) -> int:
        # Kept alive beside its fingerprint, so that its identity is not given to another item.
        if id(item) not in self._by_item:
            found = self._fingerprints.setdefault(self._likeness(item), len(self._fingerprints))
            self._by_item[id(item)] = (item, found)
        return self._by_item[id(item)][1]

    def _likeness(self, item: Item) -> Hashable:
        if isinstance(item, Leaf):
            return (*(self._node_likeness(node) for node in item.nodes),)
        if isinstance(item, FoldedRun):
            own: Hashable = len(item.repeats)
        else:
            own = (_drop_numbers(item.module), item.checkpoint and item.checkpoint.likeness)
        return (own, *(self._fingerprint(inner) for inner in item.items))

    def _node_likeness(self, index: int) -> Hashable:
        node = self._profile.nodes[index]
        name = _drop_numbers(node.module if node.op == "call_module" else call_name(node))
        tensors = tuple((output.shape, output.dtype) for output in node.outputs)
        scratch = (node.scratch_bytes.forward, node.scratch_bytes.backward)
        sizes = (node.params_bytes, node.output_bytes, node.saved_bytes, scratch)
        flops = (node.forward_flops, node.backward_flops)
        marks = (node.view_of is None, index == self._peak, index in self._recomputed)
        return (node.op, name, node.module_type, tensors, sizes, flops, marks)


def _drop_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)
