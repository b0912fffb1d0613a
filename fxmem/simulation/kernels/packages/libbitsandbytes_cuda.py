"""Kernels of bitsandbytes: 4-bit and 8-bit weights, LLM.int8, optimizers with small states.

Its library in CUDA is called by kernels in Python (bitsandbytes/backends/cuda/ops.py of release 0.50.2), which allocate
all there is; `csrc` allocates nothing on a card.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.simulation.kernels.packages import Package

_KERNELS: Final = "bitsandbytes.backends.cuda.ops"


def _register_kernels(_: Any) -> torch_common.Patches:
    """Import the kernels of the card, as the library does itself unless it was imported where there was none."""
    with contextlib.suppress(ImportError):
        importlib.import_module(_KERNELS)
    return iter(())


def _call_rows(kernels: Any) -> torch_common.Patches:
    """The kernels in Python call rows in the place of the library."""
    library = importlib.import_module(PACKAGE.module)
    for name in ("_gpu_dispatch_props", "_gemm_4bit_use_custom_cuda"):
        getattr(kernels, name, functools.cache(int)).cache_clear()  # what another card answered
    stand_ins = {
        "lib": library,
        "get_ptr": lambda tensor: tensor,
        "_get_raw_stream": lambda _: 0,
        "_cuda_device_of": lambda _: contextlib.nullcontext(),
        "CUBLAS_Context": SimpleNamespace(get_instance=lambda: SimpleNamespace(get_context=lambda _: None)),
    }
    yield torch_common.replace_all((kernels, name, value) for name, value in stand_ins.items())
    for name in ("str2optimizer32bit", "str2optimizer8bit_blockwise"):
        yield torch_common.replace(kernels, name, dict.fromkeys(getattr(kernels, name), (library.update_states,) * 3))


def _give_rows(functional: Any) -> torch_common.Patches:
    """So do other packages, which take the library from here: axolotl, Unsloth. Its functions of a CPU stay."""
    rows, real = importlib.import_module(PACKAGE.module), functional.lib

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(rows if name in PACKAGE.kernels else real, name)

    yield torch_common.replace_all([(functional, "lib", Library()), (functional, "get_ptr", lambda tensor: tensor)])


PACKAGE = Package(
    module="libbitsandbytes_cuda",
    release="bitsandbytes 0.50.2",
    python="bitsandbytes",
    operators="bitsandbytes",
    install="pip install bitsandbytes",
    patches={"bitsandbytes": _register_kernels, _KERNELS: _call_rows, "bitsandbytes.functional": _give_rows},
    patches_all=True,
)
kernel = PACKAGE.kernel


def _names(form: str) -> str:
    return " ".join(form.format(dtype) for dtype in ("fp32", "fp16", "bf16"))


def _of_elements(each: int) -> Callable[..., int]:
    """So many operations an element: of `(code, A, absmax, out, blocksize, elements)`, which may be a `c_int`."""
    return lambda *args: each * int(getattr(args[5], "value", args[5]))


_BLOCKS = [f"c{{}}quantize_blockwise_{{{{}}}}{kind}" for kind in ("", "_nf4", "_fp4")]


@kernel("ops.cu", " ".join(_names(each.format("de")) for each in _BLOCKS), _of_elements(1))
def _unpack(*_: Any) -> None:
    """Numbers times the largest of their block are written to what is given."""


@kernel("ops.cu", " ".join(_names(each.format("")) for each in _BLOCKS), _of_elements(2))
def _pack(*_: Any) -> None:
    """The largest of each block, and its numbers by it, are written to what is given."""


@kernel("gemm_4bit.cu", _names("cgemm_4bit_{}"), lambda *args: 2 * args[8] * args[9] * args[10])
def _multiply(*_: Any) -> None:
    """A product with weights that stay packed is written to what is given."""


@kernel("ops.cu", _names("cgemm_4bit_inference_naive_{}"), lambda m, n, k, *_: 2 * m * n * k)
def _multiply_row(*_: Any) -> None:
    """The same of one row."""


@kernel("ops.cu", flops=lambda context, m, n, k, *_: 2 * m * n * k)
def cigemmlt_32(*_: Any) -> int:
    """A product of whole numbers by cuBLASLt, with no workspace, is written to what is given; 0 as it ran."""
    return 0


@kernel("ops.cu", flops=lambda *args: 2 * args[5] * args[6])
def cdequant_mm_int32_fp16(*_: Any) -> None:
    """Whole numbers by those of their row and of their column are written to what is given."""


@kernel("ops.cu", flops=lambda *args: 2 * args[4] * args[5])
def cint8_vector_quant(*_: Any) -> None:
    """The largest of each row, and its numbers by it, are written to what is given."""


@kernel("ops.cu")
def update_states(*_: Any) -> None:
    """Weights and states of an optimizer are written to: all functions of its tables."""
