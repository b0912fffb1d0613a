"""No sequence ends before the last token: what `generate` is answered where it asks whether all have ended.

transformers' loops (transformers/generation/utils.py) end when every sequence has met a stopping criterion. Which token
was chosen is not known without weights. A generation that is not cut short takes the most memory; so the criteria that
look at tokens are answered "not yet", and those that count tokens are left as they are.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation import known_values

ASSUMED: Final = "no sequence ends before the last token: stopping criteria that look at tokens are not met"
_CRITERIA: Final = "transformers.generation.stopping_criteria"
_LOOPS: Final = "transformers.generation.utils"


class StopRule:
    """The answers to a library's stopping criteria; a context manager that takes its patches back when left."""

    def __init__(self) -> None:
        self.was_asked = False
        """Whether a generation asked if its sequences have ended."""
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
            (_LOOPS, "GenerationMixin", "_beam_search_has_unfinished_sequences", self._continue_beams),
            (_LOOPS, "GenerationMixin", "_flatten_beam_dim", self._keep_beams_longest),
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
            return self._answer(
                original(unsatisfied, finished, hits, early_stopping), value is None or not bool(value.all())
            )

        return staticmethod(call)

    def _keep_beams_longest(self, original: Callable[..., Any]) -> Any:
        """The indices of finished beams: all are valid, and their number is the length of the result."""

        @functools.wraps(original)
        def call(tensor: torch.Tensor) -> Any:
            flat = original(tensor)
            return self._answer(flat, 0) if flat.dtype is torch.int32 and flat.dim() == 2 else flat

        return staticmethod(call)

    def _answer(self, result: Any, value: float) -> Any:
        if isinstance(result, torch_common.FakeTensor) and not known_values.is_known(result):
            self.was_asked = True
            with torch_common.no_modes():
                known_values.attach(result, torch.full(result.shape, value, dtype=result.dtype))
        return result
