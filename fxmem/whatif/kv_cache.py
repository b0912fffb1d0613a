"""A serving engine's room for keys and values, by its own published arithmetic.

vLLM measures at its start: it runs a forward of as many tokens as a batch may have, and samples from the logits of as
many sequences as there may be; what is left of its share of the card is for keys and values. Here that run is analysed.
The CUDA context lies outside the share; where it leaves less than the share, the engine does not start.

Source: vllm-project/vllm, `v1/worker/gpu_worker.py` (`determine_available_memory`) at 35d5cda1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import nn

from fxmem.errors import ExceededError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.context import explain_room, room_bytes
from fxmem.records.fits import ServeSequences, ServeSize, UncountedTerm
from fxmem.records.profile import Assumption, Kind, Profile, Target
from fxmem.records.units import ENGINES
from fxmem.simulation.code.engine import ProfileRun, read_layout, rotary_bytes
from fxmem.simulation.step.analysis import Analysis, analyze_step, build_module
from fxmem.simulation.step.request import StepRequest

_RELEASE: Final = "V1"
CONTEXTS: Final = (2048, 8192, 32768)
"""Lengths of sequences that are counted unless others are asked for."""
_BLOCK = 512
"""What the allocator rounds to."""
_MIB = 1 << 20
_OTHER_MEMORY = UncountedTerm(
    name="memory outside torch: libraries, NCCL",
    low_bytes=71 * _MIB,
    high_bytes=164 * _MIB,
    source="logged by starts of V1: 0.07 to 0.16 GiB on one card, 0.55 on each of two; V0 counted 0.35 to 1.79",
)
_GRAPHS = UncountedTerm(
    name="CUDA graphs",
    low_bytes=0,
    high_bytes=1055 * _MIB,
    source="what capturing them added, logged by starts of V1: at most 1.03 GiB; newer ones take an estimate off",
)


def kv_cache(  # noqa: PLR0913 - the settings of the public API, by keyword
    model: nn.Module | Callable[[], nn.Module],
    *,
    engine: str = "vllm",
    utilization: float = 0.9,
    max_batched_tokens: int = 8192,
    max_seqs: int = 256,
    block_size: int = 16,
    contexts: Iterable[int] = CONTEXTS,
    target: str | Target = "h100",
    eager: bool = False,
    name: str = "",
    notes: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> ServeSize:
    """Predict what an engine has left for keys and values, with no GPU.

    The modules are those of transformers, one card serves, and keys and values have the dtype of the weights. What is
    not known before a start is in `ServeSize.uncounted`, with what was published of it; the answer is a range.

    Args:
        model: a decoder of transformers, or a function that builds one, in the dtype that is served.
        engine: "vllm".
        utilization: the share of the card that the engine may use, `--gpu-memory-utilization`.
        max_batched_tokens: tokens of a forward, `--max-num-batched-tokens`.
        max_seqs: sequences at a time, `--max-num-seqs`. Many decide the peak by their logits.
        block_size: tokens of a block of the cache.
        contexts: lengths of sequences of which to say how many fit.
        target: as for `fxmem.analyze`; a card.
        eager: whether the engine captures no CUDA graphs, `--enforce-eager`.
        name: what the model is called; its class unless given.
        notes: how it was built; these join the assumptions.
        progress: called with a few words before each stage.

    Raises:
        UsageError: a number out of its range, another engine, a target that is no card; a model that is no decoder of
            transformers, or whose layers keep something else than keys and values.
        ExceededError: the share is more than a CUDA context leaves of the card, so that the engine does not start.
        AnalysisError: the model raised.
    """
    card = catalogue.target(target) if isinstance(target, str) else target
    lengths = tuple(contexts)
    _check(engine, utilization, (max_batched_tokens, max_seqs, block_size, *lengths), card)
    tell = progress or (lambda _: None)
    module = build_module(model, tell)
    layout = read_layout(module)
    sequences = min(max_seqs, max_batched_tokens)
    request = StepRequest(
        args=(torch.empty(1, max_batched_tokens, dtype=torch.int64, device="meta"),),
        mode="infer",
        inference_mode=True,
        target=card,
        name=name or type(module).__name__,
        notes=(*notes,),
    )
    run = analyze_step(ProfileRun(module, sequences), request, tell)
    sizes = [s.nbytes for s in run.profile.storages if s.kind in (Kind.PARAMETER, Kind.BUFFER)]
    held = sum(-(-nbytes // _BLOCK) * _BLOCK for nbytes in sizes)
    weights = sum(sizes) + rotary_bytes(module)
    peak = (run.peak.allocated_bytes or 0) - held
    uncounted = (_OTHER_MEMORY, *([] if eager else [_GRAPHS]))
    memory = card.memory_bytes or 0
    high, low = (
        int(memory * utilization) - weights - peak - sum(bounds)
        for bounds in ([u.low_bytes for u in uncounted], [u.high_bytes for u in uncounted])
    )
    block_bytes = layout.group_size * layout.layer_bytes * block_size
    groups = len(layout.groups)
    low_blocks, high_blocks = max(low // block_bytes, 0), max(high // block_bytes, 0)
    return ServeSize(
        **run.profile.heading(),
        engine=engine,
        release=_RELEASE,
        memory_bytes=memory,
        utilization=utilization,
        max_batched_tokens=max_batched_tokens,
        max_seqs=max_seqs,
        block_size=block_size,
        weights_bytes=weights,
        profile_peak_bytes=peak,
        profile_peak_at=_name_peak(run),
        token_bytes=layout.layer_bytes * len(layout.windows),
        block_bytes=block_bytes,
        groups=groups,
        uncounted=uncounted,
        kv_low_bytes=low,
        kv_high_bytes=high,
        low_blocks=low_blocks,
        high_blocks=high_blocks,
        low_tokens=low_blocks // groups * block_size,
        high_tokens=high_blocks // groups * block_size,
        sequences=tuple(
            ServeSequences(context=context, blocks=blocks, low=low_blocks / blocks, high=high_blocks / blocks)
            for context in lengths
            for blocks in (layout.count_blocks(context, block_size, max_batched_tokens),)
        ),
        assumptions=_assumptions(run.profile),
    )


def _check(engine: str, utilization: float, counts: Iterable[int], card: Target) -> None:
    if engine not in ENGINES:
        raise UsageError(f"expected an engine of {', '.join(ENGINES)}, got {engine!r}")
    if not 0 < utilization <= 1:
        raise UsageError(f"expected a utilization above 0 and at most 1, got {utilization}")
    if any(count < 1 for count in counts):
        raise UsageError("expected tokens, sequences, blocks and contexts of at least 1")
    if card.device != "cuda" or card.memory_bytes is None:
        raise UsageError(f"expected a card whose memory is known, got {card.name!r}")
    room = room_bytes(card) or 0
    if card.memory_bytes * utilization > room:
        most = 1000 * room // card.memory_bytes / 1000
        raise ExceededError(
            f"expected a utilization of at most {most}, got {utilization}: {engine} does not start where less is free, "
            f"and {card.name} has {explain_room(card)}"
        )


def _name_peak(run: Analysis) -> str:
    tick = run.peak.tick
    return next((op.name for op in run.profile.ops if op.begin <= tick < op.end), "the end of the run")


def _assumptions(profile: Profile) -> tuple[Assumption, ...]:
    texts = (
        "the modules are those of transformers; the engine's own merge some of them, and its compiler fuses others",
        "the sampler has the kernels of torch; with FlashInfer's it takes less",
        "keys and values have the dtype of the weights; one card serves, with no draft model and no adapters",
        "text alone: the profile run of an encoder of images or sound is not in it",
    )
    kept = [each for each in profile.assumptions if each.topic in ("workspace", "model")]
    return (*(Assumption(topic="engine", text=text) for text in texts), *kept)
