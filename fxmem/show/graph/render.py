"""From drawing options to a file."""

from __future__ import annotations

from typing import get_args

from fxmem import __version__
from fxmem.errors import UsageError
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import printable
from fxmem.show.graph import converter, dot, svg_document
from fxmem.show.graph.composition import compose
from fxmem.show.graph.converter import Format
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


def image(profile: Profile, timeline: Timeline, form: Format, options: DrawingOptions = _DEFAULTS) -> bytes:
    """Draw the graph as a PNG, or as a PDF of one page.

    A PNG has two pixels to one of the SVG where it is not too long for that. vl-convert converts the SVG. Other
    arguments and errors are those of `render`, and:

    Raises:
        EnvironmentLacksError: vl-convert is not installed.
        AnalysisError: it failed.
    """
    require_image(form)
    return converter.convert(form, render(profile, timeline, options))


def require_image(form: Format) -> None:
    """Check that `image` can write this format here.

    Raises:
        UsageError: there is no such format.
        EnvironmentLacksError: vl-convert is not installed.
    """
    if form not in get_args(Format):
        raise UsageError(f"expected a format of {', '.join(get_args(Format))}; got {form!r}")
    converter.require(form)


def _note(drawing: Picture) -> str:
    calls = sum(box.times * len(box.shown) for box in drawing.boxes)
    return printable(f"{calls} calls in {len(drawing.boxes)} boxes; drawn by fxmem {__version__}")
