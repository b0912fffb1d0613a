"""What ATen's heavy operators are: one row each for matrix products, convolutions, attention and recurrent layers.

Nearly all FLOPs of a step are in them. Whoever has to know one of them by its name asks this table: FLOP formulas and
multiply-adds, cuBLAS's workspaces, the planners and what applies their plans, and the check of dtypes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["matrix product", "convolution", "attention", "recurrent layer"]


@dataclass(frozen=True)
class OpClass:
    """One operator, by its name without `aten.` and overload."""

    kind: Kind
    counts_macs: bool = True
    """Its FLOPs are multiply-adds, two each."""
    is_product: bool = True
    """A region of a checkpoint plan may keep its result, so that only what is cheap runs again (`Region.keeps`)."""
    uses_cublas: bool = False
    """It runs on a cuBLAS handle, and so allocates its thread's workspace."""
    one_dtype: tuple[int, ...] = ()
    """Positions of arguments that its kernel takes in one dtype only, which torch's fake kernel does not check."""


def _gemm(*one_dtype: int) -> OpClass:
    return OpClass("matrix product", uses_cublas=True, one_dtype=one_dtype)


_CUTLASS = OpClass("matrix product")
_NUMBER = OpClass("matrix product", is_product=False, uses_cublas=True)
_CONVOLUTION = OpClass("convolution")
_CONVOLUTION_OF_A_LIBRARY = OpClass("convolution", is_product=False)
_ATTENTION = OpClass("attention")
_UNCOUNTED_ATTENTION = OpClass("attention", counts_macs=False)
_RECURRENT = OpClass("recurrent layer", counts_macs=False, is_product=False)

OP_CLASSES: Final[dict[str, OpClass]] = {
    "mm": _gemm(0, 1),
    "bmm": _gemm(0, 1),
    "addmm": _gemm(0, 1, 2),
    "baddbmm": _gemm(0, 1, 2),
    "addbmm": _gemm(),
    "mv": _gemm(),
    "addmv": _gemm(),
    "_scaled_mm": _gemm(),
    "_grouped_mm": _CUTLASS,
    "_scaled_grouped_mm": _CUTLASS,
    "dot": _NUMBER,
    "vdot": _NUMBER,
    "_int_mm": OpClass("matrix product", counts_macs=False, uses_cublas=True),  # of integers
    "_addmm_activation": OpClass("matrix product", counts_macs=False, is_product=False, uses_cublas=True),
    # Composite: a step has them only where something keeps torch from decomposing them.
    "linear": OpClass("matrix product", counts_macs=False, uses_cublas=True),
    "matmul": OpClass("matrix product", counts_macs=False, is_product=False, uses_cublas=True),
    "convolution": OpClass("convolution", one_dtype=(0, 1, 2)),
    "_convolution": _CONVOLUTION,
    "convolution_overrideable": _CONVOLUTION,
    "mkldnn_convolution": OpClass("convolution", counts_macs=False),
    "cudnn_convolution": _CONVOLUTION_OF_A_LIBRARY,
    "_slow_conv2d_forward": _CONVOLUTION_OF_A_LIBRARY,
    "_scaled_dot_product_flash_attention": _ATTENTION,
    "_scaled_dot_product_efficient_attention": _ATTENTION,
    "_scaled_dot_product_cudnn_attention": _ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION,
    "_scaled_dot_product_fused_attention_overrideable": _ATTENTION,
    "_flash_attention_forward": _ATTENTION,
    "_efficient_attention_forward": _ATTENTION,
    "_cudnn_attention_forward": _UNCOUNTED_ATTENTION,
    "_scaled_dot_product_attention_math": _UNCOUNTED_ATTENTION,
    "_scaled_dot_product_attention_math_for_mps": _UNCOUNTED_ATTENTION,
    "_cudnn_rnn": _RECURRENT,
    "mkldnn_rnn_layer": _RECURRENT,
}

MAC_OPS: Final = frozenset(name for name, op in OP_CLASSES.items() if op.counts_macs)
"""Operators whose FLOPs are multiply-adds, two each."""
UNKNOWN_MAC_OPS: Final = frozenset(name for name, op in OP_CLASSES.items() if op.kind == "recurrent layer")
"""Operators with multiply-adds among other operations, counted as FLOPs in one sum."""


@functools.cache
def is_product(name: str) -> bool:
    """Whether an operator (its overload's name, such as `aten.addmm.default`) is a product that a plan may keep.

    Planner and application number a region's products alike, one from a profile, the other as they run: both ask here.
    """
    namespace, _, rest = name.partition(".")
    found = OP_CLASSES.get(rest.partition(".")[0])
    return namespace == "aten" and found is not None and found.is_product


def scaled_dot_product_ops() -> list[str]:
    """The attention operators that take a batch of queries, keys and values, and count multiply-adds."""
    return [name for name in OP_CLASSES if name.startswith("_scaled_dot_product_") and name in MAC_OPS]
