"""What several verbs have in common: the step's options, and the way from them to a report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.records.units import printable

if TYPE_CHECKING:
    import torch

    from fxmem.cli.specs import BuiltModel
    from fxmem.memory.budget import Budget, PeakShare
    from fxmem.records.profile import Report, Timeline
    from fxmem.simulation.analysis import Analysis
    from fxmem.simulation.kernel_settings import KernelSettings

__all__ = [
    "Working",
    "add_prefetch",
    "add_step",
    "add_target",
    "analyzed",
    "is_report",
    "loaded_or_analyzed",
    "model_and_inputs",
    "own",
    "require_torch",
    "step_arguments",
]

_MODEL = "torchvision:NAME, timm:NAME, hf:CLASS, hf:path/to/config.json, pkg.mod:factory or file.py:factory"


def add_step(parser: argparse.ArgumentParser, *, or_report: bool = False) -> None:
    """The model, its inputs and the step."""
    inputs = (
        "32x3x224x224[:dtype], name:8x1024:int64 or pkg.mod:make_batch; repeatable; default: what the model's "
        "family takes"
    )
    settings = "a keyword argument of the factory, or a field of the hf: config; repeatable"
    optimizer = "a torch.optim class, sgd-momentum, adamw:fused, pkg.mod:factory, or none (default adamw)"
    report = "REPORT.json, which `fxmem analyze --json` wrote (of the step's options none applies then), or "
    parser.add_argument(
        "model", metavar="MODEL|REPORT.json" if or_report else "MODEL", help=(report if or_report else "") + _MODEL
    )
    parser.add_argument("--input", action="append", default=[], metavar="SPEC", help=inputs)
    parser.add_argument("--batch", type=int, metavar="N", help="batch size of the default inputs (default 8)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=settings)
    parser.add_argument(
        "--mode",
        choices=["train", "infer"],
        default="train",
        help="a training step, or forward under no_grad (default train)",
    )
    parser.add_argument(
        "--loss",
        metavar="PKG.MOD:NAME",
        help="a function of the output; default: its .loss, else the sum of its floating-point tensors",
    )
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help=optimizer)
    parser.add_argument("--precision", choices=["bf16", "fp16"], help="run under autocast")
    parser.add_argument("--weights", choices=["bf16", "fp16"], help="cast the weights")
    freeze = "a module's path, or a pattern of parameters' names (encoder.layer.*), that is not trained; repeatable"
    parser.add_argument("--freeze", action="append", default=[], metavar="PATH|PATTERN", help=freeze)
    parser.add_argument("--channels-last", action="store_true", help="lay out weights and 4-d inputs as channels_last")
    _add_kernels(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    """Which kernels may run; left out, as torch's own flags are."""
    flag = argparse.BooleanOptionalAction
    sdpa = "the attention kernel that may run and no other, or auto: the first that can (default: as torch's flags are)"
    parser.add_argument("--sdpa", choices=["auto", "cudnn", "flash", "efficient", "math"], help=sdpa)
    parser.add_argument(
        "--allow-tf32",
        action=flag,
        help="TF32 in float32 convolutions and recurrent networks (torch's default: allowed)",
    )
    parser.add_argument(
        "--cudnn-benchmark",
        action=flag,
        help="torch.backends.cudnn.benchmark, whose choice cannot be predicted (default: off)",
    )
    parser.add_argument("--deterministic", action=flag, help="torch.use_deterministic_algorithms (default: off)")


def add_target(parser: argparse.ArgumentParser) -> None:
    """The machine a prediction is for, and what only a prediction can be asked for."""
    text = "the machine it is for: a card (see `fxmem doctor --targets`), cpu, or a JSON file (default h100)"
    parser.add_argument("--target", default="h100", metavar="NAME|FILE.json", help=text)
    accumulate = "micro-batches to one optimizer step; the step is the last of them (default 1)"
    parser.add_argument("--accumulate", type=int, default=1, metavar="K", help=accumulate)
    add_prefetch(parser)


def add_prefetch(parser: argparse.ArgumentParser) -> None:
    """What a data loader keeps on the card."""
    parser.add_argument(
        "--prefetch",
        type=int,
        default=0,
        metavar="N",
        help="further batches that wait on the card during the step (default 0)",
    )


def parsed_budget(options: argparse.Namespace) -> Budget | PeakShare | None:
    """The budget of the options; parsed before the analysis, so that a wrong one is refused first."""
    from fxmem.memory.budget import parse_budget

    return None if options.budget is None else parse_budget(options.budget)


def analyzed(options: argparse.Namespace, progress: Working) -> Analysis:
    """The analysis that the step's options ask for."""
    from fxmem.hardware import catalogue

    card = catalogue.target(options.target)
    require_torch()
    progress("loading torch")
    from fxmem.simulation.analysis import analyze_call

    step = step_arguments(options)
    built, args, kwargs = model_and_inputs(options, progress)
    loop = {"accumulate": options.accumulate, "prefetch": options.prefetch}
    return analyze_call(
        built.module, args, kwargs, name=built.spec, notes=built.notes, target=card, progress=progress, **loop, **step
    )


def is_report(model: str) -> bool:
    """Whether what stands in the model's place is a report: no form of MODEL ends in .json without a colon before
    it."""
    path = Path(model)
    return model == "-" or (path.suffix == ".json" and (os.path.isfile(path) or ":" not in model))


def loaded_or_analyzed(options: argparse.Namespace) -> tuple[Report, Timeline]:
    """What `options.model` names: the report in a file or on stdin, or the analysis of a model."""
    if is_report(options.model):
        from fxmem.memory import report_reader

        report = report_reader.load_report(Path(options.model))
        return report, report_reader.timeline(report)
    with Working(options.quiet) as progress:
        analysis = analyzed(options, progress)
        return analysis.report(), analysis.timeline


def require_torch() -> None:
    """Refuse to go on without torch."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentLacksError("expected torch, which is not installed: pip install torch (it needs no GPU)")


def step_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What the step does beside the model, as keyword arguments."""
    loss = None if options.loss is None else own("--loss", options.loss)
    step = {
        "mode": options.mode,
        "loss": loss,
        "optimizer": _optimizer(options.optimizer),
        "precision": options.precision,
    }
    return {**step, "settings": _kernel_settings(options)}


def _kernel_settings(options: argparse.Namespace) -> KernelSettings:
    from fxmem.simulation.kernel_settings import KernelSettings

    names = KernelSettings.model_fields
    return KernelSettings(**{name: getattr(options, name) for name in names})


def _optimizer(text: str) -> Any:
    from fxmem.simulation.user_code import is_file_reference, is_reference

    if text.lower() == "none":
        return None
    # `adamw:fused` has the form of a reference, too.
    looks_own = is_file_reference(text) or (is_reference(text) and "." in text.partition(":")[0])
    return own("--optimizer", text) if looks_own else text


def own(option: str, reference: str) -> Any:
    """A function or class of the user's own."""
    from fxmem.simulation.user_code import importable, is_reference, load, process_unchanged

    if not is_reference(reference):
        raise UsageError(f"expected {option} as pkg.mod:name or file.py:name, got {reference!r}")
    with process_unchanged(), importable(reference):
        found = load(reference)
    if not callable(found):
        raise UsageError(
            f"expected {option} to name a function or a class, but {reference} is of type {type(found).__name__}"
        )
    return found


def model_and_inputs(
    options: argparse.Namespace, progress: Callable[[str], None]
) -> tuple[BuiltModel, tuple[Any, ...], dict[str, Any]]:
    """What `add_step` describes."""
    from fxmem.cli.specs import build_model, parse_settings
    from fxmem.cli.specs.inputs import default_inputs, make_inputs, parse_input

    specs = [parse_input(text) for text in options.input]
    if specs and options.batch is not None:
        raise UsageError("--batch is for the default inputs; with --input, write the batch size there")
    settings = parse_settings(options.settings)
    progress(f"building {options.model}")
    built = build_model(
        options.model, settings, mode=options.mode, weights_dtype=options.weights, channels_last=options.channels_last
    )
    built = dataclasses.replace(built, notes=(*built.notes, *_freeze(built.module, options.freeze)))
    chosen = specs or default_inputs(built, 8 if options.batch is None else options.batch)
    args, kwargs = make_inputs(chosen, weights_dtype=built.weights_dtype, channels_last=options.channels_last)
    return built, args, kwargs


def _freeze(model: torch.nn.Module, patterns: Iterable[str]) -> Iterator[str]:
    """Take gradients from the parameters that each pattern names, and say how many they are."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        named = [name for name in parameters if name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)]
        if not named:
            from fxmem.simulation.user_code import closest

            paths = [
                path for path, module in model.named_modules() if path and next(module.parameters(), None) is not None
            ]
            raise UsageError(
                f"expected --freeze with a module or a pattern of parameters' names, got "
                f"{pattern!r}{closest(pattern, [*paths, *parameters])}"
            )
        for name in named:
            parameters[name].requires_grad_(False)
        yield f"{len(named)} of {len(parameters)} parameters are frozen by --freeze {pattern}"


class Working:
    """While something is computed: says on stderr what, once it has taken a second, and sends there what the model
    prints."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._timer: threading.Timer | None = None
        self._redirected = contextlib.redirect_stdout(sys.stderr)

    def __enter__(self) -> Working:
        self._redirected.__enter__()
        return self

    def __call__(self, message: str) -> None:
        """From here on this is being done."""
        self._stop()
        if not self._quiet:
            self._timer = threading.Timer(
                1.0, lambda: print(f"fxmem: {printable(message)} ...", file=sys.stderr, flush=True)
            )
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *raised: Any) -> None:
        self._stop()
        self._redirected.__exit__(*raised)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
