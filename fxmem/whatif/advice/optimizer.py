"""What is kept for the weights: other optimizers, other dtypes, parts that are not trained; and the batch in parts."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Literal

import torch
from torch import nn

from fxmem._torch import common as torch_common
from fxmem.errors import UsageError, one_line
from fxmem.simulation.ranks import MeshPlan
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.fake_model import meta_model
from fxmem.simulation.step.step import in_backward
from fxmem.whatif.advice.variant import Change, NotApplicableError, Variant, code_for_modules, known_change
from fxmem.whatif.source import find_resizing

FORMS: Final[tuple[tuple[Literal["fused", "forloop"], str, str], ...]] = (
    ("fused", "fused optimizer: one kernel, no lists of temporaries", "fused=True"),
    ("forloop", "optimizer one parameter at a time: smaller temporaries, slower", "foreach=False"),
)
"""Forms of one optimizer, what each is, and the argument for it."""
_OTHER_OPTIMIZERS = ("sgd-momentum", "adafactor", "sgd")
_COMPILED = "its step is compiled, and Inductor may keep fewer temporaries than were analysed here"
_EIGHT_BIT = (("torchao", "AdamW8bit", _COMPILED), ("bitsandbytes", "AdamW8bit", ""))
"""Package, class in its `optim`, and what to know of it."""


def optimizer_changes(analysis: Analysis) -> Iterator[Change]:
    """Other optimizers, other forms of the same, and micro-batches."""
    yield from _optimizers(analysis)
    if analysis.request.optimizer is not None:
        yield known_change("within-backward", _release_gradients)
    coupled = any("batch_norm" in op.name for op in analysis.profile.ops)
    same = "the same gradients where the loss is a mean over equal parts (no ignored labels)"
    for parts in (2, 4):
        yield Change(
            f"micro-batches-{parts}",
            f"{parts} micro-batches, their gradients added up",
            "training" if coupled else "none",
            f"for part in x.chunk({parts}):\n    (loss_fn(model(part)) / {parts}).backward()",
            partial(_micro_batches, parts),
            note="batch norms see smaller batches" if coupled else same,
            excludes="batch",
        )
    if analysis.request.prefetch:
        fewer = analysis.request.prefetch - 1
        yield known_change("prefetch-less", lambda variant, _: variant.replace_step(prefetch=fewer))


def _release_gradients(variant: Variant, _: Analysis) -> Variant:
    if variant.request.accumulate > 1:
        raise NotApplicableError("gradients of several micro-batches are added up")
    return variant.replace_step(optimizer=in_backward(variant.request.optimizer))


def _eight_bit() -> Iterator[Change]:
    for package, name, note in _EIGHT_BIT:
        title = f"{name} of {package}: state in one byte per number"
        code = f"from {package}.optim import {name}\noptimizer = {name}(model.parameters())"
        yield Change(
            f"{package}-8bit",
            title,
            "training",
            code,
            partial(_use_eight_bit, package, name),
            note=note,
            excludes="optimizer",
        )


def _use_eight_bit(package: str, name: str, variant: Variant, _: Analysis) -> Variant:
    if importlib.util.find_spec(package) is None:
        raise NotApplicableError(f"{package} is not installed, so what its optimizer keeps cannot be analysed")
    try:
        cls = getattr(importlib.import_module(f"{package}.optim"), name)
    except Exception as error:  # what another's package raises while it is imported may be anything
        raise NotApplicableError(f"{package}.optim.{name} cannot be imported: {one_line(error)}") from error
    return variant.replace_step(optimizer=cls)


def _optimizers(analysis: Analysis) -> Iterator[Change]:
    spec = analysis.request.optimizer
    if not isinstance(spec, str):
        return
    name, _, options = spec.partition(":")
    if not options and name.lower() in ("adam", "adamw", "sgd", "sgd-momentum"):
        kind = {"adam": "Adam", "adamw": "AdamW"}.get(name.lower(), "SGD")
        for form, title, argument in FORMS:
            yield Change(
                f"{form}-optimizer",
                title,
                "none",
                f"from torch.optim import {kind}\noptimizer = {kind}(model.parameters(), {argument})",
                _use_optimizer(f"{spec}:{form}"),
                excludes="optimizer",
            )
    for other in _OTHER_OPTIMIZERS:
        if other != name.lower():
            yield known_change(f"{other}-optimizer", _use_optimizer(other))
    if name.lower() in ("adam", "adamw"):
        yield from _eight_bit()


def _use_optimizer(spec: str) -> Callable[[Variant, Analysis], Variant]:
    return lambda variant, _: variant.replace_step(optimizer=spec)


def _micro_batches(parts: int, variant: Variant, _: Analysis) -> Variant:
    step = variant.request
    try:
        varied = find_resizing(named_arguments(variant.model, step.args, step.kwargs), "batch")
    except UsageError as error:
        raise NotApplicableError(f"the inputs have no batch to split: {error}") from error
    if varied.size % parts:
        raise NotApplicableError(f"a batch of {varied.size} has no {parts} equal parts")
    args, kwargs = varied.resize(step.args, step.kwargs, varied.size // parts)
    return variant.replace_step(args=args, kwargs=kwargs, accumulate=step.accumulate * parts)


# --- other dtypes and layouts of the weights --------------------------------------------------------------------------


def dtype_changes(analysis: Analysis) -> Iterator[Change]:
    """Half precision and channels_last."""
    code = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x))'
    if analysis.profile.target.device == "cpu":
        code = code.replace("cuda", "cpu")
    yield Change("bf16-autocast", "bfloat16 autocast", "rounding", code, _autocast, excludes="dtype")
    yield known_change("bf16-weights", _half)
    yield known_change("channels-last", _channels_last)


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


# --- parts of a model that are not trained ----------------------------------------------------------------------------


def frozen_changes(analysis: Analysis) -> Iterator[Change]:
    """All but the last part, and the largest part alone."""
    parts = [path for path in _parts(analysis.model) if _count_trained(analysis.model.get_submodule(path))]
    if len(parts) < 2:
        return
    sizes = {path: _count_trained(analysis.model.get_submodule(path)) for path in parts}
    largest = max(parts, key=sizes.__getitem__)
    yield _freeze_change("freeze:all-but-last", f"train {parts[-1]} alone (fine-tuning)", parts[:-1])
    if parts[:-1] != [largest]:
        yield _freeze_change(f"freeze:{largest}", f"freeze {largest} (fine-tuning)", [largest])


def _parts(model: nn.Module) -> list[str]:
    """Children, from the first module down that has several; in the order they are registered."""
    path, module = "", model
    while len(children := list(module.named_children())) == 1:
        name, module = children[0]
        path = f"{path}{name}."
    return [f"{path}{name}" for name, _ in children]


def _count_trained(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _freeze_change(key: str, title: str, paths: list[str]) -> Change:
    code = code_for_modules(paths, "module.requires_grad_(False)")
    note = "before the optimizer is made; batch norms still update their statistics"
    return Change(key, title, "training", code, partial(_freeze, paths), note=note, excludes="frozen")


def _freeze(paths: list[str], variant: Variant, _: Analysis) -> Variant:
    model = meta_model(variant.model)
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return dataclasses.replace(variant, model=model)
