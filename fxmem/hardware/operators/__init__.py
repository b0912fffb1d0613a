"""ATen's operators: one row each, in a module for each family.

    row = find_operator("aten.native_layer_norm_backward.default")

A row says what its FLOPs are, what its kernels allocate unseen on a card and on the CPU, and what kind of operator it
is; and in which file of torch that was read. Nothing here imports torch. What torch's kernels for FakeTensors get wrong
is in `fxmem.simulation.kernels`.
"""

from importlib import import_module
from pkgutil import iter_modules

from fxmem.hardware.operators.attention import flash_head as flash_head
from fxmem.hardware.operators.attention import flash_splits as flash_splits
from fxmem.hardware.operators.registry import OPERATORS as OPERATORS
from fxmem.hardware.operators.registry import Call as Call
from fxmem.hardware.operators.registry import ConvSettings as ConvSettings
from fxmem.hardware.operators.registry import NamedCall as NamedCall
from fxmem.hardware.operators.registry import Operator as Operator
from fxmem.hardware.operators.registry import Platform as Platform
from fxmem.hardware.operators.registry import find_operator as find_operator
from fxmem.hardware.operators.registry import register
from fxmem.hardware.operators.registry import short_name as short_name

for _module in iter_modules(__path__):
    if _module.name != "registry":
        register(import_module(f"{__name__}.{_module.name}").ROWS)
