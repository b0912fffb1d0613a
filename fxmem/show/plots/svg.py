"""What all plots share: elements, a scale of bytes, labels kept apart, and the style.

No script and nothing loaded from elsewhere. Colours are classes, so that one plot serves light, dark and paper; every
rule is bound to the class of the outermost element, so that a plot can be pasted into a page. Everything that comes
from the model goes through `safe`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from fxmem.records.profile import Profile
from fxmem.records.units import printable
from fxmem.show.plots.colors import DARK, KINDS, LIGHT, Theme
from fxmem.show.text_width import fit, wrap

__all__ = [
    "SIZE",
    "STYLE",
    "document",
    "heading",
    "kind_class",
    "n",
    "rect",
    "safe",
    "spread",
    "step_title",
    "steps",
    "text",
]

SIZE = 11.0
"""Height of the letters, in pixels."""
_TITLE = 15.0

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def n(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def safe(words: str) -> str:
    """Text as it may stand in XML, in an attribute too."""
    return escape(printable(words), quote=True)


def text(x: float, y: float, words: str, classes: str = "", *, room: float | None = None) -> str:
    """A line of text; its end is cut where it is wider than `room`."""
    shown = words if room is None else fit(words, SIZE, room)
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{n(x)}" y="{n(y)}"{kind}>{safe(shown)}</text>'


def rect(x: float, y: float, width: float, height: float, classes: str) -> str:
    """A rectangle."""
    return (
        f'<rect class="{classes}" x="{n(x)}" y="{n(y)}" width="{n(max(width, 0.0))}" height="{n(max(height, 0.0))}"/>'
    )


def heading(title: str, left: float, top: float, width: float) -> tuple[list[str], float]:
    """The title in at most two lines, and where it ends."""
    parts = []
    for line in wrap(title, _TITLE, width, lines=2, bold=True):
        top += _TITLE + 2.0
        # A word alone may be wider than the line.
        parts.append(text(left, top, fit(line, _TITLE, width, bold=True), "title"))
    return parts, top


def document(name: str, width: float, height: float, title: str, description: str, parts: Sequence[str]) -> str:
    """A whole SVG document, `name` being its id and the start of those of its title and description."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{name}" class="fxmem-plot" role="img" '
            f'aria-labelledby="{name}-title {name}-desc"'
            f' width="{n(width)}" height="{n(height)}" viewBox="0 0 {n(width)} {n(height)}">',
            f'<title id="{name}-title">{safe(title)}</title>',
            f'<desc id="{name}-desc">{safe(description)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{n(width)}" height="{n(height)}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def kind_class(kind: str) -> str:
    """The class that gives an element the colour of a kind of storage."""
    return f"k-{kind}"


def steps(highest: int, most: int = 6) -> list[tuple[int, str]]:
    """Round numbers of bytes from 0 up to `highest`, at most `most` of them above 0, and how they are written."""
    unit, name = next(((size, name) for size, name in _UNITS if highest >= size), _UNITS[-1])
    if highest <= 0:
        return [(0, "0")]
    power = 10.0 ** math.floor(math.log10(highest / unit / most))
    step = next(step for factor in (1, 2, 5, 10, 20) if (step := factor * power) * most >= highest / unit)
    # Of bytes there are no fractions.
    step = step if unit > 1 else max(math.ceil(step), 1)
    return [
        (0, "0"),
        *(
            (round(step * index * unit), f"{step * index:g} {name}")
            for index in range(1, math.floor(highest / unit / step) + 1)
        ),
    ]


def spread(places: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres of labels of these sizes, as near as may be to these places, in their order, none over another and all
    within `[low, high]`.

    Where there is not room for all, they overlap evenly at the upper end.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    found = list(places)
    edge = low
    for index in order:
        found[index] = max(found[index], edge + sizes[index] / 2)
        edge = found[index] + sizes[index] / 2
    edge = high
    for index in reversed(order):
        found[index] = min(found[index], edge - sizes[index] / 2)
        edge = found[index] - sizes[index] / 2
    return found


def step_title(profile: Profile) -> str:
    """What a plot is of, in one line."""
    return printable(
        f"{profile.model}: {'training' if profile.step.mode == 'train' else 'inference'} step on {profile.target.name}"
    )


def _theme(theme: Theme) -> list[str]:
    return [
        f".page{{fill:{theme.page}}}", f"text{{fill:{theme.text}}}", f".muted{{fill:{theme.muted}}}",
        f".grid{{stroke:{theme.grid}}}",
        f".axis{{stroke:{theme.line}}}", f".halo{{stroke:{theme.page}}}", f".total{{stroke:{theme.text}}}",
        f".shade{{fill:{theme.text}}}", f".peak{{stroke:{theme.accent}}}",
        f".dot{{fill:{theme.accent};stroke:{theme.page}}}",
        f".limit{{stroke:{theme.limit}}}", f".held{{stroke:{theme.text}}}", f".after{{stroke:{theme.after}}}",
        f".swatch{{stroke:{theme.line}}}",
        f".box{{fill:{theme.page};stroke:{theme.line}}}", f".hollow{{fill:{theme.page};stroke:{theme.line}}}",
        f".bar{{fill:{theme.grid}}}",
    ]  # fmt: skip


_FIXED = [
    f"text{{font:{SIZE:g}px Helvetica,Arial,'Liberation Sans','DejaVu Sans',sans-serif}}",
    f".title{{font-size:{_TITLE:g}px;font-weight:bold}}", ".strong{font-weight:bold}", ".end{text-anchor:end}",
    ".middle{text-anchor:middle}",
    ".halo{paint-order:stroke;stroke-width:3;stroke-linejoin:round}",
    ".grid,.axis,.peak,.limit,.held,.total,.after{fill:none;stroke-width:1;shape-rendering:crispEdges}",
    ".total{stroke-width:.8;stroke-opacity:.75;shape-rendering:auto}", ".after{stroke-width:1.5;shape-rendering:auto}",
    ".peak{stroke-width:1.5;stroke-dasharray:2 2}", ".limit{stroke-width:1.5;stroke-dasharray:8 3}",
    ".join{fill:none;stroke-width:1}",
    ".allocated{stroke-dasharray:5 3}", ".reserved{stroke-dasharray:1 3;stroke-width:2}",
    ".forward{fill-opacity:0}", ".backward{fill-opacity:.05}", ".optimizer{fill-opacity:.12}", ".dot{stroke-width:1.5}",
    ".swatch{stroke-width:.6}",
    *(f".{kind_class(kind)}{{fill:{color}}}" for kind, color in KINDS.items()),
]  # fmt: skip


def _bound(rules: Sequence[str]) -> str:
    """Every selector of the rules bound to a plot."""
    found = []
    for rule in rules:
        selectors, brace, body = rule.partition("{")
        found.append(".fxmem-plot " + selectors.replace(",", ",.fxmem-plot ") + brace + body)
    return "".join(found)


STYLE = _bound([*_FIXED, *_theme(LIGHT)]) + f"@media screen and (prefers-color-scheme:dark){{{_bound(_theme(DARK))}}}"
"""One style sheet for every plot; on paper it is light."""
