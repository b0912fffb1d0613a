"""A picture in Graphviz's DOT language, with all its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import graphviz  # type: ignore[import-untyped]

from fxmem import __version__
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import group, printable
from fxmem.show.graph import svg_document
from fxmem.show.graph.boxes import compose
from fxmem.show.graph.labels import NOTE_SIZE, TITLE_SIZE, FrameWords, Words, box_words, frame_words, peak_words
from fxmem.show.graph.layout import arrange
from fxmem.show.graph.picture import DrawingOptions, Picture
from fxmem.show.graph.svg_document import Drawing
from fxmem.show.plan_facts import plan_words
from fxmem.show.svg import LIGHT

_FRAME_STYLE = {"fillcolor": LIGHT.panel, "labeljust": "l"}
_MODULE_LINE = {"style": "rounded,filled", "color": LIGHT.border, "penwidth": "1", "fontcolor": LIGHT.text}
_REGION_LINE = {"style": "rounded,filled,dashed", "color": LIGHT.checkpoint, "penwidth": "2.5"}
_MODULE_STYLE = {"class": "module", **_MODULE_LINE, **_FRAME_STYLE}
_CHECKPOINT_STYLE = {"class": "checkpoint", **_REGION_LINE, "fontcolor": LIGHT.checkpoint, **_FRAME_STYLE}
"""A cluster inherits what is not set from the one around it, so everything is set."""
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
    boxes_in = group((each.frame, index) for index, each in enumerate(drawing.boxes))
    frames_in = group((around.parent, index) for index, around in enumerate(drawing.frames))

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
    return str(graph.source)


# --- from drawing options to a file -----------------------------------------------------------------------------------


_DEFAULTS = DrawingOptions()


def render(profile: Profile, timeline: Timeline, options: DrawingOptions = _DEFAULTS) -> Drawing:
    """Draw the graph as one self-contained SVG document.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's byte counts as well.
        options: what of it to draw, and how.

    Raises:
        UsageError: an option that cannot be understood.
    """
    drawing = compose(profile, timeline, options)
    words, headings = box_words(drawing), frame_words(drawing)
    layout = arrange(drawing, words, headings)
    return svg_document.write(drawing, words, headings, layout, note=_note(drawing), standalone=options.standalone)


def dot_source(profile: Profile, timeline: Timeline, options: DrawingOptions = _DEFAULTS) -> str:
    """The same graph in Graphviz's DOT language, for `dot -Tsvg` and its like. Arguments and errors as for `render`."""
    drawing = compose(profile, timeline, options)
    plan = "" if options.plan is None else f"\nPlan: {plan_words(options.plan)}"
    title = f"{svg_document.title(drawing)}\nPeak: {peak_words(drawing)}{plan}\n"
    return write_labelled(drawing, box_words(drawing), frame_words(drawing), title)


def _note(drawing: Picture) -> str:
    nodes = zip(drawing.profile.nodes, drawing.homes, strict=True)
    calls = sum(home is not None and node.op != "get_attr" for node, home in nodes)
    return printable(f"{calls} calls in {len(drawing.boxes)} boxes; drawn by fxmem {__version__}")
