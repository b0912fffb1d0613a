"""What is drawn of a profile, without places: boxes, frames around them, and edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fxmem.errors import UsageError
from fxmem.memory.figures import Figures
from fxmem.records.plan import Plan
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.records.units import Heat
from fxmem.show.graph.checkpoints import Checkpoint

OVERVIEW = 25
"""Boxes that fit one screen."""

BoxKind = Literal["call", "alias", "input", "output", "module", "group", "step"]


@dataclass(frozen=True, kw_only=True)
class DrawingOptions:
    """What to draw of a step, and how.

    Raises:
        UsageError: an option that cannot be understood.
    """

    heat: Heat = "saved"
    """The quantity that colours the boxes and stands in each; see `fxmem.show.graph.labels.HEATS`."""
    fold: bool = True
    """Whether equal siblings are drawn once, with how many they are, and views in a row as one box."""
    depth: int | None = None
    """Levels of modules told apart; deeper ones become one box with sums. None: the heaviest modules are open, as many
    as `max_boxes` allows."""
    focus: str | None = None
    """A module's path: only what is inside it is drawn. "peak": the module around the call that runs at the peak; the
    whole model where no module of it runs then."""
    max_boxes: int = OVERVIEW
    """About how many boxes there may be where `depth` is None. Of fewer than 60, a run of equal layers is one."""
    plan: Plan | None = None
    """A plan for this step: what it recomputes is hatched, its regions are framed with what they free and cost. What
    the program itself checkpoints is drawn so either way. What is kept for backward, and the peak, are those with the
    plan where it was analysed."""
    before: bool = False
    """With a plan: whether what is kept for backward, and the peak, are those without it."""
    standalone: bool = True
    """False: a part of an HTML document that may have other drawings, so without ids, and without the arrow heads that
    need one."""

    def __post_init__(self) -> None:
        if self.heat not in get_args(Heat):
            raise UsageError(f"expected heat to be one of {', '.join(get_args(Heat))}; got {self.heat!r}")
        if self.depth is not None and self.depth < 1:
            raise UsageError(f"expected a depth of at least 1, got {self.depth}")
        if self.max_boxes < 1:
            raise UsageError(f"expected max_boxes of at least 1, got {self.max_boxes}")


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
    name: str = ""
    """What its first item is known as."""
    gathered: int = 0
    """How many small calls share it; 0 for what is no box of small ones."""


@dataclass(frozen=True)
class Frame:
    """A module, a checkpointed region, or a run of equal ones, drawn around its boxes."""

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
    gathered: int = 0
    """How many small calls are in it; 1 for siblings that were too many, 0 for what is a module, a region or a run."""


@dataclass(frozen=True)
class Edge:
    """A connection from one box to a later one, by their indices. `data` goes that way, or only time (`order`);
    `hidden` keeps a place."""

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
    peak_node: int | None
    in_place: frozenset[int]
    """Nodes that write where they read: one of their operators has a name that ends in an underscore."""
    plan: Plan | None = None
    """Whose regions are drawn."""
    is_after: bool = False
    """Whether what is kept for backward, and the peak, are those with the plan."""
    recomputed: frozenset[int] = frozenset()
    """Nodes of which backward runs something again."""
    homes: tuple[int | None, ...] = ()
    """The box that stands for each node of the profile; None for one that is not drawn."""


def heat_value(heat: Heat, figures: Figures) -> int | None:
    """The quantity that colours a box: bytes, or FLOPs forward and backward. None if no call in it has a formula."""
    if heat == "flops":
        both = figures.forward + figures.backward
        return None if both.unknown_calls and not both.known else both.known
    nbytes: int = getattr(figures, heat)
    return nbytes


def count_recomputed(drawing: Picture, box: Box) -> int:
    """How many of a box's calls backward runs again, one repeat counted."""
    return sum(node in drawing.recomputed for node in box.shown)


def display_name(node: Node) -> str:
    """The name of a node that stands alone: its module's path, or its own."""
    return node.module or node.name if node.op == "call_module" else node.name
