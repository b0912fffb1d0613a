"""Losses by name, with labels made to fit the output; and what a step without a loss leaves out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from fxmem._torch.common import iterate_tensors
from fxmem.errors import UsageError, closest
from fxmem.records.units import LOSSES, NO_LOSS, format_bytes

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
