"""A profile as one self-contained HTML fragment, for notebooks: the table, and the folded drawing beneath it.

No script and nothing loaded from elsewhere. Text takes the colour of the page around it, so that it reads on light and
on dark; colours of the bar differ in lightness as well as in hue (Okabe and Ito's palette) and each part carries its
name. Everything that comes from the model is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

from fxmem.memory import facts as findings
from fxmem.memory.module_rows import Row, module_rows, step_rows, total_row, visible
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes, percent, printable, short_bytes
from fxmem.show.graph import DrawingOptions, render
from fxmem.show.palette import KINDS, LIGHT

__all__ = ["html"]

_MOST_ROWS = 1000
"""Rows in the tree at most; beyond, its deepest levels are left out."""
_MOST_NODES = 5000
"""Nodes that a drawing is made of at most: a cell's output has to come at once."""
_MOST_BOXES = 60
_MOST_CHARACTERS = 300_000
"""Of a drawing; a notebook keeps every output in its file."""

_STYLE = """
.fxmem{color:inherit;font:13px/1.5 system-ui,sans-serif;max-width:75em}
.fxmem table{border-collapse:collapse;background:none;color:inherit;margin:.4em 0}
.fxmem th,.fxmem td{text-align:left;vertical-align:top;padding:0 1.2em 0 0;border:0;background:none;color:inherit}
.fxmem .r{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.fxmem .row{display:grid;grid-template-columns:minmax(12em,1fr) repeat(5,6.2em);\
border-bottom:1px solid rgba(128,128,128,.25);padding:.1em 0}
.fxmem details details,.fxmem details .leaf{margin-left:1.2em}
.fxmem summary.row{cursor:pointer}
.fxmem summary.row .n::before{content:"+ "}
.fxmem details[open]>summary.row .n::before{content:"- "}
.fxmem .n{overflow-wrap:anywhere}
.fxmem small{opacity:.75}
.fxmem .graph{overflow:auto;max-height:40em}
.fxmem .split{display:block;margin:.4em 0}
.fxmem .split text{font:12px system-ui,sans-serif;stroke-width:2.5px;paint-order:stroke}
.fxmem .swatch{display:inline-block;width:.8em;height:.8em;border:1px solid currentColor;margin-right:.4em}
"""


def html(profile: Profile, timeline: Timeline) -> str:
    """The report as an HTML fragment: the peak and what it is made of, and the tree of modules to unfold.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
    """
    _, fitting = findings.fits(profile, timeline.peak)
    facts = [
        *findings.header_facts(profile),
        *findings.peak_facts(profile, timeline.peak),
        *findings.total_facts(profile),
        ("Memory", fitting),
    ]
    parts = [
        f"<style>{_STYLE}</style>",
        _table(facts),
        _bar(timeline),
        _shares(timeline),
        _tree(profile, timeline),
        _section("Largest alive at the peak", _largest(profile, timeline)),
        _section("Assumed", _list(findings.assumptions(profile))) if profile.assumptions else "",
        _section("Unknown", _list(findings.unknowns(profile))) if profile.unknowns else "",
        _graph(profile, timeline),
    ]
    return f'<div class="fxmem">{"".join(parts)}</div>'


def _table(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in facts)
    return f"<table>{rows}</table>"


def _bar(timeline: Timeline) -> str:
    whole = timeline.peak.requested_bytes
    shares = findings.split(timeline.peak)
    drawn: list[str] = []
    start = 0.0
    for share in shares:
        wide = 100 * share.nbytes / whole
        title = f"<title>{escape(f'{share.name}: {format_bytes(share.nbytes)}, {share.percent}')}</title>"
        part = (
            f'<rect x="{start:.3f}%" y="1" width="{wide:.3f}%" height="26" fill="{KINDS[share.kind]}" '
            f'stroke="currentColor"/>'
        )
        name = (
            f'<text x="{start + wide / 2:.3f}%" y="18" text-anchor="middle" '
            f'fill="{LIGHT.page}" stroke="{LIGHT.text}">{escape(share.name)}</text>'
            if wide >= 12
            else ""
        )
        drawn.append(f"<g>{title}{part}{name}</g>")
        start += wide
    spoken = "; ".join(f"{share.name} {share.percent}" for share in shares)
    return (
        f'<svg class="split" role="img" aria-label="{escape("The peak by kind: " + spoken)}" width="100%" '
        f'height="28">{"".join(drawn)}</svg>'
    )


def _shares(timeline: Timeline) -> str:
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{KINDS[share.kind]}"></span>{escape(share.name)}</td>'
        f'<td class="r">{format_bytes(share.nbytes)}</td><td class="r">{escape(share.percent)}</td></tr>'
        for share in findings.split(timeline.peak)
    )
    return f"<table>{rows}</table>"


def _tree(profile: Profile, timeline: Timeline) -> str:
    model = module_rows(profile, timeline)
    rest = step_rows(profile, timeline)
    rows = _affordable(model, worth=max(timeline.peak.requested_bytes // 100, 1))
    rows += rest
    head = (
        '<div class="row"><b>Module</b>'
        + "".join(f'<b class="r">{title}</b>' for title in ("Params", "Output", "Saved", "At peak", "Share"))
        + "</div>"
    )
    whole = timeline.peak.requested_bytes
    total = f'<div class="row">{_figures(total_row([model[0], *rest]), whole)}</div>'
    return f"{head}{''.join(_nested(rows, whole))}{total}"


def _affordable(model: Sequence[Row], worth: int) -> list[Row]:
    rows = visible(model, depth=None, worth=worth)
    depth = max(row.depth for row in rows)
    while len(rows) > _MOST_ROWS and depth > 1:
        depth -= 1
        rows = visible(model, depth=depth, worth=worth)
    return rows


def _nested(rows: Sequence[Row], whole: int) -> Iterator[str]:
    """Rows that have others below them become `<details>`, closed again when the level falls back."""
    for row, following in pairwise([*rows, rows[0]]):
        if following.depth > row.depth:
            yield f'<details{" open" if row.depth < 2 else ""}><summary class="row">{_figures(row, whole)}</summary>'
        else:
            yield f'<div class="row leaf">{_figures(row, whole)}</div>'
            yield "</details>" * (row.depth - following.depth)


def _figures(row: Row, whole: int) -> str:
    figures = row.figures
    kind = f" <small>{escape(printable(row.type_name))}</small>" if row.type_name else ""
    cells = [
        *(short_bytes(n) for n in (figures.params, figures.output, figures.saved, figures.at_peak)),
        percent(figures.at_peak, whole),
    ]
    return f'<span class="n">{escape(printable(row.title))}{kind}</span>' + "".join(
        f'<span class="r">{escape(cell)}</span>' for cell in cells
    )


def _graph(profile: Profile, timeline: Timeline) -> str:
    """The annotated graph, where it is small; laid out by the built-in renderer, which needs nothing installed and
    always ends."""
    if len(profile.nodes) > _MOST_NODES:
        return ""
    # A notebook shows several drawings in one document, where their ids would meet.
    options = DrawingOptions(renderer="plain", max_boxes=_MOST_BOXES, standalone=False)
    svg = render(profile, timeline, options).svg
    if len(svg) > _MOST_CHARACTERS:
        return ""
    return _section("Graph", f'<div class="graph">{svg}</div>')


def _largest(profile: Profile, timeline: Timeline) -> str:
    rows = ""
    for tensor in findings.largest_alive(profile, timeline):
        cells = (tensor.kind, tensor.tensor, tensor.owner + tensor.more, tensor.source)
        rows += (
            f"<tr><td "
            f'class="r">{format_bytes(tensor.nbytes)}</td>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        )
    return f"<table>{rows}</table>"


def _list(texts: Iterable[str]) -> str:
    return f"<ol>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ol>"


def _section(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
