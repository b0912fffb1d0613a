"""Generation: a prefill and a few decode steps are recorded, and the others are made by arithmetic."""

from fxmem.simulation.step.generation.generation import Generation, GenerationRequest
from fxmem.simulation.step.generation.recorded_generation import (
    AnyAnalysis,
    analyze_any,
    analyze_request,
    check_generates,
    choose_cache,
    generate,
    generate_step,
)

__all__ = [
    "AnyAnalysis",
    "Generation",
    "GenerationRequest",
    "analyze_any",
    "analyze_request",
    "check_generates",
    "choose_cache",
    "generate",
    "generate_step",
]
