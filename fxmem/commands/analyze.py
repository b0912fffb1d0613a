"""`fxmem analyze`."""

from __future__ import annotations

import argparse

from fxmem.commands.output import add_output, check_output, reported
from fxmem.commands.shared import Working, add_step, add_target, analyzed

__all__ = ["BRIEF", "DESCRIPTION", "add_options", "run"]

BRIEF = "peak memory of a step, node by node"
DESCRIPTION = "Predict the memory of one training or inference step."


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be asked of it."""
    add_step(parser)
    add_target(parser)
    add_output(parser)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Exit code and text for stdout."""
    check_output(options)
    with Working(options.quiet) as progress:
        analysis = analyzed(options, progress)
        report, timeline = analysis.report(), analysis.timeline
    return 0, reported(options, report, timeline)
