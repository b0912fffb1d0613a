"""A serving engine's room for keys and values, by its own published arithmetic.

vLLM measures at its start: it runs a forward of as many tokens as a batch may have, and samples from the logits of as
many sequences as there may be; what is left of its share of the card is for keys and values. Here that run is analysed,
on each card that has another part of the model. The CUDA context lies outside the share; where it leaves less than the
share, the engine does not start. SGLang measures nothing: its share of what is free is for weights, keys and values.

Source: vllm-project/vllm, `v1/worker/gpu_worker.py` (`determine_available_memory`) at 35d5cda1; what differs between
releases is in `fxmem/simulation/engines/releases.toml`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from fxmem.errors import ExceededError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.context import explain_room, room_bytes
from fxmem.records.fits import ServeChange, ServeSequences, ServeSize, UncountedTerm
from fxmem.records.profile import Assumption, Kind, Profile, Target
from fxmem.simulation.engines.cache_layout import CacheLayout, read_layout, rotary_bytes
from fxmem.simulation.engines.graphs import SPREAD, graph_bytes
from fxmem.simulation.engines.layers import LayerSizes, Stage, split_stages
from fxmem.simulation.engines.profile_run import ProfileRun, ProfileSettings
from fxmem.simulation.engines.releases import Engine, find_engine, find_newer
from fxmem.simulation.step.analysis import Analysis, analyze_step, build_module
from fxmem.simulation.step.given import pack_stage
from fxmem.simulation.step.request import StepRequest

CONTEXTS: Final = (2048, 8192, 32768)
"""Lengths of sequences that are counted unless others are asked for."""
_BLOCK = 512
"""What the allocator rounds to."""
_MIB = 1 << 20


def kv_cache(  # noqa: PLR0913 - the settings of the public API, by keyword
    model: nn.Module | Callable[[], nn.Module],
    *,
    engine: str = "vllm",
    utilization: float | None = None,
    max_batched_tokens: int | None = None,
    max_seqs: int | None = None,
    block_size: int = 16,
    mesh: str = "",
    kv_dtype: str = "auto",
    quantization: str | Mapping[str, Any] | None = None,
    contexts: Iterable[int] = CONTEXTS,
    target: str | Target = "h100",
    eager: bool = False,
    name: str = "",
    notes: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> ServeSize:
    """Predict what an engine has left for keys and values, with no GPU.

    Widths and weights are read off the modules of transformers. What is not known before a start is in
    `ServeSize.uncounted`, with what starts logged of it; the answer is a range.

    Args:
        model: a decoder of transformers, or a function that builds one, in the dtype that is served.
        engine: "vllm" or "sglang", or a release as in "vllm@0.19"; the newest that is known unless said.
        utilization: the share of the card that the engine may use, `--gpu-memory-utilization`; of SGLang that of keys,
            values and weights, `--mem-fraction-static`. As the release has it unless given, and so are the next two.
        max_batched_tokens: tokens of a forward, `--max-num-batched-tokens`.
        max_seqs: sequences at a time, `--max-num-seqs`. Many decide the peak by their logits.
        block_size: tokens of a block of the cache.
        mesh: how cards share the model, "tp=4,pp=2": each layer by 4, in 2 stages.
        kv_dtype: "fp8" for keys and values of one byte.
        quantization: "fp8" for linear layers that are quantised as they are loaded; or a checkpoint's
            `quantization_config`.
        contexts: lengths of sequences of which to say how many fit.
        target: as for `fxmem.analyze`; a card.
        eager: whether the engine captures no CUDA graphs, `--enforce-eager`.
        name: what the model is called; its class unless given.
        notes: how it was built; these join the assumptions.
        progress: called with a few words before each stage.

    Raises:
        UsageError: a number out of its range, another engine, a target that is no card; a model that is no decoder of
            transformers, or whose layers keep something else than keys and values; a mesh that does not divide it.
        ExceededError: the share is more than a CUDA context leaves of the card, so that the engine does not start.
        AnalysisError: the model raised.
    """
    card = catalogue.target(target) if isinstance(target, str) else target
    rules = find_engine(engine)
    tokens, sequences = rules.find_defaults(card, of_program=False)
    tokens = tokens if max_batched_tokens is None else max_batched_tokens
    sequences = sequences if max_seqs is None else max_seqs
    lengths, cards = tuple(contexts), math.prod(map(int, re.findall(r"=(\d+)", mesh)))
    share = rules.find_share(card, tokens, sequences, cards) if utilization is None else utilization
    _check(rules.name, share, (tokens, sequences, block_size, *lengths), card)
    tell = progress or (lambda _: None)
    packed = {"quant_method": quantization} if isinstance(quantization, str) else quantization
    start = _Start(
        build_module(model, tell), rules, card, share, tokens, sequences, block_size, kv_dtype, packed, eager
    ).split(mesh)
    start.name, start.notes, start.tell = name, (*notes,), tell
    return start.size(lengths)


@dataclass
class _Start:
    """One start of an engine."""

    model: Any
    engine: Engine
    card: Target
    utilization: float
    max_batched_tokens: int
    max_seqs: int
    block_size: int
    kv_dtype: str
    quantization: Mapping[str, Any] | None
    eager: bool
    tensor: int = 1
    stages: int = 1
    name: str = ""
    notes: tuple[str, ...] = ()
    tell: Callable[[str], None] = print

    def split(self, mesh: str) -> _Start:
        """The start over a mesh."""
        found = dict(re.findall(r"(\w+)=(\d+)(?:,|$)", mesh))
        if mesh and ({*found} - {"tp", "pp"} or ",".join(f"{key}={size}" for key, size in found.items()) != mesh):
            raise UsageError(
                f"expected a mesh of an engine as tp=4,pp=2 (each layer by 4 cards, in 2 stages), got {mesh!r}; of "
                "data or expert parallel each copy starts as one card does"
            )
        start = replace(self, tensor=int(found.get("tp", 1)), stages=int(found.get("pp", 1)))
        config = self.layout and self.model.config.get_text_config(decoder=True)
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        if min(start.tensor, start.stages) < 1 or heads % start.tensor or start.stages > layers:
            raise UsageError(f"expected tp that divides {heads} heads and pp of at most {layers} layers, got {mesh!r}")
        return start

    @cached_property
    def layout(self) -> CacheLayout:
        """Of all layers."""
        return read_layout(self.model, self.tensor, 1 if self.kv_dtype == "fp8" else None)

    @cached_property
    def sizes(self) -> LayerSizes:
        """Of the layers."""
        return LayerSizes.read(self.model)

    def stages_of(self) -> list[Stage]:
        """What each card has."""
        return list(split_stages(len(self.layout.windows), self.stages, self.tensor))

    def weigh(self, stage: Stage) -> int:
        """The bytes of a card's weights."""
        nbytes = pack_stage(self.model, self.quantization, stage)
        if nbytes is None:
            method = (self.quantization or {}).get("quant_method")
            raise UsageError(f"expected weights whose layout is known; {method} of {self.name} packs them otherwise")
        return nbytes + rotary_bytes(self.model)

    def profile(self, stage: Stage) -> Analysis:
        """The profile run of a card."""
        settings = ProfileSettings(
            engine=self.engine,
            sequences=min(self.max_seqs, self.max_batched_tokens),
            processors=catalogue.device_properties(self.card).multi_processor_count,
            tensor=self.tensor,
            is_staged=self.stages > 1,
            samples=stage.is_last,
            keeps_experts=(self.quantization or {}).get("quant_method") != "mxfp4",
            quantizes_inputs=_quantizes_inputs(self.quantization or {}),
        )
        request = StepRequest(
            args=(torch.empty(1, self.max_batched_tokens, dtype=torch.int64, device="meta"),),
            mode="infer",
            inference_mode=True,
            target=self.card,
            name=self.name or type(self.model).__name__,
            notes=self.notes,
        )
        return analyze_step(ProfileRun(self.model, settings), request, self.tell)

    def graphs(self, stage: Stage) -> tuple[int, int] | None:
        """The least and the most that CUDA graphs take; None where too little was seen."""
        if self.eager:
            return 0, 0
        if self.engine.graphs:
            low, high = self.engine.graphs
            return low * _MIB, high * _MIB
        if self.card.capability != (9, 0):
            return _OTHER_GRAPHS
        config = self.model.config.get_text_config(decoder=True)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        nbytes = graph_bytes(
            self.sizes,
            layers=len(stage.layers),
            heads_bytes=4 * size * config.num_attention_heads // self.tensor,
            tensor=self.tensor,
            max_seqs=self.max_seqs,
            splits_keys=self.sizes.dtype.itemsize == 2,
        )
        return None if nbytes is None else (int(nbytes * (1 - SPREAD)), int(nbytes * (1 + SPREAD)))

    def uncounted(self, stage: Stage) -> Iterator[UncountedTerm]:
        """What the engine has that no analysis knows."""
        outside, release = self.engine.find_outside(self.tensor, self.stages), self.engine.release
        seen = "" if outside.tensor == self.tensor else f" (of {outside.tensor} cards: of {self.tensor} none was seen)"
        yield UncountedTerm(
            name="memory outside torch: libraries, NCCL",
            low_bytes=outside.low * _MIB,
            high_bytes=outside.high * _MIB,
            source=f"logged by starts of {self.engine.name}, as of {release}{seen}{self.engine.outside_note}",
        )
        if (self.quantization or {}).get("quant_method") == "mxfp4":
            experts = pack_stage(self.model, self.quantization, stage) or 0
            yield UncountedTerm(
                name="how kernels pad packed experts",
                low_bytes=0,
                high_bytes=int(0.09 * experts),
                source="starts of gpt-oss-20b logged 6 % more than its checkpoint has, and 8 % over two cards",
            )
        if self.engine.cold and not self.eager:
            yield UncountedTerm(
                name="compiling, at a first start",
                low_bytes=0,
                high_bytes=self.engine.cold * _MIB,
                source="of 0.27.1 0.99 GiB for Qwen3-8B; a large mixture of experts took more (vLLM issue 54122)",
            )
        graphs = self.graphs(stage)
        if self.engine.counts_graphs and not self.eager:
            low, high = graphs or _SEEN_GRAPHS
            fitted = graphs not in (None, _OTHER_GRAPHS) and not self.engine.graphs
            yield UncountedTerm(name="CUDA graphs", low_bytes=low, high_bytes=high, source=_FITTED if fitted else _SEEN)

    def size(self, lengths: Sequence[int]) -> ServeSize:
        """What is left, and what a change of each setting would leave."""
        found, run = self._measure(lengths)
        changes = dict[str, ServeChange]()
        for text, other in self._changes():
            if (name := text.partition(" ")[0]) not in changes:
                with contextlib.suppress(UsageError):
                    other_size, _ = other._measure(lengths)
                    low, high = other_size.low_tokens, other_size.high_tokens
                    if low > found.low_tokens:
                        changes[name] = ServeChange(option=text, low_tokens=low, high_tokens=high)
        best = sorted(changes.values(), key=lambda each: -each.low_tokens)
        return found.model_copy(update={"changes": (*best,), "assumptions": (*self._assumptions(run.profile),)})

    def _changes(self) -> Iterator[tuple[str, _Start]]:
        heads = self.model.config.get_text_config(decoder=True).num_attention_heads
        tensor, byte = ("--tp", "fp8_e4m3") if self.engine.name == "sglang" else ("--tensor-parallel-size", "fp8")
        if self.kv_dtype == "auto":
            yield f"--kv-cache-dtype {byte}", replace(self, kv_dtype="fp8")
        if self.quantization is None:
            yield "--quantization fp8", replace(self, quantization={"quant_method": "fp8"})
        if self.max_seqs > 256:
            yield "--max-num-seqs 256", replace(self, max_seqs=256)
        if self.engine.counts_graphs and not self.eager:
            yield "--enforce-eager", replace(self, eager=True)
        for size in (2 * self.tensor, 4 * self.tensor, 8 * self.tensor):
            if self.stages == 1 and heads % size == 0:
                yield f"{tensor} {size}", replace(self, tensor=size)

    def _measure(self, lengths: Sequence[int]) -> tuple[ServeSize, Analysis]:
        """The card with the least room decides."""
        return min((self._of_card(stage, lengths) for stage in self._unlike()), key=lambda each: each[0].low_blocks)

    def _unlike(self) -> Iterator[Stage]:
        """Cards of which no two have the same part: the first, the last, and the one between with the most layers."""
        first, *between, last = [None, *self.stages_of()] if self.stages == 1 else self.stages_of()
        middle = max(between, key=lambda each: len(each.layers), default=None)
        yield from (each for each in (first, middle, last) if each is not None)

    def _of_card(self, stage: Stage, lengths: Sequence[int]) -> tuple[ServeSize, Analysis]:
        run, layout = self.profile(stage), self.layout.of(stage.layers)
        sizes = [s.nbytes for s in run.profile.storages if s.kind in (Kind.PARAMETER, Kind.BUFFER)]
        peak = (run.peak.allocated_bytes or 0) - sum(-(-nbytes // _BLOCK) * _BLOCK for nbytes in sizes)
        peak = 0 if self.engine.sampler == "none" else peak
        weights, memory = self.weigh(stage), self.card.memory_bytes or 0
        uncounted, graphs = (*self.uncounted(stage),), self.graphs(stage)
        high, low = (
            int(memory * self.utilization) - weights - peak - sum(bounds)
            for bounds in ([u.low_bytes for u in uncounted], [u.high_bytes for u in uncounted])
        )
        block_bytes = layout.group_size * layout.layer_bytes * self.block_size
        groups = len(layout.groups)
        low_blocks, high_blocks = max(low // block_bytes, 0), max(high // block_bytes, 0)
        size = ServeSize(
            **run.profile.heading(),
            engine=self.engine.name,
            release=self.engine.release,
            memory_bytes=memory,
            utilization=self.utilization,
            max_batched_tokens=self.max_batched_tokens,
            max_seqs=self.max_seqs,
            block_size=self.block_size,
            tensor_parallel=self.tensor,
            pipeline_parallel=self.stages,
            kv_dtype=self.kv_dtype,
            weights_bytes=weights,
            profile_peak_bytes=peak,
            profile_peak_at=_name_peak(run),
            token_bytes=layout.layer_bytes * len(layout.windows),
            block_bytes=block_bytes,
            groups=groups,
            uncounted=uncounted,
            graphs_low_bytes=None if graphs is None else graphs[0],
            graphs_high_bytes=None if graphs is None else graphs[1],
            counts_graphs=self.engine.counts_graphs,
            kv_low_bytes=low,
            kv_high_bytes=high,
            low_blocks=low_blocks,
            high_blocks=high_blocks,
            low_tokens=low_blocks // groups * self.block_size,
            high_tokens=high_blocks // groups * self.block_size,
            sequences=tuple(
                ServeSequences(context=context, blocks=blocks, low=low_blocks / blocks, high=high_blocks / blocks)
                for context in lengths
                for blocks in (layout.count_blocks(context, self.block_size, self.max_batched_tokens),)
            ),
        )
        return size, run

    def _assumptions(self, profile: Profile) -> Iterator[Assumption]:
        newer = find_newer(self.engine)
        texts = [
            f"a forward has merged layers, of which the largest is alive with {self.engine.hidden_states} hidden states"
            if self.engine.merges_layers
            else "the modules are those of transformers; the engine's own merge some of them",
            *_LEFT_OVER[self.engine.sampler != "none" :],
            "no draft model, no adapters; of images, what an encoder makes is in the profile run, not what it works in",
            *([f"{self.engine.name} {newer} is installed, which is newer than what is followed"] if newer else []),
        ]
        yield from (Assumption(topic="engine", text=text) for text in texts)
        yield from (each for each in profile.assumptions if each.topic in ("workspace", "model"))


_LEFT_OVER: Final = ("what the share leaves is enough for activations and graphs; the engine does not measure it",)
_SEEN_GRAPHS: Final = int(0.51 * 1024) * _MIB, int(1.85 * 1024) * _MIB
_OTHER_GRAPHS: Final = int(0.28 * 1024) * _MIB, int(2.44 * 1024) * _MIB
_FITTED: Final = "fitted to 16 starts of 0.19 on H100, at most 12 % off"
_SEEN: Final = "the least and the most that starts logged, of experts, of other cards, or of other releases"


def _check(engine: str, utilization: float, counts: Iterable[int], card: Target) -> None:
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


def _quantizes_inputs(config: Mapping[str, Any]) -> bool:
    """Whether layers of a checkpoint multiply bytes by bytes."""
    groups = config.get("config_groups", {}).values()
    return config.get("quant_method") == "fp8" or any(each.get("input_activations") for each in groups)


def _name_peak(run: Analysis) -> str:
    tick = run.peak.tick
    return next((op.name for op in run.profile.ops if op.begin <= tick < op.end), "the end of the run")
