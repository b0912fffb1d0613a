"""Changes that save memory, to a step or a generation. Each turns one way of running into another.

A change works on a `Variant`, so that several can be made one after the other. Nothing of the user's is touched:
modules are changed on a copy of the tree, tensors on copies on meta.

`code` is what to write. It may use `model`, `x` (the input), `loss_fn` (from the output to the loss), `labels`,
`logits` and `batches`, by the names most programs have for them, and `torch`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem.errors import FxmemError, UsageError
from fxmem.memory import liveness
from fxmem.records.plan import Plan
from fxmem.records.profile import Phase
from fxmem.records.units import exact_bytes
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.generation import Generation
from fxmem.simulation.step.given import quantize_weights
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif.advice.in_place import activation_changes, call_changes, release_changes
from fxmem.whatif.advice.losses import kernel_changes, logit_changes, loss_changes
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

# --- advice that the step already follows, with the bytes it saves ----------------------------------------------------


def made_changes(analysis: Analysis) -> Iterator[Change]:
    """Gradients freed by `zero_grad`, and forward without gradients."""
    if analysis.profile.step.mode == "infer":
        yield known_change("no-grad", _report_only(_no_grad_worth))
    elif analysis.request.optimizer is not None and _frees_gradients(analysis.request):
        yield known_change("set-to-none", _report_only(_zero_grad_worth))


def _frees_gradients(request: StepRequest) -> bool:
    return request.accumulate == 1 and not request.keeps_gradients


def _report_only(worth: Callable[[Analysis], str]) -> Callable[[Variant, Analysis], Variant]:
    def make(variant: Variant, analysis: Analysis) -> Variant:
        raise NotApplicableError(worth(analysis))

    return make


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
            yield AnyChange(f"{cache}-cache", title, "none", code, _use_cache(cache), excludes="cache")
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            code = f"model.to({dtype})"
            yield AnyChange(f"{name}-weights", f"{name} weights", "rounding", code, _cast(dtype), excludes="weights")
        for kind, given in (("int8", ""), ("int4", 'int4_packing_format="tile_packed_to_4d"')):
            config = f"{kind.capitalize()}WeightOnlyConfig"
            model = "model" if kind == "int8" else "model.to(torch.bfloat16)"
            code = f"from torchao.quantization import {config}, quantize_\nquantize_({model}, {config}({given}))"
            title = f"{kind} weights (torchao)"
            yield AnyChange(f"{kind}-weights", title, "rounding", code, _quantize(kind), excludes="weights")
        yield AnyChange("greedy", "no beam search", "output", "model.generate(..., num_beams=1)", _drop_beams)
        if self.step.profile.target.device == "cuda":
            yield expandable_segments()


def _use_cache(cache: str) -> Callable[[Variant, Generation], Variant]:
    def make(way: Variant, step: Generation) -> Variant:
        if step.request.cache == cache:
            raise NotApplicableError(f"the cache is {cache} already")
        return way.replace_step(cache=cache)

    return make


def _cast(dtype: torch.dtype) -> Callable[[Variant, Generation], Variant]:
    def make(way: Variant, step: Generation) -> Variant:
        if all(each.element_size() <= 2 for each in step.model.parameters()):
            raise NotApplicableError("the weights have two bytes or fewer already")
        return way.replace_step(copy.deepcopy(way.model).to(dtype))

    return make


def _quantize(kind: str) -> Callable[[Variant, Generation], Variant]:
    def make(way: Variant, step: Generation) -> Variant:
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

    return make


def _drop_beams(way: Variant, step: Generation) -> Variant:
    if step.run.beams == 1:
        raise NotApplicableError("there are no beams")
    options: dict[str, Any] = {**step.request.options}
    options.pop("num_beams", None)
    return way.replace_step(beams=1, options=options)
