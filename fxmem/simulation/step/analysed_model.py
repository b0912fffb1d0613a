"""`AnalysedModel`: what a model takes, which can be analysed again with something changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from torch import nn

from fxmem.records.profile import Profile
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.step.request import StepRequest

RequestT = TypeVar("RequestT", bound=StepRequest)


class AnalysedModel(ProfiledStep, Generic[RequestT]):
    """The memory of what a model was asked for, and its reasons."""

    is_fixed = False

    def __init__(
        self, profile: Profile, model: nn.Module, request: RequestT, repeat: Callable[[nn.Module, RequestT], Self]
    ) -> None:
        self.profile: Profile = profile
        """The step: nodes, ops and storages."""
        self.model = model
        """The model that was analysed, as it was given."""
        self.request = request
        """What it was asked for."""
        self.repeat = repeat
        """Analyses another model or request."""

    def vary(self, model: nn.Module | None = None, **changes: Any) -> Self:
        """Analyse another model, or with other settings: any field of its request."""
        return self.repeat(self.model if model is None else model, dataclasses.replace(self.request, **changes))
