"""One training or inference step: the very function that is both predicted on FakeTensors and measured on real ones.

Definition, for `mode="train"`:

    out = model(*args, **kwargs)
    loss = loss_fn(out)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

as the body of a loop, whose variables hold `out` and `loss` of the step before until the new ones replace them;
without `keep_outputs` as the body of a function, where they live until it returns. Nothing else is kept. For
`mode="infer"` it is the first line under `torch.no_grad()`, or `torch.inference_mode()`. A precision puts the first
two lines under autocast, as PyTorch recommends; there is no gradient scaler. Without an optimizer the body ends after
`backward`, the gradients in place; the caller clears them before the next run. `zero_grad="before-backward"` moves the
last line between the second and the third, and `set_to_none=False` is its argument.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from fxmem._torch.autograd import release_gradients, steps_in_backward
from fxmem._torch.common import iterate_tensors
from fxmem.errors import UsageError, closest, unknown_optimizer
from fxmem.records.profile import Step
from fxmem.records.units import OPTIMIZER_LIBRARIES, OPTIMIZER_PRESETS, Mode, Precision
from fxmem.simulation.step.given.adapters import library_optimizer
from fxmem.simulation.step.given.prepared_step import find_own_loss
from fxmem.simulation.step.request import OptimizerSpec, StepRequest

Mark = Callable[[Literal["forward", "loss", "backward", "optimizer"]], None]
"""Called with the part of the step that begins. `loss` belongs to the forward phase."""

_AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class LoopVariables:
    """What the variables of a loop hold, from one step to the next."""

    out: Any = None
    loss: torch.Tensor | None = None


def run_step(
    model: nn.Module,
    request: StepRequest,
    *,
    optimizer: Optimizer | None,
    device_type: str,
    mark: Mark,
    variables: LoopVariables | None = None,
) -> None:
    """Run the step of this module's definition once.

    The flags of the model (`training`, `requires_grad`) are taken as they are. What of the request is used: inputs,
    mode, loss, precision, and how gradients are cleared. `variables` hold output and loss afterwards; without them,
    nothing does.

    Raises:
        UsageError: the output is a generator; the loss is no scalar tensor, or does not depend on a parameter.
    """
    mark("forward")
    held = LoopVariables() if variables is None else variables  # as long as a script's variables live
    value = run_forward(model, request, device_type, mark, held)
    if value is None:
        return
    if request.zero_grad == "before-backward":
        (model if optimizer is None else optimizer).zero_grad(set_to_none=request.set_to_none)
    mark("backward")
    value.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        mark("optimizer")
        optimizer.step()
        if request.zero_grad == "after-step":
            optimizer.zero_grad(set_to_none=request.set_to_none)


def run_forward(
    model: nn.Module,
    request: StepRequest,
    device_type: str,
    mark: Mark = lambda part: None,
    variables: LoopVariables | None = None,
) -> torch.Tensor | None:
    """The loss of the step of this module's definition, None at inference; `variables` hold it, and the output.

    Raises:
        UsageError: as `run_step`.
    """
    held = LoopVariables() if variables is None else variables
    if request.mode == "infer":
        with (
            torch.inference_mode() if request.inference_mode else torch.no_grad(),
            autocast(device_type, request.precision),
        ):
            held.out = model(*request.args, **request.kwargs)
            _check_output(held.out)
        return None
    with autocast(device_type, request.precision):
        held.out = model(*request.args, **request.kwargs)
        _check_output(held.out)
        mark("loss")
        held.loss = (default_loss if request.loss is None else request.loss)(held.out)
    _check_loss(held.loss)
    return held.loss


def default_loss(out: Any) -> torch.Tensor:
    """The output's own loss (`find_own_loss`) if there is one, else the sum of its floating-point tensors.

    The tensors are those of the output's pytree and of dataclasses in it, each summed (half precision in float32, which
    an fp16 sum would overflow) and the sums added from left to right.

    Raises:
        UsageError: the output holds no floating-point tensor.
    """
    own, _ = find_own_loss(out)
    if own is not None:
        return own
    total: torch.Tensor | None = None
    for leaf in iterate_tensors(out):
        if leaf.is_floating_point():
            term = leaf.sum() if leaf.element_size() >= 4 else leaf.float().sum()
            total = term if total is None else total + term
    if total is None:
        raise UsageError(
            f"expected an output with a `.loss` or floating-point tensors to sum, got {_what(out)}; pass loss=, a "
            f"function of the output"
        )
    return total


@contextlib.contextmanager
def autocast(device_type: str, precision: Precision | None) -> Iterator[None]:
    """`torch.autocast(device_type, dtype)`, except that it does not turn itself off where the device is absent.

    The autocast weight cache lives until the outermost autocast ends, as in torch/amp/autocast_mode.py.
    """
    if precision is None:
        yield
        return
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, _AUTOCAST_DTYPES[precision])
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


def set_training(model: nn.Module, mode: Mode) -> None:
    """Put `model` in the state its user would: `train()` or `eval()`, unless the root's flag already says so.

    A model that is already training keeps the submodules its user has put in `eval()` (frozen normalisation).
    """
    if model.training != (mode == "train"):
        with contextlib.suppress(NotImplementedError):  # an exported program stays in the mode it was exported in
            model.train(mode == "train")


def describe(request: StepRequest, optimizer: Optimizer | None) -> Step:
    """The step as a record."""
    common: dict[str, Any] = {"mode": request.mode, "precision": request.precision, "prefetch": request.prefetch}
    common["keep_outputs"] = request.keeps_outputs
    if request.mode == "infer":
        return Step(optimizer=None, loss=None, inference_mode=request.inference_mode, **common)
    common |= {"zero_grad": request.zero_grad, "set_to_none": request.set_to_none}
    loss = "the output's .loss, else the sum of its floating-point tensors"
    if request.loss is not None:
        loss = getattr(request.loss, "__qualname__", type(request.loss).__qualname__)
    name = None if optimizer is None else type(optimizer).__name__
    if optimizer is not None and steps_in_backward(optimizer):
        name = f"{name} within backward"
    return Step(optimizer=name, loss=loss, accumulate=request.accumulate, **common)


# --- optimizers -------------------------------------------------------------------------------------------------------

IN_BACKWARD = "in-backward"
"""The option of an optimizer that steps within backward."""
_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {OPTIMIZER_PRESETS[0]: ("sgd", {"momentum": 0.9})}
_REFUSED = {"lbfgs": "calls the model again from inside step(), which the modelled step does not"}


def _classes() -> dict[str, type[Optimizer]]:
    found = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer)
    }
    return {name: value for name, value in found.items() if value is not Optimizer and name not in _REFUSED}


def make_optimizer(
    spec: OptimizerSpec, params: Iterable[nn.Parameter], *, foreach: bool | None = None
) -> Optimizer | None:
    """The optimizer that `spec` names, over `params`.

    A string is the name of a `torch.optim` class in any case, or `sgd-momentum` (momentum 0.9), with options after a
    colon: `adamw:fused`, `adamw:foreach`, `adamw:forloop`, `sgd:momentum=0.9,nesterov`; `adamw:in-backward` has its
    gradients released (`fxmem.release_gradients`). Everything else is the class's default. `foreach` is which
    implementation to take where neither the options nor the factory says so and the class has the choice; None leaves
    it to torch.

    Raises:
        UsageError: no such optimizer or option; the optimizer refuses these parameters.
    """
    if spec is None:
        return None
    given = list(params)
    if isinstance(spec, Optimizer):
        raise UsageError(f"expected a way to make an optimizer, got a {type(spec).__name__} over other parameters")
    cls, options = _parse(spec) if isinstance(spec, str) else (spec, {})
    steps_within = options.pop(IN_BACKWARD, False)
    if (
        isinstance(cls, type)
        and foreach is not None
        and "foreach" in _list_options(cls)
        and not {"foreach", "fused"} & options.keys()
    ):
        options = {**options, "foreach": foreach}
    try:
        made = cls(given, **options)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise UsageError(
            f"optimizer {_name(spec)} cannot take these {len(given)} parameters: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"expected optimizer factory {_name(spec)} to return a torch.optim.Optimizer, got {type(made).__name__}"
        )
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer {type(made).__name__} {_REFUSED['lbfgs']}; choose another, or None to leave the optimizer out"
        )
    if steps_within:
        release_gradients(made)
    return made


def in_backward(spec: OptimizerSpec) -> OptimizerSpec:
    """The same optimizer with its gradients released."""
    if isinstance(spec, str):
        name, _, options = spec.partition(":")
        return f"{name}:{','.join(filter(None, (options, IN_BACKWARD)))}"

    def make(params: list[nn.Parameter]) -> Optimizer:
        made = make_optimizer(spec, params)
        assert made is not None
        release_gradients(made)
        return made

    return make


def _parse(spec: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    name, _, options = spec.partition(":")
    if name.lower() in OPTIMIZER_LIBRARIES:
        wanted, _, options = options.partition(",")
        cls: Any = library_optimizer(name.lower(), wanted)
        return cls, _read_options(cls, spec, options, {})
    key, preset = _PRESETS.get(name.lower(), (name.lower(), {}))
    if key in _REFUSED:
        raise UsageError(f"optimizer {name!r} {_REFUSED[key]}; choose another, or None to leave the optimizer out")
    classes = _classes()
    if key not in classes:
        raise unknown_optimizer(name, [*classes, *_PRESETS])
    return classes[key], _read_options(classes[key], spec, options, preset)


def _read_options(cls: Callable[..., Any], spec: str, options: str, preset: dict[str, Any]) -> dict[str, Any]:
    """The options after an optimizer's name."""
    known = _list_options(cls)
    chosen = dict(preset)
    for option in filter(None, options.split(",")):
        word, equals, text = (part.strip() for part in option.partition("="))
        word, value = ("foreach", False) if word == "forloop" else (word, _literal(spec, text) if equals else True)
        if word not in (*known, IN_BACKWARD):
            others = [*known, "forloop", IN_BACKWARD]
            raise UsageError(f"{cls.__name__} has no option {word!r}{closest(word, others)}")
        chosen[word] = value
    return chosen


def _literal(spec: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise UsageError(f"expected a number or True or False after '=' in optimizer {spec!r}, got {text!r}") from error


def _list_options(cls: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(cls).parameters if name != "params"]


def _what(out: Any) -> str:
    """Describe an output by its tensors, or else by its type."""
    tensors = dict.fromkeys(f"a tensor of {str(leaf.dtype)[6:]}" for leaf in iterate_tensors(out))
    return ", ".join(tensors) or type(out).__name__


def _name(spec: Any) -> str:
    return repr(spec) if isinstance(spec, str) else getattr(spec, "__qualname__", type(spec).__qualname__)


def _check_output(out: Any) -> None:
    if inspect.isgenerator(out):
        raise UsageError(
            "expected the model to return what it computed, got a generator, whose body has not run; return "
            "list(...) of it"
        )


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        came = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(f"expected the loss to be a tensor of one element, got {came}")
    if not value.requires_grad:
        raise UsageError(
            "the loss does not depend on any parameter that requires a gradient; unfreeze one, or use mode='infer'"
        )
