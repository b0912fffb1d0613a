"""`fxmem.generate`: a model and a prompt in, a `Generation` out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware.context import context_range
from fxmem.memory import allocator, liveness
from fxmem.memory.generation import (
    RECORDED,
    DecodeSteps,
    Events,
    Extension,
    extend,
    find_steps,
    name_phases,
    recorded_events,
    replay_tokens,
    requested_by_token,
)
from fxmem.records.names import CACHES
from fxmem.records.parts import GenerationPeak, GenerationRun, TokenBytes
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Assumption, ProcessBytes, Profile, Report, Target, Timeline
from fxmem.simulation.analysis import analyze_step, build_module
from fxmem.simulation.given.batches import read_batch
from fxmem.simulation.kernel_settings import KernelSettings
from fxmem.simulation.profiled_step import ProfiledStep
from fxmem.simulation.request import StepRequest

MOST_STORAGES: Final = 30_000
"""Storages of a generation whose every token is in its profile; of a longer one, tokens in between are left out."""
MOST_RECORDED: Final = 96
"""New tokens of a generation that is recorded whole, where its steps do not grow evenly."""


class Generation(ProfiledStep):
    """The memory of a generation, and its reasons."""

    def __init__(self, profile: Profile, peak: Mapping[str, Any], *, is_whole: bool) -> None:
        self.profile = profile
        """The generation. Where it is long, the tokens between the first and the last are left out of it."""
        self._of_allocator = peak
        self._is_whole = is_whole

    def report(self) -> Report:
        """The profile and its peak; its time only where no token is left out of the profile."""
        found = super().report()
        return found if self._is_whole else found.model_copy(update={"time": None})

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Bytes alive at every moment of the profile; allocated and reserved bytes are those of the whole generation,
        the first of its process."""
        timeline = liveness.timeline(self.profile)
        return timeline.model_copy(update={"peak": timeline.peak.model_copy(update=dict(self._of_allocator))})

    @property
    def run(self) -> GenerationRun:
        """What it takes, token by token."""
        run = self.profile.step.generation
        assert run is not None
        return run


class _Generate(nn.Module):
    """A model's own `generate`, as a forward.

    Args:
        model: has a `generate` of transformers.
        tokens: after how many new tokens it ends; what is set up for all that it may make is set up for all.
        settings: arguments of `generate`.
    """

    def __init__(self, model: nn.Module, tokens: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._tokens = tokens
        self._settings = dict(settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate`."""
        with _stop_after(self._tokens):
            return self.model.generate(*args, **kwargs, **self._settings)  # type: ignore[operator]


@contextlib.contextmanager
def _stop_after(tokens: int) -> Iterator[None]:
    """transformers' limit on the length is met after so many new tokens, if not before."""
    criteria = sys.modules.get("transformers.generation.stopping_criteria")
    holder = getattr(criteria, "MaxLengthCriteria", None)
    if holder is None:
        yield
        return
    shortest: list[int] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not shortest:
                shortest.append(input_ids.shape[1])
            limit = self.max_length
            self.max_length = min(limit, shortest[0] + tokens - 1)
            try:
                return original(self, input_ids, *args, **kwargs)
            finally:
                self.max_length = limit

        return call

    with torch_common.patch(holder, "__call__", make):
        yield


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
    grow evenly, all further tokens are made by arithmetic, and the allocator replays every one.

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
    if new_tokens < 1 or beams < 1:
        raise UsageError(f"expected at least 1 new token and 1 beam, got {new_tokens} and {beams}")
    module = build_module(model, tell)
    check_generates(module)
    batch = read_batch(inputs)
    request = StepRequest(
        args=batch.args,
        kwargs=dict(batch.kwargs),
        notes=batch.notes,
        mode="infer",
        settings=settings,
        inference_mode=inference_mode,
        target=target,
        name=type(module).__name__,
    )
    ways = {"num_beams": beams, "do_sample": sample, **choose_cache(module, cache), **(options or {})}
    return generate_step(module, request, new_tokens, ways, cache, tell)


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
    model: nn.Module,
    request: StepRequest,
    new_tokens: int,
    options: Mapping[str, Any],
    cache: str,
    progress: Callable[[str], None] = lambda _: None,
) -> Generation:
    """Analyse a generation, as `generate` does; `options` are the other arguments of the model's own.

    Raises:
        The errors of `generate`.
    """
    request = _fill_prompt(request, model)
    recorded = _record(model, request, new_tokens, min(new_tokens, RECORDED), options, progress)
    extension: Extension | None = None
    is_proved = False
    if new_tokens > RECORDED:
        try:
            extension = extend(recorded)
            if options.get("num_beams", 1) == 1 and not getattr(model.config, "is_encoder_decoder", False):
                is_proved = _prove_far(extension, model, request, new_tokens, options, progress)
        except AnalysisError as error:
            if new_tokens > MOST_RECORDED:
                raise AnalysisError(
                    f"{error}; a generation whose steps change is recorded whole, up to {MOST_RECORDED} new tokens"
                ) from error
            progress("its steps change: recording every token")
            extension = None
            recorded = _record(model, request, new_tokens, new_tokens, options, progress)
    progress("replaying every token")
    with pause_gc():
        return _build(recorded, extension, new_tokens, cache, int(options.get("num_beams", 1)), is_proved)


def _record(
    model: nn.Module,
    request: StepRequest,
    new_tokens: int,
    tokens: int,
    options: Mapping[str, Any],
    progress: Callable[[str], None],
) -> DecodeSteps:
    """Record the first tokens of a generation. Its cache is set up for all of them."""
    wrapped = _Generate(model, tokens, {"max_new_tokens": new_tokens, **options}).train(model.training)
    profile = analyze_step(wrapped, request, progress).profile
    return find_steps(profile, "model")


def _prove_far(
    extension: Extension,
    model: nn.Module,
    request: StepRequest,
    new_tokens: int,
    options: Mapping[str, Any],
    progress: Callable[[str], None],
) -> bool:
    """Record the last tokens too, after a prompt that is longer by those in between; whether it could be done.

    Raises:
        AnalysisError: their steps are not those that arithmetic makes.
    """
    more = new_tokens - RECORDED
    longer = _lengthen_prompt(request, more)
    if longer is None:
        return False
    progress("recording the last tokens, too")
    extension.check_far(_record(model, longer, RECORDED, RECORDED, options, progress), more)
    return True


def _lengthen_prompt(request: StepRequest, more: int) -> StepRequest | None:
    """The request with a longer prompt, where the prompt is token ids alone; else None."""
    tensors = [*request.args, *request.kwargs.values()]
    if len(request.args) > 1 or set(request.kwargs) - {"input_ids", "attention_mask"}:
        return None
    if not all(isinstance(each, torch.Tensor) and each.dim() == 2 and each.dtype is torch.int64 for each in tensors):
        return None

    def lengthen(ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([ids, ids[:, -1:].expand(-1, more)], 1)

    kwargs = {name: lengthen(each) for name, each in request.kwargs.items()}
    return dataclasses.replace(request, args=tuple(map(lengthen, request.args)), kwargs=kwargs)


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
    recorded: DecodeSteps, extension: Extension | None, new_tokens: int, cache: str, beams: int, is_proved: bool
) -> Generation:
    profile = recorded.profile
    whole = recorded_events(recorded) if extension is None else extension.events(new_tokens)
    tokens, of_peak, of_run = _account(profile, whole)
    texts = ["the first generation of its process: the allocator has nothing cached when it begins"]
    shown = whole
    if extension is not None:
        there = "of the last ones are as was recorded" if is_proved else "of the last ones were not recorded"
        texts.append(
            f"{len(recorded.begins)} tokens were recorded; the others are like them, with sizes that grow as over "
            f"three of them; those {there}"
        )
        if len(whole.births) > MOST_STORAGES:
            shown = extension.events(new_tokens, jump=True)
            texts.append(
                "the profile and its FLOPs leave out tokens between the fourth and the last three; bytes do not"
            )
        profile = extension.profile(shown)
    run = GenerationRun(
        new_tokens=len(tokens),
        recorded_tokens=len(recorded.begins),
        cache=cache,
        beams=beams,
        prefill=_peak(tokens[:1]),
        decode=_peak(tokens[1:]) if tokens[1:] else None,
        growth_bytes=None if extension is None else max(extension.growth_bytes, 0),
        tokens=tokens,
        **of_run,
    )
    named = name_phases(profile, shown.begins)
    further = tuple(Assumption(topic="generation", text=text) for text in texts)
    changes = {
        "step": named.step.model_copy(update={"generation": run}),
        "assumptions": (*named.assumptions, *further),
    }
    return Generation(named.model_copy(update=changes), of_peak, is_whole=shown is whole)


def _account(profile: Profile, events: Events) -> tuple[tuple[TokenBytes, ...], dict[str, Any], dict[str, Any]]:
    """The bytes of every token, the allocator's part of the peak, and whether all fit."""
    target, memory = profile.target, profile.target.memory_bytes
    if target.device != "cuda":
        requested = requested_by_token(events)
        return tuple(TokenBytes(token=i + 1, requested_bytes=n) for i, n in enumerate(requested)), {}, {}
    settings = allocator.read_settings(os.environ)
    free = replay_tokens(profile, events, settings)
    reserved = max((each.reserved_bytes or 0 for each in free.tokens), default=0)
    bounded = free if memory is None or reserved <= memory else replay_tokens(profile, events, settings, memory)
    fitting = len(bounded.tokens)
    context = context_range(target)
    of_peak = {
        "allocated_bytes": max((each.allocated_bytes or 0 for each in free.tokens), default=0),
        "reserved_bytes": reserved,
        "process_bytes": None
        if context is None
        else ProcessBytes(low=reserved + context.low, high=reserved + context.high, grounds=context.grounds),
        "fits": None if memory is None else bounded.is_whole,
        "shortage": "" if bounded.is_whole else f"It runs out at token {fitting + 1} of {len(events.begins)}",
    }
    of_run = {
        "fits": of_peak["fits"],
        "last_token_that_fits": None if bounded.is_whole else fitting,
        "alloc_retries": bounded.alloc_retries,
    }
    return free.tokens, of_peak, of_run


def _peak(tokens: Sequence[TokenBytes]) -> GenerationPeak:
    """The largest of each, and the token of the most bytes alive."""

    def most(name: str) -> int | None:
        return max((n for each in tokens if (n := getattr(each, name)) is not None), default=None)

    top = max(tokens, key=lambda each: each.requested_bytes)
    return GenerationPeak(
        requested_bytes=top.requested_bytes,
        allocated_bytes=most("allocated_bytes"),
        reserved_bytes=most("reserved_bytes"),
        token=top.token,
    )
