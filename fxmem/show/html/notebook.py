"""A profile as one self-contained HTML fragment for notebooks: the table and the drawing.

No script and nothing loaded from elsewhere. Text takes the colour of the page around it, so that it reads on light and
on dark; each part of the bar carries its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fxmem.memory.by_layer import Row, module_rows, select_rows, step_rows, total_row
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes, percent, short_bytes
from fxmem.show import facts
from fxmem.show.graph import DrawingOptions, render
from fxmem.show.html.page import fill_template
from fxmem.show.html.tables import largest_table
from fxmem.show.plan_facts import finding_facts
from fxmem.show.run_facts import made_up, run_facts
from fxmem.show.svg import LIGHT

_MOST_ROWS = 1000
"""Rows in the tree at most; beyond, its deepest levels are left out."""
_MOST_NODES = 5000
"""Nodes that a drawing is made of at most: a cell's output has to come at once."""
_MOST_CHARACTERS = 300_000
"""Of a drawing; a notebook keeps every output in its file."""


class TreeRow(NamedTuple):
    """A row of the tree of modules."""

    title: str
    type_name: str
    cells: Sequence[str]
    depth: int = 0
    has_children: bool = False
    closes: int = 0
    """Rows around it that end with it."""


def notebook_html(profile: Profile, timeline: Timeline) -> str:
    """Write the report as an HTML fragment, with the tree of modules to unfold.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
    """
    model, rest = module_rows(profile, timeline), step_rows(profile, timeline)
    whole = timeline.peak.requested_bytes
    found = [*facts.header_facts(profile), *run_facts(profile), *facts.peak_facts(profile, timeline.peak)]
    return fill_template(
        "notebook",
        facts=[*found, *finding_facts(profile, timeline), *facts.outcome_facts(profile, timeline.peak)],
        palette=LIGHT,
        bar=list(_bar(timeline)),
        shares=facts.share_table(timeline.peak),
        rows=list(_tree_rows([*_affordable_rows(model, max(whole // 100, 1)), *rest], whole)),
        total=_tree_row(total_row([model[0], *rest]), whole),
        largest=largest_table(profile, timeline),
        assumptions=[*facts.assumptions(profile), *made_up(profile)],
        unknowns=facts.unknowns(profile),
        graph=_draw_graph(profile, timeline),
    )


def _bar(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Each kind's part of the bar; its place and width are percent of the whole."""
    start = 0.0
    for share in facts.split(timeline.peak):
        width = 100 * share.nbytes / timeline.peak.requested_bytes
        tooltip = f"{share.name}: {format_bytes(share.nbytes)}, {share.percent}"
        spoken = f"{share.name} {share.percent}"
        yield {**share._asdict(), "tooltip": tooltip, "spoken": spoken, "start": start, "width": width}
        start += width


def _affordable_rows(model: Sequence[Row], worth: int) -> list[Row]:
    rows = select_rows(model, depth=None, worth=worth)
    depth = max(row.depth for row in rows)
    while len(rows) > _MOST_ROWS and depth > 1:
        depth -= 1
        rows = select_rows(model, depth=depth, worth=worth)
    return rows


def _tree_rows(rows: Sequence[Row], whole: int) -> Iterator[TreeRow]:
    for row, following in pairwise([*rows, rows[0]]):
        has_children = following.depth > row.depth
        closes = max(row.depth - following.depth, 0)
        yield _tree_row(row, whole)._replace(depth=row.depth, has_children=has_children, closes=closes)


def _tree_row(row: Row, whole: int) -> TreeRow:
    figures = row.figures
    cells = map(short_bytes, (figures.params, figures.output, figures.saved, figures.at_peak))
    return TreeRow(row.title, row.type_name, [*cells, percent(figures.at_peak, whole)])


def _draw_graph(profile: Profile, timeline: Timeline) -> str | None:
    """Draw the annotated graph, where it is small. The built-in layout needs nothing installed and always ends."""
    if len(profile.nodes) > _MOST_NODES:
        return None
    svg = render(profile, timeline, DrawingOptions(standalone=False)).svg
    return svg if len(svg) <= _MOST_CHARACTERS else None
