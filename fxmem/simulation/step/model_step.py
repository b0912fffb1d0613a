"""`ModelStep`: one step of a model as what is recorded.

The steady state. Optimizer state exists before the step: at the optimizer's turn it is stepped once unrecorded, and
what it leaves behind counts as there from the start. If anything else outlives the step (a cache the first call fills),
the step is run a second time, with that already there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.fx

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem._torch.autograd import steps_in_backward
from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.memory.lengths import LoggedStep
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Kind, Phase, Profile, Target
from fxmem.records.units import GRAPH_POOL
from fxmem.simulation.asked.values import Values
from fxmem.simulation.kernels import card_emulation
from fxmem.simulation.kernels.recurrent import flatten_rnn_weights
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.ranks.mailbox import shard
from fxmem.simulation.recording.observe.event_log import LOSS, OPTIMIZER
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.recording.profile_builder import build_step
from fxmem.simulation.recording.recording import FinishedRun, Subject
from fxmem.simulation.recording.residents import Holders, name_optimizer_state, note_derived
from fxmem.simulation.recording.wiring import make_recording
from fxmem.simulation.step.fake_model import fake_copy, fake_inputs, read_really
from fxmem.simulation.step.function_copies import tensors_behind
from fxmem.simulation.step.given.prepared_step import (
    LabelledLoss,
    describe_own_loss,
    find_label_argument,
    loss_assumption,
    missing_loss,
)
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import LoopVariables, default_loss, describe, make_optimizer, run_forward, run_step


class ModelStep(Subject):
    """The step of `fxmem.simulation.step.step` on fake tensors.

    It tells the log what a program of this form has: residents, phases, gradients, optimizer state.

    Args:
        request: the step.
    """

    def __init__(self, request: StepRequest) -> None:
        super().__init__(Values())
        self.compiles_whole = request.world is None
        self._request = request
        self._optimizer: torch.optim.Optimizer | None = None
        self._cycles = 0
        self._labels: torch.Tensor | None = None
        self._missing_loss = ("", 0)
        self._own_loss: dict[str, str] = {}
        """What the loss is where none was given."""
        self._earlier: dict[str, int | None] = {}
        """Storages of the gradients that earlier micro-batches have left, by parameter."""
        self._observers_paused = contextlib.ExitStack()
        """Left when the step is over."""
        self._replacing: list[int] = []
        """When the new output and the new loss replace those of the step before."""
        self._replaced: tuple[tuple[int, int], ...] = ()

    def prepare(self, model: torch.nn.Module) -> None:
        """Make a fake copy of the model and its inputs, shard and compile it as the request says, and attach it."""
        recording, request = self.recording, self._request
        self._log, self._nodes, self._holders = recording.log, recording.nodes, Holders(recording.log)
        self._model, rebound = fake_copy(model, recording.fakes, recording.device)
        with recording.fakes:
            flatten_rnn_weights(self._model)
        if request.parallelize is not None:
            with process_unchanged(), recording.emulate():
                recording.compilation.prepare(self._model)
                self._model = shard(self._model, request.parallelize)
        args, kwargs = fake_inputs((request.args, request.kwargs), recording.fakes, recording.device)
        originals = torch_common.tree_leaves((request.args, request.kwargs))
        fakes = zip(map(id, originals), torch_common.tree_leaves((args, kwargs)), strict=True)
        loss = rebound(request.loss, {key: fake for key, fake in fakes if isinstance(fake, torch.Tensor)})
        self._request = dataclasses.replace(request, args=args, kwargs=kwargs, loss=loss)
        self._parameters = dict(self._model.named_parameters())
        self._inputs = _name_inputs(self._model, args, kwargs)
        with recording.fakes:
            ahead = range(1, request.prefetch + 1)
            self._waiting = [(f"{label}, {n} ahead", torch.empty_like(t)) for n in ahead for label, t in self._inputs]
        recording.attach(self._model)
        self._root = recording.compilation.wrap(self._model)
        self._name_residents()

    def run_forward(self) -> None:
        """Run forward and loss once, and free what they gave."""
        self.recording.begin()
        request = dataclasses.replace(self._request, loss=self._compute_loss)
        with self._log.record_step(), self.recording.compilation.observe_run():
            run_forward(self._root, request, self.recording.target.device, self._mark)
        self._collect_cycles()

    def run(self) -> None:
        """Run the step once."""
        self.recording.begin()
        if self._optimizer is None and self._request.mode == "train":
            self._optimizer = make_optimizer(self._request.optimizer, self._model.parameters())
            _choose_form(self._optimizer, foreach=card_emulation.default_foreach(self.recording.target))
        if self._request.accumulate > 1:
            if self._optimizer is not None and steps_in_backward(self._optimizer):
                raise UsageError(
                    "expected accumulate=1 with an optimizer that steps within backward: it applies each gradient at "
                    "once, and has none to add another to"
                )
            if self._request.world is None:
                self._allocate_earlier_gradients()
            else:
                self._run_earlier_micro_batch()
        variables = LoopVariables()
        self._replacing.clear()
        with self._log.record_step(), self.recording.compilation.observe_run(), self._observers_paused:
            run_step(
                self._root,
                dataclasses.replace(self._request, loss=self._compute_loss),
                optimizer=self._optimizer,
                device_type=self.recording.target.device,
                mark=self._mark,
                variables=variables,
            )
            if self._request.mode == "infer":
                self._note_replacement()
            if not self._request.keeps_outputs:
                self._drop(variables)
        self._log.end_phase()
        self._drop(variables)
        self._settle_gradients()
        if self._optimizer is not None:
            names = {id(tensor): label for label, tensor in self._parameters.items()}
            name_optimizer_state(self._log, [self._optimizer], names)
        self.recording.collectives.note_host(self._model, self._optimizer)
        for parameter in self._parameters.values() if not self._request.keeps_gradients else ():
            parameter.grad = None
        self._collect_cycles()
        places = {"": self._model, "loss": self._request.loss}
        self._holders.search([(places.items, None)], self._nodes.find_kept(self.recording.engine.find_saved()))

    def describe(self) -> FinishedRun:
        """The last run of the step."""
        compiled = self.recording.compilation.describe()
        return FinishedRun(
            recording=self.recording,
            name=self._request.name,
            notes=self._request.notes,
            step=describe(self._request, self._optimizer).model_copy(update={"compiled": compiled, **self._own_loss}),
            model=self._model,
            inputs=tuple(self._inputs),
            optimizer=self._optimizer,
            replaced=self._replaced,
            cycles=self._cycles,
            labels=loss_assumption(self._request.loss, self._labels),
            missing_loss=self._missing_loss,
        )

    def _name_residents(self) -> None:
        own = {id(tensor): (Kind.BUFFER, label, tensor) for label, tensor in self._model.named_buffers()}
        own |= {id(tensor): (Kind.PARAMETER, label, tensor) for label, tensor in self._parameters.items()}
        moved = [own.pop(id(tensor)) for tensor in _iterate_as_moved(self._model) if id(tensor) in own]
        for kind, label, tensor in (*moved, *own.values()):
            self._log.resident(tensor, kind, label)
        note_derived(self._log, self._model)
        named: tuple[tuple[Kind, Iterable[tuple[str, torch.Tensor]]], ...] = (
            (Kind.INPUT, self._inputs),
            (Kind.INPUT, self._waiting),
            (Kind.BUFFER, _name_behind(self._request.loss)),
        )
        for kind, tensors in named:
            for label, tensor in tensors:
                self._log.resident(tensor, kind, label)

    # --- what the loop's variables hold -------------------------------------------------------------------------------

    def _note_replacement(self) -> None:
        """An output or a loss is made, and replaces that of the step before."""
        self._replacing.append(self._log.pass_tick() if self._request.keeps_outputs else self._log.tick)

    def _drop(self, variables: LoopVariables) -> None:
        """Let go of what the variables hold; it is what they held of the step before, too, until it was replaced."""
        log, found = self._log, list[tuple[int, int]]()
        for name, tick in zip(vars(LoopVariables()), self._replacing, strict=False):
            if getattr(variables, name) is None:
                continue
            before = {*log.alive()}
            setattr(variables, name, None)
            gone = [index for index in sorted(before - {*log.alive()}) if log.storages[index].stream != GRAPH_POOL]
            found.append((tick, log.sum_bytes(gone)))
            for index in gone if self._request.keeps_outputs else ():
                log.note_of_before(index, f"{name} of the step before", tick)
        self._replaced = tuple(found) or self._replaced

    # --- the parts of the step ----------------------------------------------------------------------------------------

    def _mark(self, part: Literal["forward", "loss", "backward", "optimizer"]) -> None:
        match part:
            case "loss":
                self._note_replacement()
                self._nodes.on_call(LOSS)
            case "backward":
                self._note_replacement()
                self._nodes.end_of_forward()
                self._nodes.mark_outputs(len(self.recording.tracer.nodes) - 1)
                self._log.set_phase(Phase.BACKWARD)
            case "optimizer":
                self._settle_gradients()
                self._log.set_phase(Phase.OPTIMIZER)
                self._nodes.resume_call(OPTIMIZER)
                self._prepare_optimizer()
                self.recording.collectives.note_host(self._model, self._optimizer)

    def _compute_loss(self, out: Any) -> torch.Tensor:
        loss: Any = self._request.loss
        if isinstance(loss, LabelledLoss):
            with self._log.setup():
                labels = self._labels = loss.make_labels(out) if self._labels is None else self._labels
            self._log.resident(labels, Kind.INPUT, "labels")
            value = loss(out, labels)
        else:
            value = (default_loss if loss is None else loss)(out)
        if loss is None:
            self._own_loss = {"loss": describe_own_loss(out)}
            label = find_label_argument(self._model, self._request.args, self._request.kwargs)
            self._missing_loss = missing_loss(out, label)
        if isinstance(value, torch.Tensor):
            self._log.rename(value, "", Kind.OUTPUT)
        return value

    def _prepare_optimizer(self) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        if torch_common.runs_only_its_own_code(optimizer):
            self._observers_paused.enter_context(torch_common.pause_observers())
        if not torch_common.optimizer_state(optimizer):
            with self._log.setup():
                optimizer.step()

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _allocate_earlier_gradients(self) -> None:
        """Put into `.grad` what earlier micro-batches have left there."""
        for label, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                self._log.resident(parameter.grad, Kind.GRADIENT, f"{label}.grad")
                self._earlier[label] = self._log.note_storage(parameter.grad)

    def _run_earlier_micro_batch(self) -> None:
        """Leave in `.grad` what a micro-batch leaves there: shards of gradients lie in what was reduced."""
        with self._log.record_step():
            run_step(
                self._model,
                dataclasses.replace(self._request, loss=self._compute_loss),
                optimizer=None,
                device_type=self.recording.target.device,
                mark=self._mark,
            )
        self._log.end_phase()
        self._settle_gradients()
        self.recording.begin()
        self._log.phase = Phase.FORWARD

    def _settle_gradients(self) -> None:
        """Name the gradients; free those of earlier micro-batches whose parameters the model does not use."""
        for label, earlier in self._earlier.items():
            grad = self._parameters[label].grad
            if grad is not None and self._log.note_storage(grad) == earlier and not torch_autograd.version(grad):
                self._log.forget(grad)
                self._parameters[label].grad = None
        for label, tensor in [*self._parameters.items(), *self._inputs]:
            if tensor.is_leaf and tensor.grad is not None:
                self._log.rename(tensor.grad, f"{label}.grad", Kind.GRADIENT)

    def _collect_cycles(self) -> None:
        """Count the storages that only the garbage collector frees."""
        before = len(self._log.alive())
        gc.collect()
        self._cycles = before - len(self._log.alive())


def _iterate_as_moved(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a model in the order in which `model.to("cuda")` allocates them.

    `Module._apply` in torch/nn/modules/module.py: a module's children first, then its parameters, then its buffers.
    """
    for child in model.children():
        yield from _iterate_as_moved(child)
    for _, tensor in torch_modules.own_tensors(model):
        yield tensor


def _name_inputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for label, value in named_arguments(model, args, kwargs):
        tensors = [t for t in torch_common.tree_leaves(value) if isinstance(t, torch.Tensor)]
        found += [(label if len(tensors) == 1 else f"{label}.{i}", t) for i, t in enumerate(tensors)]
    return found


def _name_behind(loss: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What only the loss has at hand, fake where it is on the target's device."""
    for found in tensors_behind(loss):
        parts = (
            itertools.chain(found.named_parameters(), found.named_buffers())
            if isinstance(found, torch.nn.Module)
            else [("", found)]
        )
        for name, tensor in parts:
            if isinstance(tensor, torch_common.FakeTensor):
                yield f"loss.{name}".rstrip("."), tensor


def _choose_form(optimizer: torch.optim.Optimizer | None, *, foreach: bool) -> None:
    """Set what torch chooses by looking at real parameters. It does not look at fake ones.

    `_default_to_fused_or_foreach` in torch/optim/optimizer.py.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = foreach


# --- one step of a model, run once on FakeTensors, becomes a `Profile` ------------------------------------------------
# The program that runs is the plain training step of `fxmem.simulation.step.step`, a `ModelStep` inside a
# `Recording`; `fxmem.simulation.recording.profile_builder` turns its log into records.


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A profile and the graph it was taken from."""

    profile: Profile
    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor | None]
    opaque: tuple[str, ...]
    """What the graph names but cannot contain; empty when a GraphModule of it can run."""
    sized: LoggedStep
    """What the step of another size is made from."""


def trace_step(
    model: torch.nn.Module,
    request: StepRequest,
    progress: Callable[[str], None] = lambda _: None,
    make: Callable[[StepRequest], ModelStep] = ModelStep,
) -> TracedStep:
    """Run one step of `model` as on the request's target, and account for every byte.

    Args:
        model: real or on meta; neither it nor its tensors are changed. Run as it is: `train()` or `eval()` is the
            caller's.
        request: its `settings` are the caller's, too.
        progress: called with a few words before each stage.
        make: makes what is recorded of the request.

    Raises:
        AnalysisError: the model raised, or asked for a value that only real data has.
        EnvironmentLacksError: this build of torch cannot hold CUDA tensors.
    """
    target = request.resolved_target
    require_device(target)
    step = make(request)
    recording = make_recording(target, step, request.world, request.compile)
    if request.values == "real":
        progress("running forward and loss on the CPU, for what they read")
        step.values.reads = read_really(model, request)
    with contextlib.nullcontext() if request.world is None else request.world.entered(), pause_gc():
        step.prepare(model)
        progress("running one step on fake tensors")
        with recording.environment():
            if request.compile is not None:
                progress("compiling the step, with no kernel built")
                step.run()
                progress("running the compiled step on fake tensors")
            step.run()
            for _ in range(recording.count_runs()):
                progress("running it again: the first step is not like the next")
                step.run()
        progress("accounting")
        (profile, log), tracer = build_step(recording), recording.tracer
        for fx_node, node in zip(tracer.nodes, profile.nodes, strict=False):
            fx_node.meta["fxmem"] = node
        sized = LoggedStep(profile, log, recording.collector)
        return TracedStep(profile, tracer.graph, dict(tracer.constants), tuple(dict.fromkeys(tracer.opaque)), sized)


def repeat_forward(model: torch.nn.Module, request: StepRequest) -> None:
    """Run forward and loss alone, as `trace_step` does, for what observes `model` itself.

    As there they run again where the first run is not like the next. Neither of compiled code nor of a rank.
    """
    step = ModelStep(request)
    recording = make_recording(request.resolved_target, step)
    if request.values == "real":
        step.values.reads = read_really(model, request)
    with pause_gc():
        step.prepare(model)
        recording.tracer.write_no_graph()
        with recording.environment():
            step.run_forward()
            for _ in range(recording.count_runs()):
                step.run_forward()


def require_device(target: Target) -> None:
    """Raise an EnvironmentLacksError if this torch cannot hold tensors of the target's kind."""
    if target.device == "cuda" and torch.version.cuda is None:
        raise EnvironmentLacksError(
            f"expected a torch built with CUDA to analyse for {target.name}; torch {torch.__version__} is built for "
            f"the CPU only and cannot hold CUDA gradients, even fake ones. Install the one with CUDA (on Linux: "
            f"pip install --force-reinstall torch; it needs no GPU), or use target='cpu'."
        )
