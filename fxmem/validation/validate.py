"""Compare a prediction with a real run, or with a memory snapshot of a card.

The model handed in is not touched: the run is on a copy (`fxmem.simulation.step.model.real_model`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fxmem.errors import UsageError
from fxmem.memory.allocator import complete_timeline
from fxmem.records.profile import Target
from fxmem.records.validation import Verdict
from fxmem.simulation.kernels.kernel_settings import apply_settings
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.step.analysis import analyze_step, build_module, read_request
from fxmem.simulation.step.given import understand, view_source
from fxmem.simulation.step.model.real_model import real_model, real_values
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import set_training
from fxmem.validation.compile_real import compile_real
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.measure_cuda import found_card, measure_cuda
from fxmem.validation.profiler_log import WORKSPACE_KERNELS, WRAPPER_PRODUCTS
from fxmem.validation.snapshot import measured_step, read_snapshot
from fxmem.validation.verdict import verdict


def validate(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    snapshot: str | os.PathLike[str] | None = None,
    target: str | Target | None = None,
    tolerance: float = 0.01,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Verdict:
    """Predict a step, run it for real, and compare the two; or compare with a memory snapshot of a card.

    Args:
        model: real, on meta, or a function without arguments that builds it.
        inputs: a tensor, a tuple (positional) or a dict (keyword); real, meta or fake.
        device: where to run. With "cuda" the prediction is for the card that is found, and what is judged is the bytes
            allocated there.
        snapshot: a file that `torch.cuda.memory._dump_snapshot` wrote on any card after this step; nothing is run. The
            requested bytes are judged, which are exact in such a file.
        target: with `snapshot`, the card that it was made on: a name from the catalogue, or a `Target`.
        tolerance: largest absolute error allowed, as a fraction of the measured peak.
        progress: called with a few words before each stage.
        options: those of a step in `fxmem.analyze`, `mode` to `compile` but `accumulate` and `prefetch`, for the
            prediction and the run. A compiled step is measured on the CPU alone: inductor builds its kernels there, in
            no cache of yours.

    Raises:
        UsageError: the model or the inputs cannot be made real; no such device; no snapshot that torch wrote.
        EnvironmentLacksError: there is no card.
        AnalysisError: the model raised.
    """
    for name in options.keys() & {"accumulate", "prefetch", "ranks", "rank", "parallelize"}:
        raise UsageError(f"expected no {name}: what is run is one step, by itself")
    request = read_request(inputs, **options)
    tell = progress or (lambda _: None)
    if snapshot is not None:
        if target is None:
            raise UsageError("expected target, the card that the snapshot was made on, e.g. target='a100'")
        request = dataclasses.replace(request, target=target)
        return validate_snapshot(build_module(model, tell), request, Path(snapshot), tolerance=tolerance, progress=tell)
    if target is not None:
        raise UsageError("expected target with snapshot only: a real run is predicted for the device that it is on")
    return validate_step(model, build_module(model, tell), request, device=device, tolerance=tolerance, progress=tell)


def validate_step(
    source: nn.Module | Callable[[], nn.Module],
    model: nn.Module,
    request: StepRequest,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    tolerance: float = 0.01,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Predict a step of `model`, run it for real on `source`, and compare.

    Args:
        source: the model that is run: a module, of which a copy is made, or a function that builds it with values.
        model: the same model, which the prediction is made from; real or on meta.
        request: its target is replaced by the device's.
        device, tolerance, progress: as in `validate`.

    Raises:
        The errors of `validate`.
    """
    if request.compile is not None and device != "cpu":
        raise UsageError("expected device cpu with compile: a compiled step is measured on the CPU alone")
    given = model
    model, request = understand(given, dataclasses.replace(request, target=_target(device)))
    if model is not given:
        source = view_source(source)
    if request.values == "real":  # what is made up is to be the same in the prediction and in the run
        with process_unchanged():
            torch.manual_seed(0)
            source = model = real_model(source)
            args, kwargs = real_values((request.args, request.kwargs))
            request = dataclasses.replace(request, args=args, kwargs=kwargs)
    with apply_settings(request.settings):
        analysis = analyze_step(model, request, progress)
        progress(f"running the step on the {'card' if device == 'cuda' else 'CPU'}")
        with process_unchanged():
            torch.manual_seed(0)
            real = real_model(source)
            set_training(real, request.mode)
            args, kwargs = real_values((request.args, request.kwargs))
            request = dataclasses.replace(request, args=args, kwargs=kwargs)
            if device == "cuda":
                measurement = measure_cuda(real, request)
            else:
                products = () if request.compile is None else WRAPPER_PRODUCTS
                with compile_real(real, request.compile) as called:
                    measurement = measure_cpu(called, request, set_aside=(*WORKSPACE_KERNELS, *products))
    return verdict(analysis.profile, analysis.peak, measurement, tolerance)


def validate_snapshot(
    model: nn.Module,
    request: StepRequest,
    snapshot: Path,
    *,
    tolerance: float = 0.01,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Compare the prediction of a step with a memory snapshot of its card.

    Args:
        model: real or on meta; it is not run.
        request: its target is the card.
        snapshot: as in `validate`.
        tolerance: as in `validate`.
        progress: as in `validate`.

    Raises:
        The errors of `validate`.
    """
    if request.compile is not None:
        raise UsageError("expected snapshot without compile: the frames in a snapshot are those of eager code")
    if request.resolved_target.device != "cuda":
        raise UsageError("expected the card that the snapshot was made on, got the target cpu")
    progress("reading the snapshot")
    found = read_snapshot(snapshot)
    profile = analyze_step(model, request, progress).profile
    step = measured_step(profile, found)
    timeline = complete_timeline(profile, {"PYTORCH_ALLOC_CONF": found.allocator_settings})
    return verdict(profile, timeline.peak, step.measurement, tolerance, step.frames)


def _target(device: str) -> str | Target:
    if device not in ("cpu", "cuda"):
        raise UsageError(f"expected device='cpu' or 'cuda' (where a step can be measured), got {device!r}")
    return found_card() if device == "cuda" else device
