"""Memory by module at the peak, as an icicle: modules stand below their parents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxmem.memory.by_layer import Part, parts_at_peak
from fxmem.memory.module_tree import find_runs
from fxmem.records.profile import Kind, Peak, Profile, Timeline
from fxmem.records.units import exact_bytes, format_bytes, percent, to_words
from fxmem.show import facts
from fxmem.show.plots.xy_plot import EDGE, NARROWEST, ROW, SIZE, STYLE, heading, step_title
from fxmem.show.svg import document, fit, group, kind_class, rect, text, text_width

_HEIGHT = 30.0
"""Of a cell."""
_STRIP = 8.0
"""Of its foot, which shows the kinds."""
_NARROW = 4.0
"""Siblings narrower than this are drawn together, in cells at least `_TOGETHER` wide."""
_TOGETHER = 64.0
_NAMEABLE = 24.0
"""Room below which a name's beginning says nothing."""
_DEEPEST = 12
"""Levels drawn."""


@dataclass(frozen=True)
class _Cell:
    parts: tuple[Part, ...]
    """One, or several drawn together."""
    left: float
    width: float
    level: int

    @property
    def label(self) -> str:
        first, last = self.parts[0].label, self.parts[-1].label
        return first if len(self.parts) == 1 else f"{first} … {last}"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def by_kind(self) -> dict[Kind, int]:
        return {kind: nbytes for kind in Kind if (nbytes := sum(part.by_kind.get(kind, 0) for part in self.parts))}


def icicle_svg(
    profile: Profile, timeline: Timeline, *, width: float = 960.0, name: str = "fxmem-icicle", titled: bool = True
) -> str:
    """Plot what is alive at the peak by module, as one self-contained SVG document.

    A cell is as wide as its share; its foot is split by kind. Parameters count where they are first read, with their
    optimizer state. Equal siblings in a row, such as a model's layers, are one cell with the sum. What is
    too narrow to be seen is drawn together with its neighbours, and nothing is left out but levels below the twelfth.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
        width: of the document, in pixels, at least 280.
        name: the root's id.
        titled: whether to write the title into the picture.
    """
    width = max(width, NARROWEST)
    title = f"{step_title(profile)}: memory by module at the peak"
    parts, y = heading(title, EDGE, EDGE, width - 2 * EDGE) if titled else ([], EDGE)
    y += 8.0 if titled else 0.0
    root = _fold(parts_at_peak(profile, timeline))
    cells = list(_cells((root,), EDGE, width - 2 * EDGE, 0)) if root.nbytes else []
    nothing = text(EDGE, y + _HEIGHT / 2, "nothing is alive at the peak")
    parts += [_draw(cell, root.nbytes, y) for cell in cells] or [nothing]
    y += _HEIGHT * (max((cell.level for cell in cells), default=0) + 1)
    legend, y = _legend(timeline.peak, y + 6.0, width)
    shares = "; ".join(f"{cell.label} {percent(cell.nbytes, root.nbytes)}" for cell in cells if cell.level == 1)
    size: dict[str, Any] = {"width": None, "height": None} if titled else {}  # opened alone as large as the window
    return document(STYLE, (width, y + EDGE), (title, shares or "one part"), [*parts, *legend], id=name, **size)


def _fold(part: Part) -> Part:
    """The same tree with equal siblings in a row as one part."""
    inner = [_fold(child) for child in part.children]
    found: list[Part] = []
    for start, _, times in find_runs([_likeness(child) for child in inner]):
        run = inner[start : start + times]
        found.append(_sum(run, part.label) if times > 1 else run[0])
    return replace(part, children=tuple(found))


def _likeness(part: Part) -> Hashable:
    return (re.sub(r"\d+", "#", part.label), tuple(sorted(part.by_kind.items())), tuple(map(_likeness, part.children)))


def _sum(parts: Sequence[Part], around: str | None = None) -> Part:
    """The sum of parts; `around` names the part that they are a run in."""
    first, last = parts[0].label, parts[-1].label
    together = sum((part.by_kind for part in parts), Counter[Kind]())
    children = tuple(_sum(alike) for alike in zip(*(part.children for part in parts), strict=True))
    name = f"{around}.{first}" if around and first[:1].isdigit() else first
    label = first if around is None else f"{name}-{last} x{len(parts)}" if first != last else f"{first} x{len(parts)}"
    return Part(label, parts[0].module, together, children)


def _cells(parts: Sequence[Part], left: float, width: float, level: int) -> Iterator[_Cell]:
    yield _Cell(tuple(parts), left, width, level)
    if len(parts) > 1 or level + 1 >= _DEEPEST or not parts[0].nbytes:
        return
    scale = width / parts[0].nbytes
    rows: list[list[Part]] = []
    for part in (part for part in parts[0].children if part.nbytes):
        if rows and _joins(rows[-1], part, scale):
            rows[-1].append(part)
        else:
            rows.append([part])
    for row in rows:
        wide = sum(part.nbytes for part in row) * scale
        yield from _cells(row, left, wide, level + 1)
        left += wide


def _joins(row: Sequence[Part], part: Part, scale: float) -> bool:
    wide = sum(each.nbytes for each in row) * scale
    return part.nbytes * scale < _NARROW and row[-1].nbytes * scale < _NARROW and wide < _TOGETHER


def _draw(cell: _Cell, whole: int, top: float) -> str:
    y = top + _HEIGHT * cell.level
    wide = max(cell.width - (1.0 if cell.width > 2.0 else 0.0), 0.4)
    module = cell.parts[0].module if len(cell.parts) == 1 else ""
    place = f"{module} " if module and module != cell.label else ""
    split = [f"{to_words(kind)} {format_bytes(nbytes)}" for kind, nbytes in cell.by_kind.items()]
    several = [f"{len(cell.parts)} parts drawn together"] if len(cell.parts) > 1 else []
    tooltip = [f"{place}{cell.label}: {exact_bytes(cell.nbytes)}, {percent(cell.nbytes, whole)}", *several, *split]
    drawn = [rect(cell.left, y, wide, _HEIGHT - 2.0, "box")]
    x = cell.left
    for kind, nbytes in cell.by_kind.items():
        share = wide * nbytes / cell.nbytes
        if share >= 0.3:
            drawn.append(rect(x, y + _HEIGHT - 2.0 - _STRIP, share, _STRIP, kind_class(kind)))
        x += share
    words, room = f"{cell.label}, {format_bytes(cell.nbytes)}", wide - 8.0
    shown = words if text_width(words, SIZE) <= room else fit(cell.label, SIZE, room)
    if shown in (words, cell.label) or room >= _NAMEABLE:
        drawn.append(text(cell.left + 4.0, y + 14.0, shown))
    return group(*drawn, tooltip=tooltip, class_="cell", data_module=module, data_label=words)


def _legend(peak: Peak, y: float, width: float) -> tuple[list[str], float]:
    parts: list[str] = []
    x = EDGE
    for share in facts.split(peak):
        words = f"{share.name} {format_bytes(share.nbytes)}, {share.percent}"
        size = text_width(words, SIZE) + 40.0
        if x > EDGE and x + size > width - EDGE:
            x, y = EDGE, y + ROW
        parts.append(rect(x, y + 4.0, 16.0, 10.0, f"swatch {kind_class(share.kind)}"))
        parts.append(text(x + 22.0, y + 13.0, fit(words, SIZE, width - x - 24.0)))
        x += size
    return parts, y + ROW
