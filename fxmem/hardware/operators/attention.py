"""Attention: its FLOPs, and what the fused kernels allocate beside their results.

Shapes are those of the ATen ops: `(B, H, S, D)` for query, key and value of the `_scaled_dot_product_*` ops. Letters:
B batch, H query heads, Hk key/value heads, Sq and Sk sequence lengths, D head size, Dv head size of the values.

Read in torch 2.11; figures marked (binary) were checked in its `libtorch_cuda.so`:
- flash: `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp` (`mha_fwd`, `mha_bwd`, `set_params_splitkv`,
  `num_splits_heuristic`), FlashAttention-2 (Dao, 2023) with split keys (Flash-Decoding);
- memory-efficient: `…/cuda/attention.cu`, `attention_backward.cu`, `mem_eff_attention/kernel_forward.h`,
  `kernel_backward.h`, `kernels/cutlassB.h`;
- cuDNN: `aten/src/ATen/native/cudnn/MHA.cpp`: one workspace for the call, after the gradients, whose size cuDNN's plan
  decides.

cuDNN's plans for attention compile kernels at run time and want a driver, so they cannot be asked for on a machine
without a GPU as those of convolutions can. Their sizes are simple, though, and were read off once: cuDNN 9.19 behind a
stand-in for the driver's library, graphs as `MHA.cpp` makes them, built with cudnn-frontend 1.18 (torch 2.11's), the
first plan that builds. Of 1,009 random calls on sm_80, 86, 89, 90, 100 and 120 (head sizes 8 to 256, grouped queries,
masks, dropout, lengths that differ) every one takes what is written here. No card has confirmed it.

The results themselves (output, logsumexp, random state; the three gradients) are visible to a fake run and not
repeated. Flash attention 3 and 4, which torch uses only when asked to, are not covered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple

from fxmem.errors import UsageError
from fxmem.hardware.catalogue import device_properties
from fxmem.hardware.hidden_memory import Events, alloc, free, output
from fxmem.hardware.operators.registry import Call, NamedCall, Operator, ScratchRule
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout, read_layout
from fxmem.records.profile import Target
from fxmem.records.units import round_up

Shape = tuple[int, ...]
_FLOAT = ITEM_BYTES["float32"]
CUDNN_ATTENTION_VERSION = "9.19"
"""The cuDNN whose attention workspaces these are."""
_CUDNN_FAMILIES: dict[tuple[int, int], Literal["hopper", "blackwell", "other"]] = {
    **dict.fromkeys(((8, 0), (8, 6), (8, 9), (12, 0)), "other"),
    (9, 0): "hopper",
    (10, 0): "blackwell",
}
"""By compute capability: whose attention engines cuDNN runs there. What is not here was not asked."""


def _flash(call: Call) -> Events:
    """Accumulators of the split-keys kernel, when there are too few blocks to fill the card.

    Both live from after the output and logsumexp until the op returns.
    """
    batch, heads, queries, head_size = call.layout(0).shape
    _, kv_heads, keys, _ = call.layout(1).shape
    dropout_p = _probability(call, 3)
    if queries == 1 and heads > kv_heads and dropout_p == 0 and head_size % 8 == 0:
        # One query per sequence: the query heads of a group are computed as rows.
        queries, heads = heads // kv_heads, kv_heads
    splits = flash_splits(batch, heads, queries, keys, head_size, _multiprocessors(call.card)) if dropout_p == 0 else 1
    rows = (splits, batch, heads, queries)
    results = output("output"), output("logsumexp")
    if splits == 1:
        return results
    parts = [("logsumexp of the splits", rows), ("output of the splits", (*rows, flash_head(head_size)))]
    return *results, *_floats(parts)


def _flash_backward(call: Call) -> Events:
    """Copies of the output and its gradient, which the kernel reads dense as `(B, S, H, D)`; the gradients; the rest.

    All until the op returns: grad_query, grad_key, grad_value; `softmax_d` float `[B, H, ceil128(Sq)]`; `dq_accum`
    float `[B, ceil128(Sq), H, ceil(D)]` (binary), of which deterministic kernels sum several copies; under grouped
    queries `dk` and `dv` for every query head, summed at the end.
    """
    grad, query, key, _, out = (call.layout(position) for position in range(5))
    batch, heads, queries, head_size = query.shape
    _, kv_heads, keys, _ = key.shape
    item = ITEM_BYTES[query.dtype]
    rows, columns = round_up(queries, 128), flash_head(head_size)
    copies = -(-_multiprocessors(call.card) // (batch * heads)) if call.platform.deterministic else 1
    expanded = batch * keys * heads * head_size * item
    grouped = (alloc(f"grad_{what} of every query head", expanded) for what in ("key", "value") if heads != kv_heads)
    read = {"dense grad_output": grad, "dense output": out}
    dense = (alloc(name, query.numel * item) for name, layout in read.items() if not _is_dense_by_rows(layout))
    floats = _floats([("softmax_d", (batch, heads, rows)), ("dq_accum", (copies, batch, rows, heads, columns))])
    return *dense, *_grads(), *floats, *grouped


def _efficient(call: Call) -> Events:
    """Half-precision heads larger than 128 are accumulated in a float copy of the output.

    It lives from after the output until the op returns. Unknown before compute capability 8.0.
    """
    name = "float output"
    query, value = call.layout(0), call.layout(2)
    batch, heads, queries, head_size = query.shape
    results = (output("output"), output("logsumexp"))
    if (call.card.capability or (0, 0)) < (8, 0):
        return *results, alloc(name, None)
    needed = max(head_size, value.shape[3]) > 128 and query.dtype != "float32"
    buffers = _floats([(name, (batch, queries, heads, value.shape[3]))]) if needed else ()
    return *results, *buffers


def _efficient_backward(call: Call, packed: tuple[int, int, int] | None = None) -> Events:
    """The gradient's copy, if it is not dense by rows; grad_query, grad_key, grad_value; `delta`; the workspace.

    `delta`, float `[B, H, Sq]`, is in float32 reduced from a product as large as the output, gone before the rest. The
    kernel's workspace, a few float copies of the gradients, is that of another kernel where there is dropout, and
    unknown before compute capability 8.0. Of packed sequences it is by their number and their largest lengths.
    """
    grad, query, key, value = (call.layout(position) for position in range(4))
    batch, heads, queries, head_size = query.shape
    keys, value_size, dtype = key.shape[2], value.shape[3], query.dtype
    nbytes = batch * heads * queries * value_size * ITEM_BYTES[dtype]
    copy = () if _is_dense_by_rows(grad) else (alloc("dense grad_output", nbytes),)
    delta = _floats([("delta", (batch, heads, queries))])
    if dtype == "float32":
        product, unordered = (batch, queries, heads, value_size), (batch, queries, heads)
        scratch = _floats([("grad_output * output", product), ("delta, unordered", unordered)])
        delta = (*scratch, *delta, *free(*(event.name for event in reversed(scratch))))
    kernel = _backward_kernel(max(head_size, value_size), dtype, _probability(call, 9) > 0, call.card)
    sequences, most, most_keys = packed or (batch, queries, keys)
    sizes = (sequences, heads, most, most_keys, head_size, value_size)
    workspace = None if kernel is None else kernel.workspace_bytes(*sizes, call.platform.deterministic)
    return *copy, *_grads(), *delta, *(() if workspace == 0 else (alloc("workspace", workspace),))


def _by_heads(call: Call, tensors: int, *options: Any) -> Call:
    """A call with `(B, S, H, D)` as one with `(B, H, S, D)`: so many tensors, then these arguments."""
    layouts = (call.layout(position) for position in range(tensors))
    turned = (TensorLayout(_turn(each.shape), _turn(each.stride), each.dtype) for each in layouts)
    return replace(call, args=[*turned, *options])


def _turn(sizes: Shape) -> Shape:
    batch, rows, heads, size = sizes
    return batch, heads, rows, size


def _flash_by_rows(call: Call) -> Events:
    """The same of `(B, S, H, D)`; of packed sequences, `(all tokens, H, D)`, in decoding alone."""
    if call.argument(3) is None:
        return _flash(_by_heads(call, 3, call.args[7]))
    query, key = call.layout(0), call.layout(1)
    if call.args[5] != 1 or query.shape[1] == key.shape[1]:
        return output("output"), output("logsumexp")
    batch = read_layout(call.args[3]).numel - 1
    shapes = (batch, query.shape[1], 1, query.shape[2]), (batch, key.shape[1], call.args[6], key.shape[2])
    layouts = [TensorLayout(shape, shape, query.dtype) for shape in shapes]  # whose strides nobody asks
    return _flash(replace(call, args=[*layouts, layouts[1], call.args[7]]))


def _flash_backward_by_rows(call: Call) -> Events:
    """The same of `(B, S, H, D)`; of packed sequences, with 128 rows between each of them and the next."""
    if call.argument(6) is None:
        return _flash_backward(_by_heads(call, 5))
    grad, query, key, _, out = (call.layout(position) for position in range(5))
    (tokens, heads, size), batch = query.shape, read_layout(call.args[6]).numel - 1
    rows, item = tokens + 128 * batch, ITEM_BYTES[query.dtype]
    copies = -(-_multiprocessors(call.card) // (batch * heads)) if call.platform.deterministic else 1
    read = {"dense grad_output": grad, "dense output": out}
    dense = (alloc(name, each.nbytes) for name, each in read.items() if not each.is_contiguous())
    floats = _floats([("softmax_d", (heads, rows)), ("dq_accum", (copies, rows, heads, flash_head(size)))])
    expanded = key.shape[0] * heads * size * item
    names = ("key", "value") if heads != key.shape[1] else ()
    return *dense, *_grads(), *floats, *(alloc(f"grad_{what} of every query head", expanded) for what in names)


def _efficient_backward_by_rows(call: Call) -> Events:
    """The same of `(B, S, H, D)`. Of packed sequences the workspace is that of as many of the largest length."""
    given = _by_heads(call, 4, *[None] * 5, call.args[11])
    if call.argument(6) is None:
        return _efficient_backward(given)
    return _efficient_backward(given, (read_layout(call.args[6]).numel - 1, int(call.args[8]), int(call.args[9])))


def _cudnn(call: Call) -> Events:
    """One workspace for the call, after the results.

    256 bytes on Hopper; on data-centre Blackwell the dropout mask, if there is dropout; nothing elsewhere. Unknown on
    architectures that were not asked.
    """
    family = _CUDNN_FAMILIES.get(call.card.capability or (0, 0))
    mask = _dropout_mask(call.layout(0).shape, call.layout(1).shape) if _probability(call, 5) > 0 else 0
    own = {"hopper": 128, "blackwell": mask, "other": 0}
    results = map(output, ("seed", "offset", "output", "logsumexp"))
    return *results, *_cudnn_workspace(None if family is None else _align(own[family]))


def _cudnn_backward(call: Call) -> Events:
    """One workspace for the call, after the gradients. An output's gradient is copied if its rows are not dense.

    In the workspace: the queries' gradient in float `[B, H, Sq, D]`; the sum over each row of gradient times output,
    float `[B, H, Sq]`; under grouped queries `dk` and `dv` for every query head. Beside these Hopper's engine takes a
    word or two, the one of data-centre Blackwell the dropout mask, and the one of all others, which Blackwell too runs
    for up to 128 queries or keys without dropout, a second float gradient of the queries `[B, H, ceil8(Sq), D]`.
    Unknown on architectures that were not asked.
    """
    query, key, value = (call.layout(position).shape for position in (1, 2, 3))
    batch, heads, queries, head_size = query
    keys, dropout_p = key[2], _probability(call, 13)
    family = _CUDNN_FAMILIES.get(call.card.capability or (0, 0))
    if family == "blackwell" and dropout_p == 0 and (keys <= 128 or 1 < queries <= 128):
        family = "other"
    own = {
        "hopper": 128,
        "blackwell": _dropout_mask(query, key) if dropout_p > 0 else 0,
        "other": batch * heads * round_up(queries, 8) * head_size * _FLOAT,
    }
    expanded = (round_up(batch * heads * keys * size * 2, 128) for size in (head_size, value[3]))
    grouped = sum(expanded) if heads != key[1] else 0
    graph = batch * heads * queries * (head_size + 1) * _FLOAT
    is_dense = call.layout(0).stride[-1] == 1
    copy = () if is_dense else (alloc("dense grad_output", batch * heads * queries * value[3] * 2),)
    return *_grads(), *copy, *_cudnn_workspace(None if family is None else graph + _align(own[family] + grouped))


def _is_dense_by_rows(tensor: TensorLayout) -> bool:
    """Contiguous as `(B, S, H, D)` while shaped `(B, H, S, D)`."""
    batch, heads, rows, size = tensor.shape
    wanted = (rows * heads * size, size, heads * size, 1)
    return all(n == 1 or a == b for n, a, b in zip((batch, heads, rows, size), tensor.stride, wanted, strict=True))


def _probability(call: Call, position: int) -> float:
    value = call.argument(position, 0.0)
    if not isinstance(value, int | float):
        raise UsageError(f"expected a dropout probability at position {position}, got {type(value).__name__}")
    return float(value)


def _align(plan: int) -> int:
    """The plan's own part is put on a multiple of 128 bytes behind the graph's."""
    return plan and plan + 128


def _dropout_mask(query: Shape, key: Shape) -> int:
    """Bytes of one bit for every score, in blocks of 128 x 128."""
    return query[0] * query[1] * round_up(query[2], 128) * round_up(key[2], 128) // 8


def _cudnn_workspace(nbytes: int | None) -> Events:
    return () if nbytes == 0 else (alloc("cuDNN attention workspace", nbytes),)


class _BackwardKernel(NamedTuple):
    """`AttentionBackwardKernel` for sm_80 and later."""

    rows: int
    """`kBlockSizeI`, queries per block."""
    columns: int
    """`kBlockSizeJ`, keys per block."""
    max_head: int
    """`kMaxK`."""
    staged: bool
    """`kNeedsAccumGradK`: dK and dV are summed in the workspace: half-precision results that do not stay in
    registers."""
    shared_bytes: int
    """`sizeof(SharedStorage)` (binary)."""

    def workspace_bytes(
        self, batch: int, heads: int, queries: int, keys: int, head_size: int, value_size: int, deterministic: bool
    ) -> int:
        """`Params::workspace_size()`."""
        splits = -(-keys // self.columns)
        # The grid's x is num_splits_key, which is still its initial 1 when the heuristic reads it.
        if deterministic or (batch * heads >= 256 and keys <= 2 * self.columns):
            splits = 1
        if self.staged:
            splits = min(splits, 200 // (batch * heads))
        each = self.columns * (round_up(head_size, self.rows) + round_up(value_size, self.rows))
        staged = max(splits, 1) * each if self.staged else 0
        # GradQTempStorage: a lock, a counter and padding, 16 bytes in all, before one block of floats.
        blocks = -(-queries // self.rows) * -(-head_size // self.columns)
        per_head = round_up(staged + blocks * (4 + self.rows * self.columns), 4)
        return batch * heads * per_head * _FLOAT


def _kernels(dtype: str, dropout: bool) -> tuple[_BackwardKernel, ...]:
    """The sm_80 kernels in the order torch tries them (`cutlassB.h`); variants for aligned lengths have the same
    blocks."""
    if dtype == "float32":
        return (
            _BackwardKernel(64, 64, 32, False, 53504),
            _BackwardKernel(64, 64, 64, False, 53504),
            _BackwardKernel(128, 64, 128, False, 121344),
            _BackwardKernel(64, 64, 128, False, 67840),
            _BackwardKernel(128, 64, 65536, False, 121344),
            _BackwardKernel(64, 64, 65536, False, 67840),
        )
    small, large = {
        ("float16", False): ((40192, 44288), 154112),
        ("float16", True): ((40192, 52480), 162304),
        ("bfloat16", False): ((34560, 42240), 133632),
        ("bfloat16", True): ((39168, 51456), 152064),
    }[dtype, dropout]
    middle = () if dropout else (_BackwardKernel(128, 64, 96, False, 91648),)
    return (
        _BackwardKernel(64, 64, 32, False, small[0]),
        _BackwardKernel(64, 64, 64, False, small[1]),
        *middle,
        _BackwardKernel(128, 128, 128, False, large),
        _BackwardKernel(64, 64, 128, True, 34048),
        _BackwardKernel(128, 64, 65536, True, 60928),
        _BackwardKernel(64, 64, 65536, True, 34048),
    )


def _backward_kernel(head_size: int, dtype: str, dropout: bool, target: Target) -> _BackwardKernel | None:
    """The first that is large enough and fits the card's shared memory; None where the list is another one."""
    if not (8, 0) <= (target.capability or (0, 0)) <= (12, 0):
        return None
    available = device_properties(target).max_shared_memory_per_block_optin
    kernels = (kernel for kernel in _kernels(dtype, dropout) if head_size <= kernel.max_head)
    return next((kernel for kernel in kernels if kernel.shared_bytes <= available), None)


def flash_splits(batch: int, heads: int, queries: int, keys: int, head_size: int, multiprocessors: int) -> int:
    """Parts in which FlashAttention-2 takes keys: as few as come within 85 % of the best occupancy.

    `set_params_splitkv` and `num_splits_heuristic` (binary).
    """
    block = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    key_blocks, row_blocks = -(-keys // block), -(-queries // 64)
    work, slots = batch * heads * row_blocks, 2 * multiprocessors
    if work >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    candidates = [n for n in range(1, most + 1) if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))]
    efficiency = {n: (work * n / slots) / -(-work * n // slots) for n in candidates}
    best = max(efficiency.values(), default=0.0)
    return next((n for n in candidates if efficiency[n] >= 0.85 * best), 1)


def flash_head(head_size: int) -> int:
    """The size of a head as FlashAttention-2's kernels store it in float (binary).

    Raises:
        UsageError: they take none as large.
    """
    if head_size > 256:
        raise UsageError(f"expected a head size of at most 256 for flash attention, got {head_size}")
    return round_up(head_size, 32 if head_size <= 128 else 64)


def _multiprocessors(target: Target) -> int:
    return device_properties(target).multi_processor_count


def _grads() -> Events:
    return (output("grad_query"), output("grad_key"), output("grad_value"))


def _floats(buffers: Iterable[tuple[str, Shape]]) -> Events:
    return tuple(alloc(name, prod(shape) * _FLOAT) for name, shape in buffers)


# --- the rows ---------------------------------------------------------------------------------------------------------


def _backward_flops(c: NamedCall) -> int:
    """The scores again, their gradient, and those of v, q and k: three products over q's head size, two over v's."""
    return _products(c, 3, 2)


def _products(c: NamedCall, over_queries: int, over_values: int) -> int:
    """So many products over the head size of queries, and over that of values."""
    query: Shape = c.query.shape
    keys: int = c.key.shape[-2]
    values: int = c.value.shape[-1]
    return 2 * prod(query[:3]) * keys * (over_queries * query[-1] + over_values * values)


def _products_by_rows(c: NamedCall, over_queries: int, over_values: int) -> int:
    """The same of `(B, S, H, D)`; of packed sequences with the largest number of keys for each query."""
    keys: int = c.max_k if hasattr(c, "max_k") else c.max_seqlen_k
    is_packed = (c.cum_seq_k if hasattr(c, "cum_seq_k") else c.cu_seqlens_k) is not None
    query: Shape = c.query.shape
    widths: int = over_queries * query[-1] + over_values * c.value.shape[-1]
    return 2 * prod(query[:-1]) * int(keys if is_packed else c.key.shape[1]) * widths


def _attention(cuda: ScratchRule | None = None) -> Operator:
    # q k', then scores v: as torch counts them, with the key and value heads repeated to the query's
    return Operator(lambda c: _products(c, 1, 1), kind="attention", counts_macs=True, is_product=True, cuda=cuda)


def _by_rows(cuda: ScratchRule) -> Operator:
    """Torch's own formulas take rows for heads."""
    return replace(_attention(cuda), flops=lambda c: _products_by_rows(c, 1, 1), corrects_torch=True)


_BACKWARD_BY_ROWS = Operator(lambda c: _products_by_rows(c, 3, 2), corrects_torch=True)
_UNCOUNTED = Operator(kind="attention", is_product=True)

ROWS = {
    "transformers/cuda/flash_attn/flash_api.cpp": {
        "_scaled_dot_product_flash_attention": _attention(_flash),
        "_scaled_dot_product_flash_attention_backward": Operator(_backward_flops, cuda=_flash_backward),
        "_flash_attention_forward": _by_rows(_flash_by_rows),
        "_flash_attention_backward": replace(_BACKWARD_BY_ROWS, cuda=_flash_backward_by_rows),
    },
    "transformers/cuda/attention.cu, attention_backward.cu": {
        "_scaled_dot_product_efficient_attention": _attention(_efficient),
        "_scaled_dot_product_efficient_attention_backward": Operator(_backward_flops, cuda=_efficient_backward),
        # The same of `(B, S, H, D)`, and of packed sequences with one batch of all tokens.
        "_efficient_attention_forward": _by_rows(lambda call: _efficient(_by_heads(call, 3))),
        "_efficient_attention_backward": replace(_BACKWARD_BY_ROWS, cuda=_efficient_backward_by_rows),
        "_cudnn_attention_forward": _UNCOUNTED,
    },
    "cudnn/MHA.cpp": {
        "_scaled_dot_product_cudnn_attention": replace(_attention(_cudnn), order=(6, 7, 0, 1)),  # the seeds first
        "_scaled_dot_product_cudnn_attention_backward": Operator(_backward_flops, cuda=_cudnn_backward),
    },
    "transformers/attention.cpp": {
        """_scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_fused_attention_overrideable""": _attention(),
        """_scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_fused_attention_overrideable_backward""": Operator(_backward_flops),
        "_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps": _UNCOUNTED,
    },
}
