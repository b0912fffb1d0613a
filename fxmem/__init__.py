"""fxmem predicts the memory of a PyTorch training step from the model alone, with no GPU.

Importing the package imports neither torch nor anything else: a public name brings its module along when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxmem.advising import advise
    from fxmem.analysis import Analysis, analyze
    from fxmem.card_fitting import cards
    from fxmem.checkpointing import checkpoint, keep, uncheckpoint
    from fxmem.comparing import compare
    from fxmem.layers import by_layer
    from fxmem.lines import by_line
    from fxmem.plan_records import Plan
    from fxmem.promising import plan
    from fxmem.reports import load_plan
    from fxmem.settings import KernelSettings
    from fxmem.sizing import max_batch
    from fxmem.validation import validate

__all__ = [
    "Analysis",
    "KernelSettings",
    "Plan",
    "__version__",
    "advise",
    "analyze",
    "by_layer",
    "by_line",
    "cards",
    "checkpoint",
    "compare",
    "keep",
    "load_plan",
    "max_batch",
    "plan",
    "uncheckpoint",
    "validate",
]

__version__ = "0.1.0"

_HOMES = {
    "Analysis": "fxmem.analysis",
    "analyze": "fxmem.analysis",
    "KernelSettings": "fxmem.settings",
    "Plan": "fxmem.plan_records",
    "advise": "fxmem.advising",
    "by_layer": "fxmem.layers",
    "by_line": "fxmem.lines",
    "cards": "fxmem.card_fitting",
    "checkpoint": "fxmem.checkpointing",
    "compare": "fxmem.comparing",
    "keep": "fxmem.checkpointing",
    "load_plan": "fxmem.reports",
    "max_batch": "fxmem.sizing",
    "plan": "fxmem.promising",
    "uncheckpoint": "fxmem.checkpointing",
    "validate": "fxmem.validation",
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
