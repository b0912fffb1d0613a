"""`fxmem.generate`: a model and a prompt in, a `Generation` out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from fxmem._torch import fakes as torch_fakes
from fxmem.errors import AnalysisError, UsageError
from fxmem.memory.generation import COMPARED, LEAST_COMPARED, Events, Extension, Jump, extend, find_steps, name_phases
from fxmem.records.parts import GenerationRun
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Assumption, Profile, Target
from fxmem.records.units import CACHES, AnyMode
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.kernels.kernel_settings import KernelSettings
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.run.decode_loops import DecodeLoops, StepJumps
from fxmem.simulation.step.analysis import Analysis, analyze, analyze_step, build_module, trace_as
from fxmem.simulation.step.generation.generation import Generation, GenerationRequest, TokenAccount
from fxmem.simulation.step.given.batches import read_batch
from fxmem.simulation.step.model_step import ModelStep
from fxmem.simulation.step.request import StepRequest

# --- `GenerationStep`: a model's `generate` as a step, whose recording leaves out most tokens -------------------------


TRIED: Final[tuple[Mapping[int, int], ...]] = (LEAST_COMPARED, COMPARED, {})
"""Decode steps that are compared before others are left out, by period: where those that run after them are not as was
said, more of them; in the end none is left out."""


class GenerationStep(ModelStep):
    """The step of a model that generates.

    Args:
        request: the step.
        compared: by period, how many decode steps are compared before others are left out; empty to leave out none.
    """

    def __init__(self, request: StepRequest, compared: Mapping[int, int]) -> None:
        super().__init__(request)
        self._trace, self._jumps = BlockTrace(), StepJumps(compared)

    def make_log(self, device: torch.device) -> StepLog:
        """A log whose allocations and frees are noted step by step."""
        return StepLog(device, observers=(self._trace,))

    def patches(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        """The loops of `generate` leave out steps."""
        self._loops = DecodeLoops(self._log, self._trace, torch_fakes.Maker(self.recording.fakes), jumps=self._jumps)
        yield self._loops.patched()

    def run(self) -> None:
        """Run the step once."""
        self._jumps.jumps.clear()
        super().run()

    @property
    def has_jumped(self) -> bool:
        """Whether the last run has left out steps."""
        return bool(self._jumps.jumps)

    @property
    def jumps(self) -> tuple[Jump, ...]:
        """What the last run has left out, with the storages as the profile counts them."""
        kept = (i for i, each in enumerate(self._log.storages) if each.death is None or each.death > each.birth)
        place = {old: new for new, old in enumerate(kept)}
        return tuple(
            each._replace(grown={place[old]: more for old, more in each.grown.items()}) for each in self._jumps.jumps
        )

    @property
    def hindrance(self) -> str:
        """Why it has not left out more; empty for no reason."""
        return next((each.hindrance for each in self._loops.rollouts.values() if each.hindrance), "")


class _Generate(nn.Module):
    """A model's own `generate`, as a forward.

    Args:
        model: has a `generate` of transformers.
        settings: arguments of `generate`.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._settings = dict(settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate`."""
        return self.model.generate(*args, **kwargs, **self._settings)  # type: ignore[operator]


def record_generation(
    model: nn.Module, request: StepRequest, settings: Mapping[str, Any], progress: Callable[[str], None]
) -> tuple[Extension, str]:
    """Record a generation; how the tokens that are left out of it are made, and why no more are left out.

    Args:
        model: has a `generate` of transformers.
        request: its prompt.
        settings: arguments of `generate`.
        progress: told what is done.
    """
    wrapped = _Generate(model, settings).train(model.training)
    prefills = _count_chunks(model, request, settings)
    made: list[GenerationStep] = []

    def record(compared: Mapping[int, int]) -> Extension:
        def make(prepared: StepRequest) -> GenerationStep:
            made.append(GenerationStep(prepared, compared))
            return made[-1]

        profile = trace_as(wrapped, request, progress, make).profile
        return extend(find_steps(profile, "model", prefills), made[-1].jumps)

    for compared in TRIED:
        try:
            return record(compared), made[-1].hindrance
        except AnalysisError as error:
            if not made or not made[-1].has_jumped:
                raise
            progress(f"recording more tokens: {error}")
    raise AssertionError("the last has left out none")


def _count_chunks(model: nn.Module, request: StepRequest, options: Mapping[str, Any]) -> int:
    """Calls of the decoder that a prompt takes: one, unless `prefill_chunk_size` says otherwise."""
    default = getattr(getattr(model, "generation_config", None), "prefill_chunk_size", None)
    size = options.get("prefill_chunk_size", default)
    ids = request.kwargs.get("input_ids", request.args[0] if request.args else None)
    return 1 if size is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2 else int(-(-ids.shape[1] // size))


# --- `fxmem.generate`: a model and a prompt in, a `Generation` out ----------------------------------------------------


MOST_STORAGES: Final = 30_000
"""Storages of a generation whose every token is in its profile; of a longer one, tokens in between are left out."""


def generate(  # noqa: PLR0913 - the settings of the public API, by keyword
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    new_tokens: int = 512,
    *,
    cache: str = "dynamic",
    beams: int = 1,
    sample: bool = False,
    options: Mapping[str, Any] | None = None,
    settings: KernelSettings | None = None,
    inference_mode: bool = False,
    target: str | Target = "h100",
    progress: Callable[[str], None] | None = None,
) -> Generation:
    """Predict the memory of transformers' `model.generate(...)`, token by token, with no GPU.

    The loop of `generate` runs on fake tensors. Where three decode steps are the same but for sizes that grow evenly,
    it goes on from where the last steps begin, and those between are made by arithmetic; the last must be as arithmetic
    has them. So it is on both sides of a sliding window that fills. After a padded prompt sizes grow evenly every
    eighth or sixteenth token only, and tokens are made so many at a time. The allocator replays every token.

    Args:
        model: as `fxmem.analyze` takes it; it has a `generate` that transformers gave it.
        inputs: what `generate` is called with: the prompt's token ids, or a dict of what else the model takes.
        new_tokens: how many tokens each sequence gets.
        cache: what keys and values are kept in: "dynamic", "static", "sliding", "offloaded" or "quantized".
        beams: of beam search; 1 for none.
        sample: whether tokens are sampled rather than the likeliest taken.
        options: further arguments of `generate`.
        settings, inference_mode, target, progress: as for `fxmem.analyze`.

    Raises:
        UsageError: an argument that cannot be understood.
        AnalysisError: the model raised.
    """
    tell = progress or (lambda _: None)
    batch = read_batch(inputs)
    request = GenerationRequest(
        args=batch.args,
        kwargs=dict(batch.kwargs),
        notes=batch.notes,
        settings=settings,
        inference_mode=inference_mode,
        target=target,
        new_tokens=new_tokens,
        cache=cache,
        beams=beams,
        sample=sample,
        options=dict(options or {}),
    )
    module = build_module(model, tell)
    check_generates(module)
    return generate_step(module, dataclasses.replace(request, name=type(module).__name__), tell)


def check_generates(model: nn.Module) -> None:
    """Refuse a model without the `generate` of transformers.

    Raises:
        UsageError: it has none.
    """
    can = getattr(model, "can_generate", None)
    if not callable(getattr(model, "generate", None)) or not callable(can) or not can():
        raise UsageError(
            f"expected a model with the generate() of transformers, got {type(model).__name__}; analyse a loop of your "
            "own with `fxmem run` or fxmem.analyze"
        )


def choose_cache(model: nn.Module, cache: str) -> dict[str, Any]:
    """The arguments of `generate` that choose what keys and values are kept in.

    transformers compiles the decoder by itself with a static cache; that is left off.

    Raises:
        UsageError: no such cache, or one that this model has no use for.
    """
    if cache not in CACHES:
        raise UsageError(f"expected a cache of {', '.join(CACHES)}, got {cache!r}")
    config: Any = getattr(model, "config", None)
    if cache == "sliding" and getattr(config, "sliding_window", None) is None:
        raise UsageError(f"expected a model with a sliding window for a sliding cache; {type(model).__name__} has none")
    if cache == "dynamic":
        return {}
    return {"cache_implementation": "static" if cache == "sliding" else cache, "disable_compile": True}


def generate_step(
    model: nn.Module, request: GenerationRequest, progress: Callable[[str], None] = lambda _: None
) -> Generation:
    """Analyse a generation, as `generate` does.

    Raises:
        The errors of `generate`.
    """
    given = {"num_beams": request.beams, "do_sample": request.sample, "max_new_tokens": request.new_tokens}
    options = {**given, **choose_cache(model, request.cache), **_choose_first_token(model), **request.options}
    extension, hindrance = record_generation(model, _fill_prompt(request, model), options, progress)
    progress("replaying every token")
    with pause_gc():
        profile, events, made = _build(extension, request, hindrance)
        is_whole = len(profile.storages) == len(events.births)
        del extension  # half of what is in memory
        tokens = TokenAccount(profile, events)
        run = GenerationRun(**made, **tokens.of_run)
        profile = profile.model_copy(update={"step": profile.step.model_copy(update={"generation": run})})
        return Generation(profile, tokens, is_whole=is_whole, model=model, request=request, repeat=generate_step)


def _choose_first_token(model: nn.Module) -> dict[str, Any]:
    """The token that a decoder behind an encoder begins with. Where the model names none, any will do."""
    config, settings = cast("Any", model.config), cast("Any", getattr(model, "generation_config", None))
    ids = (getattr(settings, name, None) for name in ("decoder_start_token_id", "bos_token_id"))
    if not getattr(config, "is_encoder_decoder", False) or any(each is not None for each in ids):
        return {}
    return {"decoder_start_token_id": getattr(config, "pad_token_id", None) or 0}


def _fill_prompt(request: StepRequest, model: nn.Module) -> StepRequest:
    """The request with values for token ids and masks that have none: transformers looks at them for padding."""
    config: Any = model.config
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")}
    token = next(number for number in range(3, 10) if number not in special)

    def fill(value: Any, name: str) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "meta" or value.dtype is not torch.int64:
            return value
        return torch.full(value.shape, 1 if name.endswith("mask") else token, dtype=torch.int64)

    kwargs = {name: fill(each, name) for name, each in request.kwargs.items()}
    return dataclasses.replace(request, args=tuple(fill(each, "") for each in request.args), kwargs=kwargs)


def _build(extension: Extension, request: GenerationRequest, hindrance: str) -> tuple[Profile, Events, dict[str, Any]]:
    """The profile, the storages of every token, and further fields of `GenerationRun`."""
    steps, events = extension.steps, extension.events()
    profile, begins = steps.profile, steps.begins
    growth = extension.find_growth(events)
    texts = ["the first generation of its process: the allocator has nothing cached when it begins"]
    if extension.insertions:
        texts.append(
            f"{len(begins)} tokens were recorded; the others are like them, with sizes that grow as over three of "
            "them; those that were recorded after them are as they say"
        )
        if len(events.births) > MOST_STORAGES:
            texts.append("the profile and its FLOPs leave out the tokens that are made by arithmetic; bytes do not")
        else:
            profile, begins = extension.profile(events), tuple(events.begins)
    elif hindrance:
        texts.append(f"every token was recorded: {hindrance}")
    made = {
        "new_tokens": len(events.begins),
        "recorded_tokens": len(steps.begins),
        "cache": request.cache,
        "beams": int(request.options.get("num_beams", request.beams)),
        "growth_bytes": growth and max(growth, 0),
    }
    named = name_phases(profile, begins)
    further = tuple(Assumption(topic="generation", text=text) for text in texts)
    return named.model_copy(update={"assumptions": (*named.assumptions, *further)}), events, made


# --- what a question may be about: a step of a model, or a generation -------------------------------------------------


AnyAnalysis = Analysis | Generation


def analyze_request(model: torch.nn.Module, request: StepRequest) -> AnyAnalysis:
    """Analyse what is asked for of a model."""
    return generate_step(model, request) if isinstance(request, GenerationRequest) else analyze_step(model, request)


def analyze_any(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    inputs: Any,
    *,
    mode: AnyMode,
    target: str | Target,
    progress: Callable[[str], None] | None,
    options: dict[str, Any],
) -> AnyAnalysis:
    """`fxmem.analyze` with these options; `fxmem.generate` for the mode "generate"."""
    if mode == "generate":
        return generate(model, inputs, target=target, progress=progress, **options)
    return analyze(model, inputs, mode=mode, target=target, progress=progress, **options)
