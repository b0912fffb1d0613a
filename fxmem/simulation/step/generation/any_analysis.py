"""What a question may be about: a step of a model, or a generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxmem.records.names import AnyMode
from fxmem.records.profile import Target
from fxmem.simulation.step.analysis import Analysis, analyze, analyze_step
from fxmem.simulation.step.generation.generation import Generation, GenerationRequest
from fxmem.simulation.step.generation.recorded_generation import generate, generate_step
from fxmem.simulation.step.request import StepRequest

AnyAnalysis = Analysis | Generation


def analyze_request(model: torch.nn.Module, request: StepRequest) -> AnyAnalysis:
    """Analyse what is asked for of a model."""
    return generate_step(model, request) if isinstance(request, GenerationRequest) else analyze_step(model, request)


def analyze_any(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    inputs: Any,
    *,
    mode: AnyMode,
    target: str | Target,
    progress: Callable[[str], None] | None,
    options: dict[str, Any],
) -> AnyAnalysis:
    """`fxmem.analyze` with these options; `fxmem.generate` for the mode "generate"."""
    if mode == "generate":
        return generate(model, inputs, target=target, progress=progress, **options)
    return analyze(model, inputs, mode=mode, target=target, progress=progress, **options)
