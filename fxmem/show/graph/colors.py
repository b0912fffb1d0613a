"""Colours of a drawn graph, on light and on dark.

The ramp is one hue that changes in lightness alone, so that it reads with any kind of colour vision and in grey:
ColorBrewer's `Blues` (C. Brewer, https://colorbrewer2.org), turned round on dark, where more has to mean brighter. The
peak has Okabe and Ito's vermilion besides its border and its words; a checkpointed region a shade of their bluish
green, besides its dashes and its words. On every shade the text has a contrast of at least 4.5 (WCAG 2.1, 1.4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DARK", "LIGHT", "Palette", "Shade"]


@dataclass(frozen=True)
class Shade:
    """A box's colour and that of the text on it."""

    fill: str
    text: str


@dataclass(frozen=True)
class Palette:
    """All colours of one form of the drawing."""

    page: str
    text: str
    muted: str
    """Text of less weight."""
    line: str
    """Edges and borders."""
    frame: str
    bar: str
    peak: str
    checkpoint: str
    """Border and heading of a checkpointed region."""
    shades: tuple[Shade, ...]
    """From none to most."""


_INK, _PAPER = "#111111", "#ffffff"

LIGHT = Palette(
    page=_PAPER, text=_INK, muted="#555555", line="#666666", frame="#f5f5f5", bar="#2171b5", peak="#d55e00",
    checkpoint="#00785a",
    shades=(
        Shade(_PAPER, _INK), Shade("#eff3ff", _INK), Shade("#deebf7", _INK), Shade("#c6dbef", _INK),
        Shade("#9ecae1", _INK), Shade("#6baed6", _INK),
        Shade("#2171b5", _PAPER), Shade("#084594", _PAPER),
    ),
)  # fmt: skip
DARK = Palette(
    page="#16181d", text="#e8e8e8", muted="#a8a8a8", line="#9a9a9a", frame="#1e2127", bar="#6baed6", peak="#ff8c3a",
    checkpoint="#3ecf9f",
    shades=(
        Shade("#16181d", "#e8e8e8"), Shade("#17222f", "#e8e8e8"), Shade("#152c47", "#f2f2f2"),
        Shade("#12396b", "#f2f2f2"), Shade("#1f5a96", "#ffffff"),
        Shade("#6baed6", _INK), Shade("#9ecae1", _INK), Shade("#deebf7", _INK),
    ),
)  # fmt: skip
