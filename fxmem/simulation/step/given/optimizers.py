"""An optimizer that exists, made again over the parameters of the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer


def copy_optimizer(given: Optimizer, model: nn.Module) -> tuple[Callable[[list[nn.Parameter]], Optimizer], str]:
    """A factory of optimizers like `given`, and a note on what was taken from it.

    Its class and settings are taken. Its groups are, too, where they hold parameters of `model`; the optimizer of
    another copy of the model has one group here, of all parameters. Its state is made by the step.
    """
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    known = inspect.signature(type(given)).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    defaults = {name: value for name, value in given.defaults.items() if takes_all or name in known}
    members = [[places.get(id(parameter)) for parameter in group["params"]] for group in given.param_groups]
    rests = [{k: v for k, v in group.items() if k != "params"} for group in given.param_groups]
    is_ours = all(None not in each for each in members)

    def make(params: list[nn.Parameter]) -> Optimizer:
        if not is_ours:
            return type(given)(params, **defaults)
        ours = [[params[place] for place in each if place is not None] for each in members]
        return type(given)([{"params": each, **rest} for each, rest in zip(ours, rests, strict=True)], **defaults)

    name, count = type(given).__name__, len(given.param_groups)
    make.__qualname__ = make.__name__ = name
    extent = "over all parameters: the given one has the parameters of another model"
    if is_ours:
        extent = f"its {count} group{'s' * (count > 1)} included"
    return make, f"the optimizer is one like the {name} that was given, {extent}"
