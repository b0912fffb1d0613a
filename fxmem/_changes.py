"""Changes to a training step that save memory: each turns one way of running the step into another.

A change works on a `Variant`, so that several can be made one after the other. Nothing of the user's is touched: modules are
changed on a copy of the tree, tensors on copies on meta.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxmem import _torch, allocator, liveness
from fxmem.advice_records import Effect
from fxmem.analysis import Analysis, Call, analyze_call
from fxmem.errors import FxmemError, UsageError
from fxmem.faking import meta_model, shadow_model
from fxmem.records import Kind, Node, Peak, Phase, Profile, Storage
from fxmem.resizing import resizing_of
from fxmem.tracing import named_arguments

__all__ = ["Change", "NotToBeHadError", "Outcome", "Variant", "changes_for", "outcome"]

_CROSS_ENTROPY_CHUNKS = 8
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class NotToBeHadError(FxmemError):
    """The change does not apply here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of running the step."""

    model: nn.Module
    call: Call
    environ: Mapping[str, str]
    """Where the allocator's settings are found."""
    around: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...] = ()
    """What the step runs within."""
    released: frozenset[str] = frozenset()
    """Names of nodes whose results the program lets go after their last use."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A variant, analysed."""

    variant: Variant
    analysis: Analysis
    profile: Profile
    peak: Peak


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing to do differently."""

    key: str
    title: str
    effect: Effect
    code: str
    make: Callable[[Variant, Analysis], Variant]
    """The variant changed; raises NotToBeHadError. The analysis is of the unchanged step."""
    note: str = ""
    excludes: str = ""
    """Of changes with the same word here only one can be made."""


def outcome(variant: Variant) -> Outcome:
    """Run the variant on fakes and account for it."""
    call = {field.name: getattr(variant.call, field.name) for field in dataclasses.fields(variant.call)}
    with contextlib.ExitStack() as stack:
        for enter in variant.around:
            stack.enter_context(enter())
        analysis = analyze_call(variant.model, **call)
    profile = _let_go(analysis.profile, variant.released)
    return Outcome(variant, analysis, profile, allocator.complete_timeline(profile, variant.environ).peak)


def changes_for(analysis: Analysis) -> Iterator[Change]:
    """Everything that can be tried on this step, whether or not it will be worth it."""
    training = analysis.profile.step.mode == "train"
    if training:
        yield Change(
            "inplace",
            "activations in place",
            "none",
            "nn.ReLU(inplace=True)  # in the modules named in the note",
            _in_place,
            note=_paths(list(_safe_in_place(analysis))),
        )
    yield Change("bf16-autocast", "bfloat16 autocast", "rounding", 'with torch.autocast("cuda", dtype=torch.bfloat16): loss = ...', _autocast, excludes="dtype")
    yield Change("bf16-weights", "bfloat16 weights, gradients and optimizer state", "training", "model.to(torch.bfloat16)", _half, excludes="dtype")
    yield Change(
        "channels-last",
        "channels_last layout",
        "none",
        "model.to(memory_format=torch.channels_last); x = x.to(memory_format=torch.channels_last)",
        _channels_last,
        note="other convolution kernels, so sums in another order",
    )
    if training:
        yield from _optimizers(analysis)
        for parts in (2, 4):
            yield Change(
                f"micro-batches-{parts}",
                f"{parts} micro-batches, their gradients added up",
                "training",
                f"for part in x.chunk({parts}): (loss_fn(model(part)) / {parts}).backward()",
                _micro_batches(parts),
                note="the same gradients but for batch norms, which see smaller batches",
                excludes="batch",
            )
        yield Change(
            "chunked-loss",
            "cross-entropy in chunks, recomputed in backward",
            "none",
            "sum(checkpoint(F.cross_entropy, a, b, reduction='sum', use_reentrant=False) for a, b in zip(logits.chunk(8), labels.chunk(8))) / count",
            _chunked_loss,
            note="a fused linear and cross-entropy kernel frees the logits as well",
        )
    yield from _held(analysis)
    if analysis.profile.target.device == "cuda":
        yield Change(
            "expandable-segments",
            "allocator that can extend its segments",
            "none",
            "PYTORCH_ALLOC_CONF=expandable_segments:True python train.py",
            lambda variant, _: dataclasses.replace(variant, environ={**variant.environ, **_EXPANDABLE}),
            note="frees what is reserved and not used; the allocated peak stays",
        )


# --- modules ----------------------------------------------------------------------------------------------------------------

_IN_PLACE = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.ELU, nn.CELU, nn.SELU)
"""Their backward needs the output alone (tools/autograd/derivatives.yaml), so nothing is lost when it overwrites the input."""


def _in_place(variant: Variant, analysis: Analysis) -> Variant:
    paths = list(_safe_in_place(analysis))
    if not paths:
        raise NotToBeHadError("no activation module is left whose input nothing else needs")
    model = shadow_model(variant.model)
    for path in paths:
        vars(model.get_submodule(path))["inplace"] = True
    return dataclasses.replace(variant, model=model)


def _safe_in_place(analysis: Analysis) -> Iterator[str]:
    """Activation modules that may overwrite their input: no other node reads it later or keeps it for backward, and it is no leaf."""
    profile, modules = analysis.profile, dict(analysis.model.named_modules())
    keepers: dict[int, set[int]] = {}
    readers: dict[int, set[int]] = {}
    for index, node in enumerate(profile.nodes):
        for storage in node.saved:
            keepers.setdefault(storage, set()).add(index)
        for source in node.inputs:
            for output in profile.nodes[source].outputs:
                if output.storage is not None:
                    readers.setdefault(output.storage, set()).add(index)
    refused: set[str] = set()
    found: dict[str, None] = {}
    for index, node in enumerate(profile.nodes):
        module = modules.get(node.module) if node.op == "call_module" else None
        if not isinstance(module, _IN_PLACE) or module.inplace or getattr(module, "negative_slope", 1) < 0 or getattr(module, "alpha", 1) < 0:
            continue
        storages = {output.storage for source in node.inputs for output in profile.nodes[source].outputs}
        alone = all(
            storage is not None
            and profile.storages[storage].kind not in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OUTPUT)
            and profile.storages[storage].birth > 0
            and not (keepers.get(storage, set()) - {index})
            and max(readers.get(storage, {index})) <= index
            for storage in storages
        )
        (found if alone else dict.fromkeys(()))[node.module] = None
        if not alone:
            refused.add(node.module)
    yield from (path for path in found if path not in refused)


def _half(variant: Variant, _: Analysis) -> Variant:
    if not any(p.dtype is torch.float32 for p in variant.model.parameters()):
        raise NotToBeHadError("the weights are not float32")
    if variant.call.precision is not None:
        raise NotToBeHadError("the step runs under autocast already")
    model = meta_model(variant.model).to(torch.bfloat16)
    args, kwargs = _torch.tree_map_only(torch.Tensor, _as_bf16, (variant.call.args, variant.call.kwargs))
    return dataclasses.replace(variant, model=model, call=dataclasses.replace(variant.call, args=args, kwargs=kwargs))


def _as_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=torch.bfloat16, device="meta", requires_grad=tensor.requires_grad) if tensor.is_floating_point() else tensor


def _autocast(variant: Variant, _: Analysis) -> Variant:
    if variant.call.precision is not None:
        raise NotToBeHadError(f"the step runs under {variant.call.precision} autocast already")
    if not any(p.dtype is torch.float32 for p in variant.model.parameters()):
        raise NotToBeHadError("the weights are not float32")
    return dataclasses.replace(variant, call=dataclasses.replace(variant.call, precision="bf16"))


def _channels_last(variant: Variant, analysis: Analysis) -> Variant:
    if not any("convolution" in op.name for op in analysis.profile.ops):
        raise NotToBeHadError("the model has no convolutions")
    if any(_is_channels_last(p) for p in variant.model.parameters()):
        raise NotToBeHadError("weights are channels_last already")
    model = meta_model(variant.model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    args, kwargs = _torch.tree_map_only(torch.Tensor, _as_channels_last, (variant.call.args, variant.call.kwargs))
    return dataclasses.replace(variant, model=model, call=dataclasses.replace(variant.call, args=args, kwargs=kwargs))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _as_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    return torch.empty_like(tensor, memory_format=torch.channels_last, device="meta", requires_grad=tensor.requires_grad)


# --- optimizer --------------------------------------------------------------------------------------------------------------

_OTHER_OPTIMIZERS = (
    ("sgd-momentum", "SGD with momentum: one state per parameter", "torch.optim.SGD(model.parameters(), lr=..., momentum=0.9)"),
    ("adafactor", "Adafactor: a row and a column of state per matrix", "torch.optim.Adafactor(model.parameters(), lr=...)"),
    ("sgd", "SGD: no state", "torch.optim.SGD(model.parameters(), lr=...)"),
)


def _optimizers(analysis: Analysis) -> Iterator[Change]:
    spec = analysis.call.optimizer
    if not isinstance(spec, str):
        return
    name, _, options = spec.partition(":")
    if not options and name.lower() in ("adam", "adamw", "sgd", "sgd-momentum"):
        kind = {"adam": "Adam", "adamw": "AdamW"}.get(name.lower(), "SGD")
        for form, title, argument in (
            ("fused", "fused optimizer: one kernel, no lists of temporaries", "fused=True"),
            ("forloop", "optimizer one parameter at a time: smaller temporaries, slower", "foreach=False"),
        ):
            yield Change(
                f"{form}-optimizer", title, "none", f"torch.optim.{kind}(model.parameters(), {argument})", _stepping(f"{spec}:{form}"), excludes="optimizer"
            )
    for other, title, code in _OTHER_OPTIMIZERS:
        if other != name.lower():
            yield Change(f"{other}-optimizer", title, "training", code, _stepping(other), excludes="optimizer")


def _stepping(spec: str) -> Callable[[Variant, Analysis], Variant]:
    return lambda variant, _: dataclasses.replace(variant, call=dataclasses.replace(variant.call, optimizer=spec))


def _micro_batches(parts: int) -> Callable[[Variant, Analysis], Variant]:
    def make(variant: Variant, _: Analysis) -> Variant:
        call = variant.call
        try:
            varied = resizing_of(named_arguments(variant.model, call.args, call.kwargs), "batch")
        except UsageError as error:
            raise NotToBeHadError(f"the inputs have no batch to split: {error}") from error
        if varied.size % parts:
            raise NotToBeHadError(f"a batch of {varied.size} has no {parts} equal parts")
        args, kwargs = varied.at(call.args, call.kwargs, varied.size // parts)
        return dataclasses.replace(variant, call=dataclasses.replace(call, args=args, kwargs=kwargs, accumulate=call.accumulate * parts))

    return make


# --- the loss ---------------------------------------------------------------------------------------------------------------


def _chunked_loss(variant: Variant, analysis: Analysis) -> Variant:
    if not any(node.target.endswith("cross_entropy") for node in analysis.profile.nodes):
        raise NotToBeHadError("no torch.nn.functional.cross_entropy in the step")
    return dataclasses.replace(variant, around=(*variant.around, _cross_entropy_in_chunks))


@contextlib.contextmanager
def _cross_entropy_in_chunks() -> Iterator[None]:
    def chunked(original: Callable[..., Any]) -> Callable[..., Any]:
        unchanged = False

        def cross_entropy(logits: torch.Tensor, target: torch.Tensor, *rest: Any, **options: Any) -> Any:
            nonlocal unchanged
            reduction, ignored = options.get("reduction", "mean"), options.get("ignore_index", -100)
            simple = not rest and not options.keys() - {"reduction", "ignore_index"} and logits.dim() == 2 and target.dim() == 1 and reduction != "none"
            if unchanged or not simple or logits.shape[0] < _CROSS_ENTROPY_CHUNKS:
                # The original shows itself to function modes under its public name, which is this function's now.
                before, unchanged = unchanged, True
                try:
                    return original(logits, target, *rest, **options)
                finally:
                    unchanged = before

            def part(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return F.nll_loss(F.log_softmax(a, 1), b, reduction="sum", ignore_index=ignored)

            pairs = zip(logits.chunk(_CROSS_ENTROPY_CHUNKS), target.chunk(_CROSS_ENTROPY_CHUNKS), strict=True)
            total = torch.stack([checkpoint(part, a, b, use_reentrant=False, preserve_rng_state=False) for a, b in pairs]).sum()
            return total / (target != ignored).sum() if reduction == "mean" else total

        return cross_entropy

    with _torch.patched(F, "cross_entropy", chunked):
        yield


# --- what the program holds without need -----------------------------------------------------------------------------------------


def _held(analysis: Analysis) -> Iterator[Change]:
    """Results that are alive at the peak, that nothing keeps for backward and that nothing reads any more, by the line that made them."""
    profile, peak = analysis.profile, analysis.peak
    idle = _idle_at(profile, peak.tick)
    lines: dict[tuple[str, int] | None, list[Node]] = {}
    for index in idle:
        node = profile.nodes[index]
        lines.setdefault((node.source.file, node.source.line) if node.source else None, []).append(node)
    for place, nodes in lines.items():
        where = f"{place[0]}:{place[1]}" if place else "the function that runs the step"
        code = nodes[0].source.code if nodes[0].source else ""
        names = frozenset(node.name for node in nodes)
        yield Change(
            f"release:{nodes[0].name}",
            f"let go of what {where} made after its last use",
            "none",
            f"del the name bound by: {code}" if code else "del it, or return without it, before the peak",
            _releasing(names),
            note=f"held by a local name or by the output until the {profile.phases[-1].phase.value} ends",
        )


def _idle_at(profile: Profile, tick: int) -> list[int]:
    """Nodes with results that are held at a tick and that nothing needs any more."""
    ends = _last_use(profile)
    alive = (index for index in liveness.alive_at(profile, tick) if index in ends and ends[index] < tick)
    return list(dict.fromkeys(node for index in alive if (node := profile.storages[index].node) is not None))


def _last_use(profile: Profile) -> dict[int, int]:
    """For each storage made in forward that nothing keeps for backward: the tick at which the last call that reads it has run."""
    ends: dict[int, int] = {}
    for op in profile.ops:
        if op.phase is Phase.FORWARD:
            ends[op.node] = max(op.end, ends.get(op.node, 0))
    saved = {storage for node in profile.nodes for storage in node.saved}
    made = {
        index: ends[storage.node]
        for index, storage in enumerate(profile.storages)
        if storage.kind in (Kind.TEMPORARY, Kind.OUTPUT) and index not in saved and storage.op is not None
        if profile.ops[storage.op].phase is Phase.FORWARD and storage.node is not None and profile.nodes[storage.node].op not in ("loss", "optimizer")
    }
    for index, node in enumerate(profile.nodes):
        for source in node.inputs:
            for output in profile.nodes[source].outputs:
                if output.storage in made:
                    made[output.storage] = max(made[output.storage], ends.get(index, 0))
    return made


def _releasing(names: frozenset[str]) -> Callable[[Variant, Analysis], Variant]:
    return lambda variant, _: dataclasses.replace(variant, released=variant.released | names)


def _let_go(profile: Profile, names: frozenset[str]) -> Profile:
    """The profile with these nodes' results freed after their last use."""
    if not names:
        return profile
    ends = _last_use(profile)

    def freed(index: int, storage: Storage) -> Storage:
        node = storage.node
        if index not in ends or node is None or profile.nodes[node].name not in names:
            return storage
        return storage.model_copy(update={"death": min(storage.death, max(ends[index], storage.birth + 1))})

    return profile.model_copy(update={"storages": tuple(freed(index, storage) for index, storage in enumerate(profile.storages))})


def _paths(paths: list[str]) -> str:
    return ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
