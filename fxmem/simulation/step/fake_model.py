"""A stand-in for a model and its inputs, made of FakeTensors on the target's device.

The model is copied, not borrowed: `copy.deepcopy` with every tensor replaced by a fake one of the same shape, strides
and dtype. So the original keeps its weights, gradients, flags, hooks and whatever its forward writes to `self`, and
nothing of its size is allocated. Tensors that are one stay one, and tensors that share a storage share one.

Registered parameters and buffers go to the target's device, as `model.to(device)` would take them; other tensors the
model holds stay on the CPU if that is where they are, as they would (on meta, they go to the target's device).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.nn.quantized import FloatFunctional
from torch.overrides import TorchFunctionMode

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import modules as torch_modules
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.common import FakeTensor, tree_leaves, tree_map_only
from fxmem.errors import AnalysisError, FxmemError, UsageError, one_line
from fxmem.simulation.asked import known_values
from fxmem.simulation.asked.values import RealReads, hangs_on_values
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.recording.assumptions import COMPILED
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.recording.recording import deep_recursion
from fxmem.simulation.step.function_copies import Rebinder, tensors_behind
from fxmem.simulation.step.request import StepRequest
from fxmem.simulation.step.step import run_forward, set_training

# --- a model and its inputs with real values, for a real run ----------------------------------------------------------
# The model handed in is not touched: what runs is a copy. A model on meta has no values; its parameters get small
# random ones, which changes no memory. What is an index or a mask (an integer or boolean buffer with dimensions) would
# have to be right, so such a model is refused in favour of a function that builds it.


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


# --- which modules can be analysed, which part of a wrapper is, and which are refused ---------------------------------
# Wrappers that change where or how fast a module runs, not what it keeps, are taken off: `torch.compile`,
# `DataParallel`, `DistributedDataParallel`. What runs outside torch's Python (TorchScript, `torch.ao` quantised
# modules), has no shapes yet (lazy modules), spreads one tensor over several devices (FSDP, DTensor) or has a number
# of values that its shape does not tell (sparse tensors) is refused.


EXPORTED = "torch.export.exported_program"
"""The module that `ExportedProgram` is defined in; not imported for asking whether something is one."""


def plain_model(model: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """The module to analyse, and what was taken for granted in choosing it.

    Raises:
        UsageError: what was given is an exported program, not a module.
        AnalysisError: a module or a tensor in it cannot be followed without data; the message names it and says what to
            do.
    """
    notes: list[str] = []
    inner: Any = model
    while inner is not None:
        model, inner = inner, torch_wrappers.wrapped_module(inner)
        if inner is not None:
            notes.append(COMPILED)
        elif isinstance(model, nn.DataParallel):
            notes.append("DataParallel is left out: one device takes the whole batch")
            inner = model.module
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            notes.append(_ddp_note(model))
            inner = model.module
    if type(model).__module__ == EXPORTED:
        raise UsageError("expected an nn.Module, got an ExportedProgram; pass program.module()")
    if isinstance(model, nn.Module):
        if any(  # compiled by `torch.compile(module)` or `module.compile()`
            torch_wrappers.wrapped_module(module) is not None or torch_modules.is_compiled_in_place(module)
            for module in model.modules()
        ):
            notes.append(COMPILED)
        for path, module in model.named_modules():
            _check(path, module)
    return model, tuple(notes)


def without_compiled(model: nn.Module) -> nn.Module:
    """`model` itself, the modules that `torch.compile` wraps inside it put in their wrappers' place. Changes the
    model."""
    for module in list(model.modules()):
        for name, child in torch_modules.own_modules(module).items():
            inner = None if child is None else torch_wrappers.wrapped_module(child)
            if inner is not None:
                torch_modules.own_modules(module)[name] = inner
    return model


def _ddp_note(model: nn.parallel.DistributedDataParallel) -> str:
    buckets = sum(each.numel() * each.element_size() for each in model.module.parameters() if each.requires_grad)
    views = bool(getattr(model, "gradient_as_bucket_view", False))
    held = "which its gradients are views of" if views else f"{buckets} bytes beside the gradients"
    return f"DistributedDataParallel is left out, and with it its buckets for reducing gradients ({held})"


_QUANTISED = "torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized"


def _check(path: str, module: nn.Module) -> None:
    what = f"{path or 'the model'} ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise AnalysisError(
            f"expected a module in Python; {what} is TorchScript, which runs in an interpreter of its own. Pass the "
            f"module it was made from{', with that submodule not scripted' if path else ''}."
        )
    # `FloatFunctional` is what a model has in its place before it is quantised.
    if not isinstance(module, FloatFunctional) and type(module).__module__.startswith(_QUANTISED):
        raise AnalysisError(
            f"expected a module that runs on FakeTensors; {what} is quantised by torch.ao, whose packed weights have "
            f"no fake form and no CUDA kernels. Analyse the model before quantisation, or quantise it with "
            f"torchao.quantization.quantize_."
        )
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)):
        raise AnalysisError(
            f"expected a module whole on one device; {what} is sharded by FSDP. Analyse the module before it is "
            f"wrapped, with ranks= and the function that wraps it as parallelize=."
        )
    for name, tensor in torch_modules.own_tensors(module):
        _check_tensor(f"{path}.{name}".lstrip("."), tensor)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise AnalysisError(
            f"expected initialised tensors; {name} gets its shape at the first call. Run the model once on a batch "
            f"(model(batch)), then analyse it."
        )
    if type(tensor).__name__ == "DTensor":
        raise AnalysisError(
            f"expected tensors whole on one device; {name} is a DTensor. Analyse the module before it is distributed, "
            f"with ranks= and the function that distributes it as parallelize=."
        )
    if tensor.layout is not torch.strided:
        raise AnalysisError(
            f"expected dense tensors; {name} is {tensor.layout}, whose number of values its shape does not tell. "
            f"Register its indices and values as tensors of their own and index with them, or analyse with "
            f"{name}.to_dense() for an upper bound."
        )


# --- a stand-in for a model and its inputs, made of FakeTensors on the target's device --------------------------------


def fake_model(model: torch.nn.Module, mode: torch_common.FakeTensorMode, device: torch.device) -> torch.nn.Module:
    """The first of what `fake_copy` returns."""
    return fake_copy(model, mode, device)[0]


def fake_copy(
    model: torch.nn.Module, mode: torch_common.FakeTensorMode, device: torch.device
) -> tuple[torch.nn.Module, Callable[[Any, Mapping[int, torch.Tensor]], Any]]:
    """A copy of `model` whose tensors are fake and, where registered, on `device`; and what makes a function about the
    model one about the copy.

    That takes the function and the fakes of the inputs, by the originals' ids. Other modules and tensors that the
    function has at hand are copied to the device as well: a teacher's weights, the targets.

    Raises AnalysisError for a model that cannot be copied.
    """
    memo: dict[int, Any] = {}
    maker = torch_fakes.Maker(mode)
    with mode:
        for tensors in _by_storage(model):
            memo.update(zip(map(id, tensors), _fakes(tensors, device, maker.empty), strict=True))
        try:
            # What copying a library's class warns of is not its user's doing.
            with _CopyFakes(memo, device), deep_recursion(), warnings.catch_warnings(action="ignore"):
                made = copy.deepcopy(model, memo)
                rebinder = Rebinder(memo, foreach=device.type == "cuda")
                rebinder.model(model)
        except Exception as error:
            raised = f"copying {type(model).__name__} raised {type(error).__name__}: {error}"
            raise AnalysisError(
                f"expected a model that copy.deepcopy can copy; {raised}. Pass a factory (a function that builds the "
                f"model) instead of the model."
            ) from error

    def rebind(function: Any, inputs: Mapping[int, torch.Tensor]) -> Any:
        memo.update(inputs)
        found = [each for each in tensors_behind(function) if id(each) not in memo]
        modules = [each for each in found if isinstance(each, torch.nn.Module)]
        loose = [[each] for each in found if isinstance(each, torch.Tensor) and each.dim()]
        with mode, _CopyFakes(memo, device), deep_recursion():
            for tensors in (*_by_storage(*modules), *loose):
                new = [tensor for tensor in tensors if id(tensor) not in memo]
                memo.update(zip(map(id, new), _fakes(new, device, maker.empty) if new else (), strict=True))
            for module in modules:
                copy.deepcopy(module, memo)
            for module in modules:
                rebinder.model(module)
            return rebinder.function(function)

    return without_compiled(made), rebind


def shadow_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the tree of modules over the same parameters and buffers: to change modules, not tensors."""
    return _copy_model(model, {id(tensor): tensor for tensors in _by_storage(model) for tensor in tensors})


def meta_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose floating-point parameters and buffers are on meta: to change these, too. Others are shared with the
    model."""
    memo: dict[int, Any] = {}
    for tensors in _by_storage(model):
        moved = _fakes(tensors, torch.device("meta")) if tensors[0].is_floating_point() else tensors
        memo.update(zip(map(id, tensors), moved, strict=True))
    return _copy_model(model, memo)


def _copy_model(model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    with deep_recursion():
        made = copy.deepcopy(model, memo)
    Rebinder(memo).model(model)
    return made


def fake_inputs(value: Any, mode: torch_common.FakeTensorMode, device: torch.device) -> Any:
    """The same nested arguments with every tensor replaced by a fake one on `device`."""

    @functools.cache  # tensors that are one stay one
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return _fakes([tensor], device)[0]

    with mode:
        return torch_common.tree_map_only(torch.Tensor, fake, value)


def _by_storage(*models: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for module in itertools.chain.from_iterable(model.modules() for model in models):
        for _, tensor in torch_modules.own_tensors(module):
            key = torch_common.storage_key(tensor) if _is_plain(tensor) else id(tensor)
            groups.setdefault(key, {})[id(tensor)] = tensor
    for group in groups.values():
        yield list(group.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not torch_wrappers.is_wrapper(tensor)
        and not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
    )


def _fakes(
    tensors: list[torch.Tensor], device: torch.device, empty: Callable[..., torch.Tensor] = torch.empty_strided
) -> list[torch.Tensor]:
    """Fakes for tensors that share one storage."""
    first = tensors[0]
    if first.layout is torch.strided and torch_wrappers.is_wrapper(first):
        inside = [torch_wrappers.rebuild(tensor, lambda part: _fakes([part], device)[0]) for tensor in tensors]
        return list(map(_like, tensors, inside))
    if not _is_plain(first):
        kind = "an uninitialised tensor" if first.layout is torch.strided else f"a tensor of layout {first.layout}"
        raise AnalysisError(
            f"expected dense, initialised tensors; got {kind}, whose memory its shape does not tell. "
            "Give the model a dense tensor instead: padded, or of as many rows in all."
        )
    whole = len(tensors) == 1 and first.storage_offset() == 0
    if whole and first.untyped_storage().nbytes() == torch_common.spanned_bytes(first):
        return [_like(first, empty(first.shape, first.stride(), dtype=first.dtype, device=device))]
    base = torch.empty(first.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    return [_like(t, base.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())) for t in tensors]


def _like(original: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    if isinstance(original, torch.nn.Parameter):
        fake = torch_fakes.as_parameter(fake, original.requires_grad)
    elif original.requires_grad:
        fake.requires_grad_()
    if torch_wrappers.is_wrapper(fake):
        return fake
    known_values.give(fake, original)
    vars(fake).update({k: v for k, v in vars(original).items() if not isinstance(v, torch.Tensor)})
    return fake


class _CopyFakes(TorchFunctionMode):
    """Answers `Tensor.__deepcopy__`, for tensors a model keeps elsewhere than among its parameters and buffers."""

    def __init__(self, memo: dict[int, Any], device: torch.device) -> None:
        super().__init__()
        self._memo = memo
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        if id(tensor) not in self._memo:
            self._memo[id(tensor)] = _fakes([tensor], self._device if tensor.is_meta else tensor.device)[0]
        return self._memo[id(tensor)]
