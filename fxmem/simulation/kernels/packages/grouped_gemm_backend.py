"""Products of a mixture's experts, as grouped_gemm has them.

Read in csrc/grouped_gemm.cu of grouped_gemm 0.1.6. By cuBLAS, with a handle of its own, it allocates nothing of
torch's; sizes on the card are those of a build with CUTLASS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.simulation.kernels.packages import Package

PACKAGE = Package(
    module="grouped_gemm_backend",
    release="grouped_gemm 0.1.6",
    python="grouped_gemm",
    install="git clone https://github.com/tgale96/grouped_gemm, and PYTHONPATH=grouped_gemm before the command",
)


def _flops(a: Tensor, b: Tensor, c: Tensor, sizes: Any, trans_a: bool, trans_b: bool) -> int:
    return 2 * a.numel() * (b.shape[1] if trans_b else b.shape[-1])


@PACKAGE.kernel("csrc/grouped_gemm.cu", flops=_flops)
def gmm(a: Tensor, b: Tensor, c: Tensor, sizes: Tensor, trans_a: bool, trans_b: bool) -> None:
    """The product is written to `c`, which the package's Python allocates. CUTLASS has the arguments of each expert:
    three pitches, three addresses, a size."""
    if sizes.is_cuda:
        described = [a.new_empty(sizes.numel() * each, dtype=torch.int8) for each in (*[8] * 6, 12)]
        del described
