"""A memory snapshot as one HTML page, without a script."""

from __future__ import annotations

from fxmem.records.snapshot import Holder, SnapshotReport
from fxmem.records.units import format_bytes
from fxmem.show.html.page import fill_page
from fxmem.show.html.sections import draw_views
from fxmem.show.plots import history_svg, segments_svg
from fxmem.show.sections import TableColumn, make_table, numbers
from fxmem.show.snapshot_facts import UNKNOWN, count_blocks, hold_table, snapshot_facts


def snapshot_html(report: SnapshotReport, source: str) -> str:
    """Write the page of a snapshot.

    Args:
        report: what it says.
        source: the file that it was read from.
    """
    title = f"Memory of a card: {source}"
    heads = [
        TableColumn("Blocks in segments that are mostly unused, by line", is_head=True),
        *numbers("Blocks", "Bytes", "Unused around them"),
    ]
    rows = (
        [each.place or UNKNOWN, f"{each.count:,}", format_bytes(each.nbytes), format_bytes(each.free_bytes)]
        for each in report.in_the_way
    )
    return fill_page(
        "explanation",
        f"Read from {source}",
        title=title,
        heading=title,
        sections={
            "summary": "Summary",
            "history": "Bytes over the history",
            "lines": "Alive at the peak, by line",
            "stacks": "Alive at the peak, by stack",
            "segments": "Segments at the end",
        },
        facts=snapshot_facts(report),
        history=draw_views(lambda size, width: history_svg(report, width=width, name=f"history-{size}")),
        lines=hold_table(report, report.lines),
        stacks=[(_describe(each), each.frames or (UNKNOWN,)) for each in report.stacks],
        segments=draw_views(lambda size, width: segments_svg(report, width=width, name=f"segments-{size}")),
        in_the_way=make_table("In the way", heads, rows) if report.in_the_way else None,
    )


def _describe(holder: Holder) -> str:
    return f"{format_bytes(holder.nbytes)} in {count_blocks(holder.count)}: {holder.place or UNKNOWN}"
