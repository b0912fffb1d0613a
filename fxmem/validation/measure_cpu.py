"""Measures one real step on the CPU: its allocator's log, with every operator's own scratch memory set apart.

`torch.profiler` with `profile_memory=True` reports each allocation and free of the CPU allocator in order, in the
requested bytes (c10/core/CPUAllocator.cpp, `ProfiledCPUMemoryReporter`: no rounding, no alignment). Their
running sum over what was alive before the step is the number of bytes alive. That is the truth a lifetime model is
held to, and it needs no GPU.

The same log holds memory that no tensor of the program ever owns. A *leaf operator* is what the dispatcher hands to a
kernel once composite operators are taken apart: `aten.convolution`, not `aten.conv2d`. It is also the smallest thing a
program can see, and a FakeTensor run of it where the operator has a meta kernel. What one call of a leaf operator both
allocates and frees is its *scratch*: oneDNN's blocked copies of inputs, weights and outputs in a convolution, above
all. It depends on the CPU's instruction set and the number of threads; what is left without it does not. Counted with
it is what a kernel keeps for its own backward in a tensor whose size only its library knows: oneDNN's workspace of a
recurrent layer.

Assumptions. Scratch in OpenMP worker threads and in libraries that do not use torch's allocator (MKL) is not seen,
because the profiler does not see it. Memory on other devices is not counted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import platform
import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from fxmem._torch import kernels as torch_kernels
from fxmem._torch.common import optimizer_state, set_environment, tree_leaves
from fxmem._torch.wrappers import parts
from fxmem.errors import FxmemError, UsageError
from fxmem.records.pause_gc import freeze_gc, pause_gc
from fxmem.records.profile import Kind, Phase
from fxmem.records.validation import Machine, Measurement
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.function_copies import tensors_behind
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import LoopVariables, describe, make_optimizer, run_step
from fxmem.validation.profiler_log import (
    MARK,
    WORKSPACE_KERNELS,
    ProfilerEvent,
    fill_shapes,
    live_bytes,
    read_events,
    scratch_by_op,
    scratch_events,
)


def measure_cpu(
    model: nn.Module, request: StepRequest, *, steps: int = 3, set_aside: tuple[str, ...] = WORKSPACE_KERNELS
) -> Measurement:
    """Run `steps` real steps on the CPU and measure the last.

    One step more tells the shapes of what each operator took.

    The model is trained in place: hand in a copy. The steps before the last bring the steady state (optimizer state
    exists); garbage is collected before the last one and not during it. Where the step has no optimizer, gradients are
    cleared before each step.

    Args:
        request: with inputs on the CPU.
        set_aside: operators whose scratch `peak_without_kernel_scratch_bytes` leaves out.

    Raises:
        UsageError: fewer than two steps, or something on another device than the CPU.
        AnalysisError: the step raised; with the user's line.
    """
    check_run(model, request, steps)
    with freeze_gc():
        real = RealStep(model, request, "cpu", steps)
        return _measure(real, model, request, set_aside)


class RealStep:
    """A step that is run for real, `steps` times, the last of which is measured."""

    def __init__(self, model: nn.Module, request: StepRequest, device_type: str, steps: int) -> None:
        self._model, self._request, self._steps = model, request, steps
        self.optimizer = make_optimizer(request.optimizer, model.parameters()) if request.mode == "train" else None
        self.variables = LoopVariables() if request.keeps_outputs else None
        known: dict[str, Any] = {"device_type": device_type, "variables": self.variables}
        self.run = functools.partial(run_step, model, request, optimizer=self.optimizer, **known)

    def warm_up(self) -> None:
        """Run it until all but the last; without an optimizer, gradients are cleared after each."""
        for _ in range(self._steps - 1):
            self.run(mark=nowhere)
            if self.optimizer is None and self._request.mode == "train" and self._request.zero_grad == "after-step":
                self._model.zero_grad(set_to_none=self._request.set_to_none)


def _measure(real: RealStep, model: nn.Module, request: StepRequest, set_aside: tuple[str, ...]) -> Measurement:
    try:
        # A free is reported only of what a profiler saw allocated, and a model may keep tensors until its next step.
        # A profiler that records shapes keeps the values of torch.func's wrappers alive until it ends. So shapes are
        # those of one step more, after the measured one.
        with quiet_profiler(), torch_kernels.profiler() as earlier:
            real.warm_up()
            for _ in range(request.accumulate - 1):
                real.run(mark=nowhere, optimizer=None)
            gc.collect()
        resident = resident_bytes(model, request, real.optimizer, real.variables, earlier=read_events(earlier))
        with without_garbage(), quiet_profiler(), torch_kernels.profiler() as profiled:
            real.run(mark=mark)
        with quiet_profiler(), torch_kernels.profiler(record_shapes=True) as later:
            real.run(mark=nowhere)
    except FxmemError:
        raise
    except Exception as error:
        raise user_code_error(error, "a real step on the CPU") from error
    events = fill_shapes(read_events(profiled), read_events(later))
    return _measurement(type(model).__name__, describe(request, real.optimizer), resident, events, set_aside)


def nowhere(_: str) -> None:
    """For the parts of a step that is not measured."""


def mark(part: str) -> None:
    """Write into the profiler's log that a part of the step begins, or that a round ends."""
    with record_function(MARK + part):
        pass


@contextlib.contextmanager
def without_garbage() -> Iterator[None]:
    """Collect garbage at the start; no collector frees what a plain step would keep."""
    gc.collect()
    with pause_gc():
        yield


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep Kineto from writing to stderr that it found no GPU."""
    with set_environment({"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}):
        yield


def resident_bytes(
    model: nn.Module,
    request: StepRequest,
    optimizer: Optimizer | None,
    variables: LoopVariables | None = None,
    *,
    device_type: str = "cpu",
    earlier: Sequence[ProfilerEvent] = (),
) -> dict[Kind, int]:
    """Bytes alive on a device between two steps, by kind. Each storage counts once, under the first kind that applies
    in the order of `Kind`.

    Buffers include other tensors that are attributes of a module, or of an object or in a container that is one, what
    hooks and the loss close over, globals that a forward names, and all that the `earlier` steps have left: an average
    that a hook keeps, a graph. Kinds with nothing are left out.
    """
    storages = _find_storages(model, request, optimizer, variables, device_type)
    sizes = {kind: sum(found.values()) for kind, found in storages.items() if any(found.values())}
    known = {address for found in storages.values() for address in found}
    left: dict[int, int] = {}
    for event in earlier:
        if event.nbytes > 0:
            left[event.address] = event.nbytes
        else:
            left.pop(event.address, None)
    others = sum(nbytes for address, nbytes in left.items() if address not in known)
    return {**sizes, Kind.BUFFER: sizes.get(Kind.BUFFER, 0) + others} if others else sizes


def _find_storages(
    model: nn.Module,
    request: StepRequest,
    optimizer: Optimizer | None,
    variables: LoopVariables | None,
    device_type: str,
) -> dict[Kind, dict[int, int]]:
    """By kind, the bytes of each storage by its address."""
    inputs = tree_leaves((request.args, request.kwargs))
    owners: list[tuple[Kind, Any]] = [
        (Kind.PARAMETER, model.parameters()),
        (Kind.BUFFER, itertools.chain(_kept_by_modules(model), _behind(request.loss))),
        (Kind.INPUT, inputs),
        (Kind.OPTIMIZER_STATE, tree_leaves(list(optimizer_state(optimizer).values())) if optimizer else ()),
        (
            Kind.GRADIENT,
            (leaf.grad for leaf in (*model.parameters(), *inputs) if isinstance(leaf, torch.Tensor) and leaf.is_leaf),
        ),
        (Kind.OUTPUT, () if variables is None else tree_leaves(list(vars(variables).values()))),
    ]
    seen: set[int] = set()
    found: dict[Kind, dict[int, int]] = defaultdict(dict)
    for kind, leaves in owners:
        for leaf in (part for tensor in leaves if isinstance(tensor, torch.Tensor) for part in parts(tensor)):
            if leaf.device.type == device_type and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[kind][storage.data_ptr()] = storage.nbytes()
    return found


def _kept_by_modules(model: nn.Module) -> Iterator[torch.Tensor]:
    """What modules have beside parameters: in attributes, objects and hooks, and as globals of their forward."""
    seen = {id(module) for module in model.modules()}
    for module in model.modules():
        forward = type(module).forward
        named = (getattr(forward, "__globals__", {}).get(name) for name in _names(forward))
        attributes = (value for key, value in vars(module).items() if key not in ("_parameters", "_modules"))
        pending = [leaf for value in (*attributes, *named) for leaf in tree_leaves(value)]
        while pending:
            value = pending.pop()
            if isinstance(value, torch.Tensor):
                yield value
            elif id(value) not in seen and not isinstance(value, (type, types.ModuleType, Optimizer)):
                seen.add(id(value))
                if isinstance(value, nn.Module):  # kept out of the model's own, as in a list
                    yield from (*value.parameters(), *value.buffers())
                elif callable(value):
                    yield from _behind(value)
                elif hasattr(value, "__dict__"):
                    pending += tree_leaves(list(vars(value).values()))


def _names(forward: Any) -> tuple[str, ...]:
    """The globals that a function names."""
    code = getattr(forward, "__code__", None)
    return code.co_names if code is not None else ()


def _behind(function: Any) -> Iterator[torch.Tensor]:
    """What the loss or a hook has at hand: a teacher's weights, targets, features."""
    for found in tensors_behind(function):
        if isinstance(found, nn.Module):
            yield from (*found.parameters(), *found.buffers())
        else:
            yield found


def check_run(model: nn.Module, request: StepRequest, steps: int) -> None:
    """Refuse fewer than two steps, and a parameter, a buffer or an input outside the CPU.

    Raises:
        UsageError: names the first that is not there.
    """
    if steps < 2:
        raise UsageError(f"expected at least 2 steps (the first one allocates the optimizer's state), got {steps}")
    named = [
        *model.named_parameters(),
        *model.named_buffers(),
        *((f"input {index}", leaf) for index, leaf in enumerate(tree_leaves((request.args, request.kwargs)))),
    ]
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            raise UsageError(f"expected everything on the CPU before it is measured, but {name} is on {tensor.device}")


# --- the record -------------------------------------------------------------------------------------------------------


def _measurement(
    model: str, step: Any, resident: dict[Kind, int], events: Sequence[ProfilerEvent], set_aside: tuple[str, ...]
) -> Measurement:
    start = sum(resident.values())
    scratch = scratch_events(events)
    of_kernels = {index: call for index, call in scratch.items() if call.name in set_aside}
    live = live_bytes(start, events, {})
    at = live.index(max(live)) - 1
    running = events[at].call if at >= 0 else None
    by_phase: dict[Phase, int] = defaultdict(int)
    for event, alive in zip(events, live[1:], strict=True):
        by_phase[event.phase] = max(by_phase[event.phase], alive)
    return Measurement(
        model=model,
        step=step,
        machine=cpu_machine(),
        resident_bytes=start,
        resident_by_kind=resident,
        retained_bytes=live[-1] - start,
        peak_bytes=max(live),
        peak_phase=events[at].phase if at >= 0 else Phase.FORWARD,
        peak_op=running.name if running else "",
        peak_by_phase=dict(by_phase),
        set_aside=set_aside,
        peak_without_kernel_scratch_bytes=max(live_bytes(start, events, of_kernels)),
        peak_without_scratch_bytes=max(live_bytes(start, events, scratch)),
        scratch=scratch_by_op(events, scratch, at),
        events=tuple(event.nbytes for event in events),
        events_by_phase=dict(Counter(event.phase for event in events)),
    )


def cpu_machine() -> Machine:
    """This machine's CPU and what is known to move the memory of its kernels."""
    onednn: Any = torch.backends.mkldnn  # torch's stubs do not know its attributes
    return Machine(
        device="cpu",
        name=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        torch_version=torch.__version__,
        onednn=bool(onednn.is_available() and onednn.enabled),
        threads=torch.get_num_threads(),
    )
