"""`fxmem.analyze`: a model in, an `Analysis` out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx

from fxmem._torch.compiler.dynamo import compiled_parts
from fxmem.errors import AnalysisError, UsageError, unknown_name
from fxmem.hardware.catalogue import with_torch
from fxmem.memory.lengths import LoggedStep
from fxmem.records.profile import Profile, Target
from fxmem.records.units import Mode, Precision, Values, ZeroGrad
from fxmem.simulation.kernels.kernel_settings import KernelSettings, apply_settings
from fxmem.simulation.processes.fork import one_at_a_time
from fxmem.simulation.processes.process_guard import postpone_interrupts
from fxmem.simulation.ranks import Offload, make_plan
from fxmem.simulation.ranks.classes import find_classes, with_classes
from fxmem.simulation.ranks.mailbox import Parallelize
from fxmem.simulation.recording.assumptions import COMPILED
from fxmem.simulation.recording.compiled import Compile, parse_compile
from fxmem.simulation.recording.compiled.compiled_parts import Answered, Answers, answer_all_ways
from fxmem.simulation.recording.error_advice import suggest_input, user_code_error
from fxmem.simulation.step.fake_model import EXPORTED, plain_model
from fxmem.simulation.step.given.batches import read_batch
from fxmem.simulation.step.given.prepared_step import ignore_moves, read_loss, understand
from fxmem.simulation.step.model_step import ModelStep, TracedStep, repeat_forward, trace_step
from fxmem.simulation.step.request import AnalysedModel, Loss, OptimizerSpec, StepRequest
from fxmem.simulation.step.step import set_training


class Analysis(AnalysedModel[StepRequest]):
    """The memory of one step of a model, and its reasons.

    Everything but `graph_module` is plain data. It prints as a table in a terminal and in a notebook; what prints it
    is imported only then.
    """

    def __init__(
        self, profile: Profile, model: torch.nn.Module, traced: Callable[[], TracedStep], request: StepRequest
    ) -> None:
        super().__init__(profile, model, request, analyze_step)
        self._trace = traced

    @functools.cached_property
    def graph_module(self) -> torch.fx.GraphModule:
        """The traced graph over the model's own parameters; it runs on inputs of the traced shapes.

        Numbers the program derived from shapes are constants in it, and it computes on the device the model was
        given on. Raises AnalysisError if the program used values a graph cannot hold.
        """
        traced = self._trace()
        if traced.opaque:
            raise AnalysisError(
                f"expected a program whose every argument a graph can hold; it passes "
                f"{', '.join(traced.opaque)}. "
                "The profile is complete; only graph_module is not to be had."
            )
        return _graph_module(self.model, traced)

    def logged(self) -> LoggedStep:
        """What the step of another size is made from; see `fxmem.memory.lengths.ProfileForms`."""
        return self._trace().sized

    def with_profile(self, profile: Profile) -> Analysis:
        """The same analysis, whose profile says more."""
        return Analysis(profile, self.model, self._trace, self.request)

    def repeat_forward(self, model: torch.nn.Module) -> None:
        """Run the step's forward of another model, for what observes that model; more where that is not to be had."""
        if self.request.compile is not None or self.request.world is not None:
            self.vary(model)
            return
        prepared, request = _prepare(model, self.request)
        with _running(prepared, request):
            repeat_forward(prepared, request)


def analyze(  # noqa: PLR0913 - the settings of the public API, by keyword
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    inputs: Any,
    *,
    mode: Mode = "train",
    loss: Loss | str | None = None,
    optimizer: OptimizerSpec = "adamw",
    precision: Precision | torch.dtype | None = None,
    settings: KernelSettings | None = None,
    zero_grad: ZeroGrad = "after-step",
    set_to_none: bool = True,
    keep_outputs: bool | None = None,
    inference_mode: bool = False,
    accumulate: int = 1,
    prefetch: int = 0,
    values: Values = "bound",
    target: str | Target = "h100",
    torch: str | None = None,
    compile: Compile = None,
    ranks: int | None = None,
    rank: int | None = None,
    parallelize: Parallelize | None = None,
    mesh: str | Mapping[str, int] | None = None,
    reshard_after_forward: bool | None = None,
    offload: Offload | None = None,
    progress: Callable[[str], None] | None = None,
) -> Analysis:
    """Predict the memory of one training or inference step, with no GPU and no weights.

    Analyses in several threads take turns. What one replaces in torch it replaces for the whole process and puts back,
    whatever is raised.

    Args:
        model: an `nn.Module`, real or on meta, or a factory of one (called under `torch.device("meta")`). It is left as
            it was. Its `training` flags are kept where the root's agrees with `mode`.
        inputs: a tensor, a tuple (positional) or a dict (keyword); tensors real, meta or fake. Only shapes, strides,
            dtypes and `requires_grad` are looked at, and the values of small integer tensors given on the CPU. Of a
            `DataLoader` or a `Dataset` the first batch is taken, with no worker; a dict whose keys are no arguments of
            a forward that takes one is given whole.
        mode: "train" for forward, loss, backward and optimizer; "infer" for forward under `no_grad`.
        loss: output -> scalar tensor; "ce", "mse", "bce" or "l1", or such a loss of `torch.nn`, whose labels are made
            to fit the output. Default: the model's `training_step` if it has one, else the output's `.loss`, else the
            sum of its floating-point tensors.
        optimizer: a `torch.optim` name in any case ("adamw", "sgd-momentum", "adamw:fused"), a class, a callable
            `params -> Optimizer`, an optimizer, of which class and settings are taken, or None to leave it out.
        precision: "bf16", "fp16" or torch's dtype for autocast; None or float32 for the model's own dtypes.
        settings: which kernels may run (`fxmem.KernelSettings`); by default as torch's flags are in this process.
        zero_grad: "after-step", or "before-backward", where gradients of the step before live through forward.
        set_to_none: whether clearing gradients frees them; False fills them with zeros, and they stay.
        keep_outputs: whether the loop's variables hold output and loss of the step before until the new ones replace
            them. None: where it trains, as most loops do; False where the step is a function of its own, as in
            transformers' Trainer.
        inference_mode: at inference, run under `torch.inference_mode` rather than `torch.no_grad`.
        accumulate: micro-batches of the size of `inputs` to one optimizer step; above 1, the step is the last of them,
            and the gradients of those before exist when it begins.
        prefetch: further batches like `inputs` that wait on the card throughout the step.
        values: "bound" counts shapes that depend on data at the largest they can be; "real" runs forward and
            loss once more on the CPU, on these inputs and weights (made up where they are on meta), and decides by what
            is read there. It needs the memory of a real forward.
        target: a name from the catalogue ("h100", "rtx4090", "cpu"), a size ("24GB"), or a `Target`.
        torch: the release of torch on the target, e.g. "2.6": its workspaces, its rules for kernels, its cuDNN. What
            that release computes otherwise than the installed one, in other operators, is not predicted. None: the one
            that the target has, else the installed one.
        compile: analyse the step as `torch.compile` would run it on the target: True, a mode ("reduce-overhead"), or
            its arguments as a dict ({"mode": ..., "dynamic": ..., "options": ...}). "as-is" compiles what the model's
            author has compiled; without it, that is analysed as eager code. No kernel is built, no GPU needed. With
            `mesh` its blocks are compiled, then sharded; with `parallelize` "as-is" follows what that compiles.
        ranks: how many ranks the model is spread over; the step is that of one. No peers, network or cards are needed.
        rank: which of them. None finds the classes of equal ranks, by the first and the last of each dimension of the
            mesh, and gives the one that takes most; `profile.step.ranks.classes` has a record of each.
        parallelize: the function of the training script that shards the model (`fully_shard`, `parallelize_module`,
            `DistributedDataParallel`, `checkpoint_wrapper`, ...), in place or by returning another. It runs on a fake
            copy, with a process group of `ranks` up, and may call `init_device_mesh`.
        mesh: in the place of `ranks` and `parallelize`, a plan of ours: `{"fsdp": 8, "tp": 4}` or "fsdp=8,tp=4", with
            `replicate` for HSDP, or alone for DDP. FSDP2 wraps the model's repeated blocks; tensor parallel needs the
            model's own `tp_plan`, as transformers' models have it. With `fsdp`, `precision` is FSDP2's mixed precision.
        reshard_after_forward: with `mesh`, whether gathered parameters are freed after forward, and gathered again for
            backward. None: those of the blocks are, the others are not.
        offload: with `mesh`, "cpu" keeps the shards in the host's memory (`CPUOffloadPolicy`).
        progress: called with a few words before each stage.

    Raises:
        UsageError: an argument that cannot be understood.
        AnalysisError: the model raised, or needs values that only real data has.
        EnvironmentLacksError: this torch cannot hold tensors of the target's kind.
    """
    tell = progress or (lambda _: None)
    plan = make_plan(mesh, ranks, parallelize, reshard_after_forward=reshard_after_forward, offload=offload)
    request = read_request(
        inputs,
        mode=mode,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        settings=settings,
        zero_grad=zero_grad,
        set_to_none=set_to_none,
        keep_outputs=keep_outputs,
        inference_mode=inference_mode,
        accumulate=accumulate,
        prefetch=prefetch,
        values=values,
        target=with_torch(target, torch),
        compile=compile,
        ranks=ranks if plan is None else plan.mesh.size,
        rank=rank,
        parallelize=plan or parallelize,
    )
    return analyze_step(build_module(model, tell), request, tell)


def read_request(
    inputs: Any, *, loss: Loss | str | None = None, compile: Compile = None, **options: Any
) -> StepRequest:
    """One step as `analyze` is asked for it; `options` are further fields of `StepRequest`.

    Raises:
        UsageError: an argument that cannot be understood.
    """
    own = ("args", "kwargs", "notes")  # of the inputs
    fields = [field.name for field in dataclasses.fields(StepRequest) if field.name not in own]
    for name in options.keys() - fields:
        raise unknown_name("an option of fxmem.analyze", name, [*fields, "loss", "compile"])
    batch = read_batch(inputs)
    return StepRequest(
        args=batch.args,
        kwargs=dict(batch.kwargs),
        notes=batch.notes,
        loss=read_loss(loss),
        compile=parse_compile(compile),
        **options,
    )


def analyze_step(model: Any, request: StepRequest, progress: Callable[[str], None] | None = None) -> Analysis:
    """Analyse one step of a module, as `analyze` does.

    Raises:
        The errors of `analyze`.
    """
    if request.world is None or request.rank is not None:
        return _analyze_rank(model, request, progress)

    def analyze_rank(rank: int) -> Analysis:
        told = None if progress is None else lambda what: progress(f"rank {rank}: {what}")
        return _analyze_rank(model, dataclasses.replace(request, rank=rank), told)

    found = find_classes(request.world.size, lambda ranks: map(analyze_rank, ranks))
    return found.largest.with_profile(with_classes(found.largest.profile, found.records))


def _analyze_rank(model: Any, request: StepRequest, progress: Callable[[str], None] | None) -> Analysis:
    model, request = _prepare(model, request)
    tell = progress or (lambda _: None)
    traced = _trace(model, request, tell)
    return _answer_both_ways(Analysis(traced.profile, model, lambda: traced, request), tell)


def _answer_both_ways(analysis: Analysis, progress: Callable[[str], None]) -> Analysis:
    """The analysis with the peaks of all answers where the compiler decides by timing on the card."""
    settings, made = analysis.request.compile, analysis.profile.step.compiled
    if settings is None or made is None or not made.timed or settings.answers:
        return analysis

    def recompile(answers: Answers) -> Answered:
        progress("compiling it again, with another answer to what is decided by timing")
        other = analysis.vary(compile=settings.model_copy(update={"answers": answers}))
        return Answered(other.profile.step.compiled, other.peak.counted_bytes)

    peaks = answer_all_ways(Answered(made, analysis.peak.counted_bytes), recompile)
    step = analysis.profile.step.model_copy(update={"compiled": made.with_peaks(*peaks)})
    return analysis.with_profile(analysis.profile.model_copy(update={"step": step}))


def _prepare(model: Any, request: StepRequest) -> tuple[torch.nn.Module, StepRequest]:
    if request.compile is not None and request.compile.as_is and isinstance(model, torch.nn.Module):
        settings = request.compile.model_copy(update={"parts": compiled_parts(model)})
        request = dataclasses.replace(request, compile=settings)
    model, notes = plain_model(model)
    if request.compile is not None:
        notes = tuple(note for note in notes if note != COMPILED)
    notes = tuple(dict.fromkeys((*request.notes, *notes)))
    request = dataclasses.replace(request, name=request.name or type(model).__name__, notes=notes)
    model, request = understand(model, request)
    return model, request


def trace_as(
    model: Any, request: StepRequest, progress: Callable[[str], None], make: Callable[[StepRequest], ModelStep]
) -> TracedStep:
    """Run one step of a module as `analyze` does, recorded as what `make` makes of the request.

    Raises:
        The errors of `analyze`.
    """
    return _trace(*_prepare(model, request), progress, make)


def _trace(
    model: torch.nn.Module,
    request: StepRequest,
    progress: Callable[[str], None],
    make: Callable[[StepRequest], ModelStep] = ModelStep,
) -> TracedStep:
    with _running(model, request):
        try:
            return trace_step(model, request, progress, make)
        except AnalysisError as error:
            hint = suggest_input(str(error), model, request.args, request.kwargs)
            if not hint:
                raise
            raise AnalysisError(f"{error}; {hint}") from error


@contextlib.contextmanager
def _running(model: torch.nn.Module, request: StepRequest) -> Iterator[None]:
    """A step of the model runs inside, alone in this process."""
    with one_at_a_time(), postpone_interrupts(), _set_mode(model, request.mode), apply_settings(request.settings):
        yield


@contextlib.contextmanager
def _set_mode(model: torch.nn.Module, mode: Mode) -> Iterator[None]:
    """The model's `training` flags are those of `mode`, and are put back."""
    before = {module: module.training for module in model.modules()}
    try:
        set_training(model, mode)
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


def build_module(model: torch.nn.Module | Callable[[], torch.nn.Module], progress: Callable[[str], None]) -> Any:
    """The module itself, or what its factory builds on meta; an exported program as it is.

    Raises:
        UsageError: neither a module nor a factory of one.
        AnalysisError: the factory raised.
    """
    if isinstance(model, torch.nn.Module) or type(model).__module__ == EXPORTED:
        return model
    if not callable(model):
        raise UsageError(f"expected an nn.Module or a function that builds one, got {type(model).__name__}")
    progress("building the model on meta")
    try:
        with torch.device("meta"), ignore_moves():
            built = model()
    except Exception as error:
        raise user_code_error(
            error, f"the factory {getattr(model, '__qualname__', type(model).__name__)} under torch.device('meta')"
        ) from error
    if not isinstance(built, torch.nn.Module):
        raise UsageError(f"expected the factory to return an nn.Module, got {type(built).__name__}")
    return built


def _graph_module(model: torch.nn.Module, traced: TracedStep) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    first = next(iter([*model.parameters(), *model.buffers()]), None)
    home = first.device if first is not None else torch.device("cpu")

    def at_home(value: Any) -> Any:
        return home if isinstance(value, torch.device) and value.type == traced.profile.target.device else value

    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, at_home)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, at_home)
        if node.op in ("call_module", "get_attr"):
            constant = traced.constants.get(node.target)
            attributes[node.target] = operator.attrgetter(node.target)(model) if constant is None else constant
    module = torch.fx.GraphModule(attributes, graph, class_name=type(model).__name__)
    module.training = model.training
    return module
