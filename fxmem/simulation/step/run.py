"""One step of a model, run once on FakeTensors, becomes a `Profile`.

The program that runs is the plain training step of `fxmem.simulation.step.step`, a `ModelStep` inside a `Recording`;
`fxmem.simulation.recording.profile_builder` turns its log into records.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch
import torch.fx

from fxmem.errors import EnvironmentLacksError
from fxmem.memory.lengths import LoggedStep
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Profile, Target
from fxmem.simulation.recording.profile_builder import build_step
from fxmem.simulation.recording.wiring import make_recording
from fxmem.simulation.step.model.real_run import read_really
from fxmem.simulation.step.model_step import ModelStep
from fxmem.simulation.step.request import StepRequest


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
            f"the CPU only and cannot hold CUDA gradients, even fake ones. Install the ordinary wheel (pip install "
            f"torch; it needs no GPU), or use target='cpu'."
        )
