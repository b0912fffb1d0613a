"""A serving engine's room for keys and values, by its own published arithmetic.

vLLM measures at its start: it runs a forward of as many tokens as a batch may have, and samples from the logits of as
many sequences as there may be; what is left of its share of the card is for keys and values. Here that run is analysed.

Source: vllm-project/vllm, `v1/worker/gpu_worker.py` (`determine_available_memory`) at 35d5cda1,
`v1/worker/gpu_model_runner.py` (`profile_run`, `_dummy_sampler_run`), `v1/sample/sampler.py`,
`v1/core/kv_cache_utils.py` at bbf906a8 (`get_num_blocks`, `_get_kv_cache_groups_uniform_page_size`),
`v1/kv_cache_interface.py` (`FullAttentionSpec`, `SlidingWindowSpec`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.records.names import ENGINES
from fxmem.records.profile import Assumption, Kind, Profile, Target
from fxmem.records.sizes import ServeSequences, ServeSize, UncountedTerm
from fxmem.simulation.analysis import Analysis, analyze_step, build_module
from fxmem.simulation.request import StepRequest

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


class _CacheLayout(NamedTuple):
    """How an engine keeps keys and values."""

    layer_bytes: int
    """Of one token in one layer."""
    windows: tuple[int | None, ...]
    """Of each layer that keeps any; None: all tokens."""

    @property
    def group_size(self) -> int:
        """Layers of a group: as many as there are of the rarer kind, or of the other where that is near."""
        counts = Counter(self.windows).values()
        return max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)

    @property
    def groups(self) -> list[int | None]:
        """The window of each group."""
        size = self.group_size
        return [window for window, count in Counter(self.windows).items() for _ in range(-(-count // size))]

    def count_blocks(self, context: int, block_size: int, batched_tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes at most."""
        found = 0
        for window in self.groups:
            kept = context if window is None else min(context, window - 1 + batched_tokens)
            found += -(-kept // block_size) + (window is not None)
        return found


class _ProfileRun(nn.Module):
    """What the engine runs to measure itself."""

    def __init__(self, model: Any, sequences: int) -> None:
        super().__init__()
        self.model = model
        self._sequences = sequences

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A forward without a cache, then a sample for each sequence."""
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        last = hidden[: self._sequences].clone()
        return _sample(self.model.get_output_embeddings()(last))


def _sample(logits: torch.Tensor) -> torch.Tensor:
    """Sample with a temperature, top-k and top-p, by the kernels of torch."""
    scores = logits.to(torch.float32)
    likeliest = scores.argmax(-1)
    scores.div_(0.5)
    ordered, places = scores.sort(-1)
    least = ordered.gather(-1, torch.ones_like(likeliest)[:, None])
    ordered.masked_fill_(ordered < least, -torch.inf)
    shares = ordered.softmax(-1).cumsum(-1)
    ordered.masked_fill_(shares <= 0.1, -torch.inf)
    del shares
    scores = ordered.scatter(-1, places, ordered)
    del ordered, places
    chances = scores.softmax(-1)
    drawn = chances.div_(torch.empty_like(chances).exponential_()).argmax(-1)
    return torch.where(likeliest < 0, likeliest, drawn)


def serve_size(  # noqa: PLR0913 - the settings of the public API, by keyword
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
        AnalysisError: the model raised.
    """
    card = catalogue.target(target) if isinstance(target, str) else target
    lengths = tuple(contexts)
    _check(engine, utilization, (max_batched_tokens, max_seqs, block_size, *lengths), card)
    tell = progress or (lambda _: None)
    module = build_module(model, tell)
    layout = _read_layout(module)
    sequences = min(max_seqs, max_batched_tokens)
    ids = torch.empty(1, max_batched_tokens, dtype=torch.int64, device="meta")
    request = StepRequest(
        args=(ids,),
        mode="infer",
        inference_mode=True,
        target=card,
        name=name or type(module).__name__,
        notes=(*notes,),
    )
    run = analyze_step(_ProfileRun(module, sequences), request, tell)
    sizes = [s.nbytes for s in run.profile.storages if s.kind in (Kind.PARAMETER, Kind.BUFFER)]
    held = sum(-(-nbytes // _BLOCK) * _BLOCK for nbytes in sizes)
    weights = sum(sizes) + _rotary_bytes(module)
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


def _read_layout(model: Any) -> _CacheLayout:
    """What each layer keeps of a token, by the model's configuration.

    Raises:
        UsageError: it is not known.
    """
    if not callable(getattr(model, "get_decoder", None)) or not callable(getattr(model, "get_output_embeddings", None)):
        raise UsageError(f"expected a decoder of transformers, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    other = set(kinds) - {"full_attention", "sliding_attention"}
    heads = getattr(config, "num_attention_heads", None)
    if other or heads is None or getattr(config, "kv_lora_rank", None) or model.get_output_embeddings() is None:
        what = ", ".join(sorted(other)) or "compressed keys and values, or none"
        raise UsageError(f"expected layers that keep keys and values for each head; {type(model).__name__} has {what}")
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    item = model.get_output_embeddings().weight.dtype.itemsize
    window = getattr(config, "sliding_window", None)
    # Mistral's configurations have a window without kinds of layers: then every layer has it.
    if window and not getattr(config, "layer_types", None):
        kinds = ["sliding_attention"] * len(kinds)
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return _CacheLayout(2 * kept * size * item, windows)


def _rotary_bytes(model: Any) -> int:
    """The engine's table of sines and cosines, `RotaryEmbedding._compute_cos_sin_cache`; 0 without rotary positions."""
    config = model.config.get_text_config(decoder=True)
    frequencies = next((each for name, each in model.named_buffers() if name.endswith("inv_freq")), None)
    positions = getattr(config, "max_position_embeddings", None)
    if frequencies is None or positions is None:
        return 0
    item = model.get_output_embeddings().weight.dtype.itemsize
    return int(positions * 2 * frequencies.numel() * item)


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
