"""How deep a tree of module visits is drawn: what becomes a box of its own, and how many boxes that makes."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.show.graph.checkpoints import Checkpoint
from fxmem.show.graph.folded_tree import Item, Leaf, Run, Visit, items_of, level

__all__ = ["checkpoints_in", "choose_depth", "count", "is_one_box", "is_region"]

_TOO_COARSE = 12
"""A picture of fewer boxes is not worth having where there is more to see."""


def choose_depth(root: Visit, base: int, max_boxes: int) -> tuple[int, int]:
    """The most levels at which there are no more than `max_boxes` boxes; or one, and how many siblings share a box
    there."""
    deepest = max(max((level(visit.module) - base for visit in _visits(root)), default=0) + 1, 1)
    counts = {depth: count(root, base + depth) for depth in range(1, deepest + 1)}
    depth = next((depth for depth in range(deepest, 0, -1) if counts[depth] <= max_boxes), 0)
    if depth == 0 or (depth < deepest and counts[depth] < min(_TOO_COARSE, max_boxes)):
        return depth + 1, -(-counts[depth + 1] // max_boxes)
    return depth, 1


def _visits(item: Item) -> Iterator[Visit]:
    if isinstance(item, Visit):
        yield item
    for inner in items_of(item):
        yield from _visits(inner)


def count(item: Item, depth: int) -> int:
    """Boxes that an item is drawn as."""
    if isinstance(item, Leaf) or is_one_box(item, depth):
        return 1
    return sum(count(inner, depth) for inner in items_of(item))


def is_one_box(item: Item, depth: int) -> bool:
    """Whether it is drawn as a box of its own: a call, or a module too deep, or in which one call is all there is."""
    if isinstance(item, Visit):
        return item.checkpoint is None and (
            (level(item.module) >= depth and item.module != "")
            or (len(item.items) == 1 and isinstance(item.items[0], Leaf))
        )
    return isinstance(item, Leaf)


def is_region(item: Item) -> bool:
    """Whether it is a checkpointed region, which is drawn as a frame."""
    return isinstance(item, Visit) and item.checkpoint is not None


def checkpoints_in(item: Item, times: int = 1) -> Iterator[tuple[Checkpoint, int]]:
    """Regions within an item, each with how often it is there."""
    if isinstance(item, Visit) and item.checkpoint is not None:
        yield item.checkpoint, times
    for inner in items_of(item):
        yield from checkpoints_in(inner, times * len(item.repeats) if isinstance(item, Run) else times)
