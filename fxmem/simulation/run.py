"""One step of a model, run once on FakeTensors, becomes a `Profile`.

The program that runs is the plain training step of `fxmem.simulation.step`, on a fake copy of the model. Around it
stand, each in its own module: FakeTensors on the target's device, the kernels the target would choose, the autograd
engine, the tracer that writes the graph, and the recorder that logs every allocation and free. What is here ties them
together; `fxmem.simulation.profile_builder` turns the log into records.

The steady state. Optimizer state exists before the step: at the optimizer's turn it is stepped once unrecorded and what
it leaves behind counts as there from the start. If anything else outlives the step (a cache the first call fills), the
step is run a second time, with that already there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.fx

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import triton as torch_triton
from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import EnvironmentLacksError, FxmemError
from fxmem.hardware.workspaces import Collector, CpuCollector
from fxmem.records.pause_gc import uncollected
from fxmem.records.profile import Kind, Phase, Profile, Target
from fxmem.simulation import flops, known_values
from fxmem.simulation.error_advice import explained
from fxmem.simulation.kernel_settings import convolution_settings, is_deterministic
from fxmem.simulation.kernels import card_emulation
from fxmem.simulation.model.fake_model import deep_recursion, fake_copy, fake_inputs
from fxmem.simulation.observe.autograd_engine import AutogradEngine
from fxmem.simulation.observe.event_log import LOSS, OPTIMIZER, StepLog
from fxmem.simulation.observe.fx_tracer import ProgramTracer, named_arguments
from fxmem.simulation.observe.op_cache import CHECK, Replayer
from fxmem.simulation.observe.op_recorder import Looked, Recorder
from fxmem.simulation.process_guard import process_unchanged
from fxmem.simulation.profile_builder import Run, account
from fxmem.simulation.request import StepRequest
from fxmem.simulation.step import default_loss, describe, make_optimizer, run_step

__all__ = ["Traced", "profile"]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A profile and the graph it was taken from."""

    profile: Profile
    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor | None]
    opaque: tuple[str, ...]
    """What the graph names but cannot hold; empty when a GraphModule of it can run."""


def profile(model: torch.nn.Module, request: StepRequest, progress: Callable[[str], None] = lambda _: None) -> Traced:
    """Run one step of `model` as it would run on the request's target, and account for every byte.

    Args:
        model: real or on meta; neither it nor its tensors are changed. Run as it is: `train()` or `eval()` is the
            caller's.
        request: its `settings` are the caller's, too.
        progress: called with a few words before each stage.

    Raises:
        AnalysisError: the model raised, or asked for a value that only real data has.
        EnvironmentLacksError: this build of torch cannot hold CUDA tensors.
    """
    _require_device(request.resolved_target)
    run = _Run(model, request)
    progress("running one step on fake tensors")
    with uncollected():
        with run.environment():
            run.step()
            if run.left_over():
                progress("running it again: the first step left tensors behind")
                run.step()
        progress("accounting")
        return run.traced()


def _replacement(function: Any) -> Callable[..., Any] | None:
    return card_emulation.replacement(function) or known_values.presumed(function)


def _require_device(target: Target) -> None:
    if target.device == "cuda" and torch.version.cuda is None:
        raise EnvironmentLacksError(
            f"expected a torch built with CUDA to analyse for {target.name}; torch {torch.__version__} is built for "
            f"the CPU only "
            "and cannot hold CUDA gradients, even fake ones. "
            "Install the ordinary wheel (pip install torch; it needs no GPU), or use target='cpu'."
        )


class _Run:
    def __init__(self, model: torch.nn.Module, request: StepRequest) -> None:
        self.request, self.target = request, request.resolved_target
        target = self.target
        self.fakes = torch_common.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        device = torch.device(self.target.device, 0) if self.target.device == "cuda" else torch.device("cpu")
        self.collector: Collector | CpuCollector = CpuCollector()
        if target.device == "cuda":
            self.collector = Collector(
                target, torch.__version__, os.environ, convolution_settings(), deterministic=is_deterministic()
            )
        context = target, convolution_settings(), torch.are_deterministic_algorithms_enabled(), is_deterministic()
        self.log = StepLog(device)
        self.recorder = Recorder(
            self.log, self.fakes, self._look, self._saw, Replayer(self.fakes, os.environ.get(CHECK, ""), context)
        )
        self.model, rebound = fake_copy(model, self.fakes, device)
        with self.fakes:
            card_emulation.flatten_rnn_weights(self.model)
        args, kwargs = fake_inputs((request.args, request.kwargs), self.fakes, device)
        self.fake_request = dataclasses.replace(request, args=args, kwargs=kwargs, loss=rebound(request.loss))
        self.inputs = _name_inputs(self.model, args, kwargs)
        with self.fakes:
            ahead = range(1, request.prefetch + 1)
            self.waiting = [(f"{label}, {n} ahead", torch.empty_like(t)) for n in ahead for label, t in self.inputs]
        self.tracer = ProgramTracer(
            self.model, self.log, replacement=_replacement, on_tensor_method=self._tensor_method
        )
        self.engine = AutogradEngine(self.log, around=self.tracer.listening_in_backward, unpacking=self._unpacking)
        self.optimizer_spec = request.optimizer if request.mode == "train" else None
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters = dict(self.model.named_parameters())
        self.cycles = 0
        self.ran_compiled = False
        self._quiet = contextlib.ExitStack()
        """Left when the step is over."""
        self._name_residents()

    def _name_residents(self) -> None:
        named: tuple[tuple[Kind, Iterable[tuple[str, torch.Tensor]]], ...] = (
            (Kind.PARAMETER, self.parameters.items()),
            (Kind.BUFFER, self.model.named_buffers()),
            (Kind.INPUT, self.inputs),
            (Kind.INPUT, self.waiting),
        )
        for kind, tensors in named:
            for label, tensor in tensors:
                self.log.resident(tensor, kind, label)

    # --- running ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Everything the step runs inside; nothing global is left changed. A collection in mid-step would free at a
        moment no real run can be held to."""
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(process_unchanged())
                stack.enter_context(card_emulation.target_kernels(self.target))
                stack.enter_context(known_values.libraries_ask_for_values())
                stack.enter_context(self.fakes)
                stack.enter_context(self.recorder)
                stack.enter_context(self.engine.routed(self.tracer.call_function))
                stack.enter_context(self.tracer.listening())
                stack.enter_context(torch_wrappers.compiled_as_eager(self._saw_compiled))
                flops.torch_formulas()  # brings Triton along before its launches are looked for
                stack.enter_context(torch_triton.launches_told(self._saw_launch))
                stack.enter_context(deep_recursion())
                stack.enter_context(torch_common.patched(torch, "clear_autocast_cache", self.log.freeing_in_order))
                stack.enter_context(torch_common.patched(torch.utils, "swap_tensors", torch_fakes.swapping))
                stack.enter_context(torch_common.quiet_fake_kernels())
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # the program's own warnings are about a run that is not real
                stack.enter_context(_little_garbage())
                stack.enter_context(uncollected())
                yield
        except FxmemError:
            raise
        except Exception as error:
            raise explained(error, self.model) from error
        finally:
            self.log.close()

    def step(self) -> None:
        log = self.log
        log.begin()
        self.collector.begin()
        self.tracer.again()
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.optimizer_spec, self.model.parameters())
            _choose_form(self.optimizer, foreach=card_emulation.default_foreach(self.target))
        if self.request.accumulate > 1:
            self._earlier_gradients()
        with log.recording(), self._quiet:
            run_step(
                self.model,
                dataclasses.replace(self.fake_request, loss=self._noted_loss),
                optimizer=self.optimizer,
                device_type=self.target.device,
                mark=self._mark,
            )
        log.end_phase()
        self._forget_unused_gradients()
        self._name_gradients()
        for tensor in self.parameters.values():
            tensor.grad = None
        held = len(log.alive())
        gc.collect()
        self.cycles = held - len(log.alive())

    def _earlier_gradients(self) -> None:
        """What earlier micro-batches have left in `.grad`."""
        for label, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                self.log.resident(parameter.grad, Kind.GRADIENT, f"{label}.grad")

    def _forget_unused_gradients(self) -> None:
        """Those of earlier micro-batches that nothing was added to: the model does not use their parameters, so they
        have none."""
        if self.request.accumulate == 1:
            return
        for parameter in self.parameters.values():
            if parameter.grad is not None and not torch_autograd.version(parameter.grad):
                self.log.forget(parameter.grad)
                parameter.grad = None

    def _noted_loss(self, out: Any) -> torch.Tensor:
        loss = self.fake_request.loss
        value = (default_loss if loss is None else loss)(out)
        if isinstance(value, torch.Tensor):
            self.log.rename(value, "", Kind.OUTPUT)
        return value

    def _mark(self, part: Literal["forward", "loss", "backward", "optimizer"]) -> None:
        log = self.log
        if part == "loss":
            log.on_call(LOSS)
        elif part == "backward":
            log.end_of_forward()
            log.outputs_are(len(self.tracer.nodes) - 1)
            log.set_phase(Phase.BACKWARD)
        elif part == "optimizer":
            self._forget_unused_gradients()
            self._name_gradients()
            log.set_phase(Phase.OPTIMIZER)
            log.resume_call(OPTIMIZER)
            if self.optimizer is not None and torch_common.runs_only_its_own_code(self.optimizer):
                self._quiet.enter_context(torch_common.unwatched())
            if self.optimizer is not None and not self.optimizer.state:
                with log.setup():
                    self.optimizer.step()
                    self._name_optimizer_state()

    def _name_gradients(self) -> None:
        for label, tensor in [*self.parameters.items(), *self.inputs]:
            if tensor.is_leaf and tensor.grad is not None:
                self.log.rename(tensor.grad, f"{label}.grad", Kind.GRADIENT)

    def _name_optimizer_state(self) -> None:
        assert self.optimizer is not None
        names = {id(tensor): parameter for parameter, tensor in self.parameters.items()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.log.resident(value, Kind.OPTIMIZER_STATE, f"{names.get(id(parameter), '')}.{key}")

    def left_over(self) -> bool:
        """Whether something the step made is still there."""
        log = self.log
        return any(log.birth[index] > 0 for index in log.alive())

    def _saw_launch(self, kernel: str, arguments: tuple[Any, ...]) -> None:
        for tensor in torch_common.tensors_in(arguments):
            known_values.forget(tensor)
        self.log.note_call(f"triton.{kernel}")

    def _saw_compiled(self) -> None:
        self.ran_compiled = True

    def _tensor_method(self, name: str, tensor: torch.Tensor) -> None:
        hooks = self.engine.hooks
        (hooks.note_tensor_hook if name == "register_hook" else hooks.note_retain_grad)(tensor)

    @contextlib.contextmanager
    def _unpacking(self) -> Iterator[None]:
        with self.tracer.listening_in_backward(), self.log.bringing_back():
            yield

    def _look(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Looked:
        return Looked(flops.op_flops(func, args, kwargs, result), self.collector.look(name, args, result))

    def _saw(self, index: int, hidden: Any, phase: Phase) -> None:
        self.collector.saw(index, hidden, phase)

    def traced(self) -> Traced:
        tracer = self.tracer
        result = account(
            Run(
                name=self.request.name,
                notes=self.request.notes,
                model=self.model,
                inputs=tuple(self.inputs),
                step=describe(self.fake_request, self.optimizer),
                target=self.target,
                optimizer=self.optimizer,
                recorder=self.recorder,
                log=self.log,
                nodes=tuple(tracer.nodes),
                sources=tuple(tracer.sources),
                calls=tuple(
                    sorted(tracer.calls, key=lambda call: (call.first_node, -call.last_node, call.module.count(".")))
                ),
                recomputed=tuple(sorted(tracer.recomputed, key=lambda region: (region.first_node, -region.last_node))),
                collector=self.collector,
                ran_compiled=self.ran_compiled,
                cycles=self.cycles,
            )
        )
        for fx_node, node in zip(tracer.nodes, result.nodes, strict=False):
            fx_node.meta["fxmem"] = node
        return Traced(result, tracer.graph, dict(tracer.constants), tuple(dict.fromkeys(tracer.opaque)))


@contextlib.contextmanager
def _little_garbage() -> Iterator[None]:
    """Collections inside look only at what was made inside; torch and a loaded model library are hundreds of thousands
    of objects."""
    if gc.get_freeze_count():
        yield  # somebody else's freeze is not ours to undo
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _name_inputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for label, value in named_arguments(model, args, kwargs):
        tensors = [t for t in torch_common.tree_leaves(value) if isinstance(t, torch.Tensor)]
        found += [(label if len(tensors) == 1 else f"{label}.{i}", t) for i, t in enumerate(tensors)]
    return found


def _choose_form(optimizer: torch.optim.Optimizer | None, *, foreach: bool) -> None:
    """Settle what torch settles by looking at the parameters, which it does not do for fake ones.

    `_default_to_fused_or_foreach` in torch/optim/optimizer.py.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = foreach
