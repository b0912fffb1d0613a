"""A picture in Graphviz's DOT language: for people, with all its words, or bare, for an engine to find places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from fxmem._graph_colors import LIGHT
from fxmem._graph_layout import heading_width
from fxmem._graph_picture import Picture
from fxmem._graph_words import NOTE_SIZE, TITLE_SIZE, FrameWords, Words

__all__ = ["bare", "labelled", "quoted"]

_POINTS = 72.0
_COURIER_EM = 0.6
"""Width of every character of Courier, whatever the engine knows of fonts."""
_SPREAD = "nodesep=0.2 ranksep=0.24 splines=polyline"


def quoted(text: str) -> str:
    """A DOT string that shows as this text, of one or more lines aligned left.

    Backslashes would start an escape, and ampersands an entity. DOT cannot hold NUL.
    """
    plain = text.replace("\0", "\\0").replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return '"' + plain.replace("\r", " ").replace("\n", "\\l") + '"'


def bare(drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords]) -> str:
    """Sizes and connections alone: nothing in it comes from the model."""

    def box(index: int) -> str:
        each = words[index]
        return f"n{index} [width={each.width / _POINTS:.4f} height={each.height / _POINTS:.4f}]"

    def frame(index: int) -> str:
        # Only the label's size matters.
        characters = max(round(heading_width(headings[index]) / (_COURIER_EM * TITLE_SIZE)), 1)
        return f'label="{"x" * characters}"'

    head = f'graph [{_SPREAD} fontname=Courier fontsize={TITLE_SIZE:g} margin=10]\nnode [shape=box fixedsize=true label=""]'
    return _written(drawing, head, box, frame, lambda kind: "" if kind == "data" else " [weight=0]")


def labelled(drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords], title: str) -> str:
    """Everything that the SVG says, in the colours of its light form."""

    def box(index: int) -> str:
        each, drawn = words[index], drawing.boxes[index]
        text = "\n".join(filter(None, ("  ".join(filter(None, (each.title, each.figure))), *each.lines, each.mark))) + "\n"
        styles = ["filled", "rounded"] + (["dashed"] if drawn.kind == "alias" else [])
        shade = LIGHT.shades[0 if each.heat is None else each.heat]
        border = f' color="{LIGHT.peak}" penwidth=4' if drawn.peak else ""
        more = f' peripheries={2 if drawn.alike > 1 else 1} style="{",".join(styles)}" fillcolor="{shade.fill}" fontcolor="{shade.text}"{border}'
        return f"n{index} [label={quoted(text)} id={quoted(each.id)} class={quoted(drawn.kind)} tooltip={_tooltip(each.tooltip)}{more}]"

    def frame(index: int) -> str:
        heading = headings[index]
        return f"label={quoted(f'{heading.title}  {heading.note}' + chr(10))} id={quoted(heading.id)} tooltip={_tooltip(heading.tooltip)}"

    head = "\n".join(
        [
            f"graph [label={quoted(title)} labelloc=t {_SPREAD} compound=true fontname=Helvetica fontsize={TITLE_SIZE:g}]",
            f'node [shape=box fontname=Helvetica fontsize={NOTE_SIZE:g} margin="0.1,0.06"]',
            f'edge [color="{LIGHT.line}" arrowsize=0.6]',
        ]
    )
    styles = {"data": "", "order": " [style=dashed]", "hidden": " [style=invis]"}
    return _written(drawing, head, box, frame, styles.__getitem__, frames='style="rounded,filled" fillcolor="#8080801a" color="#999999" labeljust=l')


def _tooltip(lines: Sequence[str]) -> str:
    return quoted("\n".join(lines)).replace("\\l", "\\n")


def _written(
    drawing: Picture,
    head: str,
    box: Callable[[int], str],
    frame: Callable[[int], str],
    edge: Callable[[Literal["data", "order", "hidden"]], str],
    frames: str = "",
) -> str:
    """The graph: frames as clusters, each with its boxes and the frames in it."""
    boxes_in: dict[int | None, list[int]] = {}
    for index, each in enumerate(drawing.boxes):
        boxes_in.setdefault(each.frame, []).append(index)
    frames_in: dict[int | None, list[int]] = {}
    for index, around in enumerate(drawing.frames):
        frames_in.setdefault(around.parent, []).append(index)

    def inside(place: int | None, indent: str) -> Iterator[str]:
        for index in boxes_in.get(place, ()):
            yield f"{indent}{box(index)}"
        for index in frames_in.get(place, ()):
            yield f"{indent}subgraph cluster_{index} {{"
            yield f"{indent}  graph [{frame(index)} {frames}]"
            yield from inside(index, indent + "  ")
            yield f"{indent}}}"

    lines = [f"  n{each.tail} -> n{each.head}{edge(each.kind)}" for each in drawing.edges]
    return "\n".join(["digraph fxmem {", *(f"  {line}" for line in head.splitlines()), *inside(None, "  "), *lines, "}", ""])
