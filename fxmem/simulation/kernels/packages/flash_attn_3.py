"""FlashAttention-3: attention of batches and of packed sequences, forward and backward.

Read in hopper/flash_api.cpp and hopper/flash_attn_interface.py of release 3.0.0 (0251105a). Shapes are those of
FlashAttention-2; values may have heads of another size. Its Python calls operators that the extension module registers;
it is given the module in their place.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError
from fxmem.records.units import round_up
from fxmem.simulation.kernels.packages import Call, Package


def _call_rows(interface: Any) -> torch_common.Patches:
    yield torch_common.replace(interface, "flash_attn_3_gpu", sys.modules[PACKAGE.module])


PACKAGE = Package(
    module="flash_attn_3._C",
    release="FlashAttention-3 3.0.0",
    python="flash_attn_interface",
    operators="flash_attn_3",
    install="FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation "
    "'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'",
    patches={"flash_attn_interface": _call_rows},
)
kernel = PACKAGE.kernel
_SOURCE = "flash_api.cpp"
_FORWARD = """q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q
max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale
softmax_scale is_causal left right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa
sm_margin"""
_BACKWARD = """dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q
max_seqlen_k softmax_scale is_causal left right softcap deterministic sm_margin"""
_HEADS = (64, 96, 128, 192, 256)
"""Sizes of heads that there are kernels for."""


def _head(size: int) -> int:
    return next((each for each in _HEADS if size <= each), _HEADS[-1])


def _count_keys(call: Call) -> int:
    if getattr(call, "page_table", None) is not None:
        return int(call.page_table.shape[1] * call.k.shape[1])
    return int(call.k.shape[1] if call.cu_seqlens_k is None else call.max_seqlen_k)


def _sum_products(call: Call, of_keys: int, of_values: int) -> int:
    """FLOPs of products of all scores with keys, and with values."""
    size = call.q.shape[-1]
    rows = call.q.numel() // size
    return int(2 * rows * _count_keys(call) * (of_keys * size + of_values * call.v.shape[-1]))


@kernel(_SOURCE, flops=lambda call: _sum_products(call, 1, 1), takes=_FORWARD)
def fwd(call: Call) -> Any:
    """The result, log-sum-exps, and both of each part of the keys where they are taken apart.

    Results are those of queries in bfloat16 where these are in float8.

    Raises:
        AnalysisError: the kernel is to choose itself how many parts there are, by tiles that were not read.
    """
    q, packed, splits = call.q, call.cu_seqlens_q, call.num_splits
    if splits < 1:
        raise AnalysisError(
            f"expected num_splits of at least 1, got {splits}: FlashAttention-3 then chooses by the tiles of its "
            "kernels, which fxmem does not know. Give the number, as in flash_attn_with_kvcache(..., num_splits=1)"
        )
    heads, size = q.shape[-2], call.v.shape[-1]
    dtype = torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype
    made = q.new_empty((*q.shape[:-1], size), dtype=dtype) if call.out is None else call.out
    rows = (heads, q.shape[0]) if packed is not None else (q.shape[0], heads, q.shape[1])
    statistics = q.new_empty(rows, dtype=torch.float32)
    batch = q.shape[0] if packed is None else packed.numel() - 1
    schedule = q.new_empty((4 * round_up(batch, 4) + 1,), dtype=torch.int32)
    parts = (
        (q.new_empty((splits, *rows, size), dtype=torch.float32), q.new_empty((splits, *rows), dtype=torch.float32))
        if splits > 1
        else (None, None)
    )
    del schedule
    return made, statistics, *parts


def _find_tile(size: int, *, is_causal: bool, is_local: bool, is_capped: bool) -> tuple[int, int]:
    """Queries and keys that a block of the backward kernel takes (`kBlockM`, `kBlockN`)."""
    major, minor = torch.cuda.get_device_capability()
    if major >= 9:
        queries = {64: 96 if is_causal and is_capped else 128, 96: 64}
        queries[128] = 64 if is_causal or is_local or is_capped else 80
        return queries.get(size, 64), 128 if size <= 128 else 96 if size <= 192 else 80
    if minor in (6, 9):
        return 64 if size <= 192 else 32, 128 if size <= 96 else 96 if size <= 128 else 64
    return 128 if size <= 64 else 64, 128 if size <= 128 else 80 if size <= 192 else 64


@kernel(_SOURCE, flops=lambda call: _sum_products(call, 3, 2), takes=_BACKWARD)
def bwd(call: Call) -> Any:
    """Two numbers for each row of scores, and sums in float32: of the gradient of queries; where heads share keys, of
    those of keys and values as well. All of these are returned."""
    q, k, v, left, right = call.q, call.k, call.v, call.left, call.right
    packed_q, packed_k = call.cu_seqlens_q, call.cu_seqlens_k
    written = ((call.dq, q), (call.dk, k), (call.dv, v))
    given = [torch.empty_like(like) if each is None else None for each, like in written]
    heads, groups = q.shape[-2], k.shape[-2]
    queries = q.shape[1] if packed_q is None else int(call.max_seqlen_q)
    keys = _count_keys(call)
    left, right = -1 if left >= keys - 1 else left, -1 if right >= queries - 1 else right
    right = 0 if call.is_causal else right
    is_causal = left < 0 and right == 0
    is_local = (left >= 0 or right >= 0) and not is_causal
    size = _head(max(q.shape[-1], v.shape[-1]))
    tile, key_tile = _find_tile(size, is_causal=is_causal, is_local=is_local, is_capped=call.softcap > 0)
    batch = q.shape[0] if packed_q is None else packed_q.numel() - 1
    first: tuple[int, ...] = ()
    if all(each is None for each in (packed_q, packed_k, call.seqused_q, call.seqused_k)):
        first, rows, key_rows = (batch,), round_up(queries, tile), round_up(keys, key_tile)
    else:
        total, key_total = (
            each.shape[0] if packed is not None else batch * each.shape[1]
            for each, packed in ((q, packed_q), (k, packed_k))
        )
        rows, key_rows = round_up(total + batch * tile, tile), round_up(key_total + batch * key_tile, key_tile)

    def sums(*shape: int) -> Tensor:
        made: Tensor = q.new_empty((*first, *shape), dtype=torch.float32)
        return made

    found: list[Tensor | None] = [sums(heads, rows), sums(heads, rows), sums(heads, rows * size)]
    found += [sums(groups, key_rows * size) if heads != groups else None for _ in range(2)]
    counts = [(-(-queries // tile), batch, heads)]
    counts += [(-(-keys // key_tile), batch, groups)] * (2 if heads != groups and call.deterministic else 0)
    semaphores = [q.new_empty(each, dtype=torch.int32) for each in counts]
    del given, semaphores
    return tuple(found)
