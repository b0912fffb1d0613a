"""No sequence ends before the last token: what `generate` is answered where it asks whether all have ended.

transformers' loops (transformers/generation/utils.py) end when every sequence has met a stopping criterion. Which token
was chosen is not known without weights. A generation that is not cut short takes the most memory; so the criteria that
look at tokens are answered "not yet", and those that count tokens are left as they are. Whisper, which looks at what
was generated, finds words and no timestamps; an assistant drafts as much as it may, and none of it is accepted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation.asked import known_values

ASSUMED: Final = "no sequence ends before the last token: stopping criteria that look at tokens are not met"
DRAFTS_ASSUMED: Final = "an assistant's drafts are as long as they may be, and no token of them is accepted"
_CRITERIA: Final = "transformers.generation.stopping_criteria"
_LOOPS: Final = "transformers.generation.utils"
_WHISPER: Final = "transformers.models.whisper.generation_whisper"


class StopRule:
    """The answers to a library's stopping criteria; a context manager that takes its patches back when left."""

    def __init__(self) -> None:
        self.was_asked = False
        """Whether a generation asked if its sequences have ended."""
        self.was_drafted = False
        """Whether a generation asked which tokens of a draft are accepted."""
        self._stack = contextlib.ExitStack()
        self._patched: set[tuple[str, str]] = set()

    def __enter__(self) -> StopRule:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def install(self) -> None:
        """Patch what the program has imported since the last call."""
        for module_name, owner, name, make in (
            (_CRITERIA, "EosTokenCriteria", "__call__", self._none_ends),
            (_CRITERIA, "StopStringCriteria", "__call__", self._none_ends),
            (_CRITERIA, "ConfidenceCriteria", "__call__", self._continue_draft),
            (_LOOPS, "GenerationMixin", "_beam_search_has_unfinished_sequences", self._continue_beams),
            (_LOOPS, "GenerationMixin", "_flatten_beam_dim", self._keep_beams_longest),
            (_LOOPS, "GenerationMixin", "_assisted_decoding", self._accept_no_draft),
            (_LOOPS, "GenerationMixin", "_prepare_attention_mask_for_generation", self._pad_nothing),
            (_LOOPS, "GenerationMixin", "_get_logits_processor", self._read_tokens),
            (_WHISPER, "WhisperGenerationMixin", "_postprocess_outputs", self._hear_words),
        ):
            holder = getattr(sys.modules.get(module_name), owner, None)
            if holder is not None and name in vars(holder) and (owner, name) not in self._patched:
                self._patched.add((owner, name))
                self._stack.enter_context(torch_common.patch(holder, name, make))

    def _none_ends(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A criterion that looks at tokens, which no sequence meets."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._answer(original(*args, **kwargs), False)

        return call

    def _continue_beams(self, original: Callable[..., Any]) -> Any:
        """Whether beam search goes on: until all have met a criterion that counts tokens."""

        @functools.wraps(original)
        def call(unsatisfied: Any, finished: Any, hits: Any, early_stopping: Any) -> Any:
            value = known_values.find_value(hits)
            with torch_common.no_modes(), torch_common.pause_observers():  # the program does not ask
                goes_on = value is None or not bool(value.all())
            return self._answer(original(unsatisfied, finished, hits, early_stopping), goes_on)

        return staticmethod(call)

    def _keep_beams_longest(self, original: Callable[..., Any]) -> Any:
        """The indices of finished beams: all are valid, and their number is the length of the result."""

        @functools.wraps(original)
        def call(tensor: torch.Tensor) -> Any:
            flat = original(tensor)
            return self._answer(flat, 0) if flat.dtype is torch.int32 and flat.dim() == 2 else flat

        return staticmethod(call)

    def _pad_nothing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The mask of a prompt without one, where its tokens were generated: none of them is padding."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._answer(original(*args, **kwargs), 1)

        return call

    def _read_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What looks whether a prompt is token ids, or stands for embeddings: ids, which are not negative."""

        @functools.wraps(original)
        def call(*args: Any, encoder_input_ids: Any = None, **kwargs: Any) -> Any:
            if encoder_input_ids is None or encoder_input_ids.is_floating_point():
                return original(*args, encoder_input_ids=encoder_input_ids, **kwargs)
            is_known = known_values.is_known(encoder_input_ids)
            self._answer(encoder_input_ids, 1)
            try:
                return original(*args, encoder_input_ids=encoder_input_ids, **kwargs)
            finally:
                if not is_known:
                    known_values.forget(encoder_input_ids)

        return call

    def _continue_draft(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Whether a draft ends, an assistant not being sure of its last token: no, once probabilities are there."""

        @functools.wraps(original)
        def call(criterion: Any, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            if not isinstance(input_ids, torch_common.FakeTensor):
                return original(criterion, input_ids, scores, **kwargs)
            scores[-1].softmax(-1)
            return False

        return call

    def _accept_no_draft(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A loop with drafts, in which every drafted token is another than the model's own."""

        def count(cumsum: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(cumsum)
            def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                differs = tensor.dtype is torch.bool and sys._getframe(1).f_code.co_name == original.__name__
                result = cumsum(tensor, *args, **kwargs)
                if differs and isinstance(result, torch_common.FakeTensor):
                    self.was_drafted = True
                    return self._answer(result, 1)
                return result

            return call

        def seek(isin: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(isin)
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._answer(isin(*args, **kwargs), False)

            return call

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            patch = torch_common.patch
            with patch(torch.Tensor, "cumsum", count), patch(torch, "isin", seek):
                return original(*args, **kwargs)

        return call

    def _hear_words(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The tokens that Whisper cuts into segments: each is a word, none is padding or a time."""

        @functools.wraps(original)
        def call(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
            tokens, outputs = original(*args, generation_config=generation_config, **kwargs)
            ends = generation_config.eos_token_id
            other = {generation_config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
            return self._answer(tokens, next(token for token in range(len(other) + 1) if token not in other)), outputs

        return call

    def _answer(self, result: Any, value: float) -> Any:
        if isinstance(result, torch_common.FakeTensor) and not known_values.is_known(result):
            self.was_asked = True
            with torch_common.no_modes():
                known_values.attach(result, torch.full(result.shape, value, dtype=result.dtype))
        return result
