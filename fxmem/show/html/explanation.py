"""A memory snapshot as one HTML page, without a script."""

from __future__ import annotations

from pathlib import PurePath

from fxmem.records.explanation import Explanation
from fxmem.records.snapshot import Holder
from fxmem.records.units import format_bytes
from fxmem.show.html.page import fill_page
from fxmem.show.html.sections import draw_views
from fxmem.show.plots import history_svg, segments_svg
from fxmem.show.reproduction_facts import joined_facts, joined_table
from fxmem.show.sections import TableColumn, make_table, numbers
from fxmem.show.snapshot_facts import UNKNOWN, count_blocks, hold_table, snapshot_facts


def snapshot_html(explanation: Explanation) -> str:
    """Write the page of a snapshot, and of its program under prediction where there is one."""
    report, source, about = explanation.snapshot, PurePath(explanation.source).name, explanation.reproduction
    assert report is not None
    title = f"Memory of a card: {source}"
    heads = [
        TableColumn("Blocks in segments that are mostly unused, by line", is_head=True),
        *numbers("Blocks", "Bytes", "Unused around them"),
    ]
    rows = (
        [each.place or UNKNOWN, f"{each.count:,}", format_bytes(each.nbytes), format_bytes(each.free_bytes)]
        for each in report.in_the_way
    )
    alive = "Alive at the peak" if report.events else "Alive"
    sections = {
        "summary": "Summary",
        "history": "Bytes over the history" if report.events else "",
        "lines": f"{alive}, by line",
        "joined": "" if about is None else "Beside the prediction",
        "stacks": f"{alive}, by stack",
        "segments": "Segments at the end",
    }
    return fill_page(
        "explanation",
        f"Read from {source}",
        title=title,
        heading=title,
        sections={name: heading for name, heading in sections.items() if heading},
        facts=snapshot_facts(report),
        history=draw_views(lambda size, width: history_svg(report, width=width, name=f"history-{size}")),
        lines=hold_table(report, report.lines),
        joined=None if about is None else (joined_facts(about), joined_table(about.lines)),
        stacks=[(_describe(each), each.frames or (UNKNOWN,)) for each in report.stacks],
        segments=draw_views(lambda size, width: segments_svg(report, width=width, name=f"segments-{size}")),
        in_the_way=make_table("In the way", heads, rows) if report.in_the_way else None,
    )


def _describe(holder: Holder) -> str:
    return f"{format_bytes(holder.nbytes)} in {count_blocks(holder.count)}: {holder.place or UNKNOWN}"
