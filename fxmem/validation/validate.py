"""Compare a prediction with a real run, or with a memory snapshot of a card.

The model handed in is not touched: the run is on a copy. A model on meta has no values; its parameters get small random
ones, which changes no memory. What is an index or a mask (an integer or boolean buffer with dimensions) would have to
be right, so such a model is refused in favour of a function that builds it.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fxmem._torch.common import FakeTensor, tree_leaves, tree_map_only
from fxmem.errors import FxmemError, UsageError, one_line
from fxmem.memory.allocator import complete_timeline
from fxmem.records.names import Mode, Precision, ZeroGrad
from fxmem.records.profile import Target
from fxmem.records.validation import Verdict
from fxmem.simulation.analysis import analyze_step, build_module
from fxmem.simulation.error_advice import user_code_error
from fxmem.simulation.kernel_settings import KernelSettings, apply_settings
from fxmem.simulation.model.accepted_models import plain_model
from fxmem.simulation.model.function_copies import Rebinder
from fxmem.simulation.process_guard import process_unchanged
from fxmem.simulation.request import Loss, OptimizerSpec, StepRequest, parse_inputs
from fxmem.simulation.step import set_training
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.measure_cuda import found_card, measure_cuda
from fxmem.validation.snapshot import measured_step, read_snapshot
from fxmem.validation.verdict import verdict

_PARAMETER_STD = 0.02


def validate(  # noqa: PLR0913 - the settings of the public API, by keyword
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    mode: Mode = "train",
    loss: Loss | None = None,
    optimizer: OptimizerSpec = "adamw",
    precision: Precision | None = None,
    settings: KernelSettings | None = None,
    zero_grad: ZeroGrad = "after-step",
    set_to_none: bool = True,
    inference_mode: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    snapshot: str | os.PathLike[str] | None = None,
    target: str | Target | None = None,
    tolerance: float = 0.01,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Predict a step, run it for real, and compare the two; or compare with a memory snapshot of a card.

    Args:
        model: real, on meta, or a function without arguments that builds it.
        inputs: a tensor, a tuple (positional) or a dict (keyword); real, meta or fake.
        mode: as in `fxmem.analyze`.
        loss: as in `fxmem.analyze`.
        optimizer: as in `fxmem.analyze`.
        precision: as in `fxmem.analyze`.
        settings: which kernels may run, in the prediction and in the run; by default as torch's flags are in this
            process.
        zero_grad: as in `fxmem.analyze`.
        set_to_none: as in `fxmem.analyze`.
        inference_mode: as in `fxmem.analyze`.
        device: where to run. With "cuda" the prediction is for the card that is found, and what is judged is the bytes
            allocated there.
        snapshot: a file that `torch.cuda.memory._dump_snapshot` wrote on any card after this step; nothing is run. The
            requested bytes are judged, which are exact in such a file.
        target: with `snapshot`, the card that it was made on: a name from the catalogue, or a `Target`.
        tolerance: largest absolute error allowed, as a fraction of the measured peak.
        progress: called with a few words before each stage.

    Raises:
        UsageError: the model or the inputs cannot be made real; no such device; no snapshot that torch wrote.
        EnvironmentLacksError: there is no card.
        AnalysisError: the model raised.
    """
    args, kwargs = parse_inputs(inputs)
    request = StepRequest(
        args=args,
        kwargs=kwargs,
        mode=mode,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        settings=settings,
        zero_grad=zero_grad,
        set_to_none=set_to_none,
        inference_mode=inference_mode,
    )
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
    request = dataclasses.replace(request, target=_target(device))
    with apply_settings(request.settings):
        analysis = analyze_step(model, request, progress)
        progress(f"running the step on the {'card' if device == 'cuda' else 'CPU'}")
        with process_unchanged():
            torch.manual_seed(0)
            real = real_model(source)
            set_training(real, request.mode)
            args, kwargs = real_values((request.args, request.kwargs))
            measure = measure_cuda if device == "cuda" else measure_cpu
            measurement = measure(real, dataclasses.replace(request, args=args, kwargs=kwargs))
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


def real_model(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A copy of `model` on the CPU with real values, or what the factory builds.

    Tensors that are one stay one.

    Raises:
        UsageError: it cannot be copied; it is on meta and holds an index or a mask; the factory returned no module.
        AnalysisError: the factory raised.
    """
    if not isinstance(model, nn.Module):
        return _build(model)
    model, _ = plain_model(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    memo: dict[int, Any] = {
        id(tensor): _real_state(name, tensor)
        for name, tensor in tensors
        if _is_valueless(tensor) or tensor.device.type != "cpu"
    }
    kind = type(model).__name__
    try:
        made = copy.deepcopy(model, memo)
        Rebinder(memo).model(model)
    except Exception as error:
        raise UsageError(
            f"{kind} cannot be copied ({one_line(error)}); pass a function that builds it instead"
        ) from error
    for module in made.modules():
        for leaf in tree_leaves(list(vars(module).values())):
            if isinstance(leaf, torch.Tensor) and _is_valueless(leaf):
                raise UsageError(
                    f"{kind} holds a tensor without values that is no parameter or buffer; pass a function that "
                    f"builds it instead"
                )
    return made


def _build(factory: Callable[[], nn.Module]) -> nn.Module:
    if not callable(factory):
        raise UsageError(f"expected a torch.nn.Module or a function that builds one, got {type(factory).__name__}")
    try:
        made = factory()
    except FxmemError:
        raise
    except Exception as error:
        raise user_code_error(error, "building the model") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"expected the factory to return a torch.nn.Module, got {type(made).__name__}")
    return (
        real_model(made)
        if any(tensor.device.type != "cpu" for tensor in [*made.parameters(), *made.buffers()])
        else made
    )


def _real_state(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer on the CPU: a copy, or made-up values for one on meta."""
    parameter = isinstance(tensor, nn.Parameter)
    if not _is_valueless(tensor):
        values = tensor.detach().cpu()
    else:
        values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if parameter and values.is_floating_point():
            values.normal_(std=_PARAMETER_STD)
        elif values.is_floating_point() or values.dim() == 0:
            values.fill_(1)
        else:
            raise UsageError(
                f"{name} is on meta and holds {values.dtype}, which the model may index with; pass a function that "
                f"builds the model instead"
            )
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if parameter else values


def real_values(tree: Any) -> Any:
    """Nested arguments on the CPU: copies of their tensors, and made-up values for tensors that have none.

    Made-up values are standard normal where floating-point, 0 where integer (an index that is always in range) and True
    where boolean. Tensors that are one stay one; those that only share a storage no longer do.
    """
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _real_input(tensor)
        return made[id(tensor)]

    return tree_map_only(torch.Tensor, real, tree)


def _real_input(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_valueless(tensor):
        return torch.empty_like(tensor, device="cpu").copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
    values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if tensor.is_floating_point() or tensor.is_complex():
        return values.normal_().requires_grad_(tensor.requires_grad)
    return values.fill_(tensor.dtype is torch.bool)


def _is_valueless(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
