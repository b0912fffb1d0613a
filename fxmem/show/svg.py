"""Writing SVG documents: elements, style sheets, and text that fits without a font.

No script, and nothing loaded from elsewhere. Text is escaped here, so that no name of a model can end an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple
from unicodedata import east_asian_width

from fxmem.records.units import printable
from fxmem.show.palette import DARK, KINDS, LIGHT, Palette

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
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
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
    lines = [words] if isinstance(words, str) else words
    return element("title", "\n".join(map(escape_text, lines)))


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


def _attribute(value: str | float) -> str:
    return escape_text(value) if isinstance(value, str) else number(value)


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
