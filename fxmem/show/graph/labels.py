"""What is written in and about each box of a drawn graph, and how large that makes the box.

All text is made printable here; escaping it for a markup language is the writer's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from fxmem.memory.facts import flops_sum
from fxmem.memory.figures import Figures
from fxmem.memory.module_tree import call_name
from fxmem.records.names import Heat
from fxmem.records.plan import Plan
from fxmem.records.profile import Node, SourceLine
from fxmem.records.units import exact_bytes, format_bytes, format_flops, format_shape, printable
from fxmem.show.graph.checkpoints import Checkpoint, effect
from fxmem.show.graph.picture import Box, Frame, Picture, heat_value, known_as
from fxmem.show.svg import text_width

__all__ = [
    "HEATS",
    "LINE",
    "NOTE_SIZE",
    "PAD",
    "STEPS",
    "TITLE",
    "TITLE_SIZE",
    "FrameWords",
    "Words",
    "box_words",
    "frame_words",
    "heat_scale",
    "heat_step",
    "peak_words",
    "plan_words",
]

HEATS: dict[Heat, str] = {
    "saved": "bytes kept for backward",
    "output": "bytes of new memory its outputs bring",
    "params": "bytes of parameters and buffers it is the first to read",
    "flops": "FLOPs, forward and backward, of what has a formula (1 multiply-add = 2)",
    "live": "largest number of bytes alive while it runs",
    "scratch": "peak of the bytes that live only inside it, workspaces included",
}
"""What each quantity that can colour the boxes is, in words."""

STEPS = 7
"""Shades beside the one for nothing. Each stands for values from half of the next one's."""

TITLE_SIZE, NOTE_SIZE = 12.0, 10.5
TITLE, LINE, PAD = 16.0, 14.0, 7.0
"""Height of a box's first line, of each further one, and the margin around them, in pixels."""

_WIDEST = 400.0
_STEP_OF_WIDTH = 20.0
_USUAL = 90
"""Percent of the boxes that the usual width is enough for."""
_GAP = 14.0
_MOST_NAMED = 3
_LONGEST_NAME = 40
"""Characters; beyond, a run of checkpoints goes without the names of its first and last."""


@dataclass(frozen=True)
class Words:
    """A box, written."""

    id: str
    """Stable, and made of characters that need no escape."""
    title: str
    figure: str
    """The quantity that colours the box; empty where there is nothing to say of it."""
    lines: tuple[str, ...]
    mark: str
    """What to say of the peak, if it is here."""
    tooltip: tuple[str, ...]
    heat: int | None
    """Shade, from 0 for nothing to `STEPS`; None if the quantity is not known."""
    width: float
    height: float


@dataclass(frozen=True)
class FrameWords:
    """A frame's heading, written."""

    id: str
    title: str
    note: str
    tooltip: tuple[str, ...]
    checkpoint: bool = False
    """Whether it is a checkpointed region's, not a module's."""


def box_words(drawing: Picture) -> list[Words]:
    """The words of every box. Most boxes are equally wide, so that a chain of them is a column."""
    largest = heat_scale(drawing)
    ids = _Ids("node")
    words = [_words(drawing, box, largest, ids) for box in drawing.boxes]
    usual = sorted(each.width for each in words)[len(words) * _USUAL // 100] if words else 0.0
    return [
        replace(each, width=min(ceil(max(each.width, usual) / _STEP_OF_WIDTH) * _STEP_OF_WIDTH, _WIDEST))
        for each in words
    ]


def frame_words(drawing: Picture) -> list[FrameWords]:
    """The headings of every frame."""
    ids, regions = _Ids("module"), _Ids("checkpoint")
    found = []
    for frame in drawing.frames:
        if frame.checkpoint is not None:
            found.append(_checkpoint_words(drawing, frame, frame.checkpoint, regions))
            continue
        outside = drawing.focus if frame.parent is None else drawing.frames[frame.parent].module
        name = (
            _span(relative(frame.first, outside), relative(frame.last, outside))
            if frame.last
            else relative(frame.module, outside)
        )
        value = heat_value(drawing.heat, frame.figures)
        figure = _figure(drawing.heat, value, frame.figures)
        # A run of several calls or modules is no module itself.
        kind = _class_of(drawing, frame.module) if frame.first in ("", frame.module) else ""
        notes = [
            kind,
            *(
                [f"x{frame.alike}", f"{figure} each", *_together(drawing.heat, value, frame.alike)]
                if frame.alike > 1
                else [figure]
            ),
        ]
        tooltip = [*_where(drawing, frame.module, frame.first, frame.last, frame.alike), *_sums(frame.figures)]
        found.append(
            FrameWords(
                ids.of(frame.module),
                printable(name),
                printable(", ".join(filter(None, notes))),
                tuple(map(printable, tooltip)),
            )
        )
    return found


def _checkpoint_words(drawing: Picture, frame: Frame, checkpoint: Checkpoint, ids: _Ids) -> FrameWords:
    name = "checkpoint" if frame.whole else "part of a checkpoint"
    if frame.alike > 1:
        outside = drawing.focus if frame.parent is None else drawing.frames[frame.parent].module
        which = printable(_span(relative(frame.first, outside), relative(frame.last, outside)))
        name = f"checkpoint x{frame.alike}" + (f": {which}" if len(which) <= _LONGEST_NAME else "")
    says = effect([(checkpoint, 1)], each=frame.alike)
    tooltip = tuple(map(printable, _checkpoint_tooltip(drawing, frame, checkpoint)))
    return FrameWords(ids.of(drawing.profile.nodes[checkpoint.first_node].name), name, says, tooltip, checkpoint=True)


def _together(heat: Heat, value: int | None, times: int) -> list[str]:
    """What several add up to, of a quantity that adds up."""
    if not value or heat in ("live", "scratch"):
        return []
    return [f"{format_flops(value * times) if heat == 'flops' else format_bytes(value * times)} together"]


def heat_scale(drawing: Picture) -> int:
    """The largest value that any box has of the quantity that colours them."""
    return max((heat_value(drawing.heat, box.figures) or 0 for box in drawing.boxes), default=0)


def heat_step(value: int | None, largest: int) -> int | None:
    """The shade of a value: `STEPS` for more than half of the largest, one less for more than a quarter, and so on; 0
    for nothing."""
    if not value:
        return value
    halvings = (largest // value).bit_length() - 1
    return max(STEPS - halvings, 1)


def peak_words(drawing: Picture) -> str:
    """How high the peak is and when it falls."""
    peak = drawing.timeline.peak
    return f"{format_bytes(peak.requested_bytes)} alive, in {peak.phase}"


def plan_words(plan: Plan) -> str:
    """What a plan does to the peak, and what it costs."""
    number = sum(1 for _ in plan.all_regions())
    if not number:
        return "no checkpoints"
    allocated = plan.before.allocated_bytes is not None and plan.after.allocated_bytes is not None
    before, after = (peak.counted_bytes if allocated else peak.requested_bytes for peak in (plan.before, plan.after))
    change = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    share = "" if plan.extra_fraction is None else f", {100 * plan.extra_fraction:.1f} % of the forward's"
    flops = "an unknown number of FLOPs" if plan.extra_flops is None else f"{format_flops(plan.extra_flops)} FLOPs"
    said = [
        f"{number} checkpoint{'s' if number > 1 else ''} ({plan.chosen})",
        f"peak {format_bytes(before)} -> {format_bytes(after)}{change}{' allocated' if allocated else ' requested'}"
        + ("" if plan.analysed else ", an estimate"),
        f"{flops} run again{share}",
    ]
    return "; ".join(said)


def relative(module: str, outside: str) -> str:
    """The path as seen from inside another module."""
    return module.removeprefix(f"{outside}.") if outside else module


# --- boxes ------------------------------------------------------------------------------------------------------------


def _words(drawing: Picture, box: Box, largest: int, ids: _Ids) -> Words:
    outside = drawing.focus if box.frame is None else drawing.frames[box.frame].module
    nodes = [drawing.profile.nodes[node] for node in box.shown]
    value = heat_value(drawing.heat, box.figures)
    title, note = _name(drawing, box, nodes, outside)
    times = f" x{box.alike}" if box.alike > 1 else ""
    figure = "" if box.kind in ("alias", "input", "output") and not value else _figure(drawing.heat, value, box.figures)
    lines = [*_lines(drawing, box, nodes, note)]
    mark = _mark(drawing, box, outside=box.module)
    title, lines = printable(title + times), [printable(line) for line in lines]
    widths = [
        text_width(title, TITLE_SIZE, bold=True) + (_GAP + text_width(figure, TITLE_SIZE, bold=True) if figure else 0.0)
    ]
    widths += [text_width(line, NOTE_SIZE) for line in lines] + [text_width(mark, NOTE_SIZE, bold=True)]
    height = TITLE + LINE * (len(lines) + bool(mark)) + 2 * PAD
    name = box.module if box.kind in ("module", "group") else nodes[-1].name
    tooltip = tuple(map(printable, _tooltip(drawing, box, nodes)))
    return Words(
        ids.of(name),
        title,
        figure,
        tuple(lines),
        mark,
        tooltip,
        heat_step(value, largest),
        max(widths) + 2 * PAD,
        height,
    )


def _name(drawing: Picture, box: Box, nodes: Sequence[Node], outside: str) -> tuple[str, str]:
    """What stands first in a box, and what explains it."""
    node = nodes[0]
    if box.kind in ("module", "group"):
        if box.kind == "group":
            return _span(relative(box.first, outside), relative(box.last, outside)), f"{len(nodes)} calls"
        own = relative(box.module, outside)
        called = (
            ", ".join(dict.fromkeys(call_name(each) for each in nodes)) if len(nodes) == 1 else f"{len(nodes)} calls"
        )
        kind = _class_of(drawing, box.module)
        return (_span(own, relative(box.last, outside)) if box.last else own), ", ".join(filter(None, (kind, called)))
    if box.kind == "input":
        return call_name(node), "input"
    if box.kind in ("output", "step"):
        return node.name, "" if node.target == node.name else node.target
    if node.op == "call_module":
        own = relative(node.module, outside) or node.name
        return (_span(own, relative(box.last, outside)) if box.last else own), node.module_type
    if len(nodes) > 1:
        return ", ".join(call_name(each) for each in nodes), ""
    return node.name, "" if re.fullmatch(re.escape(call_name(node)) + r"(_\d+)?", node.name) else node.target


def _lines(drawing: Picture, box: Box, nodes: Sequence[Node], note: str) -> Iterator[str]:
    tensors = next((node.outputs for node in reversed(nodes) if node.outputs), ())
    shape = (
        ""
        if not tensors
        else f"{format_shape(tensors[0].shape)} {tensors[0].dtype}"
        + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
    )
    alias = _alias(drawing, box.shown[-1]) if box.kind in ("call", "alias") else ""
    described = ", ".join(filter(None, (note, shape)))
    if described:
        yield described
    counted = [f"{name} {text}" for name, text in _counts(box.figures) if name != drawing.heat]
    if alias or counted:
        yield ", ".join(filter(None, (alias, *counted)))
    if box.checkpoints:
        yield _checkpoints_of(box)
    if box.references:
        yield f"reads {_listed([known_as(drawing.profile.nodes[node]) for node in box.references])}"


def _checkpoints_of(box: Box) -> str:
    number = sum(times for _, times in box.checkpoints)
    return f"{number} checkpoint{'s' if number > 1 else ''} inside: {effect(box.checkpoints)}"


def _counts(figures: Figures) -> Iterator[tuple[str, str]]:
    """What there is to say in short; nothing of what there is nothing of."""
    for name, nbytes in (("saved", figures.saved), ("output", figures.output), ("params", figures.params)):
        if nbytes:
            yield name, format_bytes(nbytes)
    if figures.forward.known or figures.forward.unknown_calls:
        yield "flops", flops_sum(figures.forward)


def _figure(heat: Heat, value: int | None, figures: Figures) -> str:
    if heat == "live" and not value:
        return "runs no operator"
    if heat == "flops":
        return f"flops {flops_sum(figures.forward + figures.backward)}"
    return f"{heat} {format_bytes(value)}"


def _alias(drawing: Picture, index: int) -> str:
    """Whose memory the node's result lies in, if not in its own."""
    nodes = drawing.profile.nodes
    owner = nodes[index].view_of
    if owner is None:
        return ""
    return f"{'in place on' if index in drawing.in_place else 'view of'} {known_as(nodes[owner])}"


def _mark(drawing: Picture, box: Box, *, outside: str = "") -> str:
    """What to say of the peak; names are as seen from `outside`."""
    if not box.peak or drawing.peak_node is None:
        return ""
    where = (
        "" if len(box.shown) == 1 else f" in {relative(known_as(drawing.profile.nodes[drawing.peak_node]), outside)}"
    )
    return printable(f"PEAK{where}: {peak_words(drawing)}")


# --- tooltips ---------------------------------------------------------------------------------------------------------


def _tooltip(drawing: Picture, box: Box, nodes: Sequence[Node]) -> Iterator[str]:
    node = nodes[-1]
    if box.kind in ("module", "group"):
        yield from _where(drawing, box.module, box.first, box.last, box.alike)
        yield f"{len(nodes)} calls: {_listed([known_as(each) for each in nodes], 8)}"
    else:
        yield f"{_listed([each.name for each in nodes], 8)}: {node.op} {node.target}"
        yield from _where(drawing, box.module, box.first, box.last, box.alike)
        for tensor in node.outputs:
            yield f"output {format_shape(tensor.shape)} {tensor.dtype}"
        alias = _alias(drawing, box.shown[-1])
        if alias:
            yield alias
    shown = set(box.shown)
    parameters = [known_as(drawing.profile.nodes[index]) for index in box.nodes if index not in shown]
    if parameters:
        yield f"first to read {_listed(parameters, 8)}"
    yield from _sums(box.figures)
    if box.times > 1:
        yield f"drawn once for {box.times} equal ones; the figures are those of each, live the largest of all"
    if box.checkpoints:
        yield _checkpoints_of(box)
    if box.references:
        yield f"also reads {_listed([known_as(drawing.profile.nodes[index]) for index in box.references], 8)}"
    if len(nodes) == 1 and node.source is not None:
        yield _place_in(node.source)
    if box.peak:
        yield _mark(drawing, box)


def _checkpoint_tooltip(drawing: Picture, frame: Frame, checkpoint: Checkpoint) -> Iterator[str]:
    first, last = (drawing.profile.nodes[node].name for node in (checkpoint.first_node, checkpoint.last_node - 1))
    size = checkpoint.last_node - checkpoint.first_node
    modules = "" if checkpoint.region is None or not checkpoint.region.modules else f"{checkpoint.region.title}: "
    yield f"checkpoint: {modules}{first}{f' to {last}' if last != first else ''}, {size} node{'s' if size > 1 else ''}"
    if frame.alike > 1:
        yield f"the first of {frame.alike} equal ones, drawn once; the figures are those of each"
    if checkpoint.region is None:
        yield "the program itself checkpoints it; the figures inside are as it runs"
        yield (
            f"FLOPs run again: at most {format_flops(checkpoint.extra_flops)}, less where what comes last keeps nothing"
        )
    else:
        yield f"frees {exact_bytes(checkpoint.region.freed_bytes)} of what is saved for backward"
        yield f"FLOPs run again: {format_flops(checkpoint.extra_flops)}"
        if checkpoint.keeps:
            yield (
                f"keeps the results of its products {', '.join(map(str, checkpoint.region.keeps))} (counted from "
                f"0), which do not run again"
            )
        if checkpoint.remakes:
            yield (
                f"makes {checkpoint.remakes} saved results of its operators again, one by one; nothing of the "
                f"program runs twice"
            )
        else:
            yield (
                "keeps the state of the random number generator"
                if checkpoint.region.random
                else "draws no random numbers"
            )
        if checkpoint.region.source is not None:
            yield _place_in(checkpoint.region.source)
        yield "the figures inside are those of the step without the plan"
    if not frame.whole:
        yield f"only what is in {drawing.focus} is drawn"


def _place_in(source: SourceLine) -> str:
    return source.place + (f": {source.code}" if source.code else "")


def _where(drawing: Picture, module: str, first: str, last: str, alike: int) -> Iterator[str]:
    kind = _class_of(drawing, module)
    yield (f"module {module}" if module else "the model itself") + (f" ({kind})" if kind else "")
    if last:
        yield f"{first} to {last}" + (f", {alike} equal ones" if alike > 1 else "")


def _sums(figures: Figures) -> Iterator[str]:
    yield f"saved for backward {exact_bytes(figures.saved)}"
    yield f"output {exact_bytes(figures.output)}"
    yield f"parameters and buffers {exact_bytes(figures.params)}"
    yield f"scratch {exact_bytes(figures.scratch)}"
    yield f"live {exact_bytes(figures.live)}" if figures.live else "runs no operator"
    yield f"FLOPs {flops_sum(figures.forward)} forward, {flops_sum(figures.backward)} backward"


def _class_of(drawing: Picture, module: str) -> str:
    return drawing.profile.modules.get(module, "")


def _listed(names: Sequence[str], most: int = _MOST_NAMED) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


def _span(first: str, last: str) -> str:
    """`layers.1-31` for `layers.1` to `layers.31`; both names where they differ in more than their last number."""
    if first == last:
        return first
    start, end = re.fullmatch(r"(.*?)(\d+)", first), re.fullmatch(r"(.*?)(\d+)", last)
    return f"{first}-{end[2]}" if start and end and start[1] == end[1] else f"{first} to {last}"


class _Ids:
    """Names made fit for an id: letters, digits, `_` and `.` alone, and no two alike."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._taken: dict[str, int] = {}

    def of(self, name: str) -> str:
        plain = f"{self._prefix}-{re.sub(r'[^A-Za-z0-9_.]', '_', name)[:200]}"
        self._taken[plain] = self._taken.get(plain, 0) + 1
        return plain if self._taken[plain] == 1 else f"{plain}--{self._taken[plain]}"
