"""How wide text is, without a font at hand, and how to make it fit."""

from __future__ import annotations

from unicodedata import east_asian_width

__all__ = ["fit", "text_width", "wrap"]

_NARROW, _WIDE = frozenset("iljftrI.,:;'|!()[]/ -"), frozenset("mwMW@%")


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Width in pixels, rounded up to that of the widest of the usual sans-serif fonts (DejaVu Sans)."""
    return sum(map(_em, text)) * size * (1.1 if bold else 1.0)


def fit(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """The text, its end replaced by an ellipsis where it is wider than `width` pixels."""
    if text_width(text, size, bold=bold) <= width:
        return text
    room = width / size / (1.1 if bold else 1.0) - _em("…")
    kept = 0
    for char in text:
        room -= _em(char)
        if room < 0:
            break
        kept += 1
    return text[:kept].rstrip() + "…"


def wrap(text: str, size: float, width: float, *, lines: int, bold: bool = False) -> list[str]:
    """The text in lines of at most `width` pixels, broken at spaces, the last of at most `lines` cut short if need
    be."""
    done: list[str] = []
    line = ""
    words = text.split(" ")
    for index, word in enumerate(words):
        longer = f"{line} {word}" if line else word
        if line and text_width(longer, size, bold=bold) > width:
            if len(done) == lines - 1:
                return [*done, fit(" ".join([line, *words[index:]]), size, width, bold=bold)]
            done.append(line)
            longer = word
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
