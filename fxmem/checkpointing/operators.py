"""Applies a plan for single results of operators: the model's own forward, under a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxmem.checkpointing import subclass
from fxmem.checkpointing.tape import rematerialize
from fxmem.checkpointing.tape_survey import Survey
from fxmem.checkpointing.tape_values import ValueKey
from fxmem.records.plan import Region, Result


@dataclass
class ByOperator:
    """A model of whose operators some results are kept and some recomputed; see `fxmem.checkpointing.tape`."""

    kept: frozenset[ValueKey]
    dropped: frozenset[ValueKey]
    survey: Survey | None = None
    checked: bool = False
    """Whether a forward has been run whose results, recomputed, were compared with what they were."""

    @staticmethod
    def collect(regions: Iterable[Region]) -> ByOperator:
        """What the regions of a plan say together."""
        found = list(regions)
        return ByOperator(
            _keys(result for region in found for result in region.holds),
            _keys(result for region in found for result in region.remakes),
        )

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `classes.Way`."""
        if (
            not (module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling()
        ):  # a compiler decides by itself what it keeps
            return forward(module, *args, **kwargs)
        if self.survey is not None:
            self.survey.begin()
        with rematerialize(self.kept, self.dropped, checked=not self.checked, observer=self.survey):
            result = forward(module, *args, **kwargs)
        self.checked = True
        return result


def record_survey(model: nn.Module) -> Survey:
    """Record each training forward of `model`, until `uncheckpoint`, in the survey that is returned."""
    survey = Survey()
    subclass.become(model, ByOperator(frozenset(), frozenset(), survey))
    return survey


def _keys(results: Iterable[Result]) -> frozenset[ValueKey]:
    return frozenset((result.operator, result.number, output) for result in results for output in result.outputs)
