"""The parts of a drawn graph in words: names, the peak, a plan, and tooltips."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fxmem.memory.figures import Figures
from fxmem.records.profile import Node
from fxmem.records.units import exact_bytes, format_bytes, format_flops, format_shape, printable
from fxmem.show.facts import describe_source, flops_sum
from fxmem.show.graph.checkpoints import Checkpoint, describe_effect, sum_freed
from fxmem.show.graph.picture import Box, Frame, Picture, count_recomputed, display_name

_MOST_NAMED = 3
_LONGEST_PLACE = 22
"""Characters of a name beside a peak, in a box."""


# --- names ------------------------------------------------------------------------------------------------------------


def relative_path(module: str, outside: str) -> str:
    """The path as seen from inside another module."""
    return module.removeprefix(f"{outside}.") if outside else module


def class_name(drawing: Picture, module: str) -> str:
    """The class of a module; empty where it is not known."""
    return drawing.profile.modules.get(module, "")


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
