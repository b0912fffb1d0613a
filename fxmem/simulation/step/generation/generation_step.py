"""`GenerationStep`: a model's `generate` as a step, whose recording leaves out most tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from fxmem._torch import fakes as torch_fakes
from fxmem.errors import AnalysisError
from fxmem.memory.generation import COMPARED, LEAST_COMPARED, Extension, Jump, extend, find_steps
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.run.decode_loops import DecodeLoops, StepJumps
from fxmem.simulation.step.analysis import trace_as
from fxmem.simulation.step.model_step import ModelStep
from fxmem.simulation.step.request import StepRequest

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
        maker = torch_fakes.Maker(self.recording.fakes)
        self._loops = DecodeLoops(self._log, self._trace, maker, jumps=self._jumps)
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
    if size is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return 1
    return int(-(-ids.shape[1] // size))
