"""The command line. Nothing here imports torch until a command needs it.

Exit codes: 0 ok; 1 the analysis failed; 2 usage; 3 the environment lacks something; 4 a budget or tolerance was exceeded;
as in a shell, 130 interrupted and 141 whoever read stdout has gone. Results go to stdout and are written last, all at once;
progress, warnings, errors (one line each) and what the model itself prints go to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fxmem import __version__
from fxmem._terminal import columns, why_plain
from fxmem._units import printable
from fxmem.errors import EnvironmentLacksError, FxmemError, UsageError

if TYPE_CHECKING:
    from fxmem.records import Report, Target, Timeline
    from fxmem.sources import BuiltModel

__all__ = ["main"]

_MODEL = "torchvision:NAME, timm:NAME, hf:CLASS, hf:path/to/config.json, pkg.mod:factory or file.py:factory"
_HEATS = ("saved", "output", "params", "flops", "live", "scratch")
_RENDERERS = ("auto", "dot", "wasi", "plain")
_NARROWEST = 60
"""Columns that the table needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        return _run(arguments)
    except BrokenPipeError:
        _give_up_stdout()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT, debug)
    except FxmemError as error:
        return _fail(str(error), error.exit_code, debug)
    except SystemExit as error:
        return _fail(f"the model's own code called sys.exit({error.code!r}) while it ran", 1, debug)
    except Exception as error:
        advice = "" if debug else "; run it again with --debug to see where"
        return _fail(f"fxmem itself failed, please report it: {type(error).__name__}: {error}{advice}", 1, debug)


def _run(arguments: Sequence[str]) -> int:
    try:
        options = _parse(arguments)
    except SystemExit as leaving:  # --help and --version
        _write_result("")
        return int(leaving.code or 0)
    code, text = options.run(options)
    _write_result(text)
    return int(code)


def _fail(message: str, code: int, debug: bool) -> int:
    """Say what went wrong, in one line after the traceback if that was asked for. Called while an exception is handled."""
    if debug:
        traceback.print_exc()
    print(f"fxmem: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


# --- arguments --------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every error looks alike, and takes no abbreviations, so that an option added later breaks no script."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument (.+): invalid choice: '?(.*?)'? \(choose from (.+)\)", message)
        if choice is not None:
            what, got, known = choice[1], choice[2], re.findall(r"[\w.-]+", choice[3])
            message = f"expected {what} to be one of {', '.join(known)}; got {got!r}{_meant(got, known)}"
        number = re.fullmatch(r"argument (.+): invalid (int|float) value: (.+)", message)
        if number is not None:
            message = f"expected {number[1]} to be a {'whole number' if number[2] == 'int' else 'number'}; got {number[3]}"
        raise UsageError(f"{message}; see {self.prog} --help")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Complain of words that no argument takes."""
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if option is None:
            self.error(f"unexpected argument {words[0]!r}")
        self.error(f"no option {option}{_meant(option, re.findall(r'--[a-z-]+', self.format_usage()))}")


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    options, rest = _parser().parse_known_args(arguments)
    if rest:
        options.parser.refuse(rest)
    return options


def _parser() -> _Parser:
    parser = _Parser(prog="fxmem", description="Predicts the memory of a PyTorch training step from the model alone, with no GPU.")
    parser.add_argument("--version", action="version", version=f"fxmem {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(run: Callable[[argparse.Namespace], tuple[int, str]], brief: str, description: str) -> _Parser:
        added: _Parser = commands.add_parser(run.__name__.lstrip("_"), help=brief, description=description)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.set_defaults(run=run, parser=added)
        return added

    analyze = command(_analyze, "peak memory of a step, node by node", "Predict the memory of one training or inference step.")
    _add_step(analyze)
    target = "the machine it is for: a card (see `fxmem doctor --targets`), cpu, or a JSON file (default h100)"
    analyze.add_argument("--target", default="h100", metavar="NAME|FILE.json", help=target)
    _add_output(analyze)

    graph = command(_graph, "the annotated graph, as SVG or DOT", "Draw the graph of a step, annotated; of a report, needs no torch.")
    _add_step(graph, or_report=True)
    graph.add_argument("--target", default="h100", metavar="NAME|FILE.json", help=target)
    _add_drawing(graph)

    show = command(_show, "the table of a report written earlier", "Print a report that `fxmem analyze --json` wrote; needs no torch.")
    show.add_argument("report", metavar="REPORT.json|-", help="the file; `-` reads stdin")
    _add_output(show)

    validate = command(_validate, "run the step for real and compare", "Run the step on this machine and hold the prediction against what was measured.")
    _add_step(validate)
    validate.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to run: this machine's CPU or its NVIDIA GPU (default cpu)")
    tolerance = "largest error allowed, on the CPU with kernels' own scratch set aside; beyond it the exit code is 4 (default 0.01)"
    validate.add_argument("--tolerance", type=float, default=0.01, metavar="FRACTION", help=tolerance)
    validate.add_argument("--json", metavar="FILE|-", help="write the verdict as JSON; `-` writes it to stdout instead of the text")

    schema = command(_schema, "JSON Schema of what fxmem writes", "Print the JSON Schema of one of fxmem's records.")
    schema.add_argument("name", nargs="?", help="which one; without it, the names")

    doctor = command(_doctor, "what is installed and what is missing", "Say what this environment can do and how to get what it lacks.")
    doctor.add_argument("--targets", action="store_true", help="list the catalogue of cards instead")
    return parser


def _add_step(parser: argparse.ArgumentParser, *, or_report: bool = False) -> None:
    inputs = "32x3x224x224[:dtype], name:8x1024:int64 or pkg.mod:make_batch; repeatable; default: what the model's family takes"
    settings = "a keyword argument of the factory, or a field of the hf: config; repeatable"
    optimizer = "a torch.optim class, sgd-momentum, adamw:fused, pkg.mod:factory, or none (default adamw)"
    report = "REPORT.json, which `fxmem analyze --json` wrote (of the step's options none applies then), or "
    parser.add_argument("model", metavar="MODEL|REPORT.json" if or_report else "MODEL", help=(report if or_report else "") + _MODEL)
    parser.add_argument("--input", action="append", default=[], metavar="SPEC", help=inputs)
    parser.add_argument("--batch", type=int, metavar="N", help="batch size of the default inputs (default 8)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=settings)
    parser.add_argument("--mode", choices=["train", "infer"], default="train", help="a training step, or forward under no_grad (default train)")
    parser.add_argument("--loss", metavar="PKG.MOD:NAME", help="a function of the output; default: its .loss, else the sum of its floating-point tensors")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help=optimizer)
    parser.add_argument("--precision", choices=["bf16", "fp16"], help="run under autocast")
    parser.add_argument("--weights", choices=["bf16", "fp16"], help="cast the weights")
    parser.add_argument("--channels-last", action="store_true", help="lay out weights and 4-d inputs as channels_last")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the module tree to show")
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="width of the table (default: the terminal's)")
    parser.add_argument("--json", metavar="FILE|-", help="write the report as JSON; `-` writes it to stdout instead of the table")
    parser.add_argument("--svg", metavar="FILE.svg", help="also write the annotated graph; `fxmem graph` has more to choose")


def _add_drawing(parser: argparse.ArgumentParser) -> None:
    renderer = "dot: Graphviz on PATH; wasi: pip install 'fxmem[svg]'; plain: built in; auto: the first that works (default auto)"
    parser.add_argument("-o", "--output", required=True, metavar="FILE.svg|FILE.dot", help="what to write, by its ending")
    parser.add_argument("--heat", choices=_HEATS, default="saved", help="the quantity that colours the boxes (default saved)")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of modules told apart (default: as many as --max-boxes allows)")
    parser.add_argument("--max-boxes", type=int, default=400, metavar="N", help="about how many boxes there may be (default 400)")
    parser.add_argument("--focus", metavar="MODULE|peak", help="draw only this module, or the one in which the peak falls")
    parser.add_argument("--no-fold", action="store_true", help="draw equal siblings one by one")
    parser.add_argument("--renderer", choices=_RENDERERS, default="auto", help=renderer)


# --- commands: each returns its exit code and what to write to stdout -------------------------------------------------------


def _analyze(options: argparse.Namespace) -> tuple[int, str]:
    from fxmem import targets

    _check_output(options)
    card = targets.target(options.target)
    return 0, _reported(options, *_analyzed(options, card))


def _analyzed(options: argparse.Namespace, card: Target) -> tuple[Report, Timeline]:
    _require_torch()
    with _Working(options.quiet) as progress:
        progress("loading torch")
        from fxmem.analysis import analyze_call

        step = _step(options)
        built, args, kwargs = _model_and_inputs(options, progress)
        analysis = analyze_call(built.module, args, kwargs, name=built.spec, notes=built.notes, target=card, progress=progress, **step)
        return analysis.report(), analysis.timeline


def _show(options: argparse.Namespace) -> tuple[int, str]:
    from fxmem import reports

    _check_output(options)
    report = reports.load_report(Path(options.report))
    return 0, _reported(options, report, reports.timeline(report))


def _graph(options: argparse.Namespace) -> tuple[int, str]:
    from fxmem import drawing, reports, targets
    from fxmem.files import write_text

    _check_ending("--output", options.output, (".svg", ".dot"))
    _check_writable("--output", options.output)
    path = Path(options.model)
    # No form of MODEL ends in .json without a colon before it.
    if path.suffix == ".json" and (path.is_file() or ":" not in options.model):
        report = reports.load_report(path)
        timeline = reports.timeline(report)
    else:
        report, timeline = _analyzed(options, targets.target(options.target))
    what = {"heat": options.heat, "fold": not options.no_fold, "depth": options.depth, "focus": options.focus, "max_boxes": options.max_boxes}
    if Path(options.output).suffix == ".dot":
        text = drawing.dot_source(report, timeline, **what)
    else:
        text = drawing.svg(report, timeline, renderer=options.renderer, **what)
    write_text(Path(options.output), text)
    return 0, ""


def _validate(options: argparse.Namespace) -> tuple[int, str]:
    _check_output(options)
    if not 0 <= options.tolerance < 1:
        raise UsageError(f"expected --tolerance as a fraction between 0 and 1, got {options.tolerance}")
    _require_torch()
    with _Working(options.quiet) as progress:
        progress("loading torch")
        from fxmem.measuring_cuda import require_card
        from fxmem.sources import build_model, parse_settings
        from fxmem.validation import validate_call

        if options.device == "cuda":
            require_card()
        step = _step(options)
        built, args, kwargs = _model_and_inputs(options, progress)
        shape: dict[str, Any] = {"mode": options.mode, "weights_dtype": options.weights, "channels_last": options.channels_last}
        settings = parse_settings(options.settings)
        verdict = validate_call(
            lambda: build_model(options.model, settings, device="cpu", **shape).module,
            built.module,
            args,
            kwargs,
            name=built.spec,
            device=options.device,
            tolerance=options.tolerance,
            progress=progress,
            **step,
        )
    from fxmem.verdicts import report

    return 0 if verdict.within_tolerance else 4, _json_or(options, verdict.model_dump_json(), lambda: report(verdict))


def _schema(options: argparse.Namespace) -> tuple[int, str]:
    from fxmem import schemas

    return 0, "\n".join(schemas.RECORDS) if options.name is None else schemas.text(options.name)


def _doctor(options: argparse.Namespace) -> tuple[int, str]:
    from fxmem import doctor

    return 0, doctor.catalogue() if options.targets else doctor.report()


# --- the step ---------------------------------------------------------------------------------------------------------------


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentLacksError("expected torch, which is not installed: pip install torch (it needs no GPU)")


def _step(options: argparse.Namespace) -> dict[str, Any]:
    """What the step does beside the model, as keyword arguments."""
    loss = None if options.loss is None else _own("--loss", options.loss)
    return {"mode": options.mode, "loss": loss, "optimizer": _optimizer(options.optimizer), "precision": options.precision}


def _optimizer(text: str) -> Any:
    from fxmem.usercode import is_file_reference, is_reference

    if text.lower() == "none":
        return None
    # `adamw:fused` has the form of a reference, too.
    looks_own = is_file_reference(text) or (is_reference(text) and "." in text.partition(":")[0])
    return _own("--optimizer", text) if looks_own else text


def _own(option: str, reference: str) -> Any:
    from fxmem.usercode import importable, is_reference, load, process_unchanged

    if not is_reference(reference):
        raise UsageError(f"expected {option} as pkg.mod:name or file.py:name, got {reference!r}")
    with process_unchanged(), importable(reference):
        found = load(reference)
    if not callable(found):
        raise UsageError(f"expected {option} to name a function or a class, but {reference} is of type {type(found).__name__}")
    return found


def _model_and_inputs(options: argparse.Namespace, progress: Callable[[str], None]) -> tuple[BuiltModel, tuple[Any, ...], dict[str, Any]]:
    from fxmem.inputs import default_inputs, make_inputs, parse_input
    from fxmem.sources import build_model, parse_settings

    specs = [parse_input(text) for text in options.input]
    if specs and options.batch is not None:
        raise UsageError("--batch is for the default inputs; with --input, write the batch size there")
    settings = parse_settings(options.settings)
    progress(f"building {options.model}")
    built = build_model(options.model, settings, mode=options.mode, weights_dtype=options.weights, channels_last=options.channels_last)
    chosen = specs or default_inputs(built, 8 if options.batch is None else options.batch)
    args, kwargs = make_inputs(chosen, weights_dtype=built.weights_dtype, channels_last=options.channels_last)
    return built, args, kwargs


class _Working:
    """While something is computed: says on stderr what, once it has taken a second, and sends there what the model prints."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._timer: threading.Timer | None = None
        self._redirected = contextlib.redirect_stdout(sys.stderr)

    def __enter__(self) -> _Working:
        self._redirected.__enter__()
        return self

    def __call__(self, message: str) -> None:
        self._stop()
        if not self._quiet:
            self._timer = threading.Timer(1.0, lambda: print(f"fxmem: {printable(message)} ...", file=sys.stderr, flush=True))
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *raised: Any) -> None:
        self._stop()
        self._redirected.__exit__(*raised)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# --- output -----------------------------------------------------------------------------------------------------------------


def _check_output(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before the work is done, not after."""
    width, depth = getattr(options, "width", None), getattr(options, "depth", None)
    if width is not None and width < _NARROWEST:
        raise UsageError(f"expected --width of at least {_NARROWEST} columns, got {width}")
    if depth is not None and depth < 0:
        raise UsageError(f"expected --depth of at least 0, got {depth}")
    if options.json is not None and options.json != "-":
        _check_writable("--json", options.json, ", or - for stdout")
    if getattr(options, "svg", None) is not None:
        _check_ending("--svg", options.svg, (".svg",))
        _check_writable("--svg", options.svg)


def _check_writable(option: str, name: str, or_else: str = "") -> None:
    path = Path(name).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"expected {option} to name a file in a folder that exists, got {name!r}")
    if path.exists() and not path.is_file():  # a folder; or a device, which the file moved into place would replace
        raise UsageError(f"expected {option} to name a file{or_else}, got {name!r}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"expected {option} to name a file in a folder that can be written, got {name!r}")


def _check_ending(option: str, name: str, endings: Sequence[str]) -> None:
    if Path(name).suffix not in endings:
        raise UsageError(f"expected {option} to name a file that ends in {' or '.join(endings)}, got {name!r}")


def _reported(options: argparse.Namespace, report: Report, timeline: Timeline) -> str:
    from fxmem import reporting

    if options.svg is not None:
        _write_svg(options, report, timeline)
    width = columns() if options.width is None else options.width
    return _json_or(options, report.model_dump_json(), lambda: reporting.table(report, timeline, width=width, depth=options.depth, color=not why_plain()))


def _write_svg(options: argparse.Namespace, report: Report, timeline: Timeline) -> None:
    from fxmem import drawing
    from fxmem.files import write_text

    write_text(Path(options.svg), drawing.svg(report, timeline))


def _json_or(options: argparse.Namespace, document: str, text: Callable[[], str]) -> str:
    """The JSON if it is for stdout, else the text; the JSON is then in its file, if one was named."""
    if options.json == "-":
        return _ascii(document)
    if options.json is not None:
        from fxmem.files import write_text

        write_text(Path(options.json), document + "\n")
    return text()


def _ascii(document: str) -> str:
    """The same JSON for a stdout of any encoding; beyond ASCII there is nothing in it but strings."""
    return re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], document)


def _write_result(text: str) -> None:
    """Write to stdout and flush, so that what goes wrong there goes wrong here. Characters it cannot encode are spelled out."""
    if sys.stdout is None:
        raise FxmemError("expected a stdout to write the result to, but it is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        if text:
            sys.stdout.write(text.rstrip("\n").encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _give_up_stdout()
        raise FxmemError(f"expected a stdout that can be written, got {error.strerror}") from error


def _give_up_stdout() -> None:
    """Send what is still in stdout's buffer nowhere: the interpreter would write it when it ends, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
