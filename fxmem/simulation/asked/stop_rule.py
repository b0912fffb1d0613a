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
_Call = Callable[..., Any]
"""What another function stands for."""


class StopRule:
    """The answers to a library's stopping criteria; a context manager that takes its patches back when left."""

    def __init__(self) -> None:
        self.was_asked = False
        """Whether a generation asked if its sequences have ended."""
        self.was_drafted = False
        """Whether a generation asked which tokens of a draft are accepted."""
        self._stack = contextlib.ExitStack()
        self._patched: set[tuple[str, str]] = set()
        self._imported = 0
        """How many modules there were at the last look."""

    def __enter__(self) -> StopRule:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def install(self) -> None:
        """Patch what the program has imported since the last call."""
        if self._imported == len(sys.modules):
            return
        self._imported = len(sys.modules)
        not_met, no_padding = functools.partial(self._answer_all, False), functools.partial(self._answer_all, 1)
        for module_name, owner, name, run in (
            (_CRITERIA, "EosTokenCriteria", "__call__", not_met),
            (_CRITERIA, "StopStringCriteria", "__call__", not_met),
            (_CRITERIA, "ConfidenceCriteria", "__call__", _continue_draft),
            (_LOOPS, "GenerationMixin", "_beam_search_has_unfinished_sequences", self._continue_beams),
            (_LOOPS, "GenerationMixin", "_flatten_beam_dim", self._keep_beams_longest),
            (_LOOPS, "GenerationMixin", "_assisted_decoding", self._accept_no_draft),
            (_LOOPS, "GenerationMixin", "_prepare_attention_mask_for_generation", no_padding),
            (_LOOPS, "GenerationMixin", "_get_logits_processor", self._read_tokens),
            (_WHISPER, "WhisperGenerationMixin", "_postprocess_outputs", self._hear_words),
        ):
            holder = getattr(sys.modules.get(module_name), owner, None)
            if holder is not None and name in vars(holder) and (owner, name) not in self._patched:
                self._patched.add((owner, name))
                self._stack.enter_context(torch_common.wrap(holder, name, run))

    def _answer_all(self, value: float, original: _Call, *args: Any, **kwargs: Any) -> Any:
        """What looks at tokens, which has one answer: no sequence meets a criterion, none of a prompt is padding."""
        return self._answer(original(*args, **kwargs), value)

    def _continue_beams(self, original: _Call, unsatisfied: Any, finished: Any, hits: Any, *further: Any) -> Any:
        """Whether beam search goes on: until all have met a criterion that counts tokens."""
        value = known_values.find_value(hits)
        with torch_common.no_modes(), torch_common.pause_observers():  # the program does not ask
            goes_on = value is None or not bool(value.all())
        return self._answer(original(unsatisfied, finished, hits, *further), goes_on)

    def _keep_beams_longest(self, original: _Call, tensor: torch.Tensor) -> Any:
        """The indices of finished beams: all are valid, and their number is the length of the result."""
        flat = original(tensor)
        return self._answer(flat, 0) if flat.dtype is torch.int32 and flat.dim() == 2 else flat

    def _read_tokens(self, original: _Call, *args: Any, encoder_input_ids: Any = None, **kwargs: Any) -> Any:
        """What looks whether a prompt is token ids, or stands for embeddings: ids, which are not negative."""
        asks = encoder_input_ids is not None and not encoder_input_ids.is_floating_point()
        forgets = asks and not known_values.is_known(encoder_input_ids)
        if asks:
            self._answer(encoder_input_ids, 1)
        try:
            return original(*args, encoder_input_ids=encoder_input_ids, **kwargs)
        finally:
            if forgets:
                known_values.forget(encoder_input_ids)

    def _accept_no_draft(self, original: _Call, *args: Any, **kwargs: Any) -> Any:
        """A loop with drafts, in which every drafted token is another than the model's own."""

        def count(cumsum: _Call, tensor: torch.Tensor, *further: Any, **settings: Any) -> Any:
            differs = tensor.dtype is torch.bool and sys._getframe(2).f_code.co_name == original.__name__
            result = cumsum(tensor, *further, **settings)
            if differs and isinstance(result, torch_common.FakeTensor):
                self.was_drafted = True
                return self._answer(result, 1)
            return result

        seek = functools.partial(self._answer_all, False)
        with torch_common.wrap(torch.Tensor, "cumsum", count), torch_common.wrap(torch, "isin", seek):
            return original(*args, **kwargs)

    def _hear_words(self, original: _Call, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        """The tokens that Whisper cuts into segments: each is a word, none is padding or a time."""
        tokens, outputs = original(*args, generation_config=generation_config, **kwargs)
        ends = generation_config.eos_token_id
        other = {generation_config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
        return self._answer(tokens, next(token for token in range(len(other) + 1) if token not in other)), outputs

    def _answer(self, result: Any, value: float) -> Any:
        if isinstance(result, torch_common.FakeTensor) and not known_values.is_known(result):
            self.was_asked = True
            known_values.fill(result, value)
        return result


def _continue_draft(original: _Call, criterion: Any, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
    """Whether a draft ends, an assistant not being sure of its last token: no, once probabilities are there."""
    if not isinstance(input_ids, torch_common.FakeTensor):
        return original(criterion, input_ids, scores, **kwargs)
    scores[-1].softmax(-1)
    return False
