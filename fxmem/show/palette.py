"""Every colour that fxmem shows, on light and on dark; none stands anywhere else.

Kinds of storage have Okabe and Ito's colours ("Color Universal Design", 2008), which differ in lightness as well as in
hue, with a grey for inputs and a violet for workspaces. The shades of a drawn graph are one hue that changes in
lightness alone, so that they read with any kind of colour vision and in grey: ColorBrewer's `Blues` (C. Brewer,
https://colorbrewer2.org), reversed on dark, where more has to mean brighter. Beside every colour stands the name or the
number it is for. Text has a contrast of at least 4.5 to what it is on (WCAG 2.1, 1.4.3).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fxmem.records.profile import Kind

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
