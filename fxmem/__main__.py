"""The command line. Nothing here imports torch until a command needs it.

Exit codes: 0 ok; 1 the analysis failed; 2 usage; 3 the environment lacks something; 4 a budget or tolerance was exceeded.
Results go to stdout, progress and warnings to stderr.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fxmem import __version__
from fxmem.errors import AnalysisError, FxmemError, UsageError

if TYPE_CHECKING:
    from fxmem.analysis import Analysis
    from fxmem.records import Report
    from fxmem.sources import BuiltModel

__all__ = ["main"]

_MODEL = "torchvision:NAME, timm:NAME, hf:CLASS, hf:path/to/config.json, pkg.mod:factory or file.py:factory"


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every error looks alike."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except FxmemError as error:
        if "--debug" in arguments:
            raise
        print(f"fxmem: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read stdout has gone; there is nobody left to tell, and the interpreter must not try either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _parser() -> _Parser:
    parser = _Parser(prog="fxmem", description="Predicts the memory of a PyTorch training step from the model alone, with no GPU.")
    parser.add_argument("--version", action="version", version=f"fxmem {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    analyze = commands.add_parser("analyze", help="peak memory of a step, node by node", description="Predict the memory of one training or inference step.")
    _add_step(analyze)
    analyze.add_argument("--target", default="h100", metavar="NAME|FILE.json", help="the machine it is for: a card (see `fxmem doctor --targets`), cpu, or a JSON file (default h100)")
    _add_output(analyze)
    analyze.set_defaults(run=_analyze)

    show = commands.add_parser("show", help="the table of a report written earlier", description="Print a report that `fxmem analyze --json` wrote; needs no torch.")
    show.add_argument("report", metavar="REPORT.json")
    _add_output(show)
    show.set_defaults(run=_show)

    validate = commands.add_parser("validate", help="run the step for real and compare", description="Run the step on this machine and hold the prediction against what was measured.")
    _add_step(validate)
    validate.add_argument("--device", default="cpu", choices=["cpu"], help="where to run (default cpu)")
    validate.add_argument("--tolerance", type=float, default=0.01, metavar="FRACTION", help="largest error allowed, kernels' own scratch set aside; beyond it the exit code is 4 (default 0.01)")
    validate.add_argument("--json", metavar="FILE|-", help="write the verdict as JSON, `-` for stdout")
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help="JSON Schema of what fxmem writes", description="Print the JSON Schema of one of fxmem's records.")
    schema.add_argument("name", nargs="?", help="which one; without it, the names")
    schema.set_defaults(run=_schema)

    doctor = commands.add_parser("doctor", help="what is installed and what is missing", description="Say what this environment can do and how to get what it lacks.")
    doctor.add_argument("--targets", action="store_true", help="list the catalogue of cards instead")
    doctor.set_defaults(run=_doctor)

    for command in (analyze, show, validate, schema, doctor):
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("--input", action="append", default=[], metavar="SPEC", help="32x3x224x224[:dtype], name:8x1024:int64 or pkg.mod:make_batch; repeatable; default: what the model's family takes")
    parser.add_argument("--batch", type=int, metavar="N", help="batch size of the default inputs (default 8)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="a keyword argument of the factory, or a field of the hf: config; repeatable")
    parser.add_argument("--mode", choices=["train", "infer"], default="train", help="a training step, or forward under no_grad (default train)")
    parser.add_argument("--loss", metavar="PKG.MOD:NAME", help="a function of the output; default: its .loss, else the sum of its floating-point tensors")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="a torch.optim class, sgd-momentum, adamw:fused, …, pkg.mod:factory, or none (default adamw)")
    parser.add_argument("--precision", choices=["bf16", "fp16"], help="run under autocast")
    parser.add_argument("--weights", choices=["bf16", "fp16"], help="cast the weights")
    parser.add_argument("--channels-last", action="store_true", help="lay out weights and 4-d inputs as channels_last")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the module tree to show")
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="width of the table (default: the terminal's)")
    parser.add_argument("--json", metavar="FILE|-", help="write the report as JSON; `-` writes it to stdout instead of the table")


# --- commands ---------------------------------------------------------------------------------------------------------------


def _analyze(options: argparse.Namespace) -> int:
    _check_output(options.json)
    with _Progress(options.quiet) as progress:
        progress("loading torch")
        from fxmem import targets

        path = Path(options.target)
        card = targets.load_target(path) if path.suffix == ".json" else targets.target(options.target)
        from fxmem.analysis import analyze_call

        built, args, kwargs = _model_and_inputs(options, progress)
        analysis = analyze_call(
            built.module,
            args,
            kwargs,
            name=built.spec,
            notes=built.notes,
            mode=options.mode,
            loss=_own(options.loss),
            optimizer=_optimizer(options.optimizer),
            precision=options.precision,
            target=card,
            progress=progress,
        )
    _print(options, analysis.report(), analysis)
    return 0


def _show(options: argparse.Namespace) -> int:
    from fxmem.reports import load_report

    _check_output(options.json)
    _print(options, load_report(Path(options.report)), None)
    return 0


def _validate(options: argparse.Namespace) -> int:
    _check_output(options.json)
    if not 0 <= options.tolerance < 1:
        raise UsageError(f"expected --tolerance as a fraction between 0 and 1, got {options.tolerance}")
    with _Progress(options.quiet) as progress:
        progress("loading torch")
        from fxmem.sources import build_model, parse_settings
        from fxmem.validation import validate_call

        built, args, kwargs = _model_and_inputs(options, progress)
        settings = parse_settings(options.settings)
        verdict = validate_call(
            lambda: build_model(options.model, settings, mode=options.mode, weights_dtype=options.weights, channels_last=options.channels_last, device="cpu").module,
            built.module,
            args,
            kwargs,
            name=built.spec,
            mode=options.mode,
            loss=_own(options.loss),
            optimizer=_optimizer(options.optimizer),
            precision=options.precision,
            device=options.device,
            tolerance=options.tolerance,
            progress=progress,
        )
    from fxmem.verdicts import report

    if options.json == "-":
        print(verdict.model_dump_json())
    else:
        if options.json:
            _write(options.json, verdict.model_dump_json() + "\n")
        print(report(verdict))
    return 0 if verdict.within_tolerance else 4


def _schema(options: argparse.Namespace) -> int:
    from fxmem import schemas

    print("\n".join(schemas.names()) if options.name is None else schemas.text(options.name).rstrip("\n"))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fxmem import doctor

    print(doctor.catalogue() if options.targets else doctor.report())
    return 0


# --- parts ------------------------------------------------------------------------------------------------------------------


def _model_and_inputs(options: argparse.Namespace, progress: Callable[[str], None]) -> tuple[BuiltModel, tuple[Any, ...], dict[str, Any]]:
    from fxmem.inputs import default_inputs, make_inputs, parse_input
    from fxmem.sources import build_model, parse_settings

    specs = [parse_input(text) for text in options.input]
    if specs and options.batch is not None:
        raise UsageError("--batch is for the default inputs; with --input, write the batch size there")
    settings = parse_settings(options.settings)
    progress(f"building {options.model}")
    built = build_model(options.model, settings, mode=options.mode, weights_dtype=options.weights, channels_last=options.channels_last)
    args, kwargs = make_inputs(specs or default_inputs(built, options.batch or 8), weights_dtype=built.weights_dtype, channels_last=options.channels_last)
    return built, args, kwargs


def _own(reference: str | None) -> Any:
    if reference is None:
        return None
    from fxmem.usercode import is_reference, load

    if not is_reference(reference):
        raise UsageError(f"expected pkg.mod:name or file.py:name, got {reference!r}")
    return load(reference)


def _optimizer(text: str) -> Any:
    from fxmem.usercode import is_file_reference, is_reference, load

    if text.lower() == "none":
        return None
    looks_own = is_file_reference(text) or (is_reference(text) and "." in text.partition(":")[0])
    return load(text) if looks_own else text


def _print(options: argparse.Namespace, report: Report, analysis: Analysis | None) -> None:
    if options.json == "-":
        print(report.model_dump_json())
        return
    if options.json:
        _write(options.json, report.model_dump_json() + "\n")
    from fxmem import liveness, reporting

    width = options.width or shutil.get_terminal_size((100, 24)).columns
    if width < 40:
        raise UsageError(f"expected --width of at least 40 columns, got {width}")
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    timeline = analysis.timeline if analysis is not None else liveness.timeline(report)
    print(reporting.table(report, timeline, width=width, depth=options.depth, color=color))


def _check_output(path: str | None) -> None:
    """Refuse a place that cannot be written before the work is done, not after."""
    if path and path != "-" and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"expected a file in a folder that exists, got {path!r}")


def _write(path: str, text: str) -> None:
    from fxmem.files import write_text

    write_text(Path(path), text)


class _Progress:
    """Says on stderr what is being done, once it has taken a second."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._timer: threading.Timer | None = None

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, message: str) -> None:
        self._stop()
        if not self._quiet:
            self._timer = threading.Timer(1.0, lambda: print(f"fxmem: {message} …", file=sys.stderr, flush=True))
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


if __name__ == "__main__":
    sys.exit(main())
