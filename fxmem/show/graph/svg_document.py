"""A picture whose parts have places, written as one self-contained SVG file.

No script, and nothing loaded from elsewhere. Colours are classes, so that one file serves light and dark; every rule
is bound to the class of the outermost element, so that the file can be pasted into a page. Everything that comes from
the model is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from fxmem.memory import facts as findings
from fxmem.records.units import format_bytes, format_flops, printable
from fxmem.show.graph.colors import DARK, LIGHT, Palette
from fxmem.show.graph.labels import (
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
    plan_words,
)
from fxmem.show.graph.ladder_layout import HEADING, EdgeLine, GraphLayout, Point, Rectangle
from fxmem.show.graph.picture import Picture
from fxmem.show.text_width import fit, text_width, wrap

_EDGE = 24.0
_FACTS = 84.0
"""Width of the column of labels in the head."""
_NARROWEST = 660.0
_SWATCH = 62.0
_ROW = 17.0
_TITLE = 17.0
_BAR = 360.0
_SHADOW = 4.0
_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'
_ARROW_HEAD = (
    '<defs><marker id="fxmem-arrow" class="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0.8L8 4L0 7.2z"/></marker></defs>'
)


def title(drawing: Picture) -> str:
    """What the picture is of, in one line."""
    mode = "training step" if drawing.profile.step.mode == "train" else "inference step"
    where = f", {drawing.focus}" if drawing.focus else ""
    return printable(f"{drawing.profile.model}{where}: memory of one {mode}")


@dataclass(frozen=True)
class Drawing:
    """A picture as an SVG document."""

    svg: str
    width: float
    """In pixels."""
    height: float
    boxes: tuple[str | None, ...]
    """For each node of the profile the id of the box that stands for it; None where there is none."""


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
    width = max(layout.width, _NARROWEST) + 2 * _EDGE
    head, top = _head(drawing, width - 2 * _EDGE)
    left = (width - layout.width) / 2
    foot = top + layout.height + 22.0
    height = foot + 14.0
    parts = [
        f'<svg{_NAMESPACE if standalone else ""} class="fxmem-graph" role="img" width="{_n(width)}" '
        f'height="{_n(height)}"'
        f' viewBox="0 0 {_n(width)} {_n(height)}" data-engine="{_safe(layout.engine)}" data-heat="{drawing.heat}">',
        f"<title>{_safe(title(drawing))}</title>",
        f"<desc>{_safe(f'Peak: {peak_words(drawing)}. {note}')}</desc>",
        f"<style>{_style()}</style>",
        *([_ARROW_HEAD] if standalone else []),
        f'<rect class="page" width="{_n(width)}" height="{_n(height)}"/>',
        *head,
        f'<g transform="translate({_n(left)} {_n(top)})">',
        *(_frame(each, place, standalone) for each, place in zip(headings, layout.frames, strict=True)),
        *(_edge(drawing, words, index, line, standalone) for index, line in enumerate(layout.lines) if line),
        # Above the lines, which run across them.
        *(_heading(each, place) for each, place in zip(headings, layout.frames, strict=True)),
        *(
            _box(drawing, index, each, place, standalone)
            for index, (each, place) in enumerate(zip(words, layout.boxes, strict=True))
        ),
        "</g>",
        _text(_EDGE, foot, fit(note, NOTE_SIZE, width - 2 * _EDGE), "muted"),
        "</svg>",
        "",
    ]
    boxes = tuple(None if home is None else words[home].id for home in drawing.homes)
    return Drawing("\n".join(parts), width, height, boxes)


# --- head -------------------------------------------------------------------------------------------------------------


def _head(drawing: Picture, width: float) -> tuple[list[str], float]:
    """Title, facts, the peak's split and the legend; and the height they take."""
    y = _EDGE - 6.0
    parts: list[str] = []
    for line in wrap(title(drawing), _TITLE, width, lines=2, bold=True):
        y += _TITLE + 4.0
        parts.append(_text(_EDGE, y, line, "title"))
    y += 10.0
    facts = [fact for fact in findings.header_facts(drawing.profile) if fact[0] != "Model"]
    facts += findings.peak_facts(drawing.profile, drawing.timeline.peak)
    if drawing.plan is not None:
        facts.append(("Plan", plan_words(drawing.plan)))
    for label, value in facts:
        for row, text in enumerate(wrap(value, NOTE_SIZE + 1, width - _FACTS, lines=3)):
            y += _ROW
            parts += [_text(_EDGE, y, label, "label")] if label and not row else []
            parts.append(_text(_EDGE + _FACTS, y, text, "strong" if label in ("Peak", "Plan") else ""))
    shares = findings.split(drawing.timeline.peak)
    for index, share in enumerate(shares):
        y += _ROW
        parts += [_text(_EDGE, y, "Split", "label")] if not index else []
        length = min(width - _FACTS - 260.0, _BAR) * share.nbytes / shares[0].nbytes if shares[0].nbytes else 0.0
        parts += [
            _text(_EDGE + _FACTS, y, share.name),
            _text(_EDGE + _FACTS + 180.0, y, format_bytes(share.nbytes), "end"),
            _text(_EDGE + _FACTS + 240.0, y, share.percent, "end"),
            (
                f'<rect class="bar" x="{_n(_EDGE + _FACTS + 254)}" y="{_n(y - 9)}" width="{_n(max(length, 1.0))}" '
                f'height="10"/>'
            ),
        ]
    legend, y = _legend(drawing, y + 12.0, width)
    return [*parts, *legend], y + 18.0


def _legend(drawing: Picture, y: float, width: float) -> tuple[list[str], float]:
    parts = [
        _text(_EDGE, y + 11, "Colour", "label"),
        _text(_EDGE + _FACTS, y + 11, f"{drawing.heat}: {HEATS[drawing.heat]}"),
    ]
    largest = heat_scale(drawing)
    y += 18.0
    for step in range(STEPS + 1):
        x = _EDGE + _FACTS + _SWATCH * step
        most = largest / 2 ** (STEPS - step)
        amount = format_flops(round(most)) if drawing.heat == "flops" else format_bytes(round(most))
        parts.append(
            f'<g class="h{step}"><rect class="shape" x="{_n(x)}" y="{_n(y)}" width="{_n(_SWATCH)}" height="14"/></g>'
        )
        parts.append(_text(x + _SWATCH / 2, y + 26, "0" if not step or not largest else f"≤ {amount}", "small middle"))
    y += 32.0
    for line in wrap(_key(drawing), NOTE_SIZE, width - _FACTS, lines=6):
        y += LINE
        parts.append(_text(_EDGE + _FACTS, y, line, "muted"))
    for index, line in enumerate(wrap(_checkpoint_key(drawing), NOTE_SIZE, width - _FACTS - _SWATCH, lines=4)):
        y += LINE if index else LINE + 6.0
        if line and not index:
            parts.append(
                f'<g class="frame checkpoint"><rect x="{_n(_EDGE + _FACTS + 2)}" y="{_n(y - 11)}" '
                f'width="{_n(_SWATCH - 14)}" height="14" rx="4"/></g>'
            )
        parts.append(_text(_EDGE + _FACTS + _SWATCH, y, line, "muted"))
    return parts, y


def _key(drawing: Picture) -> str:
    """What the marks mean that are in the picture."""
    kinds = {box.kind for box in drawing.boxes}
    said = ["A frame is a module; its figures are the sums of what is inside."] if drawing.frames else []
    if "alias" in kinds:
        said.append("Dashed: a view, no memory of its own.")
    if any(box.kind in ("module", "group") for box in drawing.boxes):
        said.append("A box of several calls sums them up; of live and scratch, the largest.")
    if any(box.alike > 1 for box in drawing.boxes) or any(frame.alike > 1 for frame in drawing.frames):
        said.append("xN: N equal ones, one after another or side by side; drawn once, with the figures of each.")
    if any(box.references for box in drawing.boxes):
        said.append(
            "Reads: what it reads from outside the picture, or from too far away or with too many others for a line."
        )
    if any(box.peak for box in drawing.boxes):
        said.append("Thick border: runs at the peak.")
    said.append("Parameters are counted where they are first read. 1 multiply-add = 2 FLOPs.")
    return " ".join(said)


def _checkpoint_key(drawing: Picture) -> str:
    found = [frame.checkpoint for frame in drawing.frames if frame.checkpoint is not None]
    if not found:
        return ""
    said = [
        (
            "Dashed frame: checkpointed. Of what its calls save for backward only what goes in and out is kept; "
            "backward "
            "runs it again."
        )
    ]
    if any(each.region is not None for each in found):
        said.append("Figures of calls, and the peak that is marked, are those of the step without the plan.")
    return " ".join(said)


# --- parts ------------------------------------------------------------------------------------------------------------


def _frame(words: FrameWords, place: Rectangle, standalone: bool) -> str:
    return (
        f"<g{_id(words.id, standalone)} "
        f'class="frame{" checkpoint" if words.checkpoint else ""}">{_tooltip(words.tooltip)}<rect '
        f'{_place(place)} rx="6"/></g>'
    )


def _heading(words: FrameWords, place: Rectangle) -> str:
    room = place.width - 16.0
    first = fit(words.title, TITLE_SIZE, room, bold=True)
    length = text_width(first, TITLE_SIZE, bold=True)
    second = ""
    if words.note and room - length > 28.0:
        note = fit(words.note, NOTE_SIZE, room - length - 8.0)
        second = f'<tspan class="muted" dx="8">{_safe(note)}</tspan>'
        length += 8.0 + text_width(note, NOTE_SIZE)
    # What keeps lines off the words is a shape of its own: some converters do not know of text with an outline behind
    # it.
    behind = (
        f'<rect class="behind" '
        f"{_place(Rectangle(place.x + 5, place.y + 5, min(length + 6.0, place.width - 10), HEADING - 10.5))}/>"
    )
    text = (
        f'<text x="{_n(place.x + 8)}" y="{_n(place.y + HEADING - 8)}"><tspan '
        f'class="strong">{_safe(first)}</tspan>{second}</text>'
    )
    return (
        f"<g "
        f'class="{"heading checkpoint" if words.checkpoint else "heading"}">{_tooltip(words.tooltip)}{behind}{text}</g>'
    )


def _id(name: str, standalone: bool) -> str:
    return f' id="{_safe(name)}"' if standalone else ""


def _box(drawing: Picture, index: int, words: Words, place: Rectangle, standalone: bool) -> str:
    box = drawing.boxes[index]
    classes = [f"box {box.kind} h{'u' if words.heat is None else words.heat}", *(["peak"] if box.peak else [])]
    room = place.width - 2 * PAD
    figure = fit(words.figure, TITLE_SIZE, room, bold=True)
    heading = fit(
        words.title, TITLE_SIZE, room - (text_width(figure, TITLE_SIZE, bold=True) + 8.0 if figure else 0.0), bold=True
    )
    y = place.y + PAD + TITLE - 4.0
    parts = [f'<g{_id(words.id, standalone)} class="{" ".join(classes)}">', _tooltip(words.tooltip)]
    if box.alike > 1:
        behind = Rectangle(place.x + _SHADOW, place.y + _SHADOW, place.width, place.height)
        parts.append(f'<rect class="shape" {_place(behind)} rx="4"/>')
    parts.append(f'<rect class="shape" {_place(place)} rx="4"/>')
    parts.append(_text(place.x + PAD, y, heading, "strong"))
    if figure:
        parts.append(_text(place.x + place.width - PAD, y, figure, "strong end" if words.heat else "none end"))
    for line, more in [*((line, "") for line in words.lines), *([(words.mark, "strong")] if words.mark else [])]:
        y += LINE
        parts.append(_text(place.x + PAD, y, fit(line, NOTE_SIZE, room, bold=bool(more)), f"note {more}".strip()))
    return "".join([*parts, "</g>"])


def _edge(drawing: Picture, words: Sequence[Words], index: int, line: EdgeLine, has_head: bool) -> str:
    edge = drawing.edges[index]
    names = f"{words[edge.tail].title} to {words[edge.head].title}"
    head = ' marker-end="url(#fxmem-arrow)"' if has_head else ""
    return f'<g class="edge {edge.kind}"><title>{_safe(names)}</title><path d="{_path(line)}"{head}/></g>'


def _path(line: EdgeLine) -> str:
    first, *rest = line.points
    if not line.curved:
        return f"M{_point(first)}" + "".join(f"L{_point(point)}" for point in rest)
    curves = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    return f"M{_point(first)}" + "".join(f"C{' '.join(map(_point, curve))}" for curve in curves)


def _tooltip(lines: Sequence[str]) -> str:
    return f"<title>{_safe(chr(10).join(lines))}</title>"


def _text(x: float, y: float, text: str, classes: str = "") -> str:
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{kind}>{_safe(text)}</text>'


def _place(place: Rectangle) -> str:
    return f'x="{_n(place.x)}" y="{_n(place.y)}" width="{_n(place.width)}" height="{_n(place.height)}"'


def _point(point: Point) -> str:
    return f"{_n(point[0])} {_n(point[1])}"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _safe(text: str) -> str:
    return escape(text, quote=True)


# --- style ------------------------------------------------------------------------------------------------------------


def _style() -> str:
    fixed = [
        "text{font:10.5px Helvetica,Arial,'Liberation Sans','DejaVu Sans',sans-serif}",
        f".title{{font-size:{_TITLE:g}px;font-weight:bold}}", ".strong,.label{font-weight:bold}",
        ".box .strong,.heading .strong{font-size:12px}",
        ".box .note.strong{font-size:10.5px}", ".end{text-anchor:end}", ".middle{text-anchor:middle}",
        ".small{font-size:9px}",
        ".edge path{fill:none;stroke-width:1.1}", ".order path{stroke-dasharray:4 3}", ".shape{stroke-width:1}",
        ".frame rect{stroke-width:1}",
        ".frame.checkpoint rect{stroke-width:2.5;stroke-dasharray:9 5}",
        ".alias .shape{stroke-dasharray:4 3}", ".peak .shape{stroke-width:4}",
    ]  # fmt: skip
    rules = [*fixed, *_colors(LIGHT)]
    dark = "".join(f".fxmem-graph {rule}" for rule in _bound(_colors(DARK)))
    return "".join(f".fxmem-graph {rule}" for rule in _bound(rules)) + f"@media (prefers-color-scheme:dark){{{dark}}}"


def _bound(rules: Sequence[str]) -> Iterator[str]:
    """Every selector of a list bound to the drawing."""
    for rule in rules:
        selectors, brace, body = rule.partition("{")
        yield selectors.replace(",", ",.fxmem-graph ") + brace + body


def _colors(palette: Palette) -> list[str]:
    shades = [
        f".h{step} .shape{{fill:{shade.fill}}}.fxmem-graph .h{step} text{{fill:{shade.text}}}"
        for step, shade in enumerate(palette.shades)
    ]
    return [
        f".page{{fill:{palette.page}}}",
        f"text,tspan{{fill:{palette.text}}}", f".muted,.label{{fill:{palette.muted}}}",
        f".shape{{stroke:{palette.line}}}",
        f".frame rect{{fill:{palette.frame};stroke:{palette.line};stroke-opacity:.6}}",
        f".frame.checkpoint rect{{stroke:{palette.checkpoint};stroke-opacity:1}}",
        f".heading.checkpoint .strong{{fill:{palette.checkpoint}}}",
        f".behind{{fill:{palette.frame}}}", f".bar{{fill:{palette.bar}}}",
        f".edge path{{stroke:{palette.line}}}", f".tip path{{fill:{palette.line}}}",
        f".hu .shape{{fill:{palette.page}}}",
        *shades, f".peak .shape{{stroke:{palette.peak}}}",
    ]  # fmt: skip
