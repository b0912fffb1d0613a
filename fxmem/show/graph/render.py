"""From drawing options to a file."""

from __future__ import annotations

from fxmem import __version__
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import printable
from fxmem.show.graph import dot, svg_document
from fxmem.show.graph.composition import compose
from fxmem.show.graph.labels import box_words, frame_words
from fxmem.show.graph.layout import arrange
from fxmem.show.graph.phrases import peak_words
from fxmem.show.graph.picture import DrawingOptions, Picture
from fxmem.show.graph.svg_document import Drawing
from fxmem.show.plan_facts import plan_words

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
    return dot.write_labelled(drawing, box_words(drawing), frame_words(drawing), title)


def _note(drawing: Picture) -> str:
    nodes = zip(drawing.profile.nodes, drawing.homes, strict=True)
    calls = sum(home is not None and node.op != "get_attr" for node, home in nodes)
    return printable(f"{calls} calls in {len(drawing.boxes)} boxes; drawn by fxmem {__version__}")
