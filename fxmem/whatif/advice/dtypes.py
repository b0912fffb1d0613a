"""Other dtypes and layouts of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation.ranks import MeshPlan
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.model.fake_model import meta_model
from fxmem.whatif.advice.variant import Change, NotApplicableError, Variant


def dtype_changes(analysis: Analysis) -> Iterator[Change]:
    """Half precision and channels_last."""
    code = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x))'
    if analysis.profile.target.device == "cpu":
        code = code.replace("cuda", "cpu")
    yield Change("bf16-autocast", "bfloat16 autocast", "rounding", code, _autocast, excludes="dtype")
    yield Change(
        "bf16-weights",
        "bfloat16 weights, gradients and optimizer state",
        "training",
        "model.to(torch.bfloat16)",
        _half,
        note="before the optimizer is made; inputs in bfloat16, too",
        excludes="dtype",
    )
    yield Change(
        "channels-last",
        "channels_last layout",
        "none",
        "model.to(memory_format=torch.channels_last)\nx = x.to(memory_format=torch.channels_last)",
        _channels_last,
        note="other convolution kernels, so sums in another order",
    )


def _half(variant: Variant, _: Analysis) -> Variant:
    if not any(p.dtype is torch.float32 for p in variant.model.parameters()):
        raise NotApplicableError("the weights are not float32")
    if variant.request.precision is not None or _gathers_in_half(variant):
        raise NotApplicableError("the step computes in half precision already")
    model = meta_model(variant.model).to(torch.bfloat16)
    args, kwargs = torch_common.tree_map_only(torch.Tensor, _as_bf16, (variant.request.args, variant.request.kwargs))
    return variant.replace_step(model, args=args, kwargs=kwargs)


def _as_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.empty_like(tensor, dtype=torch.bfloat16, device="meta", requires_grad=tensor.requires_grad)
        if tensor.is_floating_point()
        else tensor
    )


def _gathers_in_half(variant: Variant) -> bool:
    plan = variant.request.parallelize
    return isinstance(plan, MeshPlan) and plan.precision is not None


def _autocast(variant: Variant, _: Analysis) -> Variant:
    if _gathers_in_half(variant):
        raise NotApplicableError("FSDP gathers parameters in half precision already")
    if variant.request.precision is not None:
        raise NotApplicableError(f"the step runs under {variant.request.precision} autocast already")
    if not any(p.dtype is torch.float32 for p in variant.model.parameters()):
        raise NotApplicableError("the weights are not float32")
    return variant.replace_step(precision="bf16")


def _channels_last(variant: Variant, analysis: Analysis) -> Variant:
    if not any("convolution" in op.name for op in analysis.profile.ops):
        raise NotApplicableError("the model has no convolutions")
    if any(_is_channels_last(p) for p in variant.model.parameters()):
        raise NotApplicableError("weights are channels_last already")
    model = meta_model(variant.model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    args, kwargs = torch_common.tree_map_only(
        torch.Tensor, _as_channels_last, (variant.request.args, variant.request.kwargs)
    )
    return variant.replace_step(model, args=args, kwargs=kwargs)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _as_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    return torch.empty_like(
        tensor, memory_format=torch.channels_last, device="meta", requires_grad=tensor.requires_grad
    )
