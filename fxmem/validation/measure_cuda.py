"""Measures one real step on a card: the caching allocator's peaks phase by phase, and its log.

The step is `fxmem.simulation.step.step.run_step`, the very function that is predicted. Before the one that is measured
come warm-up steps (they bring optimizer state, the libraries' workspaces and the allocator's segments), a garbage
collection and `torch.cuda.reset_peak_memory_stats()`; at each border of two phases the card is waited for, the peaks
are read and reset.

Assumptions. One card, the current one. What the process has there already is counted before the model is moved there,
and subtracted. That is exact for all but the reserved bytes: a segment that holds such tensors may have room for the
step's, so measure in a process of its own where reserved bytes matter. A captured CUDA graph or a pluggable allocator
is not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from fxmem._torch.common import tree_map_only
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem._torch.cuda import AllocatorLog, drop_cublas_workspaces
from fxmem.errors import EnvironmentLacksError, FxmemError, UsageError
from fxmem.hardware import catalogue
from fxmem.records.parts import CompileSettings
from fxmem.records.profile import Kind, MeasuredPhase, Phase, Step, Target
from fxmem.records.validation import Machine, Measurement
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import describe
from fxmem.validation.measure_cpu import RealStep, check_run, resident_bytes, without_garbage

_KINDS = ("requested", "allocated", "active", "reserved")


# --- the card ---------------------------------------------------------------------------------------------------------


def require_card() -> None:
    """Raise `EnvironmentLacksError` unless torch can run on a card here."""
    if torch.cuda.is_available():
        return
    built = (
        f"torch {torch.__version__} sees none"
        if torch.version.cuda
        else f"torch {torch.__version__} is built for the CPU only"
    )
    raise EnvironmentLacksError(
        f"expected an NVIDIA GPU to measure on, but {built}; run it on a machine that has one, or measure with "
        f"device='cpu'"
    )


def found_card() -> Target:
    """The current card as a target. Raises EnvironmentLacksError without one."""
    require_card()
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return card_target(found.name, (found.major, found.minor), found.total_memory)


def card_target(name: str, capability: tuple[int, int], memory_bytes: int | None) -> Target:
    """The target that is a card of that name: the catalogue's, if it knows the name with this capability, else one of
    these properties.

    The memory is the card's own: what a driver reports moves by a few per cent.
    """
    try:
        known = catalogue.target(name)
    except UsageError:
        known = None
    if known is not None and known.capability == capability:
        return known if memory_bytes is None else known.model_copy(update={"memory_bytes": memory_bytes})
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "card"
    return Target(name=key, device="cuda", full_name=name, memory_bytes=memory_bytes, capability=capability)


def card_machine() -> Machine:
    """The current card and everything that is known to move its memory. Raises EnvironmentLacksError without one."""
    require_card()
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        device="cuda",
        name=found.name,
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        cudnn_version=cudnn_version(),
        driver_version=nvidia_smi("driver_version"),
        capability=(found.major, found.minor),
        memory_bytes=found.total_memory,
        allocator_settings=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
    )


def cudnn_version() -> str | None:
    """The cuDNN that torch loads, as in `9.19.0`; None without one. Its number is major * 10000 + minor * 100 + patch
    (`cudnn_version.h`, since 9)."""
    number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return None if number is None else f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def nvidia_smi(field: str) -> str | None:
    """A field of the first card, as plain text without its unit, which torch does not say and which needs no context of
    this process. None if the tool is not there or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(said.split()), None)


# --- the run ----------------------------------------------------------------------------------------------------------


class _Meter:
    """Reads the current card's allocator over a step, phase by phase."""

    def __init__(self) -> None:
        self._log = AllocatorLog(torch.cuda.current_device())
        self._phase = Phase.FORWARD
        self.peaks: dict[Phase, dict[str, int]] = {}
        """The largest `requested`, `allocated`, `active` and `reserved` bytes."""
        self.events: dict[Phase, list[int]] = {}
        """Signed requested bytes, in order."""

    def run(self, step: Callable[..., None]) -> None:
        """Measure a step, which calls `mark` where a part begins. Garbage is collected before, and not during it."""
        with without_garbage():
            current_bytes("current")  # waits for the card
            with self._log.record():
                torch.cuda.reset_peak_memory_stats()
                step(mark=self._mark)
                self._end()

    def _mark(self, part: str) -> None:
        if part in (Phase.BACKWARD, Phase.OPTIMIZER):
            self._end()
            self._phase = Phase(part)

    def _end(self) -> None:
        self.peaks[self._phase] = current_bytes("peak")
        self.events[self._phase] = self._log.take()
        torch.cuda.reset_peak_memory_stats()


def current_bytes(what: Literal["current", "peak"]) -> dict[str, int]:
    """`requested`, `allocated`, `active` and `reserved` bytes of the current card's allocator, everything queued there
    done."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {kind: stats[f"{kind}_bytes.all.{what}"] for kind in _KINDS}


def measure_cuda(model: nn.Module, request: StepRequest, *, steps: int = 3) -> Measurement:
    """Run `steps` real steps on the current card and measure the last.

    The model is moved there and trained in place: hand in a copy, on the CPU as its inputs are. Workspaces that cuBLAS
    kept before are freed, to be allocated anew as in a process of the step's own. Where the step has no optimizer,
    gradients are cleared before each step.

    Raises:
        UsageError: fewer than two steps, or something that is not on the CPU.
        EnvironmentLacksError: no card.
        AnalysisError: the step raised; with the user's line.
    """
    check_run(model, request, steps)
    require_card()
    drop_cublas_workspaces()
    torch.cuda.empty_cache()
    foreign = current_bytes("current")
    model = model.to("cuda")
    args, kwargs = _on_card((request.args, request.kwargs))
    request = dataclasses.replace(request, args=args, kwargs=kwargs)
    real = RealStep(model, request, "cuda", steps)
    meter = _Meter()
    try:
        real.warm_up()
        with without_garbage():
            resident = resident_bytes(model, request, real.optimizer, real.variables, device_type="cuda")
            start = current_bytes("current")["requested"] - foreign["requested"]
        meter.run(real.run)
    except FxmemError:
        raise
    except Exception as error:
        raise user_code_error(error, "a real step on the card") from error
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    return make_measurement(
        type(model).__name__,
        describe(request, real.optimizer),
        card_machine(),
        CardReadings(
            resident=resident,
            start=start,
            end=current_bytes("current")["requested"] - foreign["requested"],
            foreign=foreign,
            peaks=meter.peaks,
            events=meter.events,
            beside=beside,
        ),
    )


def _on_card(tree: Any) -> Any:
    """Nested arguments with their tensors on the current card: layouts and `requires_grad` as they were; tensors that
    are one stay one."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.detach().to("cuda").requires_grad_(tensor.requires_grad)
        return moved[id(tensor)]

    return tree_map_only(torch.Tensor, move, tree)


# --- the record -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardReadings:
    """What was read from a card around and during one step; all figures in bytes."""

    resident: Mapping[Kind, int]
    """What the model, the inputs and the optimizer own when the step begins."""
    start: int
    """Requested bytes when it begins, `foreign` ones left out."""
    end: int
    """The same when it is over."""
    foreign: Mapping[str, int]
    """What was there before and is not the step's, by `requested`, `allocated`, `active` and `reserved`."""
    peaks: Mapping[Phase, Mapping[str, int]]
    """As the allocator reports them, by phase, `foreign` included."""
    events: Mapping[Phase, list[int]]
    """Signed requested bytes, by phase."""
    beside: int | None
    """In use on the card and not the allocator's; None if it is not known."""


def make_measurement(model: str, step: Step, machine: Machine, readings: CardReadings) -> Measurement:
    """The record of a step that was measured on a card."""
    own = {
        phase: {kind: max(found[kind] - readings.foreign[kind], 0) for kind in _KINDS}
        for phase, found in readings.peaks.items()
    }
    largest = {kind: max(found[kind] for found in own.values()) for kind in _KINDS}
    by_kind = dict(readings.resident)
    rest = readings.start - sum(by_kind.values())
    if rest > 0:
        by_kind[Kind.WORKSPACE] = rest
    requested = {phase: found["requested"] for phase, found in own.items()}
    return Measurement(
        model=model,
        step=step,
        machine=machine,
        resident_bytes=readings.start,
        resident_by_kind=by_kind,
        retained_bytes=readings.end - readings.start,
        peak_bytes=largest["requested"],
        peak_phase=max(requested, key=lambda phase: requested[phase]),
        peak_op="",
        peak_by_phase=requested,
        peak_without_kernel_scratch_bytes=largest["requested"],
        peak_without_scratch_bytes=largest["requested"],
        allocated_bytes=largest["allocated"],
        reserved_bytes=largest["reserved"],
        process_bytes=None if readings.beside is None else largest["reserved"] + readings.beside,
        phases=tuple(
            MeasuredPhase(phase=phase, **{f"{kind}_bytes": found[kind] for kind in _KINDS})
            for phase, found in own.items()
        ),
        events=tuple(size for sizes in readings.events.values() for size in sizes),
        events_by_phase={phase: len(sizes) for phase, sizes in readings.events.items()},
    )


# --- a model really compiled by `torch.compile` on the CPU, in the prediction's settings ------------------------------


@contextlib.contextmanager
def compile_real(model: nn.Module, settings: CompileSettings | None) -> Iterator[Any]:
    """The model as it is to be called; compiled code and inductor's files are gone afterwards.

    With `as_is` the model comes compiled by its author. Inductor builds its kernels, with this machine's C++ compiler.
    """
    if settings is None:
        yield model
        return
    torch_dynamo.load_compiler()
    with (
        torch_inductor.own_files(),
        torch_inductor.limit_saved(settings.activation_memory_budget),
        torch_dynamo.fresh_dynamo(lambda _: None),
    ):
        if settings.as_is:
            yield model
            return
        options = {**torch_inductor.mode_options(settings.mode), **settings.options}
        yield torch.compile(model, dynamic=settings.dynamic, options=options)
