"""From the options of a drawing to its file: what is drawn, which engine finds the places, what is tried after it
failed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

from fxmem import __version__
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.names import Heat, Renderer
from fxmem.records.plan import Plan
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.records.units import printable
from fxmem.show.graph import converters, dot, graphviz_layout, svg_document
from fxmem.show.graph.converters import Format
from fxmem.show.graph.graphviz_layout import Program, engines
from fxmem.show.graph.labels import box_words, frame_words, peak_words, plan_words
from fxmem.show.graph.ladder_layout import Layout, ladder
from fxmem.show.graph.picture import Picture, picture
from fxmem.show.graph.subprocess_worker import WorkerFailedError, WorkerTooSlowError

__all__ = [
    "HEATS",
    "RENDERERS",
    "Format",
    "Heat",
    "Program",
    "Renderer",
    "dot_source",
    "engines",
    "image",
    "require_image",
    "svg",
]

HEATS: tuple[Heat, ...] = get_args(Heat)
"""Quantities that can colour the boxes."""
RENDERERS: tuple[Renderer, ...] = get_args(Renderer)
"""What can find places for the boxes."""

_GRAPHVIZ: tuple[graphviz_layout.Engine, ...] = get_args(graphviz_layout.Engine)
_COARSER = 4
"""By how much fewer boxes an engine is tried again after it failed."""


def svg(
    profile: Profile,
    timeline: Timeline,
    *,
    heat: Heat = "saved",
    fold: bool = True,
    depth: int | None = None,
    focus: str | None = None,
    max_boxes: int = 400,
    plan: Plan | None = None,
    renderer: Renderer = "auto",
) -> str:
    """The graph as one self-contained SVG document.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's byte counts as well.
        heat: the quantity that colours the boxes and stands in each; see `fxmem.show.graph.labels.HEATS`.
        fold: draw equal siblings once, with how many they are, and views in a row as one box.
        depth: levels of modules told apart; deeper ones become one box with sums. None: as many as `max_boxes` allows.
        focus: a module's path: only what is inside it. "peak": the module around the call that runs at the peak; the
            whole model where that is none of the model's.
        max_boxes: about how many boxes there may be where `depth` is None. plan: checkpoints planned for this step,
        each drawn as a frame around its calls with what it frees and costs; what the
            program itself checkpoints is framed either way.
        renderer: what finds the places. "dot": Graphviz on PATH; "wasi": Graphviz as WebAssembly, `fxmem[svg]`;
            "pygraphviz": the Graphviz that the package of that name brings; "plain": built in, one box below the other;
            "auto": the first of these that is there and does it in time.

    Raises:
        UsageError: an option that cannot be understood.
        EnvironmentLacksError: the renderer asked for is not there.
        AnalysisError: the renderer asked for failed.
    """
    if renderer not in RENDERERS:
        raise UsageError(f"expected renderer to be one of {', '.join(RENDERERS)}; got {renderer!r}")
    forced = [each for each in _GRAPHVIZ if each == renderer]
    for each in forced:
        graphviz_layout.require(each)
    choice = _Choice(profile, timeline, heat, fold, depth, focus, max_boxes, plan)
    drawing = choice.picture()
    failures: list[str] = []
    # What took one of them too long takes the others too long: they are one program, built in different ways.
    too_many = math.inf
    for engine in graphviz_layout.available() if renderer == "auto" else forced:
        for attempt in choice.attempts(drawing):
            if len(attempt.boxes) >= too_many:
                continue
            words, headings = box_words(attempt), frame_words(attempt)
            try:
                layout = graphviz_layout.graphviz(engine, dot.bare(attempt, words, headings), attempt, words)
            except WorkerFailedError as error:
                too_many = min(too_many, len(attempt.boxes)) if isinstance(error, WorkerTooSlowError) else too_many
                failures.append(printable(f"{error} with {len(attempt.boxes)} boxes"))
                continue
            return svg_document.write(attempt, words, headings, layout, _note(attempt, layout, failures))
    if forced:
        raise AnalysisError(
            f"expected the renderer {renderer!r} to find places for {len(drawing.boxes)} boxes: "
            f"{'; '.join(failures)}; 'plain' always does"
        )
    words, headings = box_words(drawing), frame_words(drawing)
    layout = ladder(drawing, words, headings)
    return svg_document.write(drawing, words, headings, layout, _note(drawing, layout, failures))


def dot_source(
    profile: Profile,
    timeline: Timeline,
    *,
    heat: Heat = "saved",
    fold: bool = True,
    depth: int | None = None,
    focus: str | None = None,
    max_boxes: int = 400,
    plan: Plan | None = None,
) -> str:
    """The same graph in Graphviz's DOT language, for `dot -Tsvg` and its like. Arguments and errors as for `svg`."""
    return _Choice(profile, timeline, heat, fold, depth, focus, max_boxes, plan).dot_source()


def image(
    profile: Profile,
    timeline: Timeline,
    form: Format,
    *,
    heat: Heat = "saved",
    fold: bool = True,
    depth: int | None = None,
    focus: str | None = None,
    max_boxes: int = 400,
    plan: Plan | None = None,
    renderer: Renderer = "auto",
) -> bytes:
    """The graph as a PNG, with two pixels to one of the SVG where it is not too long for that, or as a PDF of one page.

    fxmem itself writes neither. The SVG is converted by rsvg-convert or CairoSVG; where neither is there, Graphviz
    (`dot` on PATH, or pygraphviz) draws the DOT source, without the head and the legend. Other arguments and errors as
    for `svg`, and:

    Raises:
        EnvironmentLacksError: nothing is there that could write it.
        AnalysisError: what is there failed.
    """
    require_image(form, renderer)
    what = _Choice(profile, timeline, heat, fold, depth, focus, max_boxes, plan)

    def drawn() -> str:
        return svg(
            profile,
            timeline,
            heat=heat,
            fold=fold,
            depth=depth,
            focus=focus,
            max_boxes=max_boxes,
            plan=plan,
            renderer=renderer,
        )

    return converters.convert(form, cache(drawn), what.dot_source if _may_redraw(renderer) else None)


def require_image(form: Format, renderer: Renderer = "auto") -> None:
    """Raises EnvironmentLacksError, with what to install, if `image` could not write this here; UsageError for a format
    that is none."""
    if form not in get_args(Format):
        raise UsageError(f"expected a format of {', '.join(get_args(Format))}; got {form!r}")
    converters.require(form, redrawn=_may_redraw(renderer))


def _may_redraw(renderer: Renderer) -> bool:
    """Graphviz's own drawing is no answer to a wish for another layout."""
    return renderer in ("auto", "dot", "pygraphviz")


@dataclass(frozen=True)
class _Choice:
    """What to draw, as the caller said it."""

    profile: Profile
    timeline: Timeline
    heat: Heat
    fold: bool
    depth: int | None
    focus: str | None
    max_boxes: int
    plan: Plan | None

    def __post_init__(self) -> None:
        if self.heat not in HEATS:
            raise UsageError(f"expected heat to be one of {', '.join(HEATS)}; got {self.heat!r}")
        if self.depth is not None and self.depth < 1:
            raise UsageError(f"expected a depth of at least 1, got {self.depth}")
        if self.max_boxes < 1:
            raise UsageError(f"expected max_boxes of at least 1, got {self.max_boxes}")

    def picture(self) -> Picture:
        focus = self._module_in_focus()
        return picture(
            self.profile,
            self.timeline,
            heat=self.heat,
            fold=self.fold,
            depth=self.depth,
            focus=focus,
            max_boxes=self.max_boxes,
            plan=self.plan,
        )

    def dot_source(self) -> str:
        drawing = self.picture()
        plan = "" if self.plan is None else f"\nPlan: {plan_words(self.plan)}"
        return dot.labelled(
            drawing,
            box_words(drawing),
            frame_words(drawing),
            f"{svg_document.title(drawing)}\nPeak: {peak_words(drawing)}{plan}\n",
        )

    def attempts(self, drawing: Picture) -> Iterator[Picture]:
        """The picture, and a coarser one for an engine that could not cope with it."""
        yield drawing
        if self.depth is None and self.max_boxes >= 2 * _COARSER:
            coarser = replace(self, max_boxes=self.max_boxes // _COARSER).picture()
            if len(coarser.boxes) < len(drawing.boxes):
                yield coarser

    def _module_in_focus(self) -> str:
        if not self.focus:
            return ""
        if self.focus == "peak":
            op = self.timeline.peak.op
            return "" if op is None else _around(self.profile.nodes[self.profile.ops[op].node])
        known = {
            ".".join(node.module.split(".")[:depth])
            for node in self.profile.nodes
            if node.module
            for depth in range(1, node.module.count(".") + 2)
        }
        if self.focus in known:
            return self.focus
        near = difflib.get_close_matches(self.focus, sorted(known), n=1)
        raise UsageError(
            f"expected focus to be a module that runs, or peak; got {self.focus!r}"
            + (f", did you mean {near[0]}?" if near else "")
        )


def _around(node: Node) -> str:
    """The module a node is drawn in."""
    return node.module.rpartition(".")[0] if node.op == "call_module" else node.module


def _note(drawing: Picture, layout: Layout, failures: Sequence[str]) -> str:
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
