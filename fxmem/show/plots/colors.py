"""Colours of plots and pages. A kind of storage has one colour wherever fxmem draws it.

Okabe and Ito's palette ("Color Universal Design", 2008), whose colours differ in lightness as well as in hue, with a
grey for inputs and a violet for workspaces. Beside every colour stands the name and the number it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.records.profile import Kind

__all__ = ["DARK", "KINDS", "LIGHT", "Theme"]

KINDS: dict[Kind, str] = {
    Kind.PARAMETER: "#0072b2",
    Kind.BUFFER: "#56b4e9",
    Kind.INPUT: "#999999",
    Kind.OPTIMIZER_STATE: "#cc79a7",
    Kind.GRADIENT: "#d55e00",
    Kind.OUTPUT: "#009e73",
    Kind.SAVED: "#e69f00",
    Kind.TEMPORARY: "#f0e442",
    Kind.WORKSPACE: "#6a51a3",
}


@dataclass(frozen=True)
class Theme:
    """Everything on a plot that is not a kind of storage."""

    page: str
    text: str
    muted: str
    """Text of less weight."""
    line: str
    """Axes and borders."""
    grid: str
    accent: str
    """The peak, the chosen plan."""
    limit: str
    """A budget, a card's memory."""
    after: str
    """What a plan makes of it."""


LIGHT = Theme(
    page="#ffffff",
    text="#111111",
    muted="#555555",
    line="#666666",
    grid="#d9d9d9",
    accent="#c04e00",
    limit="#a50f15",
    after="#111111",
)
DARK = Theme(
    page="#16181d",
    text="#e8e8e8",
    muted="#a8a8a8",
    line="#9a9a9a",
    grid="#3a3e46",
    accent="#ff8c3a",
    limit="#ff7b72",
    after="#f2f2f2",
)
