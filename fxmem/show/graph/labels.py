"""What is written in the boxes of a drawn graph, and how large they become.

All text is made printable here; escaping it for a markup language is the writer's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from fxmem.memory.figures import Figures, Flops
from fxmem.memory.module_tree import call_name
from fxmem.records.profile import Kind, Node, Profile
from fxmem.records.units import Heat, exact_bytes, format_bytes, format_flops, format_shape, printable
from fxmem.show.facts import describe_outputs, describe_source, flops_sum
from fxmem.show.graph.checkpoints import Checkpoint, describe_effect, sum_freed
from fxmem.show.graph.picture import Box, Frame, Picture, count_recomputed, display_name, heat_value
from fxmem.show.svg import text_width

# --- the parts of a drawn graph in words: names, the peak, a plan, and tooltips ---------------------------------------


_LONGEST_PLACE = 22
"""Characters of a name beside a peak, in a box."""


# --- names ------------------------------------------------------------------------------------------------------------


def relative_path(module: str, outside: str) -> str:
    """The path as seen from inside another module."""
    return module.removeprefix(f"{outside}.") if outside else module


def class_name(drawing: Picture, module: str) -> str:
    """The class of a module; empty where it is not known."""
    return drawing.profile.modules.get(module, "")


# --- what is written in the boxes of a drawn graph, and how large they become -----------------------------------------


_MOST_NAMED = 3


def join_names(names: Sequence[str], most: int = _MOST_NAMED) -> str:
    """At most `most` names, with a comma between them, and how many more there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


def span_names(first: str, last: str) -> str:
    """`layers.1-31` for `layers.1` to `layers.31`. Both names where more differs than their last number."""
    if first == last:
        return first
    start, end = re.fullmatch(r"(.*?)(\d+)", first), re.fullmatch(r"(.*?)(\d+)", last)
    return f"{first}-{end[2]}" if start and end and start[1] == end[1] else f"{first} to {last}"


# --- sentences --------------------------------------------------------------------------------------------------------


def peak_words(drawing: Picture) -> str:
    """How high the peak is and when it falls."""
    peak = drawing.timeline.peak
    return f"{format_bytes(peak.requested_bytes)} alive, in {peak.phase}"


def describe_recomputed(drawing: Picture, box: Box) -> str:
    """How much of a box backward runs again, and what that frees; empty where it is nothing."""
    again = count_recomputed(drawing, box)
    if not again:
        return ""
    part = f"recomputes {again} of {len(box.shown)} calls" if len(box.shown) > 1 else "recomputed in backward"
    freed = sum_freed(box.checkpoints)
    return f"{part}, frees {format_bytes(freed)}" if freed else part


def describe_checkpoints(box: Box) -> str:
    """How many checkpoints are within a box, and what they free and cost."""
    number = sum(times for _, times in box.checkpoints)
    return f"{number} checkpoint{'s' if number > 1 else ''} inside: {describe_effect(box.checkpoints)}"


def describe_alias(drawing: Picture, index: int) -> str:
    """Whose memory the node's result lies in, if not in its own."""
    nodes = drawing.profile.nodes
    owner = nodes[index].view_of
    if owner is None:
        return ""
    return f"{'in place on' if index in drawing.in_place else 'view of'} {display_name(nodes[owner])}"


def describe_peak(drawing: Picture, box: Box, *, outside: str = "") -> str:
    """What to say of the peak; names are as seen from `outside`, and in the tooltip alone where they are long."""
    if not box.peak or drawing.peak_node is None:
        return ""
    peak = drawing.timeline.peak
    where = printable(relative_path(display_name(drawing.profile.nodes[drawing.peak_node]), outside))
    at = "" if len(box.shown) == 1 or (outside and len(where) > _LONGEST_PLACE) else f" at {where}"
    return f"PEAK {format_bytes(peak.requested_bytes)} in {peak.phase}{at}"


# --- tooltips ---------------------------------------------------------------------------------------------------------


def box_tooltip(drawing: Picture, box: Box, nodes: Sequence[Node]) -> Iterator[str]:
    """The lines of the tooltip of a box, given its calls."""
    node = nodes[-1]
    if box.kind in ("module", "group"):
        yield from _place_lines(drawing, box.module, box.first, box.last, box.alike)
        yield f"{len(nodes)} calls: {join_names([display_name(each) for each in nodes], 8)}"
    else:
        yield f"{join_names([each.name for each in nodes], 8)}: {node.op} {node.target}"
        yield from _place_lines(drawing, box.module, box.first, box.last, box.alike)
        for tensor in node.outputs:
            yield f"output {format_shape(tensor.shape)} {tensor.dtype}"
        if alias := describe_alias(drawing, box.shown[-1]):
            yield alias
    shown = set(box.shown)
    if parameters := [display_name(drawing.profile.nodes[index]) for index in box.nodes if index not in shown]:
        yield f"first to read {join_names(parameters, 8)}"
    yield from _sum_lines(box.figures)
    if box.times > 1:
        yield f"drawn once for {box.times} equal ones; the figures are those of each, live the largest of all"
    if again := describe_recomputed(drawing, box):
        yield again
    if box.checkpoints:
        yield describe_checkpoints(box)
    if box.references:
        yield f"also reads {join_names([display_name(drawing.profile.nodes[index]) for index in box.references], 8)}"
    if len(nodes) == 1 and node.source is not None:
        yield describe_source(node.source)
    if box.peak:
        yield describe_peak(drawing, box)


def frame_tooltip(drawing: Picture, frame: Frame) -> Iterator[str]:
    """The lines of a module's tooltip."""
    yield from _place_lines(drawing, frame.module, frame.first, frame.last, frame.alike)
    yield from _sum_lines(frame.figures)


def checkpoint_tooltip(drawing: Picture, frame: Frame, checkpoint: Checkpoint) -> Iterator[str]:
    """The lines of the tooltip of a checkpointed region."""
    first, last = (drawing.profile.nodes[node].name for node in (checkpoint.first_node, checkpoint.last_node - 1))
    size = checkpoint.last_node - checkpoint.first_node
    modules = "" if checkpoint.region is None or not checkpoint.region.modules else f"{checkpoint.region.title}: "
    yield f"checkpoint: {modules}{first}{f' to {last}' if last != first else ''}, {size} node{'s' if size > 1 else ''}"
    if frame.alike > 1:
        yield f"the first of {frame.alike} equal ones, drawn once; the figures are those of each"
    if checkpoint.region is None:
        yield "the program itself checkpoints it; the figures inside are as it runs"
        most = format_flops(checkpoint.extra_flops)
        yield f"FLOPs run again: at most {most}, less where what comes last keeps nothing"
    else:
        yield f"frees {exact_bytes(checkpoint.region.freed_bytes)} of what is saved for backward"
        yield f"FLOPs run again: {format_flops(checkpoint.extra_flops)}"
        kept, recomputed, offloaded = checkpoint.results
        if kept:
            products = ", ".join(map(str, checkpoint.region.keeps))
            yield f"keeps the results of its products {products} (counted from 0), which do not run again"
        if offloaded:
            yield f"{offloaded} saved results of its operators wait in the host's memory"
        if recomputed:
            one_by_one = "saved results of its operators, one by one; nothing of the program runs twice"
            yield f"recomputes {recomputed} {one_by_one}"
        elif checkpoint.region.random:
            yield "keeps the state of the random number generator"
        else:
            yield "draws no random numbers"
        if checkpoint.region.source is not None:
            yield describe_source(checkpoint.region.source)
        if not drawing.is_after:
            yield "the figures inside are those of the step without the plan"
    if not frame.whole:
        yield f"only what is in {drawing.focus} is drawn"


def _place_lines(drawing: Picture, module: str, first: str, last: str, alike: int) -> Iterator[str]:
    kind = class_name(drawing, module)
    yield (f"module {module}" if module else "the model itself") + (f" ({kind})" if kind else "")
    if last:
        yield f"{first} to {last}" + (f", {alike} equal ones" if alike > 1 else "")


def _sum_lines(figures: Figures) -> Iterator[str]:
    yield f"saved for backward {exact_bytes(figures.saved)}"
    yield f"output {exact_bytes(figures.output)}"
    yield f"parameters and buffers {exact_bytes(figures.params)}"
    yield f"scratch {exact_bytes(figures.scratch)}"
    yield f"live {exact_bytes(figures.live)}" if figures.live else "runs no operator"
    yield f"FLOPs {flops_sum(figures.forward)} forward, {flops_sum(figures.backward)} backward"


HEATS: dict[Heat, str] = {
    "saved": "bytes kept for backward",
    "output": "bytes of new memory its outputs bring",
    "params": "bytes of parameters and buffers it is the first to read",
    "flops": "FLOPs, forward and backward, of what has a formula (1 multiply-add = 2)",
    "live": "largest number of bytes alive while it runs",
    "scratch": "peak of the bytes that live only inside it, workspaces included",
}
"""What each quantity that can colour the boxes is, in words."""

LARGEST: tuple[Heat, ...] = ("live", "scratch")
"""Quantities that do not add up."""
STEPS = 7
"""Shades beside the one for nothing. Each stands for values from half of the next one's."""

TITLE_SIZE, NOTE_SIZE = 12.0, 10.5
TITLE, LINE, PAD, BAR = 16.0, 14.0, 7.0, 5.0
"""Height of a box's first line, of each further one, the margin around them, and the bar below, in pixels."""

_WIDEST = 340.0
_STEP_OF_WIDTH = 20.0
_USUAL = 60
"""Percent of the boxes that the usual width is enough for."""
_GAP = 14.0
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
    share: float
    """Length of its bar: the quantity, all equal ones together, over the most that a box has."""
    again: float
    """Share of its calls that backward runs again."""
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
    ids = UniqueIds("node")
    words = [_label_box(drawing, box, largest, ids) for box in drawing.boxes]
    usual = sorted(each.width for each in words)[len(words) * _USUAL // 100] if words else 0.0
    return [replace(each, width=round_width(max(each.width, usual), _WIDEST)) for each in words]


def round_width(width: float, widest: float) -> float:
    """The width of a box, one of few, so that boxes form columns."""
    return min(ceil(width / _STEP_OF_WIDTH) * _STEP_OF_WIDTH, widest)


def frame_words(drawing: Picture, *, figures: bool = True) -> list[FrameWords]:
    """The headings of every frame, with the quantity that colours the boxes or without figures."""
    ids, regions = UniqueIds("module"), UniqueIds("checkpoint")
    found = []
    for frame in drawing.frames:
        if frame.checkpoint is not None:
            found.append(_label_checkpoint(drawing, frame, frame.checkpoint, regions))
            continue
        name = _own_span(frame.first if frame.last else frame.module, frame.last, outside_of(drawing, frame.parent))
        if frame.gathered > 1:
            name = f"{frame.gathered} small operators: {name}"
        # A run of several calls or modules is no module itself.
        kind = class_name(drawing, frame.module) if frame.first in ("", frame.module) and not frame.gathered else ""
        notes = [kind, *([f"x{frame.alike}"] if frame.alike > 1 else [])]
        notes += _frame_figures(drawing.heat, frame) if figures else []
        note, tooltip = ", ".join(filter(None, notes)), frame_tooltip(drawing, frame)
        words = FrameWords(ids.make(frame.module), printable(name), printable(note), tuple(map(printable, tooltip)))
        found.append(words)
    return found


def outside_of(drawing: Picture, frame: int | None) -> str:
    """The module that names are seen from inside a frame, or outside all of them."""
    return drawing.focus if frame is None else drawing.frames[frame].module


def _label_checkpoint(drawing: Picture, frame: Frame, checkpoint: Checkpoint, ids: UniqueIds) -> FrameWords:
    name = "checkpoint" if frame.whole else "part of a checkpoint"
    if frame.alike > 1:
        which = printable(_own_span(frame.first, frame.last, outside_of(drawing, frame.parent)))
        name = f"checkpoint x{frame.alike}" + (f": {which}" if len(which) <= _LONGEST_NAME else "")
    says = describe_effect([(checkpoint, 1)], each=frame.alike)
    tooltip = tuple(map(printable, checkpoint_tooltip(drawing, frame, checkpoint)))
    return FrameWords(ids.make(drawing.profile.nodes[checkpoint.first_node].name), name, says, tooltip, checkpoint=True)


def _frame_figures(heat: Heat, frame: Frame) -> list[str]:
    """The quantity that colours the boxes; of several equal ones, what they add up to as well."""
    value = heat_value(heat, frame.figures)
    figure = _figure(heat, value, frame.figures)
    if frame.alike == 1:
        return [figure]
    if not value or heat in LARGEST:
        return [f"{figure} each"]
    write = format_flops if heat == "flops" else format_bytes
    return [f"{figure} each", f"{write(value * frame.alike)} together"]


def box_value(heat: Heat, box: Box) -> int | None:
    """The quantity that colours a box, of all that it stands for together; of what is a largest number, of each."""
    value = heat_value(heat, box.figures)
    return value if value is None or heat in LARGEST else value * box.times


def heat_scale(drawing: Picture) -> int:
    """The largest value that any box has of the quantity that colours them."""
    return max((box_value(drawing.heat, box) or 0 for box in drawing.boxes), default=0)


def heat_step(value: int | None, largest: int) -> int | None:
    """The shade of a value. `STEPS` is for more than half of the largest, one less for more than a quarter, and so
    on; 0 is for nothing."""
    if not value:
        return value
    halvings = (largest // value).bit_length() - 1
    return max(STEPS - halvings, 1)


# --- boxes ------------------------------------------------------------------------------------------------------------


def _label_box(drawing: Picture, box: Box, largest: int, ids: UniqueIds) -> Words:
    nodes = [drawing.profile.nodes[node] for node in box.shown]
    value = box_value(drawing.heat, box)
    title, note = name_box(drawing, box, nodes)
    is_silent = box.kind in ("alias", "input", "output", "step") and not value
    figure = "" if is_silent else _figure(drawing.heat, value, box.figures, box.times)
    lines = [printable(line) for line in _box_lines(drawing, box, nodes, note)]
    mark = describe_peak(drawing, box, outside=box.module)
    room = _GAP + text_width(figure, TITLE_SIZE, bold=True) if figure else 0.0
    return Words(
        box_id(ids, box, nodes),
        title,
        figure,
        tuple(lines),
        mark,
        tuple(map(printable, box_tooltip(drawing, box, nodes))),
        heat_step(value, largest),
        value / largest if value else 0.0,
        count_recomputed(drawing, box) / len(box.shown),
        *box_size(title, room, lines, mark),
    )


def box_id(ids: UniqueIds, box: Box, nodes: Sequence[Node]) -> str:
    """The id of a box, given its calls."""
    return ids.make(box.module if box.kind in ("module", "group") else nodes[-1].name)


def box_size(title: str, room: float, lines: Sequence[str], mark: str) -> tuple[float, float]:
    """Width and height that the words of a box need, with so much room beside its title."""
    widths = [text_width(title, TITLE_SIZE, bold=True) + room, *(text_width(line, NOTE_SIZE) for line in lines)]
    width = max(*widths, text_width(mark, NOTE_SIZE, bold=True))
    return width + 2 * PAD, TITLE + LINE * (len(lines) + bool(mark)) + 2 * PAD + BAR


def _own_span(first: str, last: str, outside: str) -> str:
    """The names of the first and last of several as seen from inside another module; of one alone, its own."""
    return span_names(_own_name(first, outside), _own_name(last, outside)) if last else _own_name(first, outside)


def _own_name(module: str, outside: str) -> str:
    """The path as seen from inside another module; a number keeps the name of what it is a number of."""
    own = relative_path(module, outside)
    return f"{outside.rpartition('.')[2]}.{own}" if own[:1].isdigit() and own != module else own


def name_box(drawing: Picture, box: Box, nodes: Sequence[Node]) -> tuple[str, str]:
    """What stands first in a box, and what explains it."""
    title, note = _name_box(drawing, box, nodes, outside_of(drawing, box.frame))
    return printable(title + (f" x{box.alike}" if box.alike > 1 else "")), note


def _name_box(drawing: Picture, box: Box, nodes: Sequence[Node], outside: str) -> tuple[str, str]:
    node = nodes[0]
    if box.gathered:
        return f"{box.gathered} small operators", _own_span(box.first, box.last, outside)
    if box.kind == "group":
        return _own_span(box.first, box.last, outside), f"{len(nodes)} calls"
    if box.kind == "module":
        called = call_name(node) if len(nodes) == 1 else f"{len(nodes)} calls"
        note = ", ".join(filter(None, (class_name(drawing, box.module), called)))
        return _own_span(box.module, box.last, outside), note
    if box.kind == "input":
        return call_name(node), "input"
    if box.kind in ("output", "step"):
        kept = _describe_state(drawing.profile) if node.op == "optimizer" else ""
        return node.name, ", ".join(filter(None, ("" if node.target == node.name else node.target, kept)))
    if node.op == "call_module":
        return _own_span(node.module or node.name, box.last, outside), node.module_type
    if len(nodes) > 1:
        return ", ".join(call_name(each) for each in nodes), ""
    return node.name, "" if re.fullmatch(re.escape(call_name(node)) + r"(_\d+)?", node.name) else node.target


def _box_lines(drawing: Picture, box: Box, nodes: Sequence[Node], note: str) -> Iterator[str]:
    alias = describe_alias(drawing, box.shown[-1]) if box.kind in ("call", "alias") else ""
    if described := shape_line(nodes, note):
        yield described
    each = box.times > 1 and drawing.heat not in LARGEST
    counted = [f"{name} {text}" for name, text in _figures(box.figures) if each or name != drawing.heat]
    if alias or counted:
        yield ("each " if each else "") + ", ".join(filter(None, (alias, *counted)))
    if again := describe_recomputed(drawing, box):
        yield again
    if box.references:
        yield f"reads {join_names([display_name(drawing.profile.nodes[node]) for node in box.references])}"


def shape_line(nodes: Sequence[Node], note: str) -> str:
    """A box's second line: what it is, and the shape of what it returns."""
    return ", ".join(filter(None, (note, describe_outputs(nodes))))


def _figures(figures: Figures) -> Iterator[tuple[str, str]]:
    """What there is to say in short; nothing of what there is nothing of."""
    for name, nbytes in (("saved", figures.saved), ("output", figures.output), ("params", figures.params)):
        if nbytes:
            yield name, format_bytes(nbytes)
    if figures.forward.known or figures.forward.unknown_calls:
        yield "flops", flops_sum(figures.forward)


def _figure(heat: Heat, value: int | None, figures: Figures, times: int = 1) -> str:
    if heat == "live" and not value:
        return "runs no operator"
    if heat == "flops":
        each = figures.forward + figures.backward
        return f"flops {flops_sum(Flops(each.known * times, each.unknown_calls * times))}"
    return f"{heat} {format_bytes(value)}"


def _describe_state(profile: Profile) -> str:
    """What an optimizer keeps between steps; empty where it keeps nothing."""
    nbytes = sum(each.nbytes for each in profile.storages if each.kind is Kind.OPTIMIZER_STATE)
    return f"{format_bytes(nbytes)} of state" if nbytes else ""


class UniqueIds:
    """Makes names into unique ids of letters, digits, `_` and `.`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._taken: dict[str, int] = {}

    def make(self, name: str) -> str:
        """Return the id of the next thing of this name."""
        plain = f"{self._prefix}-{re.sub(r'[^A-Za-z0-9_.]', '_', name)[:200]}"
        self._taken[plain] = self._taken.get(plain, 0) + 1
        return plain if self._taken[plain] == 1 else f"{plain}--{self._taken[plain]}"
