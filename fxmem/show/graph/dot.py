"""A picture in Graphviz's DOT language: for people, with all its words, or bare, for an engine to find places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import graphviz  # type: ignore[import-untyped]

from fxmem.show.graph.labels import NOTE_SIZE, TITLE_SIZE, FrameWords, Words
from fxmem.show.graph.ladder_layout import heading_width, spans
from fxmem.show.graph.picture import Picture
from fxmem.show.palette import LIGHT

_POINTS = 72.0
_COURIER_EM = 0.6
"""Width of every character of Courier, whatever the engine knows of fonts."""
_FRAME_STYLE = {"fillcolor": LIGHT.panel, "labeljust": "l"}
_MODULE_STYLE = {
    "class": "module",
    "style": "rounded,filled",
    "color": LIGHT.border,
    "penwidth": "1",
    "fontcolor": LIGHT.text,
    **_FRAME_STYLE,
}
_CHECKPOINT_STYLE = {
    "class": "checkpoint",
    "style": "rounded,filled,dashed",
    "color": LIGHT.checkpoint,
    "penwidth": "2.5",
    "fontcolor": LIGHT.checkpoint,
    **_FRAME_STYLE,
}
"""A cluster inherits what is not set from the one around it, so everything is set."""
_MOST_STACKED = 8
"""Boxes of a frame that are kept above, or below, those of another."""
_SPREAD = {"nodesep": "0.2", "ranksep": "0.24", "splines": "polyline", "newrank": "true", "fontsize": f"{TITLE_SIZE:g}"}
"""`newrank`: what is to be below what holds between clusters too; without it Graphviz ranks each cluster alone and
takes it for a wish."""

Attributes = dict[str, str]


def escape(text: str) -> str:
    """A value that DOT shows as this text, of one or more lines aligned left.

    Backslashes would start an escape, ampersands an entity, and angle brackets HTML. DOT cannot hold NUL.
    """
    plain = text.replace("\0", "\\0").replace("\\", "\\\\").replace("&", "&amp;")
    shown: str = graphviz.nohtml(plain.replace("\r", " ").replace("\n", "\\l"))
    return shown


def bare(drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords]) -> str:
    """Sizes and connections alone: nothing in it comes from the model."""

    def box(index: int) -> Attributes:
        each = words[index]
        return {"width": f"{each.width / _POINTS:.4f}", "height": f"{each.height / _POINTS:.4f}"}

    def frame(index: int) -> Attributes:
        # Only the label's size matters.
        return {"label": "x" * max(round(heading_width(headings[index]) / (_COURIER_EM * TITLE_SIZE)), 1)}

    graph = graphviz.Digraph(
        "fxmem",
        graph_attr={**_SPREAD, "fontname": "Courier", "margin": "10"},
        node_attr={"shape": "box", "fixedsize": "true", "label": ""},
    )
    weightless = {"weight": "0"}
    return _write(graph, drawing, box, frame, {"data": {}, "order": weightless, "hidden": weightless})


def write_labelled(drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords], title: str) -> str:
    """Everything that the SVG says, in the colours of its light form."""

    def box(index: int) -> Attributes:
        each, drawn = words[index], drawing.boxes[index]
        lines = filter(None, ("  ".join(filter(None, (each.title, each.figure))), *each.lines, each.mark))
        shade = LIGHT.shades[0 if each.heat is None else each.heat]
        return {
            "label": escape("\n".join(lines) + "\n"),
            "id": escape(each.id),
            "class": escape(drawn.kind),
            "tooltip": _tooltip(each.tooltip),
            "peripheries": "2" if drawn.alike > 1 else "1",
            "style": "filled,rounded" + (",dashed" if drawn.kind == "alias" else ""),
            "fillcolor": shade.fill,
            "fontcolor": shade.text,
            **({"color": LIGHT.peak, "penwidth": "4"} if drawn.peak else {}),
        }

    def frame(index: int) -> Attributes:
        heading = headings[index]
        return {
            "label": escape(f"{heading.title}  {heading.note}\n"),
            "id": escape(heading.id),
            "tooltip": _tooltip(heading.tooltip),
            **(_CHECKPOINT_STYLE if heading.checkpoint else _MODULE_STYLE),
        }

    graph = graphviz.Digraph(
        "fxmem",
        graph_attr={**_SPREAD, "label": escape(title), "labelloc": "t", "compound": "true", "fontname": "Helvetica"},
        node_attr={"shape": "box", "fontname": "Helvetica", "fontsize": f"{NOTE_SIZE:g}", "margin": "0.1,0.06"},
        edge_attr={"color": LIGHT.line, "arrowsize": "0.6"},
    )
    order, hidden = {"weight": "0", "style": "dashed"}, {"weight": "0", "style": "invis"}
    return _write(graph, drawing, box, frame, {"data": {}, "order": order, "hidden": hidden})


def _tooltip(lines: Sequence[str]) -> str:
    shown: str = graphviz.nohtml(escape("\n".join(lines)).replace("\\l", "\\n"))
    return shown


def _write(
    graph: graphviz.Digraph,
    drawing: Picture,
    box: Callable[[int], Attributes],
    frame: Callable[[int], Attributes],
    edges: Mapping[str, Attributes],
) -> str:
    """Add frames as clusters with their boxes and inner frames, and the edges; return the source."""
    boxes_in: dict[int | None, list[int]] = {}
    for index, each in enumerate(drawing.boxes):
        boxes_in.setdefault(each.frame, []).append(index)
    frames_in: dict[int | None, list[int]] = {}
    for index, around in enumerate(drawing.frames):
        frames_in.setdefault(around.parent, []).append(index)

    def fill(cluster: graphviz.Digraph, place: int | None) -> None:
        for index in boxes_in.get(place, ()):
            cluster.node(f"n{index}", **box(index))
        for index in frames_in.get(place, ()):
            inner = graphviz.Digraph(f"cluster_{index}", graph_attr=frame(index))
            fill(inner, index)
            cluster.subgraph(inner)

    fill(graph, None)
    for edge in drawing.edges:
        # Where there is room to spare it is between modules, not within one.
        near = edge.kind == "data" and drawing.boxes[edge.tail].frame == drawing.boxes[edge.head].frame
        graph.edge(f"n{edge.tail}", f"n{edge.head}", **({"weight": "4"} if near else edges[edge.kind]))
    for above, below in _stack_boxes(drawing):
        graph.edge(f"n{above}", f"n{below}", **edges["hidden"])
    return str(graph.source)


def _stack_boxes(drawing: Picture) -> Iterator[tuple[int, int]]:
    """Pairs of boxes of which the second must be placed below the first. Of two frames side by side, neither then reads
    from the other.

    Without it a frame in which something reads of nothing before would begin beside the frame before, and a hundred of
    them make a staircase.
    """
    ranges = spans(drawing)
    heads: dict[int, list[int]] = {}
    for edge in drawing.edges:
        heads.setdefault(edge.tail, []).append(edge.head)
    siblings: dict[int | None, list[int]] = {}
    for index, frame in enumerate(drawing.frames):
        siblings.setdefault(frame.parent, []).append(index)
    for frames in siblings.values():
        for (first, last), (begin, end) in pairwise(ranges[frame] for frame in frames):
            if not _leads(heads, first, last, begin, end):
                continue
            lowest = [box for box in range(first, last + 1) if not any(head <= last for head in heads.get(box, ()))]
            read = {head for box in range(begin, end + 1) for head in heads.get(box, ())}
            highest = [box for box in range(begin, end + 1) if box not in read]
            for box in lowest[-_MOST_STACKED:]:
                yield from ((box, below) for below in highest[:_MOST_STACKED] if below not in heads.get(box, ()))


def _leads(heads: Mapping[int, Sequence[int]], first: int, last: int, begin: int, end: int) -> bool:
    """Whether lines lead from one of these boxes (`first` to `last`) to one of those (`begin` to `end`)."""
    reached = set(range(first, last + 1))
    for box in range(first, end + 1):
        if box in reached:
            if box >= begin:
                return True
            reached.update(heads.get(box, ()))
    return False
