"""cuBLAS workspaces: allocated through the caching allocator, kept for good or for each product.

Which of the two, and the sizes, depend on the release (`hardware/releases.py`). Source:
`aten/src/ATen/cuda/CublasHandlePool.cpp`.
- `getCurrentCUDABlasHandle` sets a workspace for its (handle, stream) pair and keeps it in a process-wide map until
  `torch._C._cuda_clearCublasWorkspaces()`. Handles belong to threads, so a training step keeps two workspaces as soon
  as both sides multiply matrices: the caller's thread runs the forward, autograd's device thread the backward. Each
  further stream adds its own. From 2.15 on each product allocates its own and frees it when it returns.
- cuBLASLt runs on the same handle. In 2.11 it keeps a second block of its own per pair, allocated at the first Lt
  matmul, whose size is cut to the cuBLAS workspace's; in 2.12 to 2.14 it uses the cuBLAS one; from 2.15 on a product
  has either the one or the other. `TORCH_CUBLASLT_UNIFIED_WORKSPACE` sets it, where workspaces are kept.
- `CUBLAS_WORKSPACE_CONFIG=:SIZE:COUNT…` (KiB) and `CUBLASLT_WORKSPACE_SIZE` (KiB) override; what cannot be parsed is
  ignored with a warning, as here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

from fxmem.errors import UsageError
from fxmem.hardware.op_classes import OP_CLASSES
from fxmem.hardware.releases import find_release
from fxmem.hardware.tensor_layouts import TensorLayout, TensorLike, read_layout
from fxmem.records.profile import Bytes, Record, Target

_LARGE = 32 << 20
_OTHER = 2 * (4096 << 10) + 8 * (16 << 10)
"""`:4096:2:16:8`."""
_LT = 1024 << 10


class CublasWorkspaces(Record):
    """The workspaces of cuBLAS on a target."""

    handle_bytes: Bytes
    """For each thread that multiplies matrices (once per stream)."""
    lt_bytes: Bytes
    """For a cuBLASLt matmul: on top for each such thread, or, where none is kept, instead; 0: it uses the other."""
    is_kept: bool
    """Whether they stay once allocated; otherwise every product allocates one and frees it."""
    torch_version: str
    """The release whose defaults these are; another than the one asked for when that one is not in the table."""
    notes: tuple[str, ...] = ()
    """Settings that were ignored, as torch ignores them."""

    def held_bytes(self, *, threads: int, lt_threads: int) -> int:
        """Total for a process.

        Args:
            threads: how many threads multiply matrices: 1 at inference, 2 when forward and backward both do.
            lt_threads: how many of them run a cuBLASLt matmul (`uses_cublaslt`).
        """
        return threads * self.handle_bytes + lt_threads * self.lt_bytes


CUBLAS_VARIABLES: Final = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DISABLE_ADDMM_CUDA_LT",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
)
"""Variables of the environment that the functions here read."""


def cublas_workspaces(target: Target, torch_version: str, environ: Mapping[str, str]) -> CublasWorkspaces:
    """The workspaces of cuBLAS on the target.

    Args:
        target: a CUDA target.
        torch_version: e.g. `2.11.0+cu130`.
        environ: the environment of the run that is predicted.

    Raises:
        UsageError: the target is no GPU, or the torch version cannot be read.
    """
    if target.capability is None:
        raise UsageError(f"expected a CUDA target for a cuBLAS workspace, got {target.name!r}")
    row, release = find_release(torch_version)
    is_kept = row.keeps_workspaces or environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    notes: list[str] = []
    handle = _LARGE if target.capability[0] in row.large_workspaces else _OTHER
    lt = _LT
    if (config := environ.get("CUBLAS_WORKSPACE_CONFIG")) is not None:
        pools = re.findall(r":([0-9]+):([0-9]+)", config)
        if pools:
            handle = sum(int(size) * int(count) << 10 for size, count in pools)
        else:
            notes.append(f"CUBLAS_WORKSPACE_CONFIG={config!r} is not of the form :SIZE:COUNT and is ignored")
    if (config := environ.get("CUBLASLT_WORKSPACE_SIZE")) is not None:
        if number := re.match(r"\s*\+?([0-9]+)", config):
            lt = int(number[1]) << 10
        else:
            notes.append(f"CUBLASLT_WORKSPACE_SIZE={config!r} is not a number of KiB and is ignored")
    unified = environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1" if row.shares_with_lt else "")
    if is_kept and unified != "0":
        lt = 0 if unified == "1" else min(lt, handle)
    return CublasWorkspaces(
        handle_bytes=handle, lt_bytes=lt, is_kept=is_kept, torch_version=release, notes=tuple(notes)
    )


def uses_cublas(op: str, torch_version: str) -> bool:
    """Whether an ATen op runs on a cuBLAS handle, whose workspace its thread then allocates."""
    found = OP_CLASSES.get(_name(op))
    if found is None or not found.uses_cublas:
        return False
    return _name(op) != "_int_mm" or find_release(torch_version)[0].integers_use_cublas


def uses_cublaslt(op: str, args: Sequence[object], environ: Mapping[str, str]) -> bool:
    """Whether an ATen op runs in cuBLASLt's workspace: `addmm` with a 1-d bias to fuse, and the scaled product.

    The product of integers runs through cuBLASLt without a workspace of its own (`int8_gemm`).

    Args:
        op: the op's name, e.g. `aten.addmm.default`.
        args: its positional arguments; for `addmm`, bias and the two matrices (beta and alpha are taken to be 1).
        environ: `DISABLE_ADDMM_CUDA_LT=1` sends `addmm` to cuBLAS.

    Source: `isInputCompliesAddmmCudaLt`, `aten/src/ATen/native/cuda/Blas.cpp`, torch 2.11.
    """
    name = _name(op)
    if name == "_scaled_mm":
        return True
    if name not in ("addmm", "_addmm_activation") or environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return False
    bias, first, second = (read_layout(cast(TensorLike, tensor)) for tensor in args[:3])
    fusable = bias.rank == 1 and bias.shape[0] == second.shape[1] and bias.is_contiguous()
    return (
        fusable
        and min(*first.shape, *second.shape) > 1
        and first.dtype in ("float16", "bfloat16", "float32", "float64")
    )


def matmul_copies(op: str, args: Sequence[object]) -> tuple[int, ...]:
    """Bytes of dense copies that a matrix product makes of operands BLAS cannot read. They are freed when it returns.

    They come after the result. BLAS wants one dimension of stride 1 and the other at least as long as a row; an
    expanded gradient (all strides 0, from `sum().backward()`) is the common case that is neither.

    Source: `prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas`, `aten/src/ATen/native/cuda/`
    (`cuBlasCommonArgs.h`, `Blas.cpp`), torch 2.11.
    """
    return tuple(
        operand.nbytes
        for operand in product_operands(_name(op), args)
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
    ordered = sorted(
        ((step, size) for size, step in zip(shape, stride, strict=True) if size != 1), key=lambda pair: pair[0]
    )
    expected = 1
    for step, size in ordered:
        if step != expected:
            return False
        expected *= size
    return True


def _name(op: str) -> str:
    return op.removeprefix("aten.").removeprefix("aten::").split(".")[0]
