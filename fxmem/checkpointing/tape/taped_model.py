"""Applies a plan for single results of operators: the model's own forward, under a tape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxmem.checkpointing import subclass
from fxmem.checkpointing.tape.host_copies import HostMemory
from fxmem.checkpointing.tape.recorder import Tape, rematerialize
from fxmem.checkpointing.tape.values import OpKey, Survey, ValueKey
from fxmem.errors import PlanWarning
from fxmem.planning import StretchPath
from fxmem.records.plan import Region, Result
from fxmem.records.units import format_bytes

_KINDS = 16
"""Forwards that are told apart; of a model with more, every forward is recorded whole."""


@dataclass
class ByOperator:
    """A model of whose operators some results are recomputed or offloaded; see `fxmem.checkpointing.tape`."""

    kept: frozenset[ValueKey]
    dropped: frozenset[ValueKey]
    offloaded: Mapping[ValueKey, int] = field(default_factory=dict)
    """With each how many others are fetched back before it."""
    memory: HostMemory = field(default_factory=HostMemory)
    """Where what is offloaded waits."""
    stretches: Mapping[ValueKey, StretchPath] = field(default_factory=dict)
    """What is freed again where it is recomputed for another stretch of the forward."""
    survey: Survey | None = None
    checked: bool = False
    """Whether a forward has been run whose results, recomputed, were compared with what they were."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """How often the forward that the plan was made for calls each operator; empty where that is not known."""
    needed: frozenset[OpKey] = frozenset()
    """The calls that lead to what is dropped, in all forwards that have been recorded whole: of others no record is
    taken, which is most of what a tape takes."""
    forwards: Mapping[frozenset[tuple[str, int]], int] = field(default_factory=dict)
    """By how often each operator was called, how many results a forward dropped that was recorded whole; -1 for a
    forward that is to be."""

    @staticmethod
    def collect(regions: Iterable[Region], operators: Mapping[str, int]) -> ByOperator:
        """What the regions of a plan say together."""
        found = list(regions)
        return ByOperator(
            _keys(result for region in found for result in region.holds),
            _keys(result for region in found for result in region.remakes),
            _places(result for region in found for result in region.offloads),
            stretches={key: one.stretch for region in found for one in region.frees for key in _keys([one])},
            operators=operators,
        )

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `subclass.Way`."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            _warn_of_compiler()
            return forward(module, *args, **kwargs)
        if self.survey is not None:
            self.survey.begin()
        known = self.forwards.values()
        is_whole = self.survey is not None or not known or -1 in known or len(known) > _KINDS
        with rematerialize(
            self.kept,
            self.dropped,
            offloaded=self.offloaded,
            memory=self.memory,
            checked=not self.checked,
            survey=self.survey,
            only=None if is_whole else self.needed,
            stretches=self.stretches,
        ) as tape:
            result = forward(module, *args, **kwargs)
        self._learn(tape, is_whole=is_whole)
        if self.operators and not self.checked:
            self._compare(tape)
        self.checked = True
        return result

    def _learn(self, tape: Tape, *, is_whole: bool) -> None:
        """Note which calls have to be recorded; of an unknown forward, that the next is recorded whole."""
        found = len(tape.met) if is_whole else -1
        if tape.draws:
            return  # the states in the record take memory where the model does: as much in every step, then
        if len(self.forwards) <= _KINDS and self.forwards.get(tape.calls) != len(tape.met):
            self.needed |= tape.needed
            self.forwards = {**self.forwards, tape.calls: found}

    def _compare(self, tape: Tape) -> None:
        """Warn where a forward is not the one that the plan was made for."""
        met = len(tape.met)
        changed = {
            name: f"{tape.recorded.get(name, 0)} {name} where the plan has {self.operators.get(name, 0)}"
            for name in sorted({*self.operators, *tape.recorded})
            if tape.recorded.get(name) != self.operators.get(name)
        }
        promised = self.dropped | set(self.offloaded)
        named = {name for name, _, _ in self.kept | promised}
        if met == len(promised) and named.isdisjoint(changed):
            return  # what is kept and recomputed is what was planned; another device has other kernels between
        told = [*changed.values()]
        others = f" and {len(told) - 3} operators more" if len(told) > 3 else ""
        warnings.warn(
            f"this step is not the one that the checkpoint plan was made for: {met} of the {len(promised)} results "
            f"that it {'recomputes or offloads' if self.offloaded else 'recomputes'} were met, "
            f"{format_bytes(sum(tape.met.values()))} together"
            + (f"; the forward calls {', '.join(told[:3])}{others}" if told else "")
            + ". Gradients are right, but less memory is freed; plan again for the program as it is now (autocast, "
            "dropout, attention, adapters, the release of torch)",
            PlanWarning,
            stacklevel=2,
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_compiler() -> bool:
    # Run by the compiler while it traces, and taken for a constant, so that its graph does not break here.
    warnings.warn(
        "a checkpoint plan for operators does nothing in a model under torch.compile, which decides by itself what it "
        "keeps; plan with application='modules', or set torch._functorch.config.activation_memory_budget",
        PlanWarning,
        stacklevel=2,
    )
    return True


def record_survey(model: nn.Module) -> Survey:
    """Record each training forward of `model`, until `uncheckpoint`, in the survey that is returned."""
    survey = Survey()
    subclass.become(model, ByOperator(frozenset(), frozenset(), survey=survey))
    return survey


def _keys(results: Iterable[Result]) -> frozenset[ValueKey]:
    return frozenset((result.operator, result.number, output) for result in results for output in result.outputs)


def _places(results: Iterable[Result]) -> dict[ValueKey, int]:
    """Offloaded results by key, with their places in the order of being fetched; of results without, the last saved
    first."""
    found: dict[ValueKey, int] = {}
    for result in results:
        for index, output in enumerate(result.outputs):
            place = result.fetched[index] if index < len(result.fetched) else -len(found) - 1
            found[result.operator, result.number, output] = place
    lowest = min(found.values(), default=0)
    return {key: place - min(lowest, 0) for key, place in found.items()}
