"""FSDP2's copy-in of gradients: what it hides where it joins them in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

from fxmem.hardware.hidden_memory import HiddenEvent, HiddenMemory, alloc
from fxmem.hardware.operators.moves import cast_slice
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout, read_layout

_COPY_IN = "fsdp.chunk_cat"
_BYTES_PER_BLOCK = 2048
"""Of a chunk, what one block of threads copies (`BLOCK_SIZE * BYTES_PER_THREAD`)."""


def copy_in_memory(name: str, args: Sequence[Any], out: Any, *, on_card: bool) -> HiddenMemory | None:
    """What a call hides by which FSDP2 joins gradients in chunks; None for nothing.

    `fsdp::chunk_cat` (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) until torch 2.14, then
    `fsdp::chunk_cat_mixed_dtype` (torch/csrc/distributed/fsdp/ChunkCat.cpp and .cu); `_pad_chunk` and `cat`
    (TensorShape.cpp), `_chunk_cat_out_cuda` (cuda/TensorShape.cu). The bytes were read from torch 2.11 and 2.15: the
    CPU's in its profiler's log, a card's in the allocator's, where torch's host code ran on a stand-in.

    Args:
        name: of the operator.
        args: its positional arguments: gradients, dimension, and how many chunks.
        out: the buffer that they are copied into.
        on_card: whether a card computes it.
    """
    if not name.startswith(_COPY_IN) or out is None:
        return None
    gradients, buffer, chunks = [read_layout(each) for each in args[0]], read_layout(out), args[2]
    events = tuple(_join(gradients, buffer, chunks, on_card=on_card))
    return HiddenMemory(events=events) if events else None


def _join(gradients: Sequence[TensorLayout], out: TensorLayout, chunks: int, *, on_card: bool) -> Iterator[HiddenEvent]:
    """`_chunk_cat`: gradients are cast and padded first, unless a card's kernel does that as it copies."""
    is_mixed = len({each.dtype for each in gradients}) > 1
    padded = [prod(_pad(each, chunks)) * ITEM_BYTES[each.dtype] for each in gradients]
    if on_card and all(_casts_as_it_copies(each, out) for each in gradients):
        yield _places(gradients, out, chunks, more=0 if is_mixed else 2)
    elif is_mixed:
        cast = [replace(each, dtype=out.dtype) for each in gradients]
        for number, (given, made) in enumerate(zip(gradients, cast, strict=True), 1):
            if given.dtype != made.dtype:
                yield alloc(f"gradient {number} in {made.dtype}", made.nbytes)
        yield from _join(cast, out, chunks, on_card=on_card)
    else:
        for number, (given, nbytes) in enumerate(zip(gradients, padded, strict=True), 1):
            if given.nbytes != nbytes:
                yield alloc(f"padded gradient {number}", nbytes)
        if not on_card and gradients[0].dtype != out.dtype:
            yield from chain.from_iterable(map(cast_slice, range(1, len(padded) + 1), padded))


def _casts_as_it_copies(gradient: TensorLayout, out: TensorLayout) -> bool:
    casts = (gradient.dtype, out.dtype) == ("bfloat16", "float32")
    return gradient.is_contiguous() and (gradient.dtype == out.dtype or casts)


def _places(gradients: Sequence[TensorLayout], out: TensorLayout, chunks: int, *, more: int) -> HiddenEvent:
    """Where a card's kernel reads and writes: numbers by block of threads, six by gradient, and a few more."""
    item = ITEM_BYTES[out.dtype]
    sizes = (prod(_pad(each, chunks)) // chunks * item for each in gradients)
    blocks = sum(-(-size // _BYTES_PER_BLOCK) for size in sizes)
    return alloc("places of the chunks", 8 * (6 * len(gradients) + more + blocks))


def _pad(gradient: TensorLayout, chunks: int) -> tuple[int, ...]:
    """The shape that the chunks divide."""
    return -(-gradient.shape[0] // chunks) * chunks, *gradient.shape[1:]
