"""Which operators are products: matrix products, convolutions and attention, where nearly all FLOPs of a step are.

A region of a checkpoint plan may keep the results of some of its products, so that only what is cheap is run again
(`Region.keeps`). Planner and application have to number them alike, one from a profile, the other as they run; both ask
here.
"""

from __future__ import annotations

import functools

__all__ = ["is_product"]

_PRODUCTS = frozenset(
    {
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_int_mm",
        "linear",
    }
)
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution"})
_ATTENTION = (
    "_scaled_dot_product_",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)


@functools.cache
def is_product(name: str) -> bool:
    """Whether an operator, given as its qualified overload (`aten.addmm.default`), is one."""
    namespace, _, rest = name.partition(".")
    packet = rest.partition(".")[0]
    if namespace != "aten" or packet.endswith("_backward"):
        return False
    return packet in _PRODUCTS or packet in _CONVOLUTIONS or packet.startswith(_ATTENTION)
