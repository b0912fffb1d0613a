"""`fxmem report`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from fxmem.cli.options import OPEN, OVERLAYS, SUBJECT, drawing
from fxmem.cli.output import check_file, write_file
from fxmem.cli.parser import argument
from fxmem.cli.step import read_budget, read_planned_step
from fxmem.cli.verbs.timeline import load_after
from fxmem.errors import UsageError

BRIEF = "one HTML page with everything, for others to read"
DESCRIPTION = (
    "Write the timeline, the graph, every node and every tensor at the peak as one self-contained HTML "
    "page; of a report, needs no torch. Of a memory snapshot (torch.cuda.memory._dump_snapshot), what it says."
)

EXAMPLES = (
    "fxmem report report.json -o report.html --open",
    "fxmem report snapshot.pickle -o snapshot.html",
)

ARGUMENTS = (
    *SUBJECT,
    argument("-o", "--output", required=True, metavar="FILE.html", help="what to write"),
    OPEN,
    *OVERLAYS,
    drawing("about how many boxes the graph shows at first; 0 leaves it out"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem report`; return the exit code and the text for stdout."""
    from fxmem.memory.allocator import read_settings
    from fxmem.memory.snapshots import is_pickle
    from fxmem.show.html import PageOptions, report_html

    check_file(options, "--output", options.output, (".html", ".htm"))
    if options.model is not None and is_pickle(Path(options.model)):
        _write_snapshot(options)
        return 0, ""
    if options.max_boxes < 0:
        raise UsageError(f"expected --max-boxes of at least 0, got {options.max_boxes}")
    budget = read_budget(options)
    plan, report, timeline = read_planned_step(options, goes_on=True)
    page = PageOptions(
        budget_bytes=None if budget is None else budget.resolve(timeline.peak.counted_bytes).nbytes,
        plan=plan,
        after=load_after(options, report),
        graph=options.max_boxes > 0,
        max_boxes=max(options.max_boxes, 1),
        settings=read_settings(os.environ),
    )
    write_file(options, options.output, report_html(report, timeline, page))
    return 0, ""


def _write_snapshot(options: argparse.Namespace) -> None:
    from fxmem.memory.snapshots import read_dump, report_dump
    from fxmem.show.html import snapshot_html

    if options.plan is not None or options.budget is not None or options.after is not None:
        raise UsageError("expected --plan, --budget and --after with a report or a model, got a memory snapshot")
    report = report_dump(read_dump(Path(options.model)))
    write_file(options, options.output, snapshot_html(report, Path(options.model).name))
