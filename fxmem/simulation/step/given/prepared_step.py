"""A step as it was given, made one that can be run: the model, and the request that fits it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem._torch.common import nested, replace
from fxmem.errors import AnalysisError, UsageError
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.ranks import MeshPlan
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.given.batches import fit_forward, misnamed_input
from fxmem.simulation.step.given.losses import read_loss
from fxmem.simulation.step.request import StepRequest

# --- code that moves tensors to a card, run where there is none -------------------------------------------------------


def ignore_moves() -> AbstractContextManager[None]:
    """Leave tensors where they are made: `.cuda()`, `.to("cuda")` and `device="cuda"` do nothing.

    A training script has such a line nearly always; the analysis puts the model and its inputs on the target itself.
    """
    return nested(replace(torch.cuda, "set_device", lambda device: None), _StayHome())


class _StayHome(TorchFunctionMode):
    """Takes a card out of the arguments of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if is_card(kwargs.get("device")):
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            if func is torch.Tensor.to and len(args) == 1 and not kwargs:
                return args[0]
        if func is torch.Tensor.to and len(args) > 1 and is_card(args[1]):
            args = (args[0], args[0].device, *args[2:])
        return func(*args, **kwargs)


def is_card(device: object) -> bool:
    """Whether an argument of torch's functions names a CUDA device."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


# --- an optimizer that exists, made again over the parameters of the step ---------------------------------------------


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


# --- modules that know their own training step: Lightning's, and any with the same two methods ------------------------


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
            return step(self, args[0] if args else kwargs[first.name], *numbers)
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
    return view_training_step(source) if isinstance(source, nn.Module) else lambda: view_training_step(source())


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


# --- a step as it was given, made one that can be run: the model, and the request that fits it ------------------------


def understand(model: nn.Module, request: StepRequest) -> tuple[nn.Module, StepRequest]:
    """The model and the request with what depends on each other settled. What is settled already stays.

    Raises:
        UsageError: an input that forward does not have, or a loss of an unknown name.
        AnalysisError: there is no forward; what the model says of its training cannot be followed.
    """
    if type(model).forward is nn.Module.forward and "forward" not in vars(model) and not has_training_step(model):
        raise AnalysisError(f"expected a module that can be called; {type(model).__name__} has no forward of its own")
    notes: list[str] = []
    request = dataclasses.replace(request, loss=read_loss(request.loss))
    if request.mode == "train" and request.loss is None and has_training_step(model):
        model = view_training_step(model)
        request = dataclasses.replace(request, loss=training_step_loss)
        notes.append(f"{type(model).__name__}.training_step is run, and what it returns is the loss")
        if request.optimizer == "adamw" and hasattr(model, "configure_optimizers"):
            request = dataclasses.replace(request, optimizer=configured_optimizer(model))
            notes.append("its configure_optimizers is used, as no other optimizer was named")
    if isinstance(request.optimizer, Optimizer):
        make, note = copy_optimizer(request.optimizer, model)
        request = dataclasses.replace(request, optimizer=make)
        notes.append(note)
    if isinstance(request.parallelize, MeshPlan):
        plan = request.parallelize
        if plan.takes_precision and request.precision is not None:
            plan = dataclasses.replace(plan, precision=request.precision)
            request = dataclasses.replace(request, parallelize=plan, precision=None)
        notes += plan.describe(model)
        if request.compile is not None and not request.compile.as_is:
            notes.append(plan.describe_compiled(model))
    batch = fit_forward(model, request.args, request.kwargs)
    wrong = misnamed_input(model, batch.kwargs)
    if wrong and not torch_modules.has_hooks(model):  # a hook may take it
        raise UsageError(wrong)
    notes += batch.notes
    if batch.rest:
        tensors = [leaf for leaf in torch_common.tree_leaves(batch.rest) if isinstance(leaf, torch.Tensor)]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors) or "no tensor"
        notes.append(f"forward takes less than the batch: the rest ({shapes}; {nbytes} bytes) is left out")
    kept = tuple(dict.fromkeys((*request.notes, *notes)))
    return model, dataclasses.replace(request, args=batch.args, kwargs=dict(batch.kwargs), notes=kept)
