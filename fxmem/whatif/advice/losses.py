"""Other ways to the same result: kernels, and logits that are not all there at once."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fxmem._torch import common as torch_common
from fxmem.records.parts import CompileSettings
from fxmem.records.profile import Kind, Profile
from fxmem.records.units import Sdpa
from fxmem.simulation.kernels.kernel_settings import KernelSettings, apply_settings, convolution_settings
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.fake_model import shadow_model
from fxmem.whatif.advice.variant import Change, NotApplicableError, Variant, known_change

_CHUNKS = 8
_SAME_ROWS = ("view", "reshape", "flatten", "float", "to", "contiguous", "operator.getitem")
"""Calls that leave rows of logits or of what they are made of as they are, where their number stays."""


def logit_changes(analysis: Analysis) -> Iterator[Change]:
    """Logits of the last position, where a language model of transformers makes those of all; for inference."""
    given = {**analysis.request.kwargs}
    takes = inspect.signature(analysis.model.forward).parameters
    if "logits_to_keep" in takes and not given.get("logits_to_keep") and given.get("labels") is None:
        yield known_change(
            "last-logits",
            lambda variant, _: variant.replace_step(kwargs={**variant.request.kwargs, "logits_to_keep": 1}),
        )


def loss_changes(_: Analysis) -> Iterator[Change]:
    """Logits that are not kept whole."""
    for change in (known_change("chunked-loss", _chunked_loss), known_change("chunked-head", _chunked_head)):
        yield dataclasses.replace(change, code=change.code.replace("CHUNKS", str(_CHUNKS)))


def _chunked_loss(variant: Variant, analysis: Analysis) -> Variant:
    if not any(node.target.endswith("cross_entropy") for node in analysis.profile.nodes):
        raise NotApplicableError("no torch.nn.functional.cross_entropy in the step")
    return dataclasses.replace(variant, around=(*variant.around, cross_entropy_in_chunks))


@contextlib.contextmanager
def cross_entropy_in_chunks() -> Iterator[None]:
    """Compute `torch.nn.functional.cross_entropy` in chunks of rows while the block runs."""

    def chunk_loss(original: Callable[..., Any]) -> Callable[..., Any]:
        unchanged = False

        def cross_entropy(logits: torch.Tensor, target: torch.Tensor, *rest: Any, **options: Any) -> Any:
            nonlocal unchanged
            reduction, ignored = options.get("reduction", "mean"), options.get("ignore_index", -100)
            simple = (
                not rest
                and not options.keys() - {"reduction", "ignore_index"}
                and logits.dim() == 2
                and target.dim() == 1
                and reduction != "none"
            )
            if unchanged or not simple or logits.shape[0] < _CHUNKS:
                # The original shows itself to function modes under its public name, which is this function's now.
                before, unchanged = unchanged, True
                try:
                    return original(logits, target, *rest, **options)
                finally:
                    unchanged = before

            def part(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return F.nll_loss(F.log_softmax(a, 1), b, reduction="sum", ignore_index=ignored)

            pairs = zip(logits.chunk(_CHUNKS), target.chunk(_CHUNKS), strict=True)
            total = torch.stack(
                [checkpoint(part, a, b, use_reentrant=False, preserve_rng_state=False) for a, b in pairs]
            ).sum()
            return total / (target != ignored).sum() if reduction == "mean" else total

        return cross_entropy

    with torch_common.patch(F, "cross_entropy", chunk_loss):
        yield


# --- with the layer that makes the logits -----------------------------------------------------------------------------


def _chunked_head(variant: Variant, analysis: Analysis) -> Variant:
    _check_head(analysis)
    model = shadow_model(variant.model)
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"forward": chunked_forward, "__module__": kind.__module__})
    return variant.replace_step(model)


def chunked_forward(self: Any, *args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
    """`forward` of a causal language model of transformers, as the code of "chunked-head" has it."""
    head = self.get_output_embeddings()

    def part(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(hidden).float(), target, reduction="sum")

    rows = self.base_model(*args, **kwargs)[0].flatten(0, 1)
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    pairs = zip(rows.chunk(_CHUNKS), targets.chunk(_CHUNKS), strict=True)
    sums = [checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return types.SimpleNamespace(loss=sum(sums) / (targets != -100).sum())


def _check_head(analysis: Analysis) -> None:
    """Refuse a step whose loss is not that of a causal language model.

    That is, in transformers: base model, output layer, logits as they are, cross-entropy with the next token; no more.

    Raises:
        NotApplicableError: with what is different.
    """
    model, nodes, labels = analysis.model, analysis.profile.nodes, analysis.request.kwargs.get("labels")
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel) or labels is None:
        raise NotApplicableError("no causal language model of transformers that is called with labels=")
    head, base = model.get_output_embeddings(), model.base_model
    names = {id(module): name for name, module in model.named_modules()}
    losses = [index for index, node in enumerate(nodes) if node.target.endswith("cross_entropy")]
    if head is None or base is model or id(base) not in names or len(losses) != 1:
        raise NotApplicableError(f"{type(model).__name__} is not a base model, an output layer and one cross-entropy")
    readers = [
        node for node in nodes if losses[0] in node.inputs and node.outputs and node.op not in ("output", "loss")
    ]
    if readers:
        raise NotApplicableError(f"the loss is more than the cross-entropy: {readers[0].name} reads it")
    logits = nodes[losses[0]].inputs[0]
    made = _walk_back(analysis, logits)
    if nodes[made].module != names[id(head)]:
        raise NotApplicableError(f"{nodes[made].name} changes the logits before the loss")
    hidden = _walk_back(analysis, nodes[made].inputs[0])
    if f"{nodes[hidden].module}.".partition(".")[0] != names[id(base)]:
        raise NotApplicableError(f"{nodes[hidden].name} changes what the base model returns before the output layer")
    rows = nodes[hidden].outputs[0].shape[:-1]
    if nodes[logits].outputs[0].shape[0] != math.prod(rows) or tuple(labels.shape) != tuple(rows):
        raise NotApplicableError("not every row of the logits goes to the loss")


def _walk_back(analysis: Analysis, index: int) -> int:
    """The node whose result this one is, viewed, sliced or converted by the model itself."""
    nodes = analysis.profile.nodes
    while not nodes[index].module and nodes[index].target in _SAME_ROWS and nodes[index].inputs:
        index = nodes[index].inputs[0]
    return index


# --- other kernels for the same mathematics: settings, attention, those that the compiler writes ----------------------


_BACKENDS: tuple[Sdpa, ...] = ("flash", "efficient", "cudnn")
"""Math is left out: it keeps the matrix of scores, which none of these does."""


def kernel_changes(analysis: Analysis) -> Iterator[Change]:
    """TF32 off, other attention kernels, and the compiler's."""
    if analysis.profile.target.device == "cuda":
        yield known_change("tf32-off", _no_tf32)
        yield from _attention(analysis.profile)
    yield known_change("sdpa", _one_kernel)
    yield known_change("compile", _compile)


def _no_tf32(variant: Variant, analysis: Analysis) -> Variant:
    profile = analysis.profile
    if not any(op.name.startswith("aten.convolution") for op in profile.ops):
        raise NotApplicableError("the model has no convolutions; matrix products take the same memory either way")
    with apply_settings(variant.request.settings):
        allowed = convolution_settings().allow_tf32
    if not allowed:
        raise NotApplicableError("TF32 is off already")
    if not any(storage.kind is Kind.WORKSPACE for storage in profile.storages):
        raise NotApplicableError("the convolutions take no workspace")
    return _set(variant, allow_tf32=False)


def _compile(variant: Variant, _: Analysis) -> Variant:
    if variant.request.world is not None:
        raise NotApplicableError("a sharded step is analysed as eager code")
    return variant.replace_step(compile=CompileSettings())


def _set(variant: Variant, **changes: Any) -> Variant:
    settings = (variant.request.settings or KernelSettings()).model_copy(update=changes)
    return variant.replace_step(settings=settings)


def _attention(profile: Profile) -> Iterator[Change]:
    """Yield the attention kernels that do not run now. Those that a card or dtype rules out are refused when
    analysed."""
    ran = {op.name.split(".")[1] for op in profile.ops if op.name.startswith("aten._scaled_dot_product")}
    if not any(node.target.endswith("scaled_dot_product_attention") for node in profile.nodes) and not ran:
        return
    for name in _BACKENDS:
        if f"_scaled_dot_product_{name}_attention" not in ran:
            yield known_change(f"sdpa-{name}", _choose_kernel(name))


def _choose_kernel(name: Sdpa) -> Callable[[Variant, Analysis], Variant]:
    return lambda variant, _: _set(variant, sdpa=name)


def _one_kernel(variant: Variant, _: Analysis) -> Variant:
    if getattr(getattr(variant.model, "config", None), "_attn_implementation", None) != "eager":
        raise NotApplicableError("no transformers model with eager attention")
    model = shadow_model(variant.model)
    choose: Callable[[str], None] | None = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise NotApplicableError("this transformers cannot change the attention of a built model")
    try:
        choose("sdpa")
    except (ValueError, ImportError) as error:
        raise NotApplicableError(f"the model has no such attention: {error}") from error
    return dataclasses.replace(variant, model=model)
