"""Floating-point operations of one ATen call, of forward and backward ops alike.

What is counted, for an op as a dispatch mode below autograd sees it:

* One multiply-add is two operations. Where torch's own registry (`torch.utils.flop_counter`) has a formula it is used
  as it is: matrix products, convolutions and attention agree with `FlopCounterMode` to the last digit. So the bias
  added inside `addmm` or a convolution and the softmax inside fused attention are left out, and products with padding
  or with scores that a mask hides are counted. One formula of torch's is wrong and not used: that of a convolution's
  backward multiplies the weight's gradient by the number of groups (32 channels of their own: 32 times too much). Here
  the gradients of input and weight cost what the forward costs, each.
* Elsewhere, the operations of the op's definition. A scalar factor that is exactly 1 costs nothing. Of the branches of
  a piecewise definition the longest counts. The larger or smaller of two values is one operation, hence `relu` and each
  place of a max pool.
* A function of C's `math.h` (`exp`, `sqrt`, `tanh`, `erf`, `pow`, …) is one operation. How many instructions it takes
  differs between machines and libraries, so a count that means the same everywhere can only count the call.
* The sum of n numbers is n operations, not n - 1, as it is for multiply-adds.
* Zero: moving, viewing, creating, selecting, ordering and converting numbers, drawing random ones, and arithmetic on
  integers and booleans, comparisons included. Complex numbers count what their real and imaginary parts cost.
* None, never 0: an op that computes and has no count in its row (`fxmem.hardware.operators`), where `uncounted` says
  why it was left out on purpose.

Composite ops (`aten.linear`, `aten.matmul`, …) reach a dispatch mode only under `torch.inference_mode`; they are None
as well.
"""

from __future__ import annotations

from fxmem.simulation.recording.flops.count import (
    Formula,
    host_bytes,
    is_counted_by_torch,
    moved_bytes,
    op_flops,
    size_of_tensors,
    torch_formulas,
)

__all__ = [
    "Formula",
    "host_bytes",
    "is_counted_by_torch",
    "moved_bytes",
    "op_flops",
    "size_of_tensors",
    "torch_formulas",
]
