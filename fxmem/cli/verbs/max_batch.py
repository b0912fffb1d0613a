"""How large a batch, sequence or other size fits?

Find the largest size of an input's dimension at which the step fits a card or a budget, by analysing it at about ten
sizes; the curve of peak against size. Of a program the size stands as {} among its arguments: --run train.py
--batch-size {}; --batch is tried first. Two that vary have names, each with the size that is tried first, 256 unless
one is said: --height {h=512} --width {w=512} finds how far one goes beside the other. Exit code 4 if nothing fits, 1 if
that is not known.

    fxmem max-batch torchvision:resnet50 --target rtx4090
    fxmem max-batch hf:GPT2LMHeadModel --dim seq
    fxmem max-batch hf:GPT2LMHeadModel --mode generate --prompt 512 --new 128
    fxmem max-batch --target rtx4090 --run train.py --batch-size {}
    fxmem max-batch --target rtx4090 --run sample.py --height {height=512} --width {width=512}
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import RUNNABLE, text_output
from fxmem.cli.output import layout, write_drawing, write_json
from fxmem.cli.parser import argument, number
from fxmem.cli.progress import Progress, say
from fxmem.cli.step import analyze_subject, check_generation, read_program
from fxmem.errors import UsageError
from fxmem.records.units import format_bytes

if TYPE_CHECKING:
    from fxmem.memory.budget import Budget

ARGUMENTS = (
    *RUNNABLE,
    argument(
        "--dim batch|seq|context|NAME:AXIS[,NAME:AXIS]",
        default="batch",
        help="batch; seq: dimension 1 of token ids, masks and labels; context: of a generation, prompt and new tokens "
        "together, as the prompt varies; the number of a dimension; or an argument's name and its axis, e.g. x:2,x:3",
    ),
    argument("--budget BYTES|16GiB", help="what the allocator may have instead; a CUDA context comes on top"),
    number("--limit", "try no larger size", least=1, default=65536),
    argument(
        "--goal",
        choices=("memory", "throughput"),
        default="memory",
        help="throughput: also the smallest size, within a tenth, that reaches 95 %% of the best estimated throughput",
    ),
    argument("--plan PLAN.json", help="with these checkpoints, which `fxmem plan --json` wrote for the same model"),
    *text_output("curve"),
    argument("--svg FILE.svg", help="also plot the curve"),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem max-batch`; return the exit code and the text for stdout."""
    from fxmem.memory import report_reader
    from fxmem.show.plots import sizes_svg
    from fxmem.show.text.fits import fits_table

    check_generation(options)
    budget, program = _read_budget(options), read_program(options, "--batch")
    if program is not None:
        _check_program(options)
    plan = None if options.plan is None else report_reader.load_plan(Path(options.plan))
    with Progress(options.quiet) as progress:
        step = analyze_subject(options, program, progress, again=True)
        from fxmem.whatif import max_batch, verified_plan
        from fxmem.whatif.program_step import ProgramStep

        if options.svg is not None and isinstance(step, ProgramStep) and len(step.program.starts) > 1:
            raise UsageError("expected --svg with one size that varies: the curve has no second axis of sizes")

        curve = max_batch.max_batch(
            step,
            budget=budget,
            dim=options.dim,
            limit=options.limit,
            goal=options.goal,
            change=None if plan is None else verified_plan.apply_plan(plan),
            start=max_batch.START if options.batch is None else options.batch,
            progress=progress.found,
        )
    if options.svg is not None:
        write_drawing(options, options.svg, sizes_svg(curve))
    text = write_json(options, curve.model_dump_json, lambda: fits_table(curve, **layout(options)))
    if curve.largest is not None:
        return 0, text
    room, smallest = format_bytes(curve.points[0].room_bytes), curve.points[0].size
    if curve.points[0].fits is None:
        say(f"expected a size that fits {room}; not even of {smallest} that is known, as sizes depend on data")
        return 1, text
    say(f"expected a size that fits {room}; none does, not even {smallest}")
    return 4, text


def _check_program(options: argparse.Namespace) -> None:
    if options.dim != "batch" or options.plan is not None or options.goal != "memory":
        raise UsageError(
            "expected --run without --dim, --plan and --goal: {} is what varies, and a program checkpoints itself"
        )


def _read_budget(options: argparse.Namespace) -> Budget | None:
    """Parse `--budget`, and refuse before the first analysis what would be refused after it."""
    from fxmem.hardware import catalogue, step_time
    from fxmem.memory.budget import parse_bytes

    if options.mode == "generate" and (options.goal != "memory" or options.plan is not None):
        raise UsageError("expected --mode generate without --goal throughput and --plan")
    if options.dim == "context" and options.mode != "generate":
        raise UsageError("expected --dim context with --mode generate; the length of a step's sequences is --dim seq")
    if options.goal == "throughput" and not step_time.has_rates(catalogue.target(options.target)):
        raise UsageError(f"expected --goal throughput on a card whose rates are known, got {options.target!r}")
    if options.budget is not None:
        return parse_bytes(options.budget, "--budget")
    if catalogue.target(options.target).memory_bytes is None:
        raise UsageError(f"expected --budget, because the memory of target {options.target!r} is not known")
    return None
