"""One analysis in a process of its own: options as JSON on stdin, the page on stdout."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from fxmem.errors import AnalysisError, FxmemError

TIME_LIMIT = 600.0
"""Seconds that an analysis may take."""
_PROGRAM = "from fxmem.cli.server.worker import main; main()"


def write_page(options: Mapping[str, Any]) -> str:
    """The page of a step, analysed in another process.

    Raises:
        AnalysisError: it failed, or took too long; with the line that it ended with.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=json.dumps(options).encode(), capture_output=True,
            timeout=TIME_LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise AnalysisError(f"the analysis took longer than {TIME_LIMIT:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise AnalysisError(lines[-1][:2000] if lines else f"the analysis ended with code {done.returncode}")
    return done.stdout.decode()


def main() -> None:
    """Analyse the step whose options stand on stdin, and write its page to stdout."""
    from fxmem.cli.step import read_budget, read_step
    from fxmem.memory.allocator import read_settings
    from fxmem.show.html import PageOptions, report_html

    options = argparse.Namespace(**json.load(sys.stdin))
    page, sys.stdout = sys.stdout, sys.stderr  # what a model prints is no part of the page
    try:
        budget = read_budget(options)
        report, timeline = read_step(options)
    except FxmemError as error:
        sys.exit(str(error))
    nbytes = None if budget is None else budget.resolve(timeline.peak.counted_bytes).nbytes
    page.write(report_html(report, timeline, PageOptions(budget_bytes=nbytes, settings=read_settings(os.environ))))
