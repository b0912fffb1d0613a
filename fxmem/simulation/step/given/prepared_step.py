"""A step as it was given, made one that can be run: the model, and the request that fits it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem._torch.common import iterate_tensors, nested, replace
from fxmem.errors import AnalysisError, UsageError, closest
from fxmem.records.units import LOSSES, NO_LOSS, format_bytes
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.ranks import MeshPlan
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.given.batches import fit_forward, misnamed_input
from fxmem.simulation.step.request import StepRequest

# --- losses by name, with labels made to fit the output; and what a step without a loss leaves out --------------------


Labels = Callable[[torch.Tensor], torch.Tensor]
"""Output -> labels of the right shape and dtype, where the output is."""

LABEL_ARGUMENTS: Final = ("labels", "targets", "target", "label", "y")
"""Names under which a forward takes labels."""


class LabelledLoss:
    """A loss of the output and of labels.

    Args:
        function: output, labels -> scalar tensor.
        labels: what makes the labels; they are on the card before the step.
        name: what the function is called.
    """

    def __init__(self, function: Callable[[Any, Any], torch.Tensor], labels: Labels, name: str) -> None:
        self._function, self._labels = function, labels
        self.__qualname__ = name

    def __call__(self, out: Any, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The loss; of labels made now unless they are given."""
        return self._function(main_tensor(out), self.make_labels(out) if labels is None else labels)

    def make_labels(self, out: Any) -> torch.Tensor:
        """Labels for an output."""
        with torch.no_grad():
            return self._labels(main_tensor(out))


def main_tensor(out: Any) -> torch.Tensor:
    """The output that a loss is of: `.logits`, "logits" or "out", else the first floating-point tensor.

    Raises:
        UsageError: there is none.
    """
    for name in ("logits", "out"):
        found = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
        if isinstance(found, torch.Tensor):
            return found
    for tensor in iterate_tensors(out):
        if tensor.is_floating_point():
            return tensor
    raise UsageError(f"expected an output with a floating-point tensor for the loss, got {type(out).__name__}")


def find_own_loss(out: Any) -> tuple[torch.Tensor | None, str]:
    """The loss that an output has, and what is taken for granted of it: its `.loss`, else its one scalar that a
    gradient leads to, beside other tensors; None where there is none."""
    own = getattr(out, "loss", None)
    if isinstance(own, torch.Tensor):
        return own, ""
    tensors = [tensor for tensor in iterate_tensors(out) if tensor.is_floating_point()]
    scalars = [tensor for tensor in tensors if tensor.dim() == 0 and tensor.requires_grad]
    if len(scalars) == 1 < len(tensors):
        return scalars[0], "the output's one scalar is taken for the loss; loss= names another"
    return None, ""


def describe_own_loss(out: Any) -> str:
    """What the loss of an output is where none is given, in words."""
    if find_own_loss(out)[0] is not None:
        return "the output's own"
    tensors = [tensor for tensor in iterate_tensors(out) if tensor.is_floating_point()]
    is_scalar = len(tensors) == 1 and tensors[0].dim() == 0
    return "the output" if is_scalar else "the sum of the output's floating-point tensors"


def read_loss(loss: Any) -> Any:
    """The loss that a name or a module of `torch.nn` means; anything else as it is.

    Raises:
        UsageError: no such name.
    """
    if isinstance(loss, str):
        if loss.lower() not in LOSSES:
            known = "ce, mse, bce, l1"
            raise UsageError(f"expected a loss as {known} or a function, got {loss!r}{closest(loss, LOSSES)}")
        return _make(LOSSES[loss.lower()])
    if type(loss) in _MODULES:
        return _make(_MODULES[type(loss)], loss)
    return _make(_FUNCTIONS[loss]) if loss in _FUNCTIONS else loss


def loss_assumption(loss: Any, labels: torch.Tensor | None) -> str | None:
    """What is taken for granted of made labels; None where there are none."""
    if not isinstance(loss, LabelledLoss) or labels is None:
        return None
    shape = "x".join(map(str, labels.shape)) or "scalar"
    dtype = str(labels.dtype).removeprefix("torch.")
    return f"{loss.__qualname__} of the output and of labels {shape} {dtype}, which are on the target throughout"


def missing_loss(out: Any, label_argument: str | None) -> tuple[str, int]:
    """What a usual loss would add to a step that sums its output: words and bytes, or nothing.

    cross_entropy keeps its log-probabilities in float32 until backward.
    """
    own, assumed = find_own_loss(out)
    if own is not None:
        return assumed, 0
    tensors = [tensor for tensor in iterate_tensors(out) if tensor.is_floating_point()]
    if not tensors or tensors[0].numel() == 1:
        return "", 0
    given = f", or give forward its argument `{label_argument}`" if label_argument else ""
    scores = main_tensor(out)
    if scores.dim() < 2:
        return (f"{NO_LOSS}; give forward its argument `{label_argument}`", 0) if given else ("", 0)
    nbytes = scores.numel() * 4
    shape = "x".join(map(str, scores.shape))
    text = (
        f"{NO_LOSS}: cross_entropy of the output {shape} would keep {format_bytes(nbytes)} until backward, "
        f"where its gradients take as much again; say --loss ce (loss='ce'){given}"
    )
    return text, nbytes


def find_label_argument(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The argument of forward for labels that was left at None; None if there is none."""
    try:
        signature = inspect.signature(model.forward)
        given = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    for name in LABEL_ARGUMENTS:
        parameter = signature.parameters.get(name)
        if parameter is not None and parameter.default is None and given.get(name) is None:
            return name
    return None


# --- the losses of torch ----------------------------------------------------------------------------------------------


def _class_labels(out: torch.Tensor) -> torch.Tensor:
    """A class for each item: of 3 dimensions the last counts classes (tokens), else the second."""
    if out.dim() < 2:
        raise UsageError(f"expected an output of classes for cross_entropy, got the shape {tuple(out.shape)}")
    shape = out.shape[:-1] if out.dim() == 3 else (out.shape[0], *out.shape[2:])
    return torch.zeros(tuple(shape), dtype=torch.int64, device=out.device)


def _flatten_tokens(function: Callable[..., torch.Tensor], out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if out.dim() == 3 and labels.dim() == 2 and labels.shape == out.shape[:-1]:
        out, labels = out.flatten(0, 1), labels.flatten()
    return function(out, labels)


_MODULES: Final[dict[type, str]] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll_loss",
    nn.MSELoss: "mse_loss",
    nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
}
_BY_NAME: Final[dict[str, Any]] = {name: getattr(functional, name) for name in _MODULES.values()}
_FUNCTIONS: Final = {function: name for name, function in _BY_NAME.items()}


def _make(name: str, module: Callable[..., torch.Tensor] | None = None) -> LabelledLoss:
    function = _BY_NAME[name] if module is None else module
    if name in ("cross_entropy", "nll_loss"):
        return LabelledLoss(functools.partial(_flatten_tokens, function), _class_labels, name)
    return LabelledLoss(function, torch.zeros_like, name)


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
