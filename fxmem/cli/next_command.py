"""The command that answers the next question, spelt out so that it can be pasted."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import ANALYSIS
from fxmem.cli.parser import Argument
from fxmem.cli.step import is_report

if TYPE_CHECKING:
    from fxmem.records.profile import Peak, Report


def next_for(options: argparse.Namespace, report: Report) -> str:
    """The command for the subject that the options of `SUBJECT` name."""
    if options.run_program is not None:
        ranks = options.ranks, options.rank
        return "" if options.compile else next_for_program(report.target.name, options.run_program, ranks)
    if is_report(options.model):
        return next_for_report(options.model, report)
    if options.mode == "generate":
        return next_for_report(options.json or "-", report)
    return next_for_model(options, report.peak)


def next_for_model(options: argparse.Namespace, peak: Peak) -> str:
    """How large a batch fits; what to change where the step does not fit, or nothing is known of that.

    Advice is about eager code. Nothing for a compiled step where it is not known what fits.
    """
    compiled = options.compile is not None
    if compiled and peak.fits is None:
        return ""
    verb = "max-batch" if peak.fits or compiled else "advise"
    return shlex.join(["fxmem", verb, *(word for each in ANALYSIS for word in _spell(each, options))])


def next_for_program(target: str, words: Sequence[str], ranks: Sequence[int | None] = ()) -> str:
    """What to change in a program; `ranks` is how many it has, and which one ran."""
    given = zip(("--ranks", "--rank"), ranks, strict=False)
    place = [word for name, value in given if value is not None for word in (name, str(value))]
    return shlex.join(["fxmem", "advise", "--target", target, *place, "--run", *words])


def next_for_report(name: str, report: Report) -> str:
    """All of a report in one page; where the step does not fit, where checkpoints go. Nothing for standard input."""
    if name == "-":
        return ""
    if report.peak.fits is False and report.step.mode == "train" and report.step.program is None:
        from fxmem.hardware.context import room_bytes

        return shlex.join(["fxmem", "plan", name, "--budget", str(room_bytes(report.target))])
    return shlex.join(["fxmem", "report", name, "--output", str(Path(name).with_suffix(".html")), "--open"])


def _spell(each: Argument, options: argparse.Namespace) -> Iterator[str]:
    """The words of an argument that was given; none if it has its default. `--quiet` is not worth repeating."""
    name, value = each.names[-1], getattr(options, each.dest)
    default = each.settings.get("default", False if each.settings.get("action") == "store_true" else None)
    if not name.startswith("-"):
        yield str(value)
    elif value == default or name == "--quiet":
        return
    elif isinstance(value, bool):
        yield name if value else f"--no-{name[2:]}"
    else:
        for item in value if isinstance(value, list) else [value]:
            yield from (name, str(item))
