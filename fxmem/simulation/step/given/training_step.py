"""Modules that know their own training step: Lightning's, and any with the same two methods."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fxmem.errors import AnalysisError
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.recording.error_advice import user_code_error

_QUIET = ("log", "log_dict", "print")
"""Methods that need a trainer and allocate nothing that stays."""


def has_training_step(model: nn.Module) -> bool:
    """Whether `training_step` of the model is to be run in forward's place."""
    return callable(getattr(type(model), "training_step", None)) and getattr(model, "automatic_optimization", True)


def view_training_step(model: nn.Module) -> nn.Module:
    """The same modules and tensors as a module that runs `training_step` when it is called.

    What the step itself calls is the model's own forward. A view of a view is the view.
    """
    kind: Any = type(model)
    if getattr(kind, "fxmem_view", False):
        return model
    step = kind.training_step
    first, *others = list(inspect.signature(step).parameters.values())[1:]
    numbers = [0 for each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fxmem_inside:
            return kind.forward(self, *args, **kwargs)
        self.fxmem_inside = True
        try:
            batch = args[0] if args else kwargs[first.name]
            return step(self, batch, *numbers)
        finally:
            self.fxmem_inside = False

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([self_parameter, first])  # type: ignore[attr-defined]  # inspect reads it
    members: dict[str, Any] = {"forward": forward, "fxmem_view": True, "__module__": kind.__module__}
    members |= {name: lambda self, *args, **kwargs: None for name in _QUIET if hasattr(kind, name)}
    if isinstance(inspect.getattr_static(kind, "device", None), property):
        members["device"] = property(lambda self: next(self.parameters()).device)
    view = copy.copy(model)
    view.__class__ = type(kind.__name__, (kind,), members)
    view.fxmem_inside = False  # type: ignore[assignment]  # a module takes any attribute
    return view


def view_source(source: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """`view_training_step` of a module, or of what a function builds."""
    if isinstance(source, nn.Module):
        return view_training_step(source)
    return lambda: view_training_step(source())


def training_step_loss(out: Any) -> torch.Tensor:
    """The loss that a training step returned, itself or under "loss"."""
    found: torch.Tensor = out["loss"] if isinstance(out, Mapping) else out
    return found


training_step_loss.__qualname__ = "training_step"


def configured_optimizer(model: nn.Module) -> Optimizer | None:
    """The optimizer that `configure_optimizers` of a model makes; None if it makes none.

    Raises:
        AnalysisError: it raised, or makes more than one.
    """
    name = type(model).__name__
    try:
        with process_unchanged():
            made: Any = model.configure_optimizers()  # type: ignore[operator]  # the caller asked whether it is there
    except Exception as error:
        raise user_code_error(error, f"{name}.configure_optimizers") from error
    found = list(_find_optimizers(made))
    if len(found) > 1:
        raise AnalysisError(
            f"expected one optimizer; configure_optimizers of {name} makes {len(found)}. Record your program instead: "
            "fxmem run train.py, or fxmem.record"
        )
    return found[0] if found else None


def _find_optimizers(made: Any) -> Iterator[Optimizer]:
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, Mapping):
        yield from _find_optimizers(made.get("optimizer"))
    elif isinstance(made, tuple | list):
        for each in made:
            yield from _find_optimizers(each)
