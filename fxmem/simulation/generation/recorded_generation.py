"""`fxmem.generate`: a model and a prompt in, a `Generation` out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from fxmem.errors import AnalysisError, UsageError
from fxmem.memory.generation import (
    DecodeSteps,
    Events,
    Extension,
    name_phases,
    recorded_events,
)
from fxmem.records.names import CACHES
from fxmem.records.parts import GenerationRun
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Assumption, Profile, Target
from fxmem.simulation.analysis import build_module
from fxmem.simulation.generation.decode_recorder import DecodeRecorder
from fxmem.simulation.generation.generation import Generation, GenerationRequest, TokenAccount
from fxmem.simulation.given.batches import read_batch
from fxmem.simulation.kernel_settings import KernelSettings
from fxmem.simulation.request import StepRequest

MOST_STORAGES: Final = 30_000
"""Storages of a generation whose every token is in its profile; of a longer one, tokens in between are left out."""
MOST_RECORDED: Final = 96
"""New tokens of a generation that is recorded whole, where its steps do not grow evenly."""


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

    A prefill and six decode steps are recorded. Where the second to the fourth of these are the same but for sizes that
    grow evenly, all further tokens are made by arithmetic, and the allocator replays every one. Where a sliding window
    fills, the steps around are recorded as well, and arithmetic goes on from there. After a padded prompt sizes grow
    evenly every sixteenth token only, and tokens are made sixteen at a time.

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
        AnalysisError: the model raised; or its decode steps do not grow evenly, and there are too many to record.
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
    new_tokens = request.new_tokens
    given = {"num_beams": request.beams, "do_sample": request.sample}
    options = {**given, **choose_cache(model, request.cache), **_choose_first_token(model), **request.options}
    filled = _fill_prompt(request, model)
    recordings = DecodeRecorder(model, filled, new_tokens, options, progress)
    extension: Extension | None = None
    is_proved = False
    try:
        recorded, extension, is_proved = recordings.extend()
    except AnalysisError as error:
        if new_tokens > MOST_RECORDED:
            raise AnalysisError(
                f"{error}; a generation whose steps change is recorded whole, up to {MOST_RECORDED} new tokens"
            ) from error
        progress("its steps change: recording every token")
        recorded = recordings.record(0, new_tokens)
    progress("replaying every token")
    with pause_gc():
        profile, events, made = _build(recorded, extension, request, is_proved)
        is_whole = len(profile.storages) == len(events.births)
        del recorded, extension  # half of what is in memory
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


def _build(
    recorded: DecodeSteps, extension: Extension | None, request: GenerationRequest, is_proved: bool
) -> tuple[Profile, Events, dict[str, Any]]:
    """The profile, the storages of every token, and further fields of `GenerationRun`."""
    profile, new_tokens = recorded.profile, request.new_tokens
    whole = recorded_events(recorded) if extension is None else extension.events(new_tokens)
    texts = ["the first generation of its process: the allocator has nothing cached when it begins"]
    shown = whole
    if extension is not None and len(recorded.begins) < new_tokens:
        there = "of the last ones are as was recorded" if is_proved else "of the last ones were not recorded"
        texts.append(
            f"{len(recorded.begins)} tokens were recorded; the others are like them, with sizes that grow as over "
            f"three of them; those {there}"
        )
        if len(whole.births) > MOST_STORAGES:
            shown = extension.events(new_tokens, jump=True)
            texts.append("the profile and its FLOPs leave out the tokens that are made by arithmetic; bytes do not")
        profile = extension.profile(shown)
    growth = None if extension is None else extension.growth_bytes
    made = {
        "new_tokens": len(whole.begins),
        "recorded_tokens": len(recorded.begins),
        "cache": request.cache,
        "beams": int(request.options.get("num_beams", request.beams)),
        "growth_bytes": growth and max(growth, 0),
    }
    named = name_phases(profile, shown.begins)
    further = tuple(Assumption(topic="generation", text=text) for text in texts)
    return named.model_copy(update={"assumptions": (*named.assumptions, *further)}), whole, made
