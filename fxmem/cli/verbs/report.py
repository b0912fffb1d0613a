"""A page: everything in one HTML file, for others to read.

Write the timeline, the graph, every node and every tensor at the peak as one self-contained HTML page; of a report,
needs no torch. Of a memory snapshot (torch.cuda.memory._dump_snapshot), what it says.

    fxmem report report.json -o report.html --open
    fxmem report snapshot.pickle -o snapshot.html
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import OPEN, OVERLAYS, SUBJECT, drawing
from fxmem.cli.output import check_file, write_file, write_page
from fxmem.cli.parser import argument
from fxmem.cli.progress import Progress
from fxmem.cli.step import is_report, read_budget, read_planned_step
from fxmem.cli.verbs.graph import load_after
from fxmem.errors import UsageError

if TYPE_CHECKING:
    from fxmem.records.advice import Advice
    from fxmem.simulation.code.profiled_step import ProfiledStep

ARGUMENTS = (
    *SUBJECT,
    argument("-o", "--output FILE.html", required=True, help="what to write"),
    OPEN,
    *OVERLAYS,
    argument(
        "--advice ADVICE.json",
        help="what `fxmem advise --json` wrote: its best changes stand on top (default: those of one line, tried here "
        "where it is a model)",
    ),
    drawing("about how many boxes the graph shows at first; 0 leaves it out"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem report`; return the exit code and the text for stdout."""
    from fxmem.memory import report_reader
    from fxmem.memory.snapshots import is_pickle

    check_file(options, "--output", options.output, (".html", ".htm"))
    if options.model is not None and is_pickle(Path(options.model)):
        _write_snapshot(options)
        return 0, ""
    budget = read_budget(options)
    advice = None if options.advice is None else report_reader.load_advice(Path(options.advice))
    step, report, timeline, plan = read_planned_step(options, goes_on=True)
    if advice is None:
        advice = _try_changes(options, step)
    elif (advice.inputs, advice.target.name) != (report.inputs, report.target.name):
        raise UsageError(f"expected --advice to be about this step, got {options.advice!r}, which is about another")
    write_page(
        *(options, options.output, report, timeline),
        budget_bytes=None if budget is None else budget.resolve(timeline.peak.counted_bytes).nbytes,
        plan=plan,
        after=load_after(options, report),
        advice=advice,
        graph=options.max_boxes > 0,
        max_boxes=max(options.max_boxes, 1),
    )
    return 0, ""


def _try_changes(options: argparse.Namespace, step: ProfiledStep) -> Advice | None:
    """Try what is changed in a line; None where the step does not run again, or would run for long."""
    is_program = options.run_program is not None
    if is_program or is_report(options.model) or options.mode == "generate" or options.compile or not step.profile.ops:
        return None
    from fxmem.whatif.advice import make_bench, try_changes

    with Progress(options.quiet) as progress:
        return try_changes(make_bench(step, None), None, plans=False, quick=True, progress=progress)


def _write_snapshot(options: argparse.Namespace) -> None:
    from fxmem.memory.snapshots import read_dump, report_dump
    from fxmem.records.shortage import Explanation
    from fxmem.show.html import snapshot_html

    if options.plan is not None or options.budget is not None or options.after is not None:
        raise UsageError("expected --plan, --budget and --after with a report or a model, got a memory snapshot")
    explanation = Explanation(source=options.model, snapshot=report_dump(read_dump(Path(options.model))))
    write_file(options, options.output, snapshot_html(explanation))
