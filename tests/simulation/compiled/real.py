"""A real compiled step on the CPU. Inductor's own C++ kernels are left unbuilt, which allocate nothing; allocations,
extern kernels, the C++ engine and AOTAutograd's runtime are real."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxmem._torch.common import patch
from fxmem._torch.inductor import fresh_dynamo, own_files
from fxmem.records.validation import Measurement
from fxmem.simulation.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu


def _unbuilt(original: Any) -> Callable[..., Any]:
    return lambda *_, **__: lambda *_, **__: None


def measure_compiled(model: nn.Module, inputs: Any, **settings: Any) -> Measurement:
    """Measure a step of the compiled model."""
    from torch._inductor.async_compile import AsyncCompile

    request = StepRequest(args=(inputs,), target="cpu", **settings)
    model.train(request.mode == "train")
    with (
        warnings.catch_warnings(action="ignore"),
        own_files(),
        fresh_dynamo(lambda _: None),
        patch(AsyncCompile, "cpp_pybinding", _unbuilt),
        patch(AsyncCompile, "cpp", _unbuilt),
    ):
        compiled: Any = torch.compile(model)
        return measure_cpu(compiled, request)
