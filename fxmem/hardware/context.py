"""What a process takes of a card beside its tensors: the context, NCCL, and cuBLAS's workspaces."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from math import ceil, log2
from pathlib import Path
from typing import Final

from pydantic import Field, TypeAdapter

from fxmem.errors import UsageError
from fxmem.hardware.catalogue import NVLINK, is_alike, same_card
from fxmem.hardware.releases import find_release
from fxmem.records.profile import Bytes, ProcessBytes, Record, Target
from fxmem.records.units import format_bytes

CONTEXT_SIZES = Path(__file__).with_name("context_sizes.json")
"""What has been measured of `ContextSize`, a JSON list."""
HOST_BYTES = 240 << 20
"""What the driver and libraries of a card have in the host's memory after a first step, measured on an H200."""


class ContextSize(Record):
    """What one process took of a card beside the allocator's segments."""

    card: str
    """As the driver names it."""
    capability: tuple[int, int]
    """CUDA compute capability (major, minor)."""
    torch: str = ""
    """Release of torch, e.g. `2.11`; empty where the source does not say."""
    cuda: str = ""
    """CUDA release torch was built for; empty where the source does not say."""
    driver: str = ""
    """Empty where the source does not say."""
    state: str = Field(
        default="working",
        pattern="^(bare|working|windows|process group( of [0-9]+)?|eager loading|other libraries)$",
    )
    """`bare`: a context and next to nothing run. `working`: in the middle of a program. `windows`: all that is not free
    there beside a context. The others do not count for one process on one card: a process group of so many ranks, all
    kernels loaded at the start, other libraries' memory."""
    ranks: int = 0
    """Of a communicator of NCCL, whose size it then is alone, without the context."""
    nbytes: Bytes
    margin: Bytes = 0
    """How far off `nbytes` may be, because the source rounds."""
    source: str


@functools.cache
def known_context_sizes() -> tuple[ContextSize, ...]:
    """Every row of the table."""
    return TypeAdapter(tuple[ContextSize, ...]).validate_json(CONTEXT_SIZES.read_bytes())


def process_range(target: Target, reserved_bytes: int, groups: int = 1) -> ProcessBytes | None:
    """What a process takes that has so many bytes reserved, which may be more than there is. None: nothing is known.

    A quarter is added to what was measured of the rest, at either end: so it holds 71 of 72 published figures of which
    each was left out of the table (`make -C benchmarks process`).

    Args:
        target: where it runs.
        reserved_bytes: of the allocator.
        groups: process groups that it communicates in, if any. Each has a communicator of its own; what those after the
            first take is in the upper end alone.
    """
    if context_range(target) is None:
        return None
    parts = [each for _, each in _parts_beside(target) if each.grounds]
    return ProcessBytes(
        low=reserved_bytes + 3 * sum(each.low for each in parts) // 4,
        high=reserved_bytes + 5 * sum(each.high for each in parts) // 4 + max(groups - 1, 0) * _FURTHER_GROUP,
        grounds=f"{'; '.join(each.grounds for each in parts)}, +/- 25 %",
    )


_FURTHER_GROUP: Final = 688 << 20
"""What NVIDIA/nccl 964 saw of each communicator among four A100 over NVLink."""
_LOADED: Final = 336 << 20
"""What programs had more than a context alone on an H200: 858 and 522 MiB, rows of the table."""


def _parts_beside(target: Target) -> list[tuple[str, ProcessBytes]]:
    """What else of a card is taken, and by what, the context first; without grounds what others have."""
    label = "Windows and a CUDA context take" if target.system else "a CUDA context takes"
    used = target.in_use_bytes
    others = ProcessBytes(low=used, high=used, grounds="") if used else None
    ranges = ((label, context_range(target)), ("NCCL", nccl_range(target)), ("other programs have", others))
    return [(label, found) for label, found in ranges if found is not None]


def context_range(target: Target) -> ProcessBytes | None:
    """The range for a process on the target. None where nothing is known.

    Taken are the rows of the same card; without any, those of cards with the same compute capability and as many
    multiprocessors. Where these have no row of a process at work, rows of every card of the capability join them. On
    Windows, rows of what it leaves of a card, with a context on it that has loaded nothing yet.
    """
    if target.device != "cuda":
        return None
    if target.system:
        counted = [row for row in known_context_sizes() if row.state == "windows"]
        return _span([row for row in counted if same_card(target, row.card)] or counted, more=_LOADED)
    counted = [row for row in known_context_sizes() if row.state in ("bare", "working")]
    rows = [row for row in counted if same_card(target, row.card)]
    rows = rows or [row for row in counted if is_alike(target, row.card)]
    if not any(row.state == "working" for row in rows):
        rows = [row for row in counted if row in rows or row.capability == target.capability]
    return _span(rows)


def nccl_range(target: Target) -> ProcessBytes | None:
    """What NCCL's first communicator takes. None without a process group.

    Taken are the rows of as many ranks, or the nearest number that was seen, on the same card; without any, on cards
    that have a link between them like it, or have none.
    """
    rows = [row for row in known_context_sizes() if row.ranks]
    if not target.ranks or target.device != "cuda" or not rows:
        return None
    linked = target.capability in NVLINK
    own = [row for row in rows if same_card(target, row.card)]
    rows = own or [row for row in rows if (row.capability in NVLINK) == linked]
    nearest = min((row.ranks for row in rows), key=lambda ranks: abs(log2(ranks / target.ranks)))
    return _span([row for row in rows if row.ranks == nearest], f" of NCCL among {nearest}")


def _span(rows: Sequence[ContextSize], what: str = "", more: int = 0) -> ProcessBytes | None:
    if not rows:
        return None
    cards = ", ".join(dict.fromkeys(row.card for row in rows))
    return ProcessBytes(
        low=min(row.nbytes - row.margin for row in rows),
        high=max(row.nbytes + row.margin for row in rows) + more,
        grounds=f"{len(rows)} published measurement{'s' * (len(rows) != 1)}{what} on {cards}",
    )


def _least_beside(target: Target) -> int:
    return sum(each.low for _, each in _parts_beside(target))


def room_bytes(target: Target) -> int | None:
    """What is left of a card at most, with which every verdict compares; a CPU's memory is all room.

    All of a card on which a context would not fit, or its size is not known. None where its memory is not known.
    """
    context, memory = context_range(target), target.memory_bytes
    if memory is None or (context is not None and context.low >= memory):
        return memory
    return max(memory - _least_beside(target), 0)


def give_room(target: Target, nbytes: int) -> Target:
    """The same card with as much memory as leaves the allocator so many bytes."""
    return target.model_copy(update={"memory_bytes": nbytes + _least_beside(target)})


def explain_room(target: Target) -> str:
    """The room of a card, and why it is less than its memory; empty off a card, and where its memory is not known."""
    memory, room, taken = target.memory_bytes, room_bytes(target), _parts_beside(target)
    if target.device != "cuda" or memory is None:
        return ""
    parts = [f"{label} {format_bytes(each.low)}{' or more' * bool(each.grounds)}" for label, each in taken]
    if context_range(target) is None:
        parts.insert(0, "what a CUDA context takes of it is not known")
    of = f"{format_bytes(room)} of " if taken else ""
    nothing = " and leaves nothing" if taken and room == memory else ""
    return f"{of}{format_bytes(memory)}: {', '.join(parts)}{nothing}"


def format_range(low: int, high: int) -> str:
    """Both ends, or one number where they are one: `495.0 MiB to 616.0 MiB`."""
    return format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"


# --- cuBLAS workspaces: allocated through the caching allocator, kept for good or for each product --------------------
# Which of the two, and the sizes, depend on the release (`hardware/releases.py`). Source:
# `aten/src/ATen/cuda/CublasHandlePool.cpp`. - `getCurrentCUDABlasHandle` sets a workspace for its (handle, stream)
# pair and keeps it in a process-wide map until `torch._C._cuda_clearCublasWorkspaces()`. Handles belong to threads,
# so a training step keeps two workspaces as soon as both sides multiply matrices: the caller's thread runs the
# forward, autograd's device thread the backward. Each further stream adds its own. From 2.15 on each product
# allocates its own and frees it when it returns. - cuBLASLt runs on the same handle. To 2.8 each of its products
# allocates a block of its own and frees it; in 2.9 to 2.11 it keeps a second block of its own per pair, allocated at
# the first Lt matmul, whose size is cut to the cuBLAS workspace's; in 2.12 to 2.14 it uses the cuBLAS one; from 2.15
# on a product has either the one or the other. `TORCH_CUBLASLT_UNIFIED_WORKSPACE` sets it, where workspaces are kept.
# - `CUBLAS_WORKSPACE_CONFIG=:SIZE:COUNT…` (KiB) and `CUBLASLT_WORKSPACE_SIZE` (KiB) override; what cannot be parsed
# is ignored with a warning, as here.


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
    keeps_lt: bool
    """Whether cuBLASLt's does."""
    torch_version: str
    """The release whose defaults these are; another than the one asked for when that one is not in the table."""
    notes: tuple[str, ...] = ()
    """Settings that were ignored, as torch ignores them."""


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
    keeps_lt = row.keeps_lt_workspaces if row.keeps_workspaces else is_kept
    if keeps_lt and unified != "0":
        lt = 0 if unified == "1" else min(lt, handle)
    return CublasWorkspaces(
        handle_bytes=handle, lt_bytes=lt, is_kept=is_kept, keeps_lt=keeps_lt, torch_version=release, notes=tuple(notes)
    )


# --- what CUB, NVIDIA's library of parallel primitives, takes for itself ----------------------------------------------
# Read off an H200's allocator (torch 2.11, CUDA 13.0), 130 sorts of 3,280 to 1,048,576 items, all to the byte
# (`benchmarks/programs/card_runs.py`: `script/lengths`, `script/read_backs`). Other architectures share the formula;
# the items of a block are theirs, which moves a kilobyte for each block.


SCAN_BYTES = 1279
"""Temporary storage of a scan of 3,280 to 11,200 items, and of what is built on one; those of more are not known and
taken to be the same."""
_ALIGNMENT = 256
_BINS = 256
"""Of a digit of eight bits, one pass for each digit."""
_SINGLE_BLOCK_BYTES = 256 * 9 * 8
"""Keys, or values where these are larger, that one block sorts without temporary storage."""
_ITEMS = {(8, 8): 4608, (4, 8): 5376, (8, 0): 5760}
"""Items of a block by bytes of a key and of a value."""


def radix_sort_bytes(count: int, key_bytes: int, value_bytes: int = 0, bits: int | None = None) -> int | None:
    """Temporary storage of `cub::DeviceRadixSort` with one sweep (`SortPairs`, `SortKeys`): keys and values a second
    time, a histogram of 8-byte counts for each pass, what blocks tell each other, and room for alignment.

    Args:
        count: items.
        key_bytes: of a key.
        value_bytes: of a value; 0 sorts keys alone.
        bits: of a key that are sorted by; None for all.

    Returns:
        Bytes; None for sizes that were not measured.
    """
    if count * max(key_bytes, value_bytes) <= _SINGLE_BLOCK_BYTES:
        return 1
    items = _ITEMS.get((key_bytes, value_bytes))
    if items is None:
        return None
    passes = ceil((8 * key_bytes if bits is None else bits) / 8)
    twice = sum(_align(count * each) for each in (key_bytes, value_bytes))
    return _ALIGNMENT - 1 + twice + passes * _BINS * 8 + _ALIGNMENT + ceil(count / items) * _BINS * 4


def _align(nbytes: int) -> int:
    return ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
