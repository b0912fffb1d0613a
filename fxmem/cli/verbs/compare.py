"""What changed from one step to another?

Compare two steps: two reports, two models, or one model with other options (--with). The four peaks, what they are made
of, the phases, and what changed by module and by node; of two reports, needs no torch. The step's options apply to both
sides, those after --with to the second alone. With --fail-over a gate for CI.

    fxmem compare before.json after.json
    fxmem compare before.json after.json --markdown comment.md
    fxmem compare before.json after.json --fail-over 2%
    fxmem compare torchvision:resnet50 --with "--precision bf16"
    fxmem compare v1.2 main --bisect 'run --target rtx4090 train.py'
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import TYPE_CHECKING

from fxmem.cli.options import ANALYSIS_OR_REPORT, or_generation, text_output
from fxmem.cli.output import layout, write_drawing, write_json
from fxmem.cli.parser import Parser, argument, number, repeatable
from fxmem.cli.progress import Progress, say
from fxmem.cli.step import is_report, read_step
from fxmem.errors import UsageError
from fxmem.records.units import format_bytes, percent

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget, BudgetShare
    from fxmem.records.profile import Peak
    from fxmem.whatif.bisection import Bisected

_STEP = or_generation(*ANALYSIS_OR_REPORT)

ARGUMENTS = (
    *_STEP,
    argument(
        "second MODEL|REPORT.json",
        nargs="?",
        help="what to compare it with: another report or model (default: the same model, with the options of --with)",
    ),
    repeatable(
        "--with OPTION[=VALUE]",
        dest="changes",
        help="an option of the second step alone, as precision=bf16, batch=64, optimizer=sgd, channels-last or "
        "set=width=64; repeatable",
    ),
    argument(
        "--bisect 'run ...'",
        help="find the commit with which the peak of a command of fxmem changed, between two commits in the place of "
        "the models: the first is right",
    ),
    number(
        "--depth", "levels of modules to show, every change in them (default: changes of 1 %% of the peak)", least=0
    ),
    argument(
        "--fail-over 2%|500MiB",
        help="exit code 4 where the second peak is above the first by more than so much, or than a share of it; 1 "
        "where that is not known. 0: any growth",
    ),
    argument("--svg FILE.svg", help="also write both steps' timelines in one plot: .svg, .png or .pdf"),
    number("--top", "how many nodes to list, the largest change first", least=0, default=8),
    *text_output("comparison"),
    argument("--markdown FILE|-", help="write a summary for a pull request; `-` writes it instead of the table"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem compare`; return the exit code and the text for stdout."""
    from fxmem.memory import report_reader
    from fxmem.memory.allocator import known_levels, read_settings
    from fxmem.memory.budget import parse_growth
    from fxmem.memory.comparison import compare
    from fxmem.memory.liveness import shorten_step
    from fxmem.show import plots
    from fxmem.show.facts import find_fit
    from fxmem.show.text import comparison as comparison_reporting
    from fxmem.show.text.comparison import summarize_growth

    most = None if options.fail_over is None else parse_growth(options.fail_over, "--fail-over")
    if options.bisect is None:
        other = _second_options(options)
        (before, timeline), (after, later) = read_step(options), read_step(other)
        comparison = compare(before, after)
    else:
        before, after, commit = _find_commit(options)
        timeline, later = (report_reader.timeline(each) for each in (before, after))
        comparison = compare(before, after).model_copy(update={"commit": commit})
    if options.svg is not None:
        levels = known_levels(before, timeline, read_settings(os.environ))
        name = options.second or " ".join(options.changes)
        later_step = plots.StepAfter(shorten_step(after, before), later.peak, name)
        write_drawing(
            options, options.svg, plots.timeline_svg(plots.PlottedStep(before, timeline, levels), after=later_step)
        )
    summary = "" if options.markdown is None else summarize_growth(comparison, timeline, later)
    sides = (before, timeline.peak), (after, later.peak)
    verdicts = [find_fit(*each).verdict for each in sides] if comparison.after.fits is not None else []
    shape = {"depth": options.depth, "top": options.top, "verdicts": verdicts, **layout(options)}
    text = write_json(options, comparison.to_json, lambda: comparison_reporting.table(comparison, **shape), summary)
    return (0 if most is None else _judge(timeline.peak, later.peak, most, options.fail_over)), text


def _find_commit(options: argparse.Namespace) -> Bisected:
    """The two steps and the commit that --bisect asks for."""
    from fxmem.whatif.bisection import bisect

    given = [each.names[0] for each in _STEP if each.names[0] not in ("model", "--quiet") and each.is_given(options)]
    if given or options.changes or options.model is None or options.second is None:
        what = given[0] if given else "--with" if options.changes else "one commit or none"
        raise UsageError(
            f"expected two commits and no option of a step beside --bisect, whose words have it; got {what}"
        )
    with Progress(options.quiet) as progress:
        return bisect(options.bisect, options.model, options.second, progress)


def _judge(before: Peak, after: Peak, most: Budget | BudgetShare, stated: str) -> int:
    """The exit code of a gate: 4 where the peak grew by more than is allowed, 1 where that is not known."""
    grown = after.counted_bytes - before.counted_bytes
    is_more = grown > most.resolve(before.counted_bytes).nbytes
    if (before if is_more else after).at_least:
        short = "first" if is_more else "second"
        say(f"not known whether the peak grew by more than {stated}: the {short} step ran out of memory before")
        return 1
    if is_more:
        share = percent(grown, before.counted_bytes)
        say(f"the peak grew by {'at least ' * after.at_least}{format_bytes(grown)} ({share}), more than {stated}")
    return 4 if is_more else 0


def _second_options(options: argparse.Namespace) -> argparse.Namespace:
    """The options of the second step: the first's, but for the model and what --with changes."""
    model = options.second or options.model
    if options.second is None and not options.changes:
        raise UsageError(
            "expected a second REPORT.json or MODEL to compare with, or --with OPTION=VALUE for the same model with "
            "another option"
        )
    if options.changes and is_report(model):
        raise UsageError(
            f"expected --with for a model, but {model!r} is a report: what it says was fixed when it was written"
        )
    if options.model == "-" and model == "-":
        raise UsageError("expected stdin (-) for one of the two, got it for both")
    parser = Parser(prog=options.parser.prog, add_help=False).add_arguments(_STEP)
    words, other = [model], copy.copy(options)
    for change in options.changes:
        name, equals, value = change.partition("=")
        words.append(f"--{name}" + (f"={value}" if equals else ""))
    names = {word.partition("=")[0] for word in words[1:]}
    if "--input" in names:
        other.input, other.batch = [], None
    if "--batch" in names:
        other.input = []
    keys = {change.split("=")[1] for change in options.changes if change.startswith("set=")}
    other.settings = [text for text in options.settings if text.partition("=")[0] not in keys]
    _, rest = parser.parse_known_args(words, namespace=other)
    if rest:
        parser.error(f"--with {rest[0].removeprefix('--')}: expected an option of the step")
    return other
