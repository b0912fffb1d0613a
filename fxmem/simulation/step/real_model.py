"""A model and its inputs with real values, for a real run.

The model handed in is not touched: what runs is a copy. A model on meta has no values; its parameters get small random
ones, which changes no memory. What is an index or a mask (an integer or boolean buffer with dimensions) would have to
be right, so such a model is refused in favour of a function that builds it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch.common import FakeTensor, tree_leaves, tree_map_only
from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.simulation.asked.values import RealReads, hangs_on_values
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.fake_model import plain_model
from fxmem.simulation.step.function_copies import Rebinder
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import run_forward, set_training

_PARAMETER_STD = 0.02


def real_model(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A copy of `model` on the CPU with real values, or what the factory builds.

    Tensors that are one stay one.

    Raises:
        UsageError: it cannot be copied; it is on meta and holds an index or a mask; the factory returned no module.
        AnalysisError: the factory raised.
    """
    if not isinstance(model, nn.Module):
        return _build(model)
    model, _ = plain_model(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    elsewhere = [(name, each) for name, each in tensors if _is_valueless(each) or each.device.type != "cpu"]
    memo: dict[int, Any] = {id(each): _real_state(name, each) for name, each in elsewhere}
    kind, instead = type(model).__name__, "pass a function that builds it instead"
    try:
        made = copy.deepcopy(model, memo)
        Rebinder(memo).model(model)
    except Exception as error:
        raise UsageError(f"{kind} cannot be copied ({one_line(error)}); {instead}") from error
    for module in made.modules():
        for leaf in tree_leaves(list(vars(module).values())):
            if isinstance(leaf, torch.Tensor) and _is_valueless(leaf):
                raise UsageError(f"{kind} holds a tensor without values that is no parameter or buffer; {instead}")
    return made


def _build(factory: Callable[[], nn.Module]) -> nn.Module:
    if not callable(factory):
        raise UsageError(f"expected a torch.nn.Module or a function that builds one, got {type(factory).__name__}")
    try:
        made = factory()
    except FxmemError:
        raise
    except Exception as error:
        raise user_code_error(error, "building the model") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"expected the factory to return a torch.nn.Module, got {type(made).__name__}")
    is_here = all(tensor.device.type == "cpu" for tensor in (*made.parameters(), *made.buffers()))
    return made if is_here else real_model(made)


def _real_state(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer on the CPU: a copy, or made-up values for one on meta."""
    parameter = isinstance(tensor, nn.Parameter)
    if not _is_valueless(tensor):
        values = tensor.detach().cpu()
    else:
        values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if parameter and values.is_floating_point():
            values.normal_(std=_PARAMETER_STD)
        elif values.is_floating_point() or values.dim() == 0:
            values.fill_(1)
        else:
            what = f"{name} is on meta and holds {values.dtype}, which the model may index with"
            raise UsageError(f"{what}; pass a function that builds the model instead")
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if parameter else values


def real_values(tree: Any) -> Any:
    """Nested arguments on the CPU: copies of their tensors, and made-up values for tensors that have none.

    Made-up values are standard normal where floating-point, 0 where integer (an index that is always in range) and True
    where boolean. Tensors that are one stay one; those that only share a storage no longer do.
    """
    return tree_map_only(torch.Tensor, functools.cache(_real_input), tree)  # each tensor once


def _real_input(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_valueless(tensor):
        return torch.empty_like(tensor, device="cpu").copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
    values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if tensor.is_floating_point() or tensor.is_complex():
        return values.normal_().requires_grad_(tensor.requires_grad)
    return values.fill_(tensor.dtype is torch.bool)


def _is_valueless(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


# --- one forward and loss of a model for real, on the CPU, for what it reads of its tensors ---------------------------


def read_really(model: torch.nn.Module, request: StepRequest) -> RealReads:
    """Run forward and loss of a copy on the CPU, and keep what is read.

    Raises:
        UsageError: the model cannot be copied, or has an index or a mask without values.
        AnalysisError: it raised.
    """
    reads = RealReads()
    with process_unchanged(), torch.device("cpu"):
        torch.manual_seed(0)
        made = real_model(model)
        args, kwargs = real_values((request.args, request.kwargs))
        step = dataclasses.replace(request, args=args, kwargs=kwargs)
        set_training(made, request.mode)
        try:
            with _Watch(reads), _WatchLists(reads):
                run_forward(made, step, "cpu")
        except FxmemError:
            raise
        except Exception as error:
            raise AnalysisError(f"the model on real values raised {one_line(error)}") from error
    return reads


class _Watch(torch_common.DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, reads: RealReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if hangs_on_values(func, args):
            self._reads.note(func, args)
        return func(*args, **(kwargs or {}))


class _WatchLists(TorchFunctionMode):
    """Sees `tolist`: of a real tensor it is no operator, of a fake one many."""

    def __init__(self, reads: RealReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            for number in args[0].detach().flatten():
                self._reads.note(torch_fakes.NUMBER_OF, (number,))
        return func(*args, **(kwargs or {}))
