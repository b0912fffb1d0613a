"""Is it true? runs the step for real and compares.

Run the step on this machine and hold the prediction against what was measured; or hold it against a memory snapshot of
a card, made by anyone.

    fxmem validate torchvision:resnet18 --input 2x3x64x64
    fxmem validate hf:GPT2LMHeadModel --device cuda
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fxmem.cli.options import COMPILE, MODEL, PROGRAM, STEP, STEPS_OF_PROGRAM, or_program
from fxmem.cli.output import write_file, write_json
from fxmem.cli.parser import argument
from fxmem.cli.progress import Progress
from fxmem.cli.step import build_changed_module, build_step, read_program, replace, require_torch, step_request
from fxmem.errors import UsageError
from fxmem.records.units import STEPS, MeasuredDevice

if TYPE_CHECKING:
    from fxmem.cli.step import ProgramWords
    from fxmem.records.validation import ProgramVerdict, Verdict

ARGUMENTS = (
    or_program(MODEL),
    *STEP,
    argument(
        "--device",
        default="cpu",
        choices=get_args(MeasuredDevice),
        help="where to run: this machine's CPU or its NVIDIA GPU",
    ),
    argument(
        "--snapshot FILE.pickle", help="run nothing: compare with what torch.cuda.memory._dump_snapshot wrote on a card"
    ),
    argument("--target NAME|FILE.json", help="the card that the snapshot was made on"),
    argument(
        "--tolerance FRACTION",
        type=float,
        default=0.01,
        help="largest error allowed, on the CPU with kernels' own workspace set aside; beyond it the exit code is 4",
    ),
    *COMPILE,
    STEPS_OF_PROGRAM,
    argument(
        "--share FILE.json",
        help="also write the figures, versions and settings for others: no code, no path, nothing is sent",
    ),
    argument("--json FILE|-", help="write the verdict as JSON; `-` writes it to stdout instead of the text"),
    *PROGRAM,
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem validate`; return the exit code and the text for stdout."""
    if not 0 <= options.tolerance < 1:
        raise UsageError(f"expected --tolerance as a fraction between 0 and 1, got {options.tolerance}")
    program = read_program(options)
    if program is not None and (options.snapshot is not None or options.target is not None):
        raise UsageError("expected --run without --snapshot and --target: both runs are made here")
    if (options.snapshot is None) != (options.target is None):
        raise UsageError("expected --snapshot together with --target, the card that the snapshot was made on")
    if options.snapshot is not None and options.device != "cpu":
        raise UsageError("expected --snapshot or --device, not both: with a snapshot nothing is run")
    if program is None and options.compile is not None and (options.snapshot is not None or options.device != "cpu"):
        raise UsageError("expected --compile with --device cpu and no --snapshot: compiled steps are measured here")
    require_torch(options if program is None else None)
    if options.share is not None:
        from fxmem.cli.share import check_share

        check_share(options)
    with Progress(options.quiet) as progress:
        progress("loading torch")
        found: tuple[Verdict | ProgramVerdict, Any] = (
            _validate_step(options, progress)
            if program is None
            else (_validate_program(options, program, progress), ())
        )
    return _write(options, *found)


def _write(options: argparse.Namespace, verdict: Verdict | ProgramVerdict, inputs: Any) -> tuple[int, str]:
    from fxmem.show.text.verdict import table

    said = ""
    if options.share is not None:
        from fxmem.cli.share import describe, share

        shared = share(options, verdict, inputs)
        write_file(options, options.share, shared.model_dump_json(indent=2, exclude_none=True) + "\n")
        said = describe(shared)
    text = write_json(options, verdict.model_dump_json, lambda: table(verdict) + said)
    return 0 if verdict.within_tolerance else 4, text


def _validate_program(options: argparse.Namespace, program: ProgramWords, progress: Progress) -> ProgramVerdict:
    from fxmem.validation.validate import validate_program

    return validate_program(
        (program.program, *program.arguments),
        is_module=program.is_module,
        steps=STEPS if options.steps is None else options.steps,
        device=options.device,
        compile=options.compile,
        tolerance=options.tolerance,
        progress=progress,
    )


def _validate_step(options: argparse.Namespace, progress: Progress) -> tuple[Verdict, Any]:
    """The verdict on a step, and the step's inputs."""
    from fxmem.hardware import catalogue
    from fxmem.simulation.recording.compiled import read_compile
    from fxmem.validation.measure_cuda import require_card
    from fxmem.validation.validate import validate_snapshot, validate_step

    if options.device == "cuda":
        require_card()
    card = {} if options.target is None else {"target": catalogue.target(options.target)}
    request = step_request(options, compile=read_compile(options.compile, options.compile_option), **card)
    built, args, kwargs = build_step(options, progress)
    request = replace(request, args=args, kwargs=kwargs, name=built.spec, notes=built.notes)
    judging: dict[str, Any] = {"tolerance": options.tolerance, "progress": progress}
    if options.snapshot is not None:
        verdict = validate_snapshot(built.module, request, Path(options.snapshot), **judging)
    else:
        verdict = validate_step(
            lambda: build_changed_module(options, progress, mode=options.mode, device="cpu").module,
            built.module,
            request,
            device=options.device,
            **judging,
        )
    return verdict, (*args, kwargs)
