"""A real compiled step on the CPU. Inductor's own C++ kernels are left unbuilt, which allocate nothing; allocations,
extern kernels, the C++ engine and AOTAutograd's runtime are real."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

import fxmem
from fxmem._torch.common import patch
from fxmem._torch.compiler.dynamo import fresh_dynamo
from fxmem._torch.compiler.inductor import own_files
from fxmem.records.validation import Measurement
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.validation.profiler_log import WORKSPACE_KERNELS, WRAPPER_PRODUCTS
from tests.simulation.recording.compiled.models import Case

SET_ASIDE = (*WORKSPACE_KERNELS, *WRAPPER_PRODUCTS)
"""Extern kernels whose scratch is set aside: those of eager code, and products as inductor's wrappers call them."""


def _unbuilt(original: Any) -> Callable[..., Any]:
    return lambda *_, **__: lambda *_, **__: None


def believe_the_cpu() -> AbstractContextManager[None]:
    """What the CPU says that it has, it has: inductor would build a program for each of some of its kinds of vectors,
    four seconds each. `TORCHINDUCTOR_VEC_ISA_OK` does so for the others."""
    from torch._inductor.cpu_vec_isa import VecISA

    return patch(VecISA, "check_build", lambda _: lambda *_: True)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inductor's own kernels are left unbuilt, and its files in no cache of the user's."""
    from torch._inductor.async_compile import AsyncCompile

    with own_files(), patch(AsyncCompile, "cpp_pybinding", _unbuilt), patch(AsyncCompile, "cpp", _unbuilt):
        yield


def measure_compiled(case: Case, mode: str) -> tuple[Measurement, list[str]]:
    """Measure a step of the compiled model; with the reasons of dynamo's graph breaks."""
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
        without_kernels(),
        fresh_dynamo(breaks.append),
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
