"""The memory that ops allocate unseen, written into the log of a step.

Each hidden buffer becomes a storage of kind `workspace` whose live range lies inside its op's ticks, in the order torch
allocates and frees; later ticks move up. What is kept for good is there before the step and after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from fxmem.hardware.hidden_memory import HeldBuffer, HiddenEvent, HiddenMemory, alloc
from fxmem.hardware.operators.moves import cast_slice
from fxmem.hardware.tensor_layouts import ITEM_BYTES, TensorLayout, read_layout
from fxmem.records.profile import Kind, PhaseSpan, Storage


class TimedOp(NamedTuple):
    """When an op runs, and the node that it runs for."""

    node: int
    begin: int
    end: int
    stream: int = 0


class BareLog(NamedTuple):
    """A step's log before hidden buffers were put in."""

    ops: Sequence[TimedOp]
    phases: Sequence[PhaseSpan]
    ticks: int
    moved: Sequence[int]
    """Where each of its ticks is now."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkspaceLog:
    """Hidden buffers, and the ticks of everything else beside them."""

    ticks: int
    moved: Sequence[int]
    """Where each old tick is now."""
    ops: Sequence[tuple[int, int]]
    """Begin and end of each op."""
    phases: tuple[PhaseSpan, ...]
    storages: tuple[Storage, ...]
    """The hidden buffers."""


def insert_workspaces(
    ops: Sequence[TimedOp],
    phases: Sequence[PhaseSpan],
    ticks: int,
    memory: Mapping[int, HiddenMemory],
    held: Mapping[str, HeldBuffer],
    *,
    is_loop: bool = True,
) -> WorkspaceLog:
    """Put hidden buffers into the log of a step.

    Args:
        ops: of the log, with its `phases` and how many `ticks` it has, without workspaces.
        memory: by index of the op, what it hides. Buffers of unknown size are left out.
        held: by name, what is there all the time from the first step on.
        is_loop: whether steps came before this one; else what is held begins with the op that needs it.
    """
    log, births = _Log(), dict[int | None, int]()
    spans, shift_before = [], [0]
    passing = _Passing(ops, {name: buffer for name, buffer in held.items() if buffer.needed_by})
    for index, op in enumerate(ops):
        spans.append(log.run(index, op, memory[index].events if index in memory else ()))
        passing.follow(index, log)
        if not is_loop and any(buffer.op == index for buffer in held.values()):
            births[index] = log.insert()
        shift_before.append(log.shift)
    log.keep(ticks + 1)
    ticks += log.shift
    residents = [
        _workspace(name, buffer.nbytes, births.get(buffer.op, 0), buffer.op, None, buffer.stream, death=ticks)
        for name, buffer in held.items()
        if not buffer.needed_by
    ]
    moves = (
        {"begin": phase.begin + shift_before[phase.first_op], "end": phase.end + shift_before[phase.last_op]}
        for phase in phases
    )
    moved_phases = (phase.model_copy(update=move) for phase, move in zip(phases, moves, strict=True))
    return WorkspaceLog(ticks, log.moved, spans, tuple(moved_phases), (*log.added, *residents))


def _workspace(
    name: str, nbytes: int, birth: int, op: int | None, node: int | None, stream: int, death: int = 0
) -> Storage:
    life: dict[str, Any] = {"birth": birth, "death": death or birth, "stream": stream}
    return Storage(nbytes=nbytes, kind=Kind.WORKSPACE, op=op, node=node, name=name, **life)


class _Passing:
    """Buffers that a CUDA graph holds to its end: its recording gives cuBLAS's workspaces back (`clear_cublas_manager`
    of torch/_inductor/cudagraph_trees.py)."""

    def __init__(self, ops: Sequence[TimedOp], buffers: Mapping[str, HeldBuffer]) -> None:
        self._ops = ops
        self._buffers = {name: (buffer, set(buffer.needed_by)) for name, buffer in buffers.items()}
        self._there: dict[str, Storage] = {}

    def follow(self, index: int, log: _Log) -> None:
        """Allocate what an op needs, and free all after its graph's last op."""
        for name, (buffer, needed_by) in self._buffers.items():
            if index in needed_by and name not in self._there:
                node, stream = self._ops[index].node, buffer.stream
                self._there[name] = _workspace(name, buffer.nbytes, log.insert(), index, node, stream)
        if index + 1 == len(self._ops) or self._ops[index + 1].stream != self._ops[index].stream:
            for there in self._there.values():
                log.end(there)
            self._there.clear()


class _Log:
    """Copies a log tick by tick, making room as it goes."""

    def __init__(self) -> None:
        self.moved: list[int] = []
        self.shift = 0
        """How many ticks were put in so far."""
        self.added: list[Storage] = []
        self._tick = 0

    def keep(self, until: int) -> None:
        """The old ticks before `until` follow."""
        if until > self._tick:
            self.moved += range(self._tick + self.shift, until + self.shift)
            self._tick = until

    def run(self, index: int, op: TimedOp, events: Sequence[HiddenEvent]) -> tuple[int, int]:
        """Where one op with its hidden events begins and ends; it ends before the buffers that it leaves to go at its
        return."""
        self.keep(op.begin)
        begin = op.begin + self.shift
        buffers: dict[str, Storage] = {}
        for event in events:
            if event.action == "output" and self._tick < op.end:
                self.keep(self._tick + 1)
            elif event.action == "alloc" and (event.nbytes or any(event.other_bytes)):
                made = _workspace(event.name, event.nbytes or 0, self.insert(), index, op.node, op.stream)
                plans = {"other_bytes": event.other_bytes, "smaller_bytes": event.smaller_bytes}
                buffers[event.name] = made.model_copy(update=plans)
            elif event.action == "free" and event.name in buffers:
                self.end(buffers.pop(event.name))
        self.keep(op.end)
        end = op.end + self.shift
        for buffer in reversed(buffers.values()):
            self.end(buffer)
        return begin, end

    def insert(self) -> int:
        """Put a tick in here."""
        self.shift += 1
        return self._tick + self.shift - 1

    def end(self, buffer: Storage) -> None:
        """A hidden buffer goes here."""
        self.added.append(buffer.model_copy(update={"death": self.insert()}))


# --- FSDP2's copy-in of gradients: what it hides where it joins them in chunks ----------------------------------------


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
