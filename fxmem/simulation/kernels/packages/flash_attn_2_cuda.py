"""FlashAttention-2 as flash-attn has it: attention of batches, of packed sequences, with a cache of keys and values.

Read in csrc/flash_attn/flash_api.cpp of FlashAttention-2 2.8.3. Shapes are `(B, S, H, D)`, those of packed sequences
`(all tokens, H, D)`; FLOPs are those of all scores, as torch counts them, with `max_seqlen` keys for each query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.hardware.operators import flash_head, flash_splits
from fxmem.records.units import round_up
from fxmem.simulation.kernels.packages import Package, register

PACKAGE = Package(
    module="flash_attn_2_cuda",
    release="FlashAttention-2 2.8.3",
    python="flash_attn",
    operators="flash_attn",
    install="FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation flash-attn",
)
register("flash-attn-2-cuda", PACKAGE)
kernel = PACKAGE.kernel
_SOURCE = "flash_api.cpp"


def _floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties().multi_processor_count)


def _split_keys(q: Tensor, batch: int, heads: int, queries: int, keys: int, size: int, splits: int = 0) -> Any:
    """Sums of each part of the keys, where they are taken apart (`set_params_splitkv`)."""
    parts = splits or flash_splits(batch, heads, queries, keys, size, _multiprocessors())
    rows = parts, batch, heads, queries
    return (_floats(q, *rows), _floats(q, *rows, flash_head(size))) if parts > 1 else None


def _is_grouped(q: Tensor, k: Tensor, queries: int, left: int, right: int, slopes: Any) -> bool:
    """Whether the heads of a group are taken as its queries: one token of each sequence, for which causal is no mask,
    and no other mask."""
    return queries == 1 and q.shape[-2] > k.shape[-2] and left < 0 and right < 0 and slopes is None


def _flops(q: Tensor, k: Tensor, *_: Any) -> int:
    return 4 * q.numel() * k.shape[1]


@kernel(_SOURCE, flops=_flops)
def fwd(  # noqa: PLR0913 - the kernel's own
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> Any:
    """The result, log-sum-exps `(B, H, S)`, the scores if they are asked for, seed and offset."""
    batch, queries, heads, size = whole = q.shape
    keys, groups = k.shape[1:3]
    left, right = (-1 if each >= keys else each for each in (left, right))
    is_grouped = p_dropout == 0 and _is_grouped(q, k, queries, left, right, alibi_slopes)
    if is_grouped:
        q = q.reshape(batch, groups, heads // groups, size).transpose(1, 2)
        queries, heads = heads // groups, groups
    made = torch.empty_like(q) if out is None else out
    statistics = _floats(q, batch, heads, queries)
    scores = (batch, heads, round_up(queries, 128), round_up(keys, 128)) if return_softmax else (0,)
    kept = q.new_empty(scores)
    parts = _split_keys(q, batch, heads, queries, keys, size) if p_dropout == 0 else None
    state = q.new_empty(2, dtype=torch.int64)
    del parts
    if is_grouped:
        made, statistics = made.transpose(1, 2).reshape(whole), statistics.reshape(batch, -1, 1)
    return made, statistics, kept, state


def _packed_flops(q: Tensor, k: Tensor, *rest: Any) -> int:
    return 4 * q.numel() * int(rest[9])


@kernel(_SOURCE, flops=_packed_flops)
def varlen_fwd(  # noqa: PLR0913 - the kernel's own
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> Any:
    """The same of packed sequences, with log-sum-exps `(H, all tokens)`; keys are taken apart in decoding alone."""
    batch, (_, heads, size) = cu_seqlens_q.numel() - 1, q.shape
    groups, queries, whole = k.shape[-2], max_seqlen_q, q.shape
    is_grouped = p_dropout == 0 and _is_grouped(q, k, queries, left, right, alibi_slopes)
    if is_grouped:
        queries, heads = heads // groups, groups
        q = q.reshape(batch, groups, queries, size).transpose(1, 2).reshape(batch * queries, groups, size)
    made = torch.empty_like(q) if out is None else out
    statistics = _floats(q, heads, q.shape[0])
    scores = (batch, heads, round_up(queries, 128), round_up(max_seqlen_k, 128)) if return_softmax else (0,)
    kept = q.new_empty(scores)
    parts = _split_keys(q, batch, heads, queries, max_seqlen_k, size) if is_grouped else None
    state = q.new_empty(2, dtype=torch.int64)
    del parts
    if is_grouped:
        made = made.reshape(batch, queries, heads, size).transpose(1, 2).reshape(whole)
        statistics = statistics.reshape(heads * queries, batch)
    return made, statistics, kept, state


def _backward(q: Tensor, k: Tensor, v: Tensor, given: Any, sums: Any, rows: Any, copies: int) -> Any:
    """Gradients; a float copy of that of queries, of which deterministic kernels sum several; those of keys and values
    for every head of queries, summed in the end."""
    made = [torch.empty_like(like) if each is None else each for each, like in zip(given, (q, k, v), strict=True)]
    heads, groups, size = q.shape[-2], k.shape[-2], q.shape[-1]
    statistics = _floats(q, *sums)
    summed = _floats(q, *((copies,) if copies > 1 else ()), *rows, heads, flash_head(size))
    if heads != groups:
        whole = [k.new_empty((*k.shape[:-2], heads, size)) for _ in range(2)]
        for target, each in zip(made[1:], whole, strict=True):
            torch.sum(each.reshape(*k.shape[:-1], heads // groups, size), -2, out=target)
    del summed
    return *made, statistics


def _copies(deterministic: bool, batch: int, heads: int) -> int:
    return -(-_multiprocessors() // (batch * heads)) if deterministic else 1


def _backward_flops(dout: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    return 10 * q.numel() * k.shape[1]


@kernel(_SOURCE, flops=_backward_flops)
def bwd(  # noqa: PLR0913 - the kernel's own
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    *_: Any,
) -> Any:
    """Gradients, and sums over each row of gradient times result."""
    batch, queries, heads, _size = q.shape
    rows = round_up(queries, 128)
    copies = _copies(deterministic, batch, heads)
    return _backward(q, k, v, (dq, dk, dv), (batch, heads, rows), (batch, rows), copies)


def _packed_backward_flops(dout: Tensor, q: Tensor, k: Tensor, *rest: Any) -> int:
    return 10 * q.numel() * int(rest[10])


@kernel(_SOURCE, flops=_packed_backward_flops)
def varlen_bwd(  # noqa: PLR0913 - the kernel's own
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    *_: Any,
) -> Any:
    """The same of packed sequences, with 128 rows between each of them and the next."""
    batch, heads = cu_seqlens_q.numel() - 1, q.shape[1]
    rows = q.shape[0] + 128 * batch
    return _backward(q, k, v, (dq, dk, dv), (heads, rows), (rows,), _copies(deterministic, batch, heads))


def _cache_flops(q: Tensor, k_cache: Tensor, *rest: Any) -> int:
    return 4 * q.numel() * _cached_keys(k_cache, rest[8])


def _cached_keys(k_cache: Tensor, block_table: Any) -> int:
    return int(k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]))


@kernel(_SOURCE, flops=_cache_flops)
def fwd_kvcache(  # noqa: PLR0913 - the kernel's own
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    alibi_slopes: Any,
    out: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    left: int,
    right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> Any:
    """The result and log-sum-exps. Heads of a size that is no multiple of 8 are padded, in the cache as well."""
    batch, queries, heads, size = whole = q.shape
    keys, groups = _cached_keys(k_cache, block_table), k_cache.shape[2]
    is_grouped = size % 8 == 0 and _is_grouped(q, k_cache, queries, left, right, alibi_slopes)
    if is_grouped:
        q = q.reshape(batch, groups, heads // groups, size).transpose(1, 2)
        queries, heads = heads // groups, groups
    padded = round_up(size, 8)
    if padded != size:
        q, *widened = (torch.nn.functional.pad(each, (0, padded - size)) for each in (q, k_cache, v_cache))
    made = torch.empty_like(q) if out is None or padded != size else out
    statistics = _floats(q, batch, heads, queries)
    if padded != size:
        widened += [torch.nn.functional.pad(each, (0, padded - size)) for each in (k, v) if each is not None]
    parts = _split_keys(q, batch, heads, queries, keys, padded, num_splits)
    del parts
    if padded != size:
        made = made[..., :size] if out is None else out.copy_(made[..., :size])
    if is_grouped:
        made, statistics = made.transpose(1, 2).reshape(whole), statistics.reshape(batch, -1, 1)
    return made, statistics
