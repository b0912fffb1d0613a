"""`DecodeRecorder`: records a generation's first tokens, its last ones, and what comes where its steps change."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError
from fxmem.memory.generation import (
    JOINT,
    PERIOD,
    RECORDED,
    TAIL,
    DecodeSteps,
    Extension,
    extend,
    find_steps,
    join_steps,
    recorded_tokens,
)
from fxmem.simulation.analysis import analyze_step
from fxmem.simulation.request import StepRequest

_CHANGING: Final = 4
"""Steps, from the one that fills a window on, that may be like neither those before nor those after."""
_COMPARED: Final = 2 + TAIL
"""Steps recorded of those that others are made like: three that are compared, and two more."""


class DecodeRecorder:
    """What is recorded of a generation.

    Args:
        model: has a `generate` of transformers.
        request: its prompt.
        new_tokens: how many it makes in all.
        options: further arguments of the model's own `generate`.
        progress: told what is done.
    """

    def __init__(
        self,
        model: nn.Module,
        request: StepRequest,
        new_tokens: int,
        options: Mapping[str, Any],
        progress: Callable[[str], None],
    ) -> None:
        self._model = model
        self._request = request
        self._new_tokens = new_tokens
        self._options = options
        self._progress = progress

    def record(self, more: int, tokens: int) -> DecodeSteps:
        """Record tokens after a prompt that is longer by `more`; the cache is set up for the whole generation."""
        request = self._request if not more else _lengthen_prompt(self._request, more)
        settings = {"max_new_tokens": self._new_tokens - more, **self._options}
        wrapped = _Generate(self._model, tokens, settings).train(self._model.training)
        profile = analyze_step(wrapped, request, self._progress).profile
        return find_steps(profile, "model", self._count_chunks(request))

    def extend(self) -> tuple[DecodeSteps, Extension | None, bool]:
        """Record the first tokens and every change of the steps.

        Returns:
            What was recorded; how the others are made, None if there are none; whether the last tokens were recorded.

        Raises:
            AnalysisError: the steps grow unevenly elsewhere than where a window fills.
        """
        pieces = self._find_pieces()
        more, tokens = pieces[0]
        steps = self.record(0, tokens)
        if tokens == self._new_tokens:
            return steps, None, False
        try:
            extension = extend(steps)
        except AnalysisError:
            if pieces[1:] or self._new_tokens < recorded_tokens(PERIOD):
                raise
            steps, extension = self._extend_by_periods()
        for more, tokens in pieces[1:]:
            self._progress("recording where its steps change")
            steps, before = join_steps(extension, self.record(more, tokens), more)
            is_end = more + tokens == self._new_tokens
            extension = Extension(steps, before) if is_end else extend(steps, before)
        if more + tokens == self._new_tokens:
            return steps, extension, True
        return steps, extension, self._prove_far(extension)

    def _extend_by_periods(self) -> tuple[DecodeSteps, Extension]:
        """Record enough tokens to make further ones a period at a time."""
        self._progress(f"its steps change: recording three times {PERIOD} of them")
        least = recorded_tokens(PERIOD)
        steps = self.record(0, least + (self._new_tokens - least) % PERIOD)
        return steps, extend(steps, period=PERIOD)

    def _count_chunks(self, request: StepRequest) -> int:
        """Calls of the decoder that a prompt takes: one, unless `prefill_chunk_size` says otherwise."""
        settings = getattr(self._model, "generation_config", None)
        size = self._options.get("prefill_chunk_size", getattr(settings, "prefill_chunk_size", None))
        ids = _prompt_ids(request)
        return 1 if size is None or ids is None else -(-ids.shape[1] // size)

    def _find_pieces(self) -> list[tuple[int, int]]:
        """By how much longer the prompt is, and the tokens, of each recording: of the first tokens, and of changes."""
        pieces = [(0, min(RECORDED, self._new_tokens))]
        for change in self._find_changes():
            more, tokens = pieces[-1]
            if change < more + tokens - TAIL + 1:
                pieces[-1] = (more, change - more + _CHANGING + _COMPARED)
            else:
                pieces.append((change - JOINT - 1, JOINT + 1 + _CHANGING + _COMPARED))
        more, tokens = pieces[-1]
        pieces[-1] = (more, min(tokens, self._new_tokens - more))
        return pieces

    def _find_changes(self) -> list[int]:
        """The tokens, from 0, with which a window of the model's configuration may be full.

        Raises:
            AnalysisError: there are some, and they cannot be recorded after a longer prompt.
        """
        config: Any = self._model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        windows = {getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")}
        ids = _prompt_ids(self._request)
        if ids is None:
            return []
        found = sorted(window - 1 - ids.shape[1] for window in windows if isinstance(window, int))
        changes = [token for token in found if 0 < token < self._new_tokens]
        if changes and self._new_tokens > RECORDED and not self._is_lengthened:
            raise AnalysisError("expected a prompt of token ids, and no beams, where a sliding window fills")
        return changes

    @property
    def _is_lengthened(self) -> bool:
        """Whether tokens further on are recorded after a longer prompt: it is ids alone, and there are no beams."""
        encodes = getattr(self._model.config, "is_encoder_decoder", False)
        return self._options.get("num_beams", 1) == 1 and not encodes and bool(_find_ids(self._request))

    def _prove_far(self, extension: Extension) -> bool:
        """Record the last tokens, after a prompt that is longer by those in between; whether it could be done.

        Raises:
            AnalysisError: their steps are not those that arithmetic makes.
        """
        if not self._is_lengthened:
            return False
        self._progress("recording the last tokens, too")
        insertion = extension.insertions[-1]
        step, period = RECORDED - 2 - TAIL, insertion.period  # the first that is compared with others
        tokens = step + period + 1
        reached = extension.token(insertion)
        more = self._new_tokens - tokens
        more -= (more + step - reached) % period  # the same place in a period
        extension.check_step(self.record(more, tokens), step, more + step - reached)
        return True


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


def _prompt_ids(request: StepRequest) -> torch.Tensor | None:
    """The token ids of a prompt, sequences by tokens; None if there are none."""
    ids = request.kwargs.get("input_ids", request.args[0] if request.args else None)
    return ids if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None


def _find_ids(request: StepRequest) -> list[torch.Tensor]:
    """The prompt's ids and their mask, where it is nothing else; else nothing."""
    tensors = [*request.args, *request.kwargs.values()]
    if len(request.args) > 1 or set(request.kwargs) - {"input_ids", "attention_mask"}:
        return []
    is_text = all(isinstance(each, torch.Tensor) and each.dim() == 2 and each.dtype is torch.int64 for each in tensors)
    return tensors if is_text else []


def _lengthen_prompt(request: StepRequest, more: int) -> StepRequest:
    """The request with a prompt of ids that is longer."""

    def lengthen(ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([ids, ids[:, -1:].expand(-1, more)], 1)

    kwargs = {name: lengthen(each) for name, each in request.kwargs.items()}
    return dataclasses.replace(request, args=tuple(map(lengthen, request.args)), kwargs=kwargs)
