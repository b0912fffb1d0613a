"""Matrix products: their FLOPs, whether they run on cuBLAS, and the copies of operands that BLAS cannot read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from fxmem.hardware.hidden_memory import Events, alloc, output
from fxmem.hardware.operators.registry import OPERATORS, Call, FlopRule, NamedCall, Operator, short_name
from fxmem.hardware.releases import find_release
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout, TensorLike, read_layout

_SMALL_PRODUCT = 400
"""Multiplications of an item of a batch below which a loop of torch's own computes it on the CPU."""
_SMALL_HALF_PRODUCT = 16**3
"""The same in half precision."""


def uses_cublas(op: str, torch_version: str) -> bool:
    """Whether an ATen op runs on a cuBLAS handle, whose workspace its thread then allocates."""
    found = OPERATORS.get(short_name(op))
    if found is None or not found.uses_cublas:
        return False
    return short_name(op) != "_int_mm" or find_release(torch_version)[0].integers_use_cublas


def uses_cublaslt(op: str, args: Sequence[object], environ: Mapping[str, str]) -> bool:
    """Whether an ATen op runs in cuBLASLt's workspace: `addmm` with a 1-d bias to fuse, and the scaled product.

    The product of integers runs through cuBLASLt without a workspace of its own (`int8_gemm`).

    Args:
        op: the op's name, e.g. `aten.addmm.default`.
        args: its positional arguments; for `addmm`, bias and the two matrices (beta and alpha are taken to be 1).
        environ: `DISABLE_ADDMM_CUDA_LT=1` sends `addmm` to cuBLAS.

    Source: `isInputCompliesAddmmCudaLt`, `aten/src/ATen/native/cuda/Blas.cpp`, torch 2.11.
    """
    name = short_name(op)
    if name == "_scaled_mm":
        return True
    if name not in ("addmm", "_addmm_activation") or environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return False
    bias, first, second = (read_layout(cast(TensorLike, tensor)) for tensor in args[:3])
    fusable = bias.rank == 1 and bias.shape[0] == second.shape[1] and bias.is_contiguous()
    known = first.dtype in ("float16", "bfloat16", "float32", "float64")
    return fusable and known and min(*first.shape, *second.shape) > 1


def matmul_copies(op: str, args: Sequence[object]) -> tuple[int, ...]:
    """Bytes of dense copies that a matrix product makes of operands BLAS cannot read. They are freed when it returns.

    They come after the result. BLAS wants one dimension of stride 1 and the other at least as long as a row; an
    expanded gradient (all strides 0, from `sum().backward()`) is the common case that is neither.

    Source: `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas`, `aten/src/ATen/native/cuda/`
    (`cuBlasCommonArgs.h`, `Blas.cpp`), torch 2.11.
    """
    return tuple(
        operand.nbytes
        for operand in product_operands(short_name(op), args)
        if operand.numel and not (operand.is_blas_matrix() or _dense(operand.shape[-2:], operand.stride[-2:]))
    )


def product_operands(short: str, args: Sequence[object]) -> list[TensorLayout]:
    """The two matrices, or batches of them, that a product multiplies; none for another operator.

    Args:
        short: the operator, without `aten.` and overload.
        args: its positional arguments.
    """
    first = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}.get(short)
    return [] if first is None else [read_layout(cast(TensorLike, each)) for each in args[first : first + 2]]


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Strides of size-1 dimensions say nothing."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _on_card(call: Call) -> Events | None:
    """The copies, and cuBLAS's workspace where each product allocates its own."""
    platform = call.platform
    if platform.cublas is None or not uses_cublas(call.name, platform.torch_version):
        return None
    copies = [alloc(f"dense operand {i}", nbytes) for i, nbytes in enumerate(matmul_copies(call.name, call.args))]
    lt = uses_cublaslt(call.name, call.args, platform.environ)
    if platform.cublas.keeps_lt if lt else platform.cublas.is_kept:
        return (output("result"), *copies) if copies else None
    nbytes = platform.cublas.lt_bytes if lt else platform.cublas.handle_bytes
    return output("result"), *copies, alloc("cuBLASLt workspace" if lt else "cuBLAS workspace", nbytes)


def _on_cpu(call: Call) -> Events | None:
    """`addmm_impl_cpu_`, `bmm_out_or_baddbmm_` (LinearAlgebra.cpp): matrices that BLAS cannot read are copied.

    MKL reads batches; where it cannot, each item is a product of its own. oneDNN, which computes half precision
    (`checksize` in mkldnn/Matmul.cpp), may copy both to a layout of its own, as the machine wants it.
    """
    first, second = operands = product_operands(call.name, call.args)
    size = first.shape[-2] * first.shape[-1] * second.shape[-1] if first.rank > 1 < second.rank else 0
    if ITEM_BYTES[first.dtype] < 4:
        return None if size <= _SMALL_HALF_PRODUCT else (output("result"), alloc("oneDNN's copies", None))
    copied = [each for each in operands if each.numel and not each.is_blas_matrix()]
    is_batch = first.rank == 3
    if not copied or (is_batch and size < _SMALL_PRODUCT):
        return None
    nbytes = (each.nbytes // (each.shape[0] if is_batch else 1) for each in copied)
    return output("result"), *(alloc(f"contiguous matrix {number}", each) for number, each in enumerate(nbytes, 1))


def _flops(a: TensorLayout, b: TensorLayout) -> int:
    """A multiply-add for each element of `a` and column of `b`."""
    return 2 * a.numel * b.shape[-1]


def _grouped_flops(c: NamedCall) -> int:
    """Groups add up to one product, unless both operands are 3-d: that is a batch. They split the rows (2d x 3d), the
    columns (3d x 2d) or the contraction (2d x 2d)."""
    a: TensorLayout = c.self
    b: TensorLayout = c.mat2
    batch = a.shape[0] if a.rank == b.rank == 3 else 1
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


_CUTLASS = Operator(_grouped_flops, kind="matrix product", counts_macs=True, is_product=True)


_CUTLASS = Operator(_grouped_flops, kind="matrix product", counts_macs=True, is_product=True)


_CUTLASS = Operator(_grouped_flops, kind="matrix product", counts_macs=True, is_product=True)


def _gemm(flops: FlopRule | None, *one_dtype: int, multiplies_matrices: bool = True) -> Operator:
    """A product that cuBLAS computes; torch's own formula goes before this one, which is for what it refuses."""
    cpu = _on_cpu if multiplies_matrices else None
    return replace(_CUTLASS, flops=flops, uses_cublas=True, one_dtype=one_dtype, cuda=_on_card, cpu=cpu)


def _integers_or_composite(*, is_product: bool = False) -> Operator:
    """Without a count; composite ones are in a step only where something keeps torch from decomposing them."""
    return Operator(kind="matrix product", is_product=is_product, uses_cublas=True, cuda=_on_card)


def _cusparse_workspace(call: Call) -> Events:
    """What `cusparseSpMM_bufferSize` asks for."""
    return output("result"), alloc("cuSPARSE workspace", None)


_NUMBER = Operator(lambda c: 2 * c.read, kind="matrix product", counts_macs=True, uses_cublas=True, cuda=_on_card)

ROWS = {
    "LinearAlgebra.cpp, cuda/Blas.cpp, cuda/cuBlasCommonArgs.h": {
        "mm bmm": _gemm(lambda c: _flops(c.self, c.mat2), 0, 1),
        "addmm": _gemm(lambda c: _flops(c.mat1, c.mat2), 0, 1, 2),
        "baddbmm": _gemm(lambda c: _flops(c.batch1, c.batch2), 0, 1, 2),
        "addbmm": _gemm(lambda c: _flops(c.batch1, c.batch2), multiplies_matrices=False),
        "mv": _gemm(lambda c: 2 * c.read, multiplies_matrices=False),
        "addmv": _gemm(lambda c: 2 * c.mat.numel, multiplies_matrices=False),
        "dot vdot": _NUMBER,
        "_scaled_mm": _gemm(None, multiplies_matrices=False),
        "_addmm_activation": replace(_integers_or_composite(), cpu=_on_cpu),
        "_int_mm": replace(_integers_or_composite(is_product=True), flops=0),
        "linear": _integers_or_composite(is_product=True),
        "matmul": _integers_or_composite(),
        "_trilinear": Operator(uncounted="rare in models"),
    },
    "sparse/SparseTensorMath.cpp, sparse/cuda/SparseCUDATensorMath.cu": {
        # Called with the values of a sparse matrix alone.
        "_sparse_addmm": Operator(
            lambda c: 2 * c.mat1.numel * c.mat2.shape[1], kind="matrix product", cuda=_cusparse_workspace
        ),
    },
    "cuda/GroupedBlas.cpp, GroupedMMUtils.h": {"_grouped_mm _scaled_grouped_mm": _CUTLASS},
}
