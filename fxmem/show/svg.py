"""Writing SVG documents: elements, style sheets, and text that fits without a font.

No script, and nothing loaded from elsewhere. Text is escaped here, so that no name of a model can end an element.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple, get_args
from unicodedata import east_asian_width

from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError
from fxmem.records.profile import Kind
from fxmem.records.units import printable

# --- every colour that fxmem shows, on light and on dark; none stands anywhere else -----------------------------------
# Kinds of storage have Okabe and Ito's colours ("Color Universal Design", 2008), which differ in lightness as well as
# in hue, with a grey for inputs and a violet for workspaces. The shades of a drawn graph are one hue that changes in
# lightness alone, so that they read with any kind of colour vision and in grey: ColorBrewer's `Blues` (C. Brewer,
# https://colorbrewer2.org), reversed on dark, where more has to mean brighter. Beside every colour stands the name or
# the number it is for. Text has a contrast of at least 4.5 to what it is on (WCAG 2.1, 1.4.3).


_INK, _PAPER, _VERMILION = "#111111", "#ffffff", "#d55e00"
_NIGHT, _MOON, _SNOW, _ORANGE, _SLATE = "#16181d", "#e8e8e8", "#f2f2f2", "#ff8c3a", "#3a3e46"
_BLUES = ("#eff3ff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#2171b5", "#084594")
_NIGHT_BLUES = ("#17222f", "#152c47", "#12396b", "#1f5a96")

KINDS: dict[Kind, str] = {
    Kind.PARAMETER: "#0072b2",
    Kind.BUFFER: "#56b4e9",
    Kind.INPUT: "#999999",
    Kind.OPTIMIZER_STATE: "#cc79a7",
    Kind.GRADIENT: _VERMILION,
    Kind.OUTPUT: "#009e73",
    Kind.SAVED: "#e69f00",
    Kind.UNSHARDED: "#003f63",
    Kind.COMMUNICATION: "#b15928",
    Kind.TEMPORARY: "#f0e442",
    Kind.WORKSPACE: "#6a51a3",
}
"""The colour of each kind of storage, on light and on dark."""


@dataclass(frozen=True)
class Shade:
    """A box's colour, and that of the text on it."""

    fill: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Palette:
    """All other colours, for one kind of screen."""

    page: str
    text: str
    muted: str
    """Text of less weight."""
    line: str
    """Axes, edges, and borders of boxes."""
    border: str
    """Borders of tables and sections."""
    grid: str
    panel: str
    """The background of a part of a page, and of a frame."""
    accent: str
    """The peak and the chosen plan, as lines or on a page."""
    peak: str
    """The border of the box that runs at the peak."""
    limit: str
    """A budget, a card's memory, and that a step does not fit it."""
    good: str
    link: str
    bar: str
    checkpoint: str
    """Border and heading of a checkpointed region."""
    shades: tuple[Shade, ...]
    """Of boxes, from nothing to most."""


LIGHT = Palette(
    page=_PAPER, text=_INK, muted="#555555", line="#666666", border="#c9c9c9", grid="#d9d9d9", panel="#f5f5f5",
    accent="#c04e00", peak=_VERMILION, limit="#a50f15", good="#1a6b3a", link="#0b5a94", bar=_BLUES[5],
    checkpoint="#00785a",
    shades=(Shade(_PAPER, _INK), *(Shade(blue, _INK) for blue in _BLUES[:5]), *(Shade(b, _PAPER) for b in _BLUES[5:])),
)  # fmt: skip
DARK = Palette(
    page=_NIGHT, text=_MOON, muted="#a8a8a8", line="#9a9a9a", border=_SLATE, grid=_SLATE, panel="#1e2127",
    accent=_ORANGE, peak=_ORANGE, limit="#ff7b72", good="#6fcf97", link="#7cc0f0", bar=_BLUES[4],
    checkpoint="#3ecf9f",
    shades=(
        Shade(_NIGHT, _MOON), Shade(_NIGHT_BLUES[0], _MOON), Shade(_NIGHT_BLUES[1], _SNOW),
        Shade(_NIGHT_BLUES[2], _SNOW), Shade(_NIGHT_BLUES[3], _PAPER),
        Shade(_BLUES[4], _INK), Shade(_BLUES[3], _INK), Shade(_BLUES[1], _INK),
    ),
)  # fmt: skip


def css_variables() -> str:
    """The colours as CSS variables of a page: `--text`, `--link` ... They are dark where the screen is."""
    return f":root{{{_variables(LIGHT)}}}@media screen and (prefers-color-scheme: dark){{:root{{{_variables(DARK)}}}}}"


def _variables(palette: Palette) -> str:
    names = (field.name for field in fields(palette) if field.name != "shades")
    return "".join(f"--{name}:{getattr(palette, name)};" for name in names)


# --- writing SVG documents: elements, style sheets, and text that fits without a font ---------------------------------


FONT = "Helvetica,Arial,'Liberation Sans','DejaVu Sans',sans-serif"

_NARROW, _WIDE = frozenset("iljftrI.,:;'|!()[]/ -"), frozenset("mwMW@%")
_BOLD = 1.1
"""Width of bold text over that of the same text in plain."""


# --- elements ---------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def element(tag: str, *content: str, **attributes: str | float | None) -> str:
    """An element.

    Args:
        tag: its name.
        content: what is inside it: elements, or text that is escaped already.
        attributes: their names with `_` for `-`, and `class_`; text is escaped, None and "" are left out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape_text(value) if isinstance(value, str) else number(value)}"'
        for name, value in attributes.items()
        if value is not None and value != ""
    )
    inside = "".join(content)
    return f"<{tag}{written}>{inside}</{tag}>" if inside else f"<{tag}{written}/>"


def group(*content: str, tooltip: str | Sequence[str] = "", **attributes: str | float | None) -> str:
    """A group of elements, with an optional tooltip: text, or lines of text."""
    return element("g", title(tooltip) if tooltip else "", *content, **attributes)


def title(words: str | Sequence[str]) -> str:
    """The tooltip of the element around it: text, or lines of text."""
    return element("title", "\n".join(map(escape_text, [words] if isinstance(words, str) else words)))


def escape_text(words: str) -> str:
    """Text as it may stand in an element or an attribute."""
    return escape(words if words.isprintable() else printable(words), quote=True)


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """A line of text. `x` is where it starts, or its middle or end if a class says so."""
    return element("text", escape_text(words), x=x, y=y, class_=classes)


def rect(x: float, y: float, width: float, height: float, classes: str = "", *, rx: float | None = None) -> str:
    """A rectangle; `rx` rounds its corners."""
    return element("rect", class_=classes, x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), rx=rx)


def circle(x: float, y: float, radius: float, classes: str, *, tooltip: str = "") -> str:
    """A circle around a point."""
    return element("circle", title(tooltip) if tooltip else "", class_=classes, cx=x, cy=y, r=radius)


def path(classes: str, *way: str | float, tooltip: str = "", **attributes: str | float | None) -> str:
    """A path of letters and coordinates: `path("axis", "M", 0, 5, "H", 90)`."""
    written: list[str] = []
    is_number = False
    for each in way:
        written.append(each if isinstance(each, str) else f"{' ' if is_number else ''}{number(each)}")
        is_number = not isinstance(each, str)
    return element("path", title(tooltip) if tooltip else "", class_=classes, d="".join(written), **attributes)


# --- documents --------------------------------------------------------------------------------------------------------


class StyleSheet(NamedTuple):
    """The style of one kind of document."""

    kind: str
    """Class of the outermost element, which every rule is bound to: the document can be pasted into a page."""
    css: str


def style_sheet(template: Path) -> StyleSheet:
    """The style of one kind of document: it is light, dark where the screen is dark, and light on paper.

    Args:
        template: the rules, each a line; after a line `/* colours */` those that name colours of a palette. Its stem
            gives the kind.
    """
    kind = f"fxmem-{template.stem}"
    rules, colors = template.read_text(encoding="utf-8").split("/* colours */\n")
    light, dark = (
        # The window around a document that is opened alone has the page's colour, too.
        f"svg.{kind}{{background:{palette.page}}}{_bind(kind, _fill_in(text, palette))}"
        for text, palette in ((rules + colors, LIGHT), (colors, DARK))
    )
    return StyleSheet(kind, f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}")


def _fill_in(rules: str, palette: Palette) -> list[str]:
    shades = (
        f".h{step} {what}{{fill:{color}}}"
        for step, shade in enumerate(palette.shades)
        for what, color in ((".shape", shade.fill), ("text", shade.text), (".amount", shade.text))
    )
    kinds = (f".{kind_class(kind)}{{fill:{color}}}" for kind, color in KINDS.items())
    several = {"font": FONT, "shades": "\n".join(shades), "kinds": "\n".join(kinds)}
    return Template(rules).substitute({**vars(palette), **several}).splitlines()


def kind_class(kind: str) -> str:
    """The class that gives an element the colour of a kind of storage."""
    return f"k-{kind}"


def document(
    style: StyleSheet,
    size: tuple[float, float],
    words: tuple[str, str],
    parts: Iterable[str],
    *,
    standalone: bool = True,
    **attributes: str | float | None,
) -> str:
    """Write a whole SVG document.

    Args:
        style: its style.
        size: width and height in pixels.
        words: title and description, for people who do not see it.
        parts: what is in it, each a line of the file.
        standalone: False where it becomes part of an HTML document.
        attributes: of the outermost element. If an `id` is among them, title and description have ids made from it.
    """
    width, height = size
    name = attributes.get("id")
    ids = (f"{name}-title", f"{name}-desc") if name else (None, None)
    inside = [
        element("title", escape_text(words[0]), id=ids[0]),
        element("desc", escape_text(words[1]), id=ids[1]),
        element("style", style.css),
        rect(0.0, 0.0, width, height, "page"),
        *parts,
    ]
    root: dict[str, str | float | None] = {
        "xmlns": "http://www.w3.org/2000/svg" if standalone else None,
        "class_": style.kind,
        "role": "img",
        "aria_labelledby": " ".join(each for each in ids if each),
        "width": width,
        "height": height,
        "viewBox": f"0 0 {number(width)} {number(height)}",
        **attributes,
    }
    return element("svg", *(f"\n{part}" for part in inside), "\n", **root) + "\n"


def _bind(kind: str, rules: Sequence[str]) -> str:
    bound = []
    for rule in rules:
        selectors, brace, body = rule.partition("{")
        bound.append(f".{kind} {selectors.replace(',', f',.{kind} ')}{brace}{body}")
    return "".join(bound)


# --- the width of text ------------------------------------------------------------------------------------------------


def text_width(words: str, size: float, *, bold: bool = False) -> float:
    """The width of text in pixels in DejaVu Sans, the widest usual font."""
    return sum(map(_em, words)) * size * (_BOLD if bold else 1.0)


def fit(words: str, size: float, width: float, *, bold: bool = False) -> str:
    """The text, its end replaced by an ellipsis where it is wider than `width` pixels."""
    if text_width(words, size, bold=bold) <= width:
        return words
    room = width / size / (_BOLD if bold else 1.0) - _em("…")
    kept = 0
    for char in words:
        room -= _em(char)
        if room < 0:
            break
        kept += 1
    return words[:kept].rstrip() + "…"


def wrap(words: str, size: float, width: float, *, lines: int, bold: bool = False) -> list[str]:
    """Break text at spaces into lines of at most `width` pixels. The last of at most `lines` is cut to fit."""
    done: list[str] = []
    line = ""
    parts = words.split(" ")
    for index, part in enumerate(parts):
        longer = f"{line} {part}" if line else part
        if line and text_width(longer, size, bold=bold) > width:
            if len(done) == lines - 1:
                return [*done, fit(" ".join([line, *parts[index:]]), size, width, bold=bold)]
            done.append(line)
            longer = part
        line = longer
    return [*done, fit(line, size, width, bold=bold)]


def _em(char: str) -> float:
    if char in _NARROW:
        return 0.38
    if char in _WIDE:
        return 0.98
    if char.isascii():
        return 0.70 if char.isupper() else 0.63
    return 1.0 if east_asian_width(char) in "WF" or char == "…" else 0.75


# --- a drawing as PNG or PDF, converted from its SVG by vl-convert ----------------------------------------------------
# Its wheel is complete (resvg and fonts), so that no library of the system is needed. It draws the SVG itself, with
# head and legend. It runs in a process of its own under a time limit.


Format = Literal["png", "pdf"]

TIME_LIMIT = 60.0
"""Seconds that the conversion may take."""
_ZOOM = 2.0
"""Pixels of a PNG to one of the SVG, so that it can be printed."""
_LONGEST = 32_000
"""Pixels of a PNG's side at most; many viewers refuse 32,768."""
_WORKER = """
import sys, vl_convert

convert = {"png": vl_convert.svg_to_png, "pdf": vl_convert.svg_to_pdf}[sys.argv[1]]
try:
    sys.stdout.buffer.write(convert(sys.stdin.buffer.read().decode(), scale=float(sys.argv[2])))
except Exception as error:
    sys.exit(str(error).partition("\\n")[0])  # a trace of its own code follows
"""
_MAGIC: dict[Format, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-"}


def require_image(form: str) -> None:
    """Check that a drawing can be written in this format here.

    Raises:
        UsageError: there is no such format.
        EnvironmentLacksError: vl-convert is not installed.
    """
    if form not in get_args(Format):
        raise UsageError(f"expected a format of {', '.join(get_args(Format))}; got {form!r}")
    if importlib.util.find_spec("vl_convert") is None:
        raise EnvironmentLacksError(
            f"expected vl-convert to write .{form}, which is not here: pip install 'fxmem[image]'. A .svg needs nothing"
        )


def convert(form: Format, drawing: str) -> bytes:
    """The bytes of a PNG, or of a one-page PDF, of a drawing as SVG.

    A PNG has two pixels to one of the SVG where it is not too long for that.

    Raises:
        UsageError: there is no such format.
        EnvironmentLacksError: the converter is not there.
        AnalysisError: it failed.
    """
    require_image(form)
    sides = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', drawing)
    zoom = min(_ZOOM, _LONGEST / max(map(float, sides.groups()))) if sides and form == "png" else 1.0
    command = [sys.executable, "-P", "-c", _WORKER, form, f"{zoom:.4f}"]
    failed = "answered what is none"
    try:
        done = subprocess.run(command, input=drawing.encode(), capture_output=True, timeout=TIME_LIMIT, check=False)
        if done.returncode == 0 and done.stdout.startswith(_MAGIC[form]):
            return done.stdout
        if done.returncode != 0:
            complaint = "".join(
                f": {line[:200]}" for line in done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            )
            failed = f"failed with exit code {done.returncode}{complaint}"
    except subprocess.TimeoutExpired:
        failed = f"took longer than {TIME_LIMIT:g} s"
    raise AnalysisError(f"expected a .{form}, but vl-convert {failed}; write .svg instead")
