"""Which modules can be analysed, which part of a wrapper is, and which are refused.

Wrappers that change where or how fast a module runs, not what it keeps, are taken off: `torch.compile`, `DataParallel`,
`DistributedDataParallel`. What runs outside torch's Python (TorchScript, `torch.ao` quantised modules), has no shapes
yet (lazy modules), spreads one tensor over several devices (FSDP, DTensor) or has a number of values that its shape
does not tell (sparse tensors) is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.ao.nn.quantized import FloatFunctional

from fxmem._torch import modules as torch_modules
from fxmem._torch import wrappers as torch_wrappers
from fxmem.errors import AnalysisError, UsageError
from fxmem.simulation.recording.assumptions import COMPILED

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
        if _compiles(model):
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


def _compiles(model: nn.Module) -> bool:
    """Whether any of it is compiled: by `torch.compile(module)` or `module.compile()`."""
    return any(
        torch_wrappers.wrapped_module(module) is not None or torch_modules.is_compiled_in_place(module)
        for module in model.modules()
    )


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
