"""`vllm` in a program that trains: an engine that shares the card with it.

Where an engine runs in the process that trains (TRL's `vllm_mode="colocate"`), it allocates by torch's own allocator,
and measures by `torch.cuda` what is left for keys and values. So it does here: its weights, its profile run and its
blocks are allocated on the pretended card, in its order. With `enable_sleep_mode` weights and blocks have pools of
their own; asleep they have no memory.

The rules are those of the release that is installed here, else of the newest that is known.

Source: vllm 0.33.0, `v1/worker/gpu_worker.py` (`init_device`, `determine_available_memory`, `sleep`, `wake_up`,
`compile_or_warm_up_model`), `v1/worker/utils.py` (`request_memory`), `device_allocator/cumem.py`, `utils/mem_utils.py`,
`engine/arg_utils.py` (defaults), `entrypoints/llm.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from fxmem.errors import AnalysisError
from fxmem.records.parts import EngineUse
from fxmem.records.profile import Kind, Phase, Target
from fxmem.records.units import ENGINE_POOL, format_bytes
from fxmem.simulation.card.card_memory import CardMemory
from fxmem.simulation.card.card_thread import Roots
from fxmem.simulation.code.source_lines import program_place
from fxmem.simulation.engines.cache_layout import CacheLayout, read_layout, rotary_bytes
from fxmem.simulation.engines.profile_run import ProfileRun, ProfileSettings
from fxmem.simulation.engines.releases import find_engine, find_installed
from fxmem.simulation.kernels.packages import Package
from fxmem.simulation.recording.recording import Recording

_ENGINE = find_engine(find_installed("vllm"))
_RELEASE: Final = _ENGINE.release if _ENGINE.release.count(".") > 1 else f"{_ENGINE.release}.0"
_ALONE: Final[Mapping[str, Any]] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "cpu_offload_gb": 0,
    "enable_lora": False,
    "speculative_config": None,
}
"""Settings that have another value in no engine that is followed here."""
_TAGS: Final = ("weights", "kv_cache")
"""What may wake by itself."""


class Engines:
    """The engines of one program.

    Args:
        memory: of its card.
        generating: what an engine of the program works inside, in a phase.
        roots: the program's modules.
        recording: of the program.
    """

    def __init__(
        self,
        memory: CardMemory,
        generating: Callable[[nn.Module, Phase], contextlib.AbstractContextManager[None]],
        roots: Roots,
        recording: Recording,
    ) -> None:
        self.memory = memory
        self._generating, self._roots, self._recording = generating, roots, recording
        self._engines: list[_Use] = []

    def package(self) -> Package:
        """The package as the program imports it. What it has besides is refused where it is used."""
        values = {
            "__version__": _RELEASE,
            "LLM": type("LLM", (_LLM,), {"_engines": self}),
            "SamplingParams": _SamplingParams,
            **dict.fromkeys(("RequestOutput", "CompletionOutput"), SimpleNamespace),
            **dict.fromkeys(("TokensPrompt", "TextPrompt"), dict),
            **dict.fromkeys(("StructuredOutputsParams", "GuidedDecodingParams"), SimpleNamespace),
        }
        return Package(module="vllm", release=f"vllm {_RELEASE}", values=values)

    @property
    def uses(self) -> tuple[EngineUse, ...]:
        """What each takes."""
        self.share()
        return tuple(each.record(self.memory) for each in self._engines)

    def note(self, use: _Use) -> None:
        """An engine has started."""
        self._engines.append(use)
        self.share()

    def share(self) -> None:
        """Blocks have come or gone."""
        self.memory.share(any(each.has_blocks for each in self._engines))

    @contextlib.contextmanager
    def running(self, module: nn.Module | None = None, phase: Phase = Phase.ROLLOUT) -> Iterator[None]:
        """An engine works inside; without a module it starts, which is no part of the program's graph."""
        around = self._recording.tracer.write_nothing() if module is None else self._generating(module, phase)
        with around, torch.no_grad():
            yield

    def name(self, module: nn.Module) -> None:
        """Let a module be one of the program's, and its tensors have their names in it."""
        path, log = self._roots.find_path(module) or self._roots.adopt(module), self._recording.log
        for name, parameter in module.named_parameters():
            log.rename(parameter, f"{path}.{name}", Kind.PARAMETER)
        for name, buffer in module.named_buffers():
            log.rename(buffer, f"{path}.{name}", Kind.BUFFER)

    def prepare(self) -> None:
        """Let the libraries that it has imported ask for values, as before a call of a module that is seen."""
        self._recording.ask_libraries()

    def pool(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Allocate from a pool of the engine's own."""
        return self._recording.log.streams.keep(ENGINE_POOL + number)


@dataclasses.dataclass
class _Settings:
    """How an engine is built."""

    utilization: float
    max_model_len: int
    max_batched_tokens: int
    max_seqs: int
    block_size: int
    can_sleep: bool
    kv_bytes: int | None
    """For keys and values, where that is said."""

    @classmethod
    def read(cls, given: Mapping[str, Any], config: Any, memory_bytes: int) -> _Settings:
        """The settings of a call, and the defaults of the card."""
        card = Target(name="", device="cuda", full_name=torch.cuda.get_device_name(), memory_bytes=memory_bytes)
        tokens, sequences = _ENGINE.find_defaults(card, of_program=True)
        defaults = {
            "gpu_memory_utilization": _ENGINE.utilization,
            "max_model_len": config.max_position_embeddings,
            "max_num_batched_tokens": tokens,
            "max_num_seqs": sequences,
            "block_size": 16,
            "enable_sleep_mode": False,
            "kv_cache_memory_bytes": None,
        }
        return cls(*(default if given.get(name) is None else given[name] for name, default in defaults.items()))


@dataclasses.dataclass
class _Use:
    """What an engine has taken so far."""

    place: str
    settings: _Settings
    free_bytes: int
    weights_bytes: int = 0
    peak_bytes: int = 0
    kv_bytes: int = 0
    sleeps: int = 0
    level: int = 0
    has_blocks: bool = True

    def record(self, memory: CardMemory) -> EngineUse:
        """The record of it."""
        settings, most = self.settings, None
        if memory.wanted is None:
            spare = memory.usable_bytes - memory.most_shared
            largest = min(settings.utilization + spare / memory.total_bytes, self.free_bytes / memory.total_bytes)
            most = math.floor(largest * 1000) / 1000
        return EngineUse(
            name="vllm",
            release=_RELEASE,
            place=self.place,
            utilization=settings.utilization,
            max_batched_tokens=settings.max_batched_tokens,
            max_seqs=settings.max_seqs,
            weights_bytes=self.weights_bytes,
            profile_peak_bytes=self.peak_bytes,
            kv_bytes=self.kv_bytes,
            can_sleep=settings.can_sleep,
            sleeps=self.sleeps,
            level=self.level,
            start_free_bytes=self.free_bytes,
            most_utilization=None if settings.kv_bytes is not None else most,
        )


class _SamplingParams(SimpleNamespace):
    """The sampling parameters that say how much is made."""

    def __init__(self, n: int = 1, max_tokens: int | None = 16, logprobs: int | None = None, **others: Any) -> None:
        super().__init__(n=n, max_tokens=max_tokens, logprobs=logprobs, **others)


class VLLM(ProfileRun):
    """What an engine has on the card. Its steps are as its profile run, of fewer tokens."""

    def __init__(self, model: Any) -> None:
        processors = torch.cuda.get_device_properties().multi_processor_count
        super().__init__(model, ProfileSettings(_ENGINE, 1, processors, is_alone=False))
        del self.head  # its name is that in the model
        self.model, self.head = model, model.get_output_embeddings()
        dtype = model.get_output_embeddings().weight.dtype
        table = torch.empty(rotary_bytes(model) // dtype.itemsize, dtype=dtype, device="cuda")
        self.register_buffer("rotary", table)

    def add_blocks(self, layout: CacheLayout, blocks: int, block_size: int) -> None:
        """Allocate so many blocks of keys and values."""
        for layer in range(layout.group_size):
            kept = torch.zeros(blocks * block_size * layout.layer_bytes, dtype=torch.int8, device="cuda")
            self.register_buffer(f"kv_cache_{layer}", kept)

    def tensors(self, tag: str) -> list[torch.Tensor]:
        """The tensors that sleep and wake under a tag."""
        found: list[tuple[str, torch.Tensor]] = [*self.named_parameters(), *self.named_buffers()]
        return [each for name, each in found if name.startswith("kv_cache_") == (tag == "kv_cache")]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take weights by their names, one after another."""
        own, loaded = dict(self.model.named_parameters()), set[str]()
        for name, value in weights:
            if name in own and own[name].shape == value.shape and own[name].untyped_storage().nbytes():
                own[name].copy_(value)
                loaded.add(name)
        return loaded


class _LLM:
    """The class `LLM` on the pretended card. Each sequence is as long as it may be."""

    _engines: Engines

    def __init__(self, model: str, *, tokenizer: str | None = None, dtype: Any = "auto", **given: Any) -> None:
        place = program_place(sys._getframe(1))
        _check(given, place)
        self._tokenizer: Any = None
        self._name = tokenizer or model
        with self._engines.running():
            ones = torch.ones(16, 16, device="cuda")
            torch.mm(ones, ones)  # what cuBLAS keeps is there before anything is measured
            del ones
            free, total = self._measure()
            config = _read_config(model, given)
            settings = self._settings = _Settings.read(given, config, total)
            requested = math.ceil(total * settings.utilization)
            if free < requested and settings.kv_bytes is None:
                self._engines.memory.refuse(requested)
            use = self._use = _Use(place, settings, free)
            with self._pool("weights"):
                self._module = VLLM(_build(config, dtype))
            self._engines.name(self._module)
            self._layout = read_layout(self._module.model)
            self._find_room(requested, free)
        self._asleep: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self._kept: list[torch.Tensor] = []
        self._engines.note(use)
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights)),
            sleep=self.sleep,
            wake_up=self.wake_up,
            reload_weights=lambda *_, **__: None,
        )
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=settings.max_model_len, hf_config=config),
            model_executor=SimpleNamespace(driver_worker=worker, collective_rpc=self.collective_rpc),
            reset_prefix_cache=self.reset_prefix_cache,
        )

    # --- its start ----------------------------------------------------------------------------------------------------

    def _measure(self) -> tuple[int, int]:
        """What is free on the card once torch has given back what lies idle, and all it has."""
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return free, total

    def _find_room(self, requested: int, free: int) -> None:
        """Run what the engine runs to measure itself, and take what is left of its share for keys and values."""
        settings, use, layout = self._settings, self._use, self._layout
        after_load, _ = self._measure()
        use.weights_bytes = free - after_load
        torch.cuda.reset_peak_memory_stats()
        self._run(settings.max_batched_tokens, settings.max_seqs)
        use.peak_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        after, _ = self._measure()
        room = requested - (free - after) - use.peak_bytes if settings.kv_bytes is None else settings.kv_bytes
        block = layout.group_size * layout.layer_bytes * settings.block_size
        needed = layout.count_blocks(settings.max_model_len, settings.block_size, settings.max_batched_tokens)
        if room < needed * block:
            raise ValueError(
                f"vllm.LLM has {format_bytes(max(room, 0))} left for keys and values, and one sequence of "
                f"max_model_len={settings.max_model_len:,} tokens takes {format_bytes(needed * block)}: expected a "
                f"larger gpu_memory_utilization than {settings.utilization}, or a smaller max_model_len"
            )
        with self._pool("kv_cache"):
            self._module.add_blocks(layout, room // block, settings.block_size)
        self._engines.name(self._module)
        use.kv_bytes = room // block * block
        self._run(settings.max_seqs, settings.max_seqs)

    def _run(self, tokens: int, sequences: int) -> None:
        self._engines.prepare()
        tokens = max(tokens, 1)
        self._module.settings = self._module.settings._replace(sequences=max(min(tokens, sequences), 1))
        self._module(torch.empty(1, tokens, dtype=torch.int64, device="cuda"))

    def _pool(self, tag: str) -> contextlib.AbstractContextManager[None]:
        return self._engines.pool(_TAGS.index(tag)) if self._settings.can_sleep else contextlib.nullcontext()

    # --- sleep --------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, **_: Any) -> None:
        """Free weights and blocks; level 1 keeps the weights on the host."""
        if not self._settings.can_sleep:
            return
        for tag in _TAGS:
            if tag in self._asleep:
                continue
            found = self._asleep[tag] = []
            for tensor in self._module.tensors(tag):
                storage = tensor.untyped_storage()
                if not storage.nbytes():  # shared with one that sleeps
                    continue
                if tag == "weights" and level == 1:
                    self._kept.append(torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True))
                found.append((tensor, storage.nbytes()))
                storage.resize_(0)
        self._measure()
        self._use.sleeps, self._use.level, self._use.has_blocks = self._use.sleeps + 1, level, False
        self._engines.share()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Give memory back to what sleeps, or to what has one of these tags."""
        waking = [tag for tag in _TAGS if tag in self._asleep and (tags is None or tag in tags)]
        phase = Phase.ROLLOUT if "kv_cache" in waking else Phase.SYNC
        if not waking:
            return
        with self._engines.running(self._module, phase):
            # The driver is asked, which gives nothing back that torch's allocator has cached.
            needed = sum(nbytes for tag in waking for _, nbytes in self._asleep[tag])
            if needed > torch.cuda.mem_get_info()[0]:
                self._engines.memory.refuse(needed)
            for tag in waking:
                with self._pool(tag):
                    for tensor, nbytes in self._asleep.pop(tag):
                        tensor.untyped_storage().resize_(nbytes)
        if "weights" in waking:
            self._kept.clear()
        self._use.has_blocks = "kv_cache" not in self._asleep
        self._engines.share()

    # --- what it is asked ---------------------------------------------------------------------------------------------

    def generate(self, prompts: Any, sampling_params: Any = None, *_: Any, **__: Any) -> list[SimpleNamespace]:
        """Sequences of as many tokens as they may have, for each prompt."""
        if self._asleep:
            what = " and ".join(self._asleep)
            raise AnalysisError(
                f"expected an engine that is awake; generate at {program_place(sys._getframe(1))} finds its {what} "
                "asleep: call wake_up() before"
            )
        is_one = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], int))
        ids = [self._find_ids(each) for each in ([prompts] if is_one else prompts)]
        params = sampling_params or _SamplingParams()
        each_params = params if isinstance(params, Sequence) else [params] * len(ids)
        tokens, sequences = sum(map(len, ids)), sum(each.n for each in each_params)
        with self._engines.running(self._module):
            self._run(min(tokens, self._settings.max_batched_tokens), min(sequences, self._settings.max_seqs))
        return [
            SimpleNamespace(
                request_id=str(number),
                prompt=None,
                prompt_token_ids=own,
                prompt_logprobs=None,
                outputs=[self._complete(own, of, index) for index in range(of.n)],
                finished=True,
            )
            for number, (own, of) in enumerate(zip(ids, each_params, strict=True))
        ]

    def _complete(self, prompt: list[int], params: Any, index: int) -> SimpleNamespace:
        room = self._settings.max_model_len - len(prompt)
        count = room if params.max_tokens is None else min(params.max_tokens, room)
        token = self._module.model.config.get_text_config(decoder=True).vocab_size // 2
        known = SimpleNamespace(logprob=-1.0, rank=1, decoded_token="")
        chances = None if params.logprobs is None else [{token + k: known for k in range(params.logprobs or 1)}] * count
        return SimpleNamespace(
            index=index,
            text="",
            token_ids=[token] * count,
            logprobs=chances,
            cumulative_logprob=-1.0 * count,
            finish_reason="length",
            stop_reason=None,
        )

    def chat(self, messages: Any, sampling_params: Any = None, *_: Any, **__: Any) -> list[SimpleNamespace]:
        """As `generate`, of conversations."""
        several = messages if messages and isinstance(messages[0], list) else [messages]
        apply = self.get_tokenizer().apply_chat_template
        return self.generate([{"prompt": apply(each, tokenize=False)} for each in several], sampling_params)

    def _find_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids") or prompt["prompt"]
        return list(self.get_tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else prompt)

    def get_tokenizer(self) -> Any:
        """The tokenizer, which the program has beside the model."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._name)
        return self._tokenizer

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        with self._engines.running(self._module, Phase.SYNC):
            return self._module.load_weights(weights)

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        """What each worker answers: there is one."""
        worker = self.llm_engine.model_executor.driver_worker
        if callable(method):
            return [method(worker, *args, **(kwargs or {}))]
        if not hasattr(worker, method):
            raise AnalysisError(
                f"expected a call that workers of vllm {_RELEASE} are followed in "
                f"({', '.join(sorted(set(vars(worker)) - {'model_runner'}))}); got {method!r} at "
                f"{program_place(sys._getframe(1))}"
            )
        return [getattr(worker, method)(*args, **(kwargs or {}))]

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """What a function of the model returns, of each worker."""
        return [function(self.llm_engine.model_executor.driver_worker.model_runner.model)]

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        """Forget what prompts have in common: no memory is freed."""
        return True


def _check(given: Mapping[str, Any], place: str) -> None:
    """Raise an AnalysisError for an engine that is not followed."""
    other = {name: given[name] for name, usual in _ALONE.items() if given.get(name) not in (None, usual)}
    if other:
        raise AnalysisError(
            f"expected an engine on one card with plain weights; vllm.LLM at {place} has "
            f"{', '.join(f'{name}={value!r}' for name, value in other.items())}, which is not predicted yet"
        )


def _read_config(model: str, given: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=bool(given.get("trust_remote_code")))
    return config.get_text_config(decoder=True) if given.get("language_model_only") else config


def _build(config: Any, dtype: Any) -> Any:
    """The model without values: vLLM's own has its parameters, some of them merged."""
    from transformers import AutoModelForCausalLM

    wanted = getattr(config, "dtype", None) if dtype == "auto" else dtype
    wanted = getattr(torch, wanted.removeprefix("torch.")) if isinstance(wanted, str) else wanted
    if wanted in (None, torch.float32) and dtype == "auto":
        wanted = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make(config, dtype=wanted)
    made = {id(each): torch.empty_like(each, device="cuda") for each in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(made[id(parameter)], requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, made[id(buffer)])
    return model.eval()
