"""Carrying out a plan for single results of operators: the model's own forward, under a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxmem.checkpointing import subclass
from fxmem.checkpointing.tape import rematerializing
from fxmem.checkpointing.tape_survey import Survey
from fxmem.checkpointing.tape_values import ValueKey
from fxmem.records.plan import Region, Result

__all__ = ["ByOperator", "surveyed"]


@dataclass
class ByOperator:
    """A model of whose operators some results are held and some made again; see `fxmem.checkpointing.tape`."""

    held: frozenset[ValueKey]
    dropped: frozenset[ValueKey]
    survey: Survey | None = None
    checked: bool = False
    """Whether a forward has been run whose results, made again, were held against what they were."""

    @staticmethod
    def of(regions: Iterable[Region]) -> ByOperator:
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
        ):  # a compiler decides by itself what it holds
            return forward(module, *args, **kwargs)
        if self.survey is not None:
            self.survey.begin()
        with rematerializing(self.held, self.dropped, checked=not self.checked, observer=self.survey):
            result = forward(module, *args, **kwargs)
        self.checked = True
        return result


def surveyed(model: nn.Module) -> Survey:
    """From now on, until `uncheckpoint`, what each training forward of `model` comes down to is found in what is
    returned; nothing else changes."""
    survey = Survey()
    subclass.become(model, ByOperator(frozenset(), frozenset(), survey))
    return survey


def _keys(results: Iterable[Result]) -> frozenset[ValueKey]:
    return frozenset((result.operator, result.number, output) for result in results for output in result.outputs)
