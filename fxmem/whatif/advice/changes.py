"""Changes that save memory, to a step or a generation. Each turns one way of running into another.

A change works on a `Variant`, so that several can be made one after the other. Nothing of the user's is touched:
modules are changed on a copy of the tree, tensors on copies on meta.

`code` is what to write. It may use `model`, `x` (the input), `loss_fn` (from the output to the loss), `labels`,
`logits` and `batches`, by the names most programs have for them, and `torch`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fxmem._torch import common as torch_common
from fxmem.errors import FxmemError, UsageError
from fxmem.memory import liveness
from fxmem.records.parts import CompileSettings
from fxmem.records.plan import Plan
from fxmem.records.profile import Kind, Phase, Profile
from fxmem.records.units import Sdpa, exact_bytes
from fxmem.simulation.kernels.kernel_settings import KernelSettings, apply_settings, convolution_settings
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.fake_model import shadow_model
from fxmem.simulation.step.generation import Generation
from fxmem.simulation.step.given import quantize_weights
from fxmem.whatif.advice.in_place import activation_changes, call_changes, release_changes
from fxmem.whatif.advice.optimizer import dtype_changes, frozen_changes, optimizer_changes
from fxmem.whatif.advice.variant import (
    AnyChange,
    Bench,
    Change,
    NotApplicableError,
    Outcome,
    Variant,
    describe_ranks,
    known_change,
    place_change,
)

# --- other ways to the same result: kernels, and logits that are not all there at once --------------------------------


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


# --- advice that the step already follows, with the bytes it saves ----------------------------------------------------


def made_changes(analysis: Analysis) -> Iterator[Change]:
    """Gradients freed by `zero_grad`, and forward without gradients."""
    if analysis.profile.step.mode == "infer":
        yield known_change("no-grad", partial(_report_only, _no_grad_worth))
    elif (of := analysis.request).optimizer is not None and of.accumulate == 1 and not of.keeps_gradients:
        yield known_change("set-to-none", partial(_report_only, _zero_grad_worth))


def _report_only(worth: Callable[[Analysis], str], variant: Variant, analysis: Analysis) -> Variant:
    raise NotApplicableError(worth(analysis))


def _zero_grad_worth(analysis: Analysis) -> str:
    """The peak of the same step with `set_to_none=False`, beside its own."""
    done = "the step does so already, as PyTorch by default"
    try:
        more = analysis.vary(set_to_none=False).peak.counted_bytes - analysis.peak.counted_bytes
    except FxmemError:
        return done
    return (
        f"{done}; with set_to_none=False its peak is {exact_bytes(more)} higher"
        if more
        else f"{done}; its peak is the same without"
    )


def _no_grad_worth(analysis: Analysis) -> str:
    """A forward that keeps what backward needs is that of a training step."""
    done = "the step runs under no_grad and in eval mode already; inference_mode takes the same memory"
    if analysis.profile.step.precision:
        done += ", without the copies of weights that autocast keeps under no_grad"
    try:
        profile = analysis.vary(mode="train", optimizer=None).profile
    except FxmemError:
        return done
    span = next(span for span in profile.phases if span.phase is Phase.FORWARD)
    more = max(liveness.live_bytes(profile)[span.begin : span.end], default=0) - analysis.peak.requested_bytes
    return f"{done}; without them forward takes {exact_bytes(more)} more" if more > 0 else done


# --- changes that save memory, to a step or a generation --------------------------------------------------------------


_LONG = ("compile", "torchao-8bit")
"""Changes that take many times as long as an analysis: inductor writes the kernels of a whole step, and torchao's
optimizer takes each parameter apart."""
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""The allocator's setting, by the variable of the environment that has it."""


def find_changes(analysis: Analysis) -> Iterator[Change]:
    """Yield every change that can be tried on this step, worth it or not."""
    training = analysis.profile.step.mode == "train"
    yield from activation_changes(analysis)
    yield from call_changes(analysis)
    yield from dtype_changes(analysis)
    yield from kernel_changes(analysis)
    if training:
        yield from optimizer_changes(analysis)
        yield from frozen_changes(analysis)
        yield from loss_changes(analysis)
    else:
        yield from logit_changes(analysis)
    yield from release_changes(analysis)
    yield from made_changes(analysis)
    if analysis.profile.target.device == "cuda":
        yield expandable_segments()


def expandable_segments() -> AnyChange[Any, Any]:
    """The change of the allocator, of any step for a card."""
    return known_change(
        "expandable-segments", lambda way, _: dataclasses.replace(way, environ={**way.environ, **EXPANDABLE})
    )


class ModelBench(Bench[Variant, Analysis]):
    """Tries changes to the step of a model, on stand-ins of it.

    Args:
        analysis: of the step as it is.
        host_memory: as in `fxmem.plan`.
    """

    def __init__(self, analysis: Analysis, host_memory: int | str | None = None) -> None:
        super().__init__(analysis, Variant(analysis.model, analysis.request, environ=dict(os.environ)), host_memory)

    def changes(self) -> Iterator[Change]:
        """Every change that can be tried."""
        return (place_change(change, self.step.request) for change in find_changes(self.step))

    def takes_long(self, change: Change) -> bool:
        """See `Bench.takes_long`."""
        return change.key in _LONG

    def parts(self, reached: Outcome[Variant, Analysis]) -> int:
        """How many micro-batches there are to one of the step as it is."""
        return reached.variant.request.accumulate // self.step.request.accumulate

    def has_norms(self) -> bool:
        """Whether plans of strategy "norms" are worth a try."""
        return any("batch_norm" in op.name for op in self.step.profile.ops)

    def plan_code(self, plan: Plan, budget: float) -> tuple[str, str]:
        """See `Bench.plan_code`."""
        asked = '"norms"' if plan.strategy == "norms" else f"budget={budget}"
        if plan.host_bytes:
            asked += f", host_memory={self.host_memory!r}"
        ranks, place = describe_ranks(self.step.request, self.step.profile)
        code = (
            f"import fxmem\nanalysis = fxmem.analyze(model, x{ranks})\n"
            f"plan = fxmem.plan(analysis, {asked})\nmodel = fxmem.checkpoint(model, plan)"
        )
        return code, f"{place}analysed as you train: loss, optimizer, precision, target"


# --- a generation -----------------------------------------------------------------------------------------------------


GenerationChange = AnyChange[Variant, Generation]


class GenerationBench(Bench[Variant, Generation]):
    """Tries changes to a generation, on copies of its model. It has nothing to checkpoint."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, Variant(generation.model, generation.request, environ=dict(os.environ)))

    def changes(self) -> Iterator[GenerationChange]:
        """Every change that can be tried."""
        for cache, title in (("static", "static cache, set up once"), ("offloaded", "cache kept on the host")):
            code = f'model.generate(..., cache_implementation="{cache}")'
            yield AnyChange(f"{cache}-cache", title, "none", code, partial(_use_cache, cache), excludes="cache")
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            code, title = f"model.to({dtype})", f"{name} weights"
            yield AnyChange(f"{name}-weights", title, "rounding", code, partial(_cast, dtype), excludes="weights")
        for kind, given in (("int8", ""), ("int4", 'int4_packing_format="tile_packed_to_4d"')):
            config = f"{kind.capitalize()}WeightOnlyConfig"
            model = "model" if kind == "int8" else "model.to(torch.bfloat16)"
            code = f"from torchao.quantization import {config}, quantize_\nquantize_({model}, {config}({given}))"
            title = f"{kind} weights (torchao)"
            yield AnyChange(f"{kind}-weights", title, "rounding", code, partial(_quantize, kind), excludes="weights")
        yield AnyChange("greedy", "no beam search", "output", "model.generate(..., num_beams=1)", _drop_beams)
        if self.step.profile.target.device == "cuda":
            yield expandable_segments()


def _use_cache(cache: str, way: Variant, step: Generation) -> Variant:
    if step.request.cache == cache:
        raise NotApplicableError(f"the cache is {cache} already")
    return way.replace_step(cache=cache)


def _cast(dtype: torch.dtype, way: Variant, step: Generation) -> Variant:
    if all(each.element_size() <= 2 for each in step.model.parameters()):
        raise NotApplicableError("the weights have two bytes or fewer already")
    return way.replace_step(copy.deepcopy(way.model).to(dtype))


def _quantize(kind: str, way: Variant, step: Generation) -> Variant:
    if any(not each.is_floating_point() or type(each.data) is not torch.Tensor for each in step.model.parameters()):
        raise NotApplicableError("the weights are quantised already")
    card, model = step.profile.target, copy.deepcopy(way.model)
    if kind == "int4":
        if (card.capability or (0, 0)) < (8, 0):
            raise NotApplicableError("the kernel of int4 weights needs a card of compute capability 8.0")
        model = model.to(torch.bfloat16)
    try:
        quantize_weights(model, kind)
    except UsageError as error:
        raise NotApplicableError(str(error)) from error
    return way.replace_step(model)


def _drop_beams(way: Variant, step: Generation) -> Variant:
    if step.run.beams == 1:
        raise NotApplicableError("there are no beams")
    options: dict[str, Any] = {**step.request.options}
    options.pop("num_beams", None)
    return way.replace_step(beams=1, options=options)
