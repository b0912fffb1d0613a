"""fxmem predicts the memory of a PyTorch training step from the model alone, GPU-free.

Importing the package imports neither torch nor anything else: a public name brings its module along when it is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what a type checker sees of the table below
    from fxmem.checkpointing import checkpoint as checkpoint
    from fxmem.checkpointing import keep as keep
    from fxmem.checkpointing import release_gradients as release_gradients
    from fxmem.checkpointing import uncheckpoint as uncheckpoint
    from fxmem.memory.by_layer import by_layer as by_layer
    from fxmem.memory.by_line import by_line as by_line
    from fxmem.memory.comparison import compare as compare
    from fxmem.memory.report_reader import load_plan as load_plan
    from fxmem.records.plan import Plan as Plan
    from fxmem.simulation.kernels.kernel_settings import KernelSettings as KernelSettings
    from fxmem.simulation.program import RecordedProgram as RecordedProgram
    from fxmem.simulation.program import mark as mark
    from fxmem.simulation.program import mark_step as mark_step
    from fxmem.simulation.program import record as record
    from fxmem.simulation.step.analysis import Analysis as Analysis
    from fxmem.simulation.step.analysis import analyze as analyze
    from fxmem.simulation.step.generation import Generation as Generation
    from fxmem.simulation.step.generation import generate as generate
    from fxmem.validation.validate import validate as validate
    from fxmem.validation.validate import validate_program as validate_program
    from fxmem.whatif.advice import advise as advise
    from fxmem.whatif.card_fit import cards as cards
    from fxmem.whatif.kv_cache import kv_cache as kv_cache
    from fxmem.whatif.max_batch import max_batch as max_batch
    from fxmem.whatif.shard import shard as shard
    from fxmem.whatif.sweep import sweep as sweep
    from fxmem.whatif.verified_plan import plan as plan

__version__ = "0.2.0"

_HOMES = {
    name: f"fxmem.{home}"
    for home, names in {
        "checkpointing": "checkpoint keep release_gradients uncheckpoint",
        "memory.by_layer": "by_layer",
        "memory.by_line": "by_line",
        "memory.comparison": "compare",
        "memory.report_reader": "load_plan",
        "records.plan": "Plan",
        "simulation.kernels.kernel_settings": "KernelSettings",
        "simulation.program": "RecordedProgram mark mark_step record",
        "simulation.step.analysis": "Analysis analyze",
        "simulation.step.generation": "Generation generate",
        "validation.validate": "validate validate_program",
        "whatif.advice": "advise",
        "whatif.card_fit": "cards",
        "whatif.kv_cache": "kv_cache",
        "whatif.max_batch": "max_batch",
        "whatif.shard": "shard",
        "whatif.sweep": "sweep",
        "whatif.verified_plan": "plan",
    }.items()
    for name in names.split()
}
"""The public names, each with the module that has it."""
__all__ = ["__version__", *sorted(_HOMES)]


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for a public one

    def __getattr__(name: str) -> object:
        if name == "testing":  # a module, which is there without an import of its own
            return import_module("fxmem.testing")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # so that the next use does not come through here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
