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
from fxmem.simulation.kernels.packages import Call, Package

PACKAGE = Package(
    module="flash_attn_2_cuda",
    release="FlashAttention-2 2.8.3",
    python="flash_attn",
    operators="flash_attn",
    install="FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation flash-attn",
)
kernel = PACKAGE.kernel
_SOURCE = "flash_api.cpp"
_MASK = "is_causal left right softcap"
_OUTER = "cu_seqlens_q cu_seqlens_k"
_LONGEST = "max_seqlen_q max_seqlen_k p_dropout softmax_scale zero_tensors"
_FORWARD = f"q k v out alibi_slopes p_dropout softmax_scale {_MASK} return_softmax generator"
_PACKED = f"q k v out {_OUTER} seqused_k leftpad_k block_table alibi_slopes {_LONGEST} {_MASK} return_softmax generator"
_GRADIENTS = "dout q k v out softmax_lse dq dk dv"
_BACKWARD = f"{_GRADIENTS} alibi_slopes p_dropout softmax_scale {_MASK} deterministic generator rng_state"
_PACKED_BACKWARD = f"{_GRADIENTS} {_OUTER} alibi_slopes {_LONGEST} {_MASK} deterministic generator rng_state"
_CACHED = f"""q k_cache v_cache k v cache_seqlens rotary_cos rotary_sin cache_batch_idx cache_leftpad block_table
alibi_slopes out softmax_scale {_MASK} rotary_interleaved num_splits"""


def _floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties().multi_processor_count)


def _split_keys(q: Tensor, batch: int, heads: int, queries: int, keys: int, size: int, splits: int = 0) -> Any:
    """Sums of each part of the keys, where they are taken apart (`set_params_splitkv`)."""
    parts = splits or flash_splits(batch, heads, queries, keys, size, _multiprocessors())
    rows = parts, batch, heads, queries
    return (_floats(q, *rows), _floats(q, *rows, flash_head(size))) if parts > 1 else None


def _is_grouped(call: Call, k: Tensor, queries: int) -> bool:
    """Whether the heads of a group are taken as its queries: one token of each sequence, for which causal is no mask,
    no other mask, and no dropout."""
    has_mask = call.left >= 0 or call.right >= 0 or call.alibi_slopes is not None
    return queries == 1 and call.q.shape[-2] > k.shape[-2] and not has_mask and not getattr(call, "p_dropout", 0)


def _scores(call: Call, batch: int, heads: int, queries: int, keys: int) -> tuple[int, ...]:
    return (batch, heads, round_up(queries, 128), round_up(keys, 128)) if call.return_softmax else (0,)


@kernel(_SOURCE, flops=lambda call: 4 * call.q.numel() * call.k.shape[1], takes=_FORWARD)
def fwd(call: Call) -> Any:
    """The result, log-sum-exps `(B, H, S)`, the scores if they are asked for, seed and offset."""
    q, k = call.q, call.k
    batch, queries, heads, size = whole = q.shape
    keys, groups = k.shape[1:3]
    call.left, call.right = (-1 if each >= keys else each for each in (call.left, call.right))
    is_grouped = _is_grouped(call, k, queries)
    if is_grouped:
        q = q.reshape(batch, groups, heads // groups, size).transpose(1, 2)
        queries, heads = heads // groups, groups
    made = torch.empty_like(q) if call.out is None else call.out
    statistics = _floats(q, batch, heads, queries)
    kept = q.new_empty(_scores(call, batch, heads, queries, keys))
    parts = _split_keys(q, batch, heads, queries, keys, size) if call.p_dropout == 0 else None
    state = q.new_empty(2, dtype=torch.int64)
    del parts
    if is_grouped:
        made, statistics = made.transpose(1, 2).reshape(whole), statistics.reshape(batch, -1, 1)
    return made, statistics, kept, state


@kernel(_SOURCE, flops=lambda call: 4 * call.q.numel() * int(call.max_seqlen_k), takes=_PACKED)
def varlen_fwd(call: Call) -> Any:
    """The same of packed sequences, with log-sum-exps `(H, all tokens)`; keys are taken apart in decoding alone."""
    q, groups, queries, keys = call.q, call.k.shape[-2], call.max_seqlen_q, call.max_seqlen_k
    batch, (_, heads, size) = call.cu_seqlens_q.numel() - 1, q.shape
    is_grouped, whole = _is_grouped(call, call.k, queries), q.shape
    if is_grouped:
        queries, heads = heads // groups, groups
        q = q.reshape(batch, groups, queries, size).transpose(1, 2).reshape(batch * queries, groups, size)
    made = torch.empty_like(q) if call.out is None else call.out
    statistics = _floats(q, heads, q.shape[0])
    kept = q.new_empty(_scores(call, batch, heads, queries, keys))
    parts = _split_keys(q, batch, heads, queries, keys, size) if is_grouped else None
    state = q.new_empty(2, dtype=torch.int64)
    del parts
    if is_grouped:
        made = made.reshape(batch, queries, heads, size).transpose(1, 2).reshape(whole)
        statistics = statistics.reshape(heads * queries, batch)
    return made, statistics, kept, state


def _backward(call: Call, batch: int, sums: Any, rows: Any) -> Any:
    """Gradients; a float copy of that of queries, of which deterministic kernels sum several; those of keys and values
    for every head of queries, summed in the end."""
    q, k = call.q, call.k
    given = ((call.dq, q), (call.dk, k), (call.dv, call.v))
    made = [torch.empty_like(like) if each is None else each for each, like in given]
    heads, groups, size = q.shape[-2], k.shape[-2], q.shape[-1]
    copies = -(-_multiprocessors() // (batch * heads)) if call.deterministic else 1
    statistics = _floats(q, *sums)
    summed = _floats(q, *((copies,) if copies > 1 else ()), *rows, heads, flash_head(size))
    if heads != groups:
        whole = [k.new_empty((*k.shape[:-2], heads, size)) for _ in range(2)]
        for target, each in zip(made[1:], whole, strict=True):
            torch.sum(each.reshape(*k.shape[:-1], heads // groups, size), -2, out=target)
    del summed
    return *made, statistics


@kernel(_SOURCE, flops=lambda call: 10 * call.q.numel() * call.k.shape[1], takes=_BACKWARD)
def bwd(call: Call) -> Any:
    """Gradients, and sums over each row of gradient times result."""
    batch, queries, heads, _size = call.q.shape
    rows = round_up(queries, 128)
    return _backward(call, batch, (batch, heads, rows), (batch, rows))


@kernel(_SOURCE, flops=lambda call: 10 * call.q.numel() * int(call.max_seqlen_k), takes=_PACKED_BACKWARD)
def varlen_bwd(call: Call) -> Any:
    """The same of packed sequences, with 128 rows between each of them and the next."""
    batch = call.cu_seqlens_q.numel() - 1
    rows = call.q.shape[0] + 128 * batch
    return _backward(call, batch, (call.q.shape[1], rows), (rows,))


def _cached_keys(call: Call) -> int:
    return int(call.k_cache.shape[1] * (1 if call.block_table is None else call.block_table.shape[1]))


@kernel(_SOURCE, flops=lambda call: 4 * call.q.numel() * _cached_keys(call), takes=_CACHED)
def fwd_kvcache(call: Call) -> Any:
    """The result and log-sum-exps. Heads of a size that is no multiple of 8 are padded, in the cache as well."""
    q, out = call.q, call.out
    batch, queries, heads, size = whole = q.shape
    keys, groups = _cached_keys(call), call.k_cache.shape[2]
    is_grouped = size % 8 == 0 and _is_grouped(call, call.k_cache, queries)
    if is_grouped:
        q = q.reshape(batch, groups, heads // groups, size).transpose(1, 2)
        queries, heads = heads // groups, groups
    padded = round_up(size, 8)
    if padded != size:
        caches = (q, call.k_cache, call.v_cache)
        q, *widened = (torch.nn.functional.pad(each, (0, padded - size)) for each in caches)
    made = torch.empty_like(q) if out is None or padded != size else out
    statistics = _floats(q, batch, heads, queries)
    if padded != size:
        fresh = (each for each in (call.k, call.v) if each is not None)
        widened += [torch.nn.functional.pad(each, (0, padded - size)) for each in fresh]
    parts = _split_keys(q, batch, heads, queries, keys, padded, call.num_splits)
    del parts
    if padded != size:
        made = made[..., :size] if out is None else out.copy_(made[..., :size])
    if is_grouped:
        made, statistics = made.transpose(1, 2).reshape(whole), statistics.reshape(batch, -1, 1)
    return made, statistics
