"""ATen's operators: one row each, in a module for each family.

    row = find_operator("aten.native_layer_norm_backward.default")

A row says what its FLOPs are, what its kernels allocate unseen on a card and on the CPU, and what kind of operator it
is; and in which file of torch that was read. Nothing here imports torch. What torch's kernels for FakeTensors get wrong
is in `fxmem.simulation.kernels`.
"""

from importlib import import_module
from pkgutil import iter_modules

from fxmem.hardware.operators.registry import (
    OPERATORS,
    Call,
    ConvSettings,
    NamedCall,
    Operator,
    Platform,
    find_operator,
    register,
    short_name,
)

__all__ = [
    "OPERATORS",
    "Call",
    "ConvSettings",
    "NamedCall",
    "Operator",
    "Platform",
    "find_operator",
    "register",
    "short_name",
]

for _module in iter_modules(__path__):
    if _module.name != "registry":
        register(import_module(f"{__name__}.{_module.name}").ROWS)
