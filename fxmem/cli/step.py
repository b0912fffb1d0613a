"""From the options of a step to its analysis. Nothing here imports torch before an analysis is asked for."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from fxmem.cli.given_program import name_program
from fxmem.cli.options import COMPILE, DEFAULT_BATCH, DEFAULT_PROMPT, GENERATION, LOOP, RANKS, SHARDING, STEP, TARGET
from fxmem.cli.parser import Argument
from fxmem.cli.progress import Progress, say
from fxmem.cli.spec_names import check_names, is_reference, names_optimizer_factory
from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError
from fxmem.records.pause_gc import pause_gc
from fxmem.records.units import AS_IS, LOSSES, STEPS, exact_bytes, format_bytes, format_shape

if TYPE_CHECKING:
    import torch

    from fxmem.cli.specs import BuiltModel
    from fxmem.memory.budget import Budget, BudgetShare
    from fxmem.records.plan import Plan
    from fxmem.records.profile import Report, Timeline
    from fxmem.records.units import Mode
    from fxmem.simulation.code.profiled_step import ProfiledStep
    from fxmem.simulation.kernels.kernel_settings import KernelSettings
    from fxmem.simulation.step.analysis import Analysis
    from fxmem.simulation.step.generation import Generation
    from fxmem.simulation.step.request import StepRequest
    from fxmem.whatif.program_step import ProgramStep

_Record = TypeVar("_Record")


def read_budget(options: argparse.Namespace) -> Budget | BudgetShare | None:
    """Parse `--budget` before the analysis, so that a wrong one is refused first."""
    from fxmem.memory.budget import parse_budget

    return None if options.budget is None else parse_budget(options.budget)


def check_host_memory(options: argparse.Namespace, *, of_model: bool) -> None:
    """Refuse a wrong `--host-memory`, and one that no plan could use, before the analysis."""
    from fxmem.memory.budget import parse_bytes

    if options.host_memory is None:
        return
    parse_bytes(options.host_memory, "--host-memory")
    if not of_model:
        raise UsageError("expected --host-memory with a model: of a program, and of a report, only regions are planned")
    if options.mode != "train":
        raise UsageError("expected --host-memory with a training step: at inference nothing waits for backward")


class ProgramWords(NamedTuple):
    """A program on the command line: the fields of `Launch`."""

    program: str
    arguments: tuple[str, ...]
    is_module: bool
    ranks: int | None = None
    rank: int | None = None


def read_program(options: argparse.Namespace, *allowed: str) -> ProgramWords | None:
    """Read the program that `--run` names; None where a model is given instead.

    `allowed` are options of a model's step that mean something for a program, too, as its rank does; the others are
    refused: a program says itself what it does.
    """
    given: list[str] | None = getattr(options, "run_program", None)
    if (options.model is None) == (given is None):
        raise UsageError("expected a MODEL, or --run with a program: one of the two")
    if given is None:
        return None
    is_module = given[:1] == ["-m"]
    words = tuple(given[is_module:])
    if not words:
        raise UsageError("expected a program after --run, its script first")
    if getattr(options, "compile", None) not in (None, AS_IS):
        raise UsageError(f"expected --compile {AS_IS} with --run: a program says itself what it compiles")
    for each in (*STEP, *LOOP, *COMPILE, *SHARDING):
        name = each.names[0]
        if each.is_given(options) and name not in ("--quiet", "--compile", *allowed):
            raise UsageError(f"expected --run without {name}: a program says itself what it does")
    return ProgramWords(words[0], words[1:], is_module, *read_ranks(options))


def read_ranks(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """How many ranks a program has, and which one runs; None for one process, or one rank of each class."""
    ranks, rank = (getattr(options, name, None) for name in ("ranks", "rank"))
    if rank is not None and ranks is None:
        raise UsageError(f"expected --rank {rank} with --ranks: how many there are")
    return ranks, rank


def program_step(options: argparse.Namespace, words: ProgramWords, *, goes_on: bool = False) -> ProgramStep:
    """The program that `--run` names, for the card of the options. It has not run.

    Args:
        options: of the verb.
        words: the program.
        goes_on: whether it runs on as `fxmem run` lets it, unless a number of steps is given.
    """
    from fxmem.hardware import catalogue

    card = catalogue.target(options.target)
    require_torch()
    from fxmem.simulation.program import Launch
    from fxmem.whatif.program_step import ProgramCommand, ProgramStep

    steps = STEPS if options.steps is None else options.steps
    goes_on = goes_on and options.steps is None
    values = ((f"--{name}", getattr(options, name, None)) for name in ("target", "steps", "compile", "ranks", "rank"))
    given = tuple(str(word) for pair in values if pair[1] is not None for word in pair)
    launch = Launch(*words, typed=name_program(words[0], *words[1]))
    return ProgramStep(ProgramCommand(launch, card, steps, options.compile, goes_on, given))


def read_step(options: argparse.Namespace) -> tuple[Report, Timeline]:
    """The report of the subject that the options name, and its timeline: it is analysed, run, or read."""
    subject = _read_subject(options, goes_on=False)
    return subject.report, subject.timeline


def _read_subject(options: argparse.Namespace, *, goes_on: bool) -> PlannedSubject:
    from fxmem.memory import report_reader

    program = read_program(options)
    check_generation(options)
    with Progress(options.quiet) as progress:
        step = analyze_subject(options, program, progress, goes_on=goes_on)
        report = step.report()
    return PlannedSubject(step, report, report_reader.timeline(report))


class PlannedSubject(NamedTuple):
    """A step, and a plan for it."""

    step: ProfiledStep
    report: Report
    timeline: Timeline
    plan: Plan | None = None


def read_planned_step(options: argparse.Namespace, *, goes_on: bool = False) -> PlannedSubject:
    """The plan that `--plan` names, if it does, and the step as `read_step` reads it.

    What the options leave out of a model's step is as the plan has it: the model and its inputs, the target, the
    optimizer and so on.

    Raises:
        UsageError: the plan is for another step.
    """
    if options.plan is None:
        return _read_subject(options, goes_on=goes_on)
    from fxmem.memory import report_reader
    from fxmem.show.plan_facts import check_same_step

    plan = report_reader.load_plan(Path(options.plan))
    if options.run_program is None and (options.model is None or not is_report(options.model)):
        _fill_in(options, plan)
    subject = _read_subject(options, goes_on=goes_on)
    check_same_step(plan, subject.report)
    before, now = plan.before.requested_bytes, subject.timeline.peak.requested_bytes
    if before != now:
        raise UsageError(
            f"expected the step that the plan was made for, whose peak without it is {exact_bytes(before)}; here it is "
            f"{exact_bytes(now)}: give the options that `fxmem plan` had, or plan it anew"
        )
    return subject._replace(plan=plan)


def _fill_in(options: argparse.Namespace, plan: Plan) -> None:
    """Set what the options leave out to what the plan was made for. Raises UsageError for a generation."""
    step = plan.step
    known = {name: getattr(step, name) for name in ("mode", "precision", "accumulate", "prefetch", "zero_grad")}
    known |= {"loss": step.loss if step.loss in LOSSES else None, "optimizer": step.optimizer or "none"}
    known |= {"set_to_none": step.set_to_none, "keep_outputs": step.keep_outputs, "target": plan.target.name}
    known |= {"inference_mode": step.inference_mode}
    if options.batch is None:
        known["input"] = [f"{each.name}:{format_shape(each.shape)}:{each.dtype}" for each in plan.inputs]
    for each in (*STEP, TARGET, *LOOP):
        if each.dest in known and not each.is_given(options):
            setattr(options, each.dest, known[each.dest])
    if options.mode == "generate":  # which goes with no optimizer that is filled in
        raise UsageError(f"expected a plan for this step; it is for mode {step.mode}, not {options.mode}: plan it anew")
    options.model = options.model or plan.model


def analyze_subject(
    options: argparse.Namespace,
    program: ProgramWords | None,
    progress: Progress,
    *,
    again: bool = False,
    goes_on: bool = False,
) -> ProfiledStep:
    """Analyse the model's step or generation, or load the report that the options name; a program is yet to run.

    A report is refused where the step is to run `again`; a program `goes_on` as for `program_step`.
    """
    if program is not None:
        progress("running the program as it is")
        return program_step(options, program, goes_on=goes_on)
    if again or not is_report(options.model):
        return (analyze_generation if options.mode == "generate" else analyze_model)(options, progress)
    from fxmem.memory import report_reader
    from fxmem.simulation.code.profiled_step import ReportedStep

    return ReportedStep(report_reader.load_report(Path(options.model)))


def analyze_model(options: argparse.Namespace, progress: Progress) -> Analysis:
    """Analyse the step that the options describe."""
    from fxmem.hardware import catalogue

    card = catalogue.target(options.target)
    require_torch(options)
    _say_least(options)
    progress("loading torch")
    with pause_gc():
        from fxmem.simulation.ranks import make_plan
        from fxmem.simulation.recording.compiled import read_compile
        from fxmem.simulation.step.analysis import analyze_step

    own = None if options.parallelize is None else load_callable("--parallelize", options.parallelize)
    plan = make_plan(
        options.mesh, options.ranks, own, reshard_after_forward=options.reshard_after_forward, offload=options.offload
    )
    compiled = read_compile(options.compile, options.compile_option)
    request = step_request(
        options,
        target=card,
        accumulate=options.accumulate,
        prefetch=options.prefetch,
        compile=compiled,
        ranks=options.ranks if plan is None else plan.mesh.size,
        rank=options.rank,
        parallelize=plan or own,
    )
    with pause_gc():  # most of it is the import of the model's library
        built, args, kwargs = build_step(options, progress)
    module, notes = built.module, built.notes
    if getattr(options, "checkpoints", None):  # of a sweep they are in its grid
        from fxmem.whatif.source import checkpoint_blocks

        module = checkpoint_blocks(module)
        notes = (*notes, "each repeated block is checkpointed (--checkpoints blocks)")
    request = replace(request, args=args, kwargs=kwargs, name=built.spec, notes=notes)
    return analyze_step(module, request, progress)


_CHANGES_WEIGHTS = ("--set", "--weights", "--quantize", "--lora", "--freeze", "--optimizer", "--download")


def _say_least(options: argparse.Namespace) -> None:
    """Say for the wait what the weights of a known model take, and in training what goes with them where it reaches
    each: by the table of the hub's models alone, without torch. Nothing where that does not say it."""
    from fxmem.simulation.stand_ins.hub_models import find_weights

    changing = (*(each for each in STEP if each.names[0] in _CHANGES_WEIGHTS), *RANKS, *SHARDING)
    found = find_weights(options.model.removeprefix("hf:")) if options.model.startswith("hf:") else None
    if options.quiet or found is None or any(each.is_given(options) for each in changing):
        return
    count, dtype = found
    nbytes = count * (4 if dtype == "float32" else 2)
    trained = f"; {format_bytes(4 * nbytes)} with gradients and AdamW's two states of all" * (options.mode == "train")
    say(f"at least {format_bytes(nbytes)}: {count:,} parameters in {dtype}{trained}; the whole follows")


def with_defaults(options: argparse.Namespace, arguments: Iterable[Argument], **given: Any) -> argparse.Namespace:
    """The options, with defaults for arguments that the verb does not have."""
    defaults = {each.dest: each.settings.get("default", False) for each in arguments}
    return argparse.Namespace(**{**defaults, **vars(options), **given})


_NOT_OF_A_GENERATION = (
    "--loss",
    "--optimizer",
    "--zero-grad",
    "--set-to-none",
    "--keep-outputs",
    "--values",
    "--freeze",
)


def check_generation(options: argparse.Namespace) -> None:
    """Refuse what a generation has not, and what only a generation has."""
    generates = options.mode == "generate"
    others = (*(each for each in STEP if each.names[0] in _NOT_OF_A_GENERATION), *LOOP, *COMPILE, *RANKS, *SHARDING)
    for each in others if generates else GENERATION:
        if each.is_given(options):
            said = "no part of a generation" if generates else "of a generation: add --mode generate"
            raise UsageError(f"expected no {each.names[0]} with --mode {options.mode}: it is {said}")
    if generates and options.input and (options.batch is not None or options.prompt is not None):
        raise UsageError("--batch and --prompt are for the default inputs; with --input, write the sizes there")


def analyze_generation(options: argparse.Namespace, progress: Progress) -> Generation:
    """Analyse the generation that the options describe."""
    from fxmem.hardware import catalogue

    card = catalogue.target(options.target)
    require_torch(options)
    _say_least(options)
    progress("loading torch")
    from fxmem.cli.specs.inputs import make_batch, name_main_input, parse_input
    from fxmem.simulation.step.generation import GenerationRequest, check_generates, generate_step

    specs = [parse_input(text) for text in options.input]
    built = build_changed_module(options, progress, mode="infer")
    check_generates(built.module)
    if options.weights is None and options.quantize is None:
        _refuse_packed(built)
    prompt, notes = (name_main_input(specs, built.module), ()) if specs else _prompt(built, options)
    batch = make_batch(prompt, weights_dtype=built.weights_dtype)
    request = GenerationRequest(
        args=batch.args,
        kwargs=dict(batch.kwargs),
        precision=options.precision,
        settings=_kernel_settings(options),
        inference_mode=options.inference_mode,
        target=card,
        name=built.spec,
        notes=(*built.notes, *notes, *batch.notes),
        new_tokens=options.new,
        cache=options.kv_cache,
        beams=options.beams,
        sample=options.sample,
    )
    return generate_step(built.module, request, progress)


def _refuse_packed(built: BuiltModel) -> None:
    """Raise an `AnalysisError` for a checkpoint with packed weights, with what they take."""
    packed = built.packed
    if packed is not None:
        size = "" if packed.nbytes is None else f"; the weights take {exact_bytes(packed.nbytes)}"
        raise AnalysisError(
            f"{built.spec} is served with packed weights ({packed.method}), whose kernels no run without a card can "
            f"follow: a total would be wrong{size}; --weights bf16 analyses them unpacked"
        )


def _prompt(built: BuiltModel, options: argparse.Namespace) -> tuple[list[Any], tuple[str, ...]]:
    """The inputs that a prompt of the configuration takes, and a note."""
    from fxmem.cli.specs.inputs import TensorSpec, default_inputs

    positions = getattr(getattr(built.module, "config", None), "max_position_embeddings", None)
    most = positions - options.new if isinstance(positions, int) else DEFAULT_PROMPT
    batch, prompt = options.batch or 1, options.prompt or max(min(DEFAULT_PROMPT, most), 1)
    ids = TensorSpec((batch, prompt), "int64", "input_ids")
    notes: tuple[str, ...] = ()
    try:
        found = [each for each in default_inputs(built, batch) if not (each.name or "").startswith("decoder_")]
    except UsageError:
        if options.prompt is None or getattr(built.module, "main_input_name", None) != "input_ids":
            raise
        # How many tokens an image becomes is its processor's to say.
        found, notes = [ids], ("the prompt is text alone, with no image, sound or video: --input gives one with them",)
    if options.prompt is not None and not any(each.name == "input_ids" for each in found):
        raise UsageError(f"expected --input: {options.model} takes no token ids as its prompt")
    chosen = [ids if each.name == "input_ids" else each for each in found]
    # As a tokenizer gives it.
    return [*chosen, *(replace(each, name="attention_mask") for each in chosen if each.name == "input_ids")], notes


def refuse_compile(options: argparse.Namespace, why: str) -> None:
    """Raise a `UsageError` where a verb is for eager code alone."""
    if options.compile is not None:
        raise UsageError(f"expected no --compile here: {why}")


def replace(record: _Record, **changes: Any) -> _Record:
    """`dataclasses.replace`, imported only now: it brings `inspect`, a twelfth of what `fxmem --help` takes."""
    from dataclasses import replace

    return replace(record, **changes)  # type: ignore[type-var]  # what is given is a dataclass


def is_report(model: str) -> bool:
    """Whether the argument MODEL is a report: a model spec that ends in .json has a colon."""
    path = Path(model)
    return model == "-" or (path.suffix == ".json" and (os.path.isfile(path) or ":" not in model))


def require_torch(options: argparse.Namespace | None = None) -> None:
    """Raise an `EnvironmentLacksError` if torch is not installed; refuse misspelt names before."""
    if options is not None and is_report(options.model):
        raise UsageError(
            f"expected a model or a program, got the report {options.model!r}: here the step runs again, and what a "
            "report says was fixed when it was written"
        )
    if options is not None:
        check_names(options)
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentLacksError("expected torch, which is not installed: pip install torch (it needs no GPU)")


def step_request(options: argparse.Namespace, **further: Any) -> StepRequest:
    """The step that the options describe, without inputs; `further` are other fields of the request."""
    from fxmem.simulation.step.request import StepRequest

    return StepRequest(
        mode=options.mode,
        loss=None if options.loss is None else _load_loss(options.loss),
        optimizer=_load_optimizer(options.optimizer),
        precision=options.precision,
        zero_grad=options.zero_grad,
        set_to_none=options.set_to_none,
        keep_outputs=options.keep_outputs,
        inference_mode=options.inference_mode,
        values=options.values,
        settings=_kernel_settings(options),
        **further,
    )


def _kernel_settings(options: argparse.Namespace) -> KernelSettings:
    from fxmem.simulation.kernels.kernel_settings import KernelSettings

    return KernelSettings(**{name: getattr(options, name) for name in KernelSettings.model_fields})


def _load_loss(text: str) -> Any:
    from fxmem.simulation.step.given import read_loss

    return load_callable("--loss", text) if is_reference(text) else read_loss(text)


def _load_optimizer(text: str) -> Any:
    if text.lower() == "none":
        return None
    return load_callable("--optimizer", text) if names_optimizer_factory(text) else text


def load_callable(option: str, reference: str) -> Any:
    """Load the user's own function or class that an option names."""
    from fxmem.cli.specs.recipes import importable, load
    from fxmem.simulation.processes.process_guard import process_unchanged

    if not is_reference(reference):
        raise UsageError(f"expected {option} as pkg.mod:name or file.py:name, got {reference!r}")
    with process_unchanged(), importable(reference):
        found = load(reference)
    if not callable(found):
        raise UsageError(
            f"expected {option} to name a function or a class, but {reference} is of type {type(found).__name__}"
        )
    return found


def build_step(
    options: argparse.Namespace, progress: Callable[[str], None]
) -> tuple[BuiltModel, tuple[Any, ...], dict[str, Any]]:
    """Build the model on meta, and the arguments of its forward."""
    from fxmem.cli.specs.inputs import add_labels, default_inputs, make_batch, name_main_input, parse_input

    specs = [parse_input(text) for text in options.input]
    if specs and options.batch is not None:
        raise UsageError("--batch is for the default inputs; with --input, write the batch size there")
    built = build_changed_module(options, progress, mode=options.mode)
    given = name_main_input(specs, built.module)
    chosen = given or default_inputs(built, DEFAULT_BATCH if options.batch is None else options.batch)
    if options.loss is None:
        chosen = add_labels(chosen, built)
    batch = make_batch(
        chosen,
        weights_dtype=built.weights_dtype,
        channels_last=options.channels_last,
        keep_values=options.values == "real",
    )
    return replace(built, notes=(*built.notes, *batch.notes)), batch.args, dict(batch.kwargs)


def build_changed_module(
    options: argparse.Namespace, progress: Callable[[str], None], *, mode: Mode, device: Literal["meta", "cpu"] = "meta"
) -> BuiltModel:
    """Build the model, with what the options change about it: frozen, quantised, with adapters; and notes on that."""
    from fxmem.cli.specs import build_model, parse_settings
    from fxmem.simulation.step.given import add_lora, quantize_weights

    settings = parse_settings(options.settings)
    progress(f"building {options.model}")
    shape: dict[str, Any] = {"weights_dtype": options.weights, "channels_last": options.channels_last}
    built = build_model(options.model, settings, mode=mode, device=device, **shape)
    module, notes = built.module, [*_freeze(built.module, options.freeze)]
    if options.quantize is not None:
        notes.append(quantize_weights(module, options.quantize))
    if options.lora is not None:
        module, note = add_lora(module, options.lora)
        notes.append(note)
    return replace(built, module=module, notes=(*built.notes, *notes))


def _freeze(model: torch.nn.Module, patterns: Iterable[str]) -> Iterator[str]:
    """Freeze the parameters that each pattern names; yield a note on each pattern."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        named = [name for name in parameters if name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)]
        if not named:
            from fxmem.errors import closest

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
