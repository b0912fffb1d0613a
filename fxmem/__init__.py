"""fxmem predicts the memory of a PyTorch training step from the model alone, GPU-free.

Importing the package imports neither torch nor anything else: a public name brings its module along when it is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxmem.checkpointing import checkpoint, keep, release_gradients, uncheckpoint
    from fxmem.memory.by_layer import by_layer
    from fxmem.memory.by_line import by_line
    from fxmem.memory.comparison import compare
    from fxmem.memory.report_reader import load_plan
    from fxmem.records.plan import Plan
    from fxmem.simulation.analysis import Analysis, analyze
    from fxmem.simulation.generation import Generation, generate
    from fxmem.simulation.kernel_settings import KernelSettings
    from fxmem.simulation.program import RecordedProgram, mark, mark_step, record
    from fxmem.validation.validate import validate
    from fxmem.validation.validate_program import validate_program
    from fxmem.whatif.advice import advise
    from fxmem.whatif.card_fit import cards
    from fxmem.whatif.max_batch import max_batch
    from fxmem.whatif.serve_size import serve_size
    from fxmem.whatif.shard import shard
    from fxmem.whatif.verified_plan import plan

__all__ = [
    "Analysis",
    "Generation",
    "KernelSettings",
    "Plan",
    "RecordedProgram",
    "__version__",
    "advise",
    "analyze",
    "by_layer",
    "by_line",
    "cards",
    "checkpoint",
    "compare",
    "generate",
    "keep",
    "load_plan",
    "mark",
    "mark_step",
    "max_batch",
    "plan",
    "record",
    "release_gradients",
    "serve_size",
    "shard",
    "uncheckpoint",
    "validate",
    "validate_program",
]

__version__ = "0.1.0"

_HOMES = {
    "Analysis": "fxmem.simulation.analysis",
    "analyze": "fxmem.simulation.analysis",
    "Generation": "fxmem.simulation.generation",
    "generate": "fxmem.simulation.generation",
    "KernelSettings": "fxmem.simulation.kernel_settings",
    "Plan": "fxmem.records.plan",
    "RecordedProgram": "fxmem.simulation.program",
    "record": "fxmem.simulation.program",
    "advise": "fxmem.whatif.advice",
    "by_layer": "fxmem.memory.by_layer",
    "by_line": "fxmem.memory.by_line",
    "cards": "fxmem.whatif.card_fit",
    "checkpoint": "fxmem.checkpointing",
    "compare": "fxmem.memory.comparison",
    "keep": "fxmem.checkpointing",
    "load_plan": "fxmem.memory.report_reader",
    "mark": "fxmem.simulation.program",
    "mark_step": "fxmem.simulation.program",
    "max_batch": "fxmem.whatif.max_batch",
    "plan": "fxmem.whatif.verified_plan",
    "release_gradients": "fxmem.checkpointing",
    "serve_size": "fxmem.whatif.serve_size",
    "shard": "fxmem.whatif.shard",
    "uncheckpoint": "fxmem.checkpointing",
    "validate": "fxmem.validation.validate",
    "validate_program": "fxmem.validation.validate_program",
}


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for a public one

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # so that the next use does not come through here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
