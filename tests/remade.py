"""Regions of OPERATORS plans, put together by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fxmem.checkpointing import record_survey
from fxmem.planning import OperatorCall, OperatorValue
from fxmem.records.plan import Region, Result


def regions_of(
    calls: Sequence[OperatorCall], values: Sequence[OperatorValue], holds: Callable[[OperatorValue], bool]
) -> list[Region]:
    """One region, in which all that is saved is recomputed, but for what is kept."""
    held = [value for value in values if not value.overwritten and holds(value)]
    dropped = [value for value in values if value.saved and value not in held]
    return [Region(first_node=0, last_node=1, holds=results(calls, held), remakes=results(calls, dropped))]


def results(calls: Sequence[OperatorCall], values: Sequence[OperatorValue]) -> tuple[Result, ...]:
    """The values as plans name them."""
    return tuple(
        Result(operator=calls[value.call].name, number=calls[value.call].number, outputs=(value.position,))
        for value in values
    )


def seen(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[OperatorCall], list[OperatorValue]]:
    """What a real forward of a copy of the model comes down to."""
    model = copy.deepcopy(model).train()
    survey = record_survey(model)
    model(*args, **kwargs)
    return survey.finish()


def remaking(
    model: nn.Module, *args: Any, holds: Callable[[OperatorValue], bool] = lambda _: False, **kwargs: Any
) -> list[Region]:
    """Of this model: all that is saved is recomputed, but for what is kept."""
    return regions_of(*seen(model, *args, **kwargs), holds=holds)
