"""A picture whose parts have places, written as one self-contained SVG document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxmem.records.units import format_bytes, format_flops, printable
from fxmem.show import facts, svg
from fxmem.show.graph.labels import (
    BAR,
    HEATS,
    LINE,
    NOTE_SIZE,
    PAD,
    STEPS,
    TITLE,
    TITLE_SIZE,
    FrameWords,
    Words,
    heat_scale,
    peak_words,
)
from fxmem.show.graph.layout import HEADING, EdgeLine, GraphLayout, Rectangle
from fxmem.show.graph.picture import Picture
from fxmem.show.plan_facts import plan_words
from fxmem.show.sections import Fact
from fxmem.show.svg import element, fit, group, rect, text, text_width, wrap

_EDGE = 24.0
_FACTS = 84.0
"""Width of the column of labels in the head."""
_HEAD = 388.0
"""Width of the column of facts, left of the graph."""
_BETWEEN = 22.0
_SWATCH = 48.0
_ROW = 17.0
_TITLE = 17.0
_SHADOW = 4.0
_BAND = 5.0
"""Width of the hatched band beside what backward runs again."""
_ARROW_HEAD = (
    '<defs><marker id="fxmem-arrow" class="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0.8L8 4L0 7.2z"/></marker></defs>'
)

_STYLE = svg.style_sheet(Path(__file__).with_name("graph.css"))


@dataclass(frozen=True)
class Drawing:
    """A picture as an SVG document."""

    svg: str
    width: float
    """In pixels."""
    height: float
    boxes: tuple[str | None, ...]
    """For each node of the profile the id of the box that stands for it; None where there is none."""


def title(drawing: Picture) -> str:
    """What the picture is of, in one line."""
    mode = "training step" if drawing.profile.step.mode == "train" else "inference step"
    where = f", {drawing.focus}" if drawing.focus else ""
    return printable(f"{drawing.profile.model}{where}: memory of one {mode}")


def write(
    drawing: Picture,
    words: Sequence[Words],
    headings: Sequence[FrameWords],
    layout: GraphLayout,
    *,
    note: str,
    standalone: bool = True,
) -> Drawing:
    """Write a picture whose parts have places; `note` goes to its foot.

    Not standalone, it has no ids, and no arrow heads, which are referred to by theirs.
    """
    left = _EDGE + _HEAD + _BETWEEN
    head, foot = _head(drawing, _HEAD)
    for line in wrap(note, NOTE_SIZE, _HEAD, lines=3):
        foot += LINE
        head.append(text(_EDGE, foot, line, "muted"))
    width, height = left + layout.width + _EDGE, max(foot, layout.height + _EDGE) + _EDGE
    frames = list(zip(headings, layout.frames, strict=True))
    boxes = zip(words, layout.boxes, strict=True)
    parts = [
        *([_ARROW_HEAD] if standalone else []),
        *head,
        f'<g transform="translate({svg.number(left)} {svg.number(_EDGE)})">',
        *(_frame(each, place, standalone) for each, place in frames),
        *(_edge(drawing, words, index, line, standalone) for index, line in enumerate(layout.lines) if line),
        # Above the lines, which run across them.
        *(_heading(each, place) for each, place in frames),
        *(_box(drawing, index, each, place, standalone) for index, (each, place) in enumerate(boxes)),
        "</g>",
    ]
    written = svg.document(
        _STYLE,
        (width, height),
        (title(drawing), f"Peak: {peak_words(drawing)}. {note}"),
        parts,
        standalone=standalone,
        # Opened alone it is as large as the window, whatever that is.
        **({"width": None, "height": None} if standalone else {}),
        data_heat=drawing.heat,
    )
    return Drawing(written, width, height, tuple(None if home is None else words[home].id for home in drawing.homes))


# --- head -------------------------------------------------------------------------------------------------------------


def _head(drawing: Picture, width: float) -> tuple[list[str], float]:
    """Title, facts, the peak's split and the legend; and the height they need."""
    y = _EDGE - 6.0
    parts: list[str] = []
    for line in wrap(title(drawing), _TITLE, width, lines=2, bold=True):
        y += _TITLE + 4.0
        parts.append(text(_EDGE, y, line, "title"))
    y += 10.0
    rows = [fact for fact in facts.header_facts(drawing.profile) if fact.key != "model"]
    if drawing.plan is not None:
        rows.append(Fact("Plan", plan_words(drawing.plan), "plan"))
    fit = facts.find_fit(drawing.profile, drawing.timeline.peak)
    rows += [Fact("Memory", fit.verdict, "memory")] if fit.exit_code or fit.is_fitting is not None else []
    rows += facts.peak_facts(drawing.profile, drawing.timeline.peak)
    for fact in rows:
        for row, line in enumerate(wrap(fact.text, NOTE_SIZE + 1, width - _FACTS, lines=3)):
            y += _ROW
            parts += [text(_EDGE, y, fact.label, "label")] if fact.label and not row else []
            parts.append(text(_EDGE + _FACTS, y, line, "strong" if fact.key in ("memory", "peak", "plan") else ""))
    shares = facts.split(drawing.timeline.peak)
    for index, share in enumerate(shares):
        y += _ROW
        parts += [text(_EDGE, y, "Split", "label")] if not index else []
        length = (width - _FACTS - 232.0) * share.nbytes / shares[0].nbytes if shares[0].nbytes else 0.0
        parts += [
            text(_EDGE + _FACTS, y, share.name),
            text(_EDGE + _FACTS + 180.0, y, format_bytes(share.nbytes), "end"),
            text(_EDGE + _FACTS + 226.0, y, share.percent, "end"),
            rect(_EDGE + _FACTS + 232, y - 9, max(length, 1.0), 10, "bar"),
        ]
    legend, y = _legend(drawing, y + 12.0, width)
    return [*parts, *legend], y + 18.0


def _legend(drawing: Picture, y: float, width: float) -> tuple[list[str], float]:
    parts = [
        text(_EDGE, y + 11, "Colour", "label"),
        text(_EDGE + _FACTS, y + 11, fit(f"{drawing.heat}: {HEATS[drawing.heat]}, at most", NOTE_SIZE, width - _FACTS)),
    ]
    largest = heat_scale(drawing)
    y += 18.0
    for step in range(STEPS + 1):
        x = _EDGE + _SWATCH * step
        most = largest / 2 ** (STEPS - step)
        amount = format_flops(round(most)) if drawing.heat == "flops" else format_bytes(round(most))
        parts.append(group(rect(x, y, _SWATCH, 14, "shape"), class_=f"h{step}"))
        parts.append(text(x + _SWATCH / 2, y + 26, "0" if not step or not largest else amount, "small middle"))
    y += 32.0
    for line in wrap(_key(drawing), NOTE_SIZE, width, lines=12):
        y += LINE
        parts.append(text(_EDGE, y, line, "muted"))
    for index, line in enumerate(wrap(_plan_key(drawing), NOTE_SIZE, width - _SWATCH, lines=8)):
        y += LINE if index else LINE + 6.0
        if line and not index:
            parts.append(_hatch(Rectangle(_EDGE + _SWATCH / 2, y - 11, _BAND, 3 * LINE), 1.0))
        parts.append(text(_EDGE + _SWATCH, y, line, "muted"))
    return parts, y


def _key(drawing: Picture) -> str:
    """What the marks mean that are in the picture."""
    kinds = {box.kind for box in drawing.boxes}
    sentences = ["A frame is a module; its figures are the sums of what is inside."] if drawing.frames else []
    if "alias" in kinds:
        sentences.append("Dashed: a view, no memory of its own.")
    if any(box.kind in ("module", "group") for box in drawing.boxes):
        sentences.append("A box of several calls sums them up; of live and scratch, the largest.")
    if any([each.alike > 1 for each in drawing.boxes] + [each.alike > 1 for each in drawing.frames]):
        sentences.append("xN: N equal ones, one after another or side by side; drawn once.")
        sentences.append("Colour, bar and the figure beside the name are of all together.")
    if any(box.references for box in drawing.boxes):
        far = "from too far away or with too many others for a line"
        sentences.append(f"Reads: what it reads from outside the picture, or {far}.")
    if any(box.peak for box in drawing.boxes):
        sentences.append("Thick border: runs at the peak.")
    sentences.append("Parameters are counted where they are first read. 1 multiply-add = 2 FLOPs.")
    return " ".join(sentences)


def _plan_key(drawing: Picture) -> str:
    """What is said of what backward runs again; empty where it is nothing."""
    if not drawing.recomputed:
        return ""
    words = "Hatched: backward runs it again, all of the box or the part of its calls that the band is long."
    if any(frame.checkpoint is not None for frame in drawing.frames):
        words += " Dashed frame: a checkpointed region, of which only what goes in and out is kept."
    if drawing.plan is not None:
        without = "" if drawing.is_after else "out"
        words += f" Colours, saved bytes and the marked peak are those of the step with{without} the plan."
    return words


# --- parts ------------------------------------------------------------------------------------------------------------


def _frame(words: FrameWords, place: Rectangle, standalone: bool) -> str:
    classes = "frame checkpoint" if words.checkpoint else "frame"
    return group(_rect(place, rx=6), tooltip=words.tooltip, id=words.id if standalone else None, class_=classes)


def _heading(words: FrameWords, place: Rectangle) -> str:
    room = place.width - 16.0
    first = fit(words.title, TITLE_SIZE, room, bold=True)
    length = text_width(first, TITLE_SIZE, bold=True)
    spans = [element("tspan", svg.escape_text(first), class_="strong")]
    if words.note and room - length > 28.0:
        note = fit(words.note, NOTE_SIZE, room - length - 8.0)
        spans.append(element("tspan", svg.escape_text(note), class_="muted", dx=8))
        length += 8.0 + text_width(note, NOTE_SIZE)
    # What keeps lines off the words is a shape of its own: some converters do not know of text with an outline behind
    # it.
    behind = rect(place.x + 5, place.y + 5, min(length + 6.0, place.width - 10), HEADING - 10.5, "behind")
    line = element("text", *spans, x=place.x + 8, y=place.y + HEADING - 8)
    return group(behind, line, tooltip=words.tooltip, class_="heading checkpoint" if words.checkpoint else "heading")


def _box(drawing: Picture, index: int, words: Words, place: Rectangle, standalone: bool) -> str:
    box = drawing.boxes[index]
    classes = f"box {box.kind} h{'u' if words.heat is None else words.heat}{' peak' if box.peak else ''}"
    room = place.width - 2 * PAD
    figure = fit(words.figure, TITLE_SIZE, room, bold=True)
    left = room - (text_width(figure, TITLE_SIZE, bold=True) + 8.0) if figure else room
    y = place.y + PAD + TITLE - 4.0
    shadow = rect(place.x + _SHADOW, place.y + _SHADOW, place.width, place.height, "shape", rx=4)
    parts = [*([shadow] if box.alike > 1 else []), _rect(place, "shape", rx=4)]
    parts.append(text(place.x + PAD, y, fit(words.title, TITLE_SIZE, left, bold=True), "strong"))
    if figure:
        parts.append(text(place.x + place.width - PAD, y, figure, "strong end" if words.heat else "none end"))
    for line in words.lines:
        y += LINE
        parts.append(text(place.x + PAD, y, fit(line, NOTE_SIZE, room), "note"))
    if words.mark:
        parts.append(text(place.x + PAD, y + LINE, fit(words.mark, NOTE_SIZE, room, bold=True), "note strong"))
    if words.again:
        parts.append(_hatch(place, words.again))
    if words.share:
        wide = max((place.width - 2 * PAD) * words.share, 1.0)
        way = ("M", place.x + PAD, place.y + place.height - BAR - 3.0, "h", wide, "v", BAR, "h", -wide, "z")
        parts.append(svg.path("amount", *way))
    return group(*parts, tooltip=words.tooltip, id=words.id if standalone else None, class_=classes)


def _hatch(place: Rectangle, share: float) -> str:
    """A hatched band beside a box, as long as the share of it that backward runs again.

    It is a path of its own: a pattern would need an id, of which a drawing within a page has none.
    """
    x, height = place.x - _BAND - 2.0, max(place.height * share, 2 * _BAND)
    way: list[str | float] = ["M", x, place.y, "h", _BAND, "v", height, "h", -_BAND, "z"]
    for y in range(int(_BAND), int(height), 5):
        way += ["M", x, place.y + y, "l", _BAND, -_BAND]
    return svg.path("again", *way)


def _edge(drawing: Picture, words: Sequence[Words], index: int, line: EdgeLine, has_head: bool) -> str:
    edge = drawing.edges[index]
    names = f"{words[edge.tail].title} to {words[edge.head].title}"
    first, *rest = line.points
    letters = ("C", "", "") if line.curved else ("L",)
    way: list[str | float] = ["M", *first]
    for place, point in enumerate(rest):
        letter = letters[place % len(letters)]
        way += [letter, *point] if letter else point
    drawn = svg.path("", *way, marker_end="url(#fxmem-arrow)" if has_head else None)
    return group(drawn, tooltip=names, class_=f"edge {edge.kind}")


def _rect(place: Rectangle, classes: str = "", *, rx: float) -> str:
    return rect(place.x, place.y, place.width, place.height, classes, rx=rx)
