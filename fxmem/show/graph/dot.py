"""A picture in Graphviz's DOT language: for people, with all its words, or bare, for an engine to find places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from fxmem.show.graph.labels import NOTE_SIZE, TITLE_SIZE, FrameWords, Words
from fxmem.show.graph.ladder_layout import heading_width, spans
from fxmem.show.graph.picture import Edge, Picture
from fxmem.show.palette import LIGHT

__all__ = ["bare", "labelled", "quoted"]

_POINTS = 72.0
_COURIER_EM = 0.6
"""Width of every character of Courier, whatever the engine knows of fonts."""
_FRAME_STYLE = f'fillcolor="{LIGHT.panel}" labeljust=l'
_MODULE_STYLE = (
    f'class=module style="rounded,filled" color="{LIGHT.border}" penwidth=1 fontcolor="{LIGHT.text}" {_FRAME_STYLE}'
)
_CHECKPOINT_STYLE = (
    f'class=checkpoint style="rounded,filled,dashed" color="{LIGHT.checkpoint}" penwidth=2.5 '
    f'fontcolor="{LIGHT.checkpoint}" {_FRAME_STYLE}'
)
"""A cluster takes what is not said from the one around it, so everything is said."""
_NEAR = "weight=4"
_MOST_STACKED = 8
"""Boxes of a frame that are held above, or below, those of another."""
_SPREAD = "nodesep=0.2 ranksep=0.24 splines=polyline newrank=true"
"""`newrank`: what is to be below what holds between clusters too; without it Graphviz ranks each cluster alone and
takes it for a wish."""


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

    head = (
        f"graph [{_SPREAD} fontname=Courier fontsize={TITLE_SIZE:g} margin=10]\nnode [shape=box fixedsize=true "
        f'label=""]'
    )
    return _written(drawing, head, box, frame, {"data": "", "order": "weight=0", "hidden": "weight=0"})


def labelled(drawing: Picture, words: Sequence[Words], headings: Sequence[FrameWords], title: str) -> str:
    """Everything that the SVG says, in the colours of its light form."""

    def box(index: int) -> str:
        each, drawn = words[index], drawing.boxes[index]
        text = (
            "\n".join(filter(None, ("  ".join(filter(None, (each.title, each.figure))), *each.lines, each.mark))) + "\n"
        )
        styles = ["filled", "rounded"] + (["dashed"] if drawn.kind == "alias" else [])
        shade = LIGHT.shades[0 if each.heat is None else each.heat]
        border = f' color="{LIGHT.peak}" penwidth=4' if drawn.peak else ""
        more = (
            f' peripheries={2 if drawn.alike > 1 else 1} style="{",".join(styles)}" fillcolor="{shade.fill}" '
            f'fontcolor="{shade.text}"{border}'
        )
        return (
            f"n{index} [label={quoted(text)} id={quoted(each.id)} class={quoted(drawn.kind)} "
            f"tooltip={_tooltip(each.tooltip)}{more}]"
        )

    def frame(index: int) -> str:
        heading = headings[index]
        said = (
            f"label={quoted(f'{heading.title}  {heading.note}' + chr(10))} id={quoted(heading.id)} "
            f"tooltip={_tooltip(heading.tooltip)}"
        )
        return f"{said} {_CHECKPOINT_STYLE if heading.checkpoint else _MODULE_STYLE}"

    head = "\n".join(
        [
            (
                f"graph [label={quoted(title)} labelloc=t {_SPREAD} compound=true fontname=Helvetica "
                f"fontsize={TITLE_SIZE:g}]"
            ),
            f'node [shape=box fontname=Helvetica fontsize={NOTE_SIZE:g} margin="0.1,0.06"]',
            f'edge [color="{LIGHT.line}" arrowsize=0.6]',
        ]
    )
    return _written(
        drawing, head, box, frame, {"data": "", "order": "weight=0 style=dashed", "hidden": "weight=0 style=invis"}
    )


def _tooltip(lines: Sequence[str]) -> str:
    return quoted("\n".join(lines)).replace("\\l", "\\n")


def _written(
    drawing: Picture,
    head: str,
    box: Callable[[int], str],
    frame: Callable[[int], str],
    edges: Mapping[str, str],
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
            yield f"{indent}  graph [{frame(index)}]"
            yield from inside(index, indent + "  ")
            yield f"{indent}}}"

    def edge(each: Edge) -> str:
        # Where there is room to spare it is between modules, not within one.
        near = each.kind == "data" and drawing.boxes[each.tail].frame == drawing.boxes[each.head].frame
        return f"  n{each.tail} -> n{each.head} [{_NEAR if near else edges[each.kind]}]"

    stacked = (Edge(above, below, "hidden") for above, below in _stacked(drawing))
    lines = [*map(edge, drawing.edges), *map(edge, stacked)]
    return "\n".join(
        ["digraph fxmem {", *(f"  {line}" for line in head.splitlines()), *inside(None, "  "), *lines, "}", ""]
    )


def _stacked(drawing: Picture) -> Iterator[tuple[int, int]]:
    """Pairs of boxes of which the second has to be placed below the first, so that of two frames side by side neither
    reads of the other.

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
    """Whether lines lead from one of the boxes `first` to `last` to one of those from `begin` to `end`."""
    reached = set(range(first, last + 1))
    for box in range(first, end + 1):
        if box in reached:
            if box >= begin:
                return True
            reached.update(heads.get(box, ()))
    return False
