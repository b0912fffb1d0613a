"""A real compiled step on the CPU. Inductor's own C++ kernels are left unbuilt, which allocate nothing; allocations,
extern kernels, the C++ engine and AOTAutograd's runtime are real."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import fxmem
from fxmem._torch.common import patch
from fxmem._torch.compiler.dynamo import fresh_dynamo
from fxmem._torch.compiler.inductor import own_files
from fxmem.records.validation import Measurement
from fxmem.simulation.analysis import Analysis
from fxmem.simulation.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.profiler_log import WORKSPACE_KERNELS
from tests.simulation.compiled.models import Case

SET_ASIDE = (*WORKSPACE_KERNELS, "aten.mm.out", "aten.addmm.out", "aten.bmm.out")
"""Extern kernels whose scratch is set aside: those of eager code, and products as inductor's wrappers call them, for
which oneDNN lays out bfloat16 anew."""


def _unbuilt(original: Any) -> Callable[..., Any]:
    return lambda *_, **__: lambda *_, **__: None


def measure_compiled(case: Case, mode: str) -> tuple[Measurement, list[str]]:
    """Measure a step of the compiled model; with the reasons of dynamo's graph breaks."""
    from torch._inductor.async_compile import AsyncCompile

    named = isinstance(case.inputs, dict)
    request = StepRequest(
        args=() if named else (case.inputs,),
        kwargs=case.inputs if named else {},
        target="cpu",
        mode=mode,  # type: ignore[arg-type]
        optimizer=case.optimizer,
        precision=case.precision,  # type: ignore[arg-type]
    )
    case.model.train(mode == "train")
    breaks: list[str] = []
    with (
        warnings.catch_warnings(action="ignore"),
        own_files(),
        fresh_dynamo(breaks.append),
        patch(AsyncCompile, "cpp_pybinding", _unbuilt),
        patch(AsyncCompile, "cpp", _unbuilt),
    ):
        compiled: Any = torch.compile(case.model, dynamic=case.dynamic)
        return measure_cpu(compiled, request, set_aside=SET_ASIDE), breaks


def predict_compiled(case: Case, mode: str) -> Analysis:
    """Predict the same step."""
    return fxmem.analyze(
        case.model,
        case.inputs,
        mode=mode,  # type: ignore[arg-type]
        optimizer=case.optimizer,
        precision=case.precision,
        target="cpu",
        compile={"dynamic": case.dynamic},
    )
