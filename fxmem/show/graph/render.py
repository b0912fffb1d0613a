"""From drawing options to a file: the engine that finds places, and what follows its failure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from fxmem import __version__
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import printable
from fxmem.show.graph import converter, dot, graphviz_layout, svg_document
from fxmem.show.graph.composition import compose
from fxmem.show.graph.converter import Format
from fxmem.show.graph.labels import box_words, frame_words
from fxmem.show.graph.ladder_layout import GraphLayout, ladder
from fxmem.show.graph.phrases import peak_words, plan_words
from fxmem.show.graph.picture import DrawingOptions, Picture
from fxmem.show.graph.subprocess_worker import WorkerFailedError, WorkerTooSlowError
from fxmem.show.graph.svg_document import Drawing

_GRAPHVIZ: tuple[graphviz_layout.Engine, ...] = get_args(graphviz_layout.Engine)
_COARSER = 4
"""By how much fewer boxes an engine is tried again after it failed."""
_DEFAULTS = DrawingOptions()


def render(profile: Profile, timeline: Timeline, options: DrawingOptions = _DEFAULTS) -> Drawing:
    """Draw the graph as one self-contained SVG document.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's byte counts as well.
        options: what of it to draw, and how.

    Raises:
        UsageError: an option that cannot be understood.
        EnvironmentLacksError: the renderer asked for is not there.
        AnalysisError: the renderer asked for failed.
    """
    forced = [each for each in _GRAPHVIZ if each == options.renderer]
    for each in forced:
        graphviz_layout.require(each)
    drawing = compose(profile, timeline, options)
    failures: list[str] = []
    # What took one of them too long takes the others too long: they are one program, built in different ways.
    too_many = math.inf
    for engine in graphviz_layout.available() if options.renderer == "auto" else forced:
        for attempt in _attempts(drawing, options):
            if len(attempt.boxes) >= too_many:
                continue
            words, headings = box_words(attempt), frame_words(attempt)
            try:
                layout = graphviz_layout.graphviz(engine, dot.bare(attempt, words, headings), attempt, words)
            except WorkerFailedError as error:
                too_many = min(too_many, len(attempt.boxes)) if isinstance(error, WorkerTooSlowError) else too_many
                failures.append(printable(f"{error} with {len(attempt.boxes)} boxes"))
                continue
            note = _note(attempt, layout, failures)
            return svg_document.write(attempt, words, headings, layout, note=note, standalone=options.standalone)
    if forced:
        raise AnalysisError(
            f"expected the renderer {options.renderer!r} to find places for {len(drawing.boxes)} boxes: "
            f"{'; '.join(failures)}; 'plain' always does"
        )
    words, headings = box_words(drawing), frame_words(drawing)
    layout = ladder(drawing, words, headings)
    note = _note(drawing, layout, failures)
    return svg_document.write(drawing, words, headings, layout, note=note, standalone=options.standalone)


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


def _attempts(drawing: Picture, options: DrawingOptions) -> Iterator[Picture]:
    """The picture, and a coarser one for an engine that could not cope with it."""
    yield drawing
    if options.depth is None and options.max_boxes >= 2 * _COARSER:
        fewer = replace(options, max_boxes=options.max_boxes // _COARSER)
        coarser = compose(drawing.profile, drawing.timeline, fewer)
        if len(coarser.boxes) < len(drawing.boxes):
            yield coarser


def _note(drawing: Picture, layout: GraphLayout, failures: Sequence[str]) -> str:
    folded = sum(box.times * len(box.shown) for box in drawing.boxes)
    parts = [
        (
            f"{folded} calls in {len(drawing.boxes)} boxes, {drawing.depth} "
            f"{'level' if drawing.depth == 1 else 'levels'} of modules"
        ),
        f"layout: {layout.engine}" + (f" ({'; '.join(failures)})" if failures else ""),
        f"drawn by fxmem {__version__}",
    ]
    return printable("; ".join(parts))
