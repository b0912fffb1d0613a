"""Read what `torch.cuda.memory._dump_snapshot` wrote, of any length, into columns.

Format: the `Snapshot` of `torch.cuda.memory._snapshot` (torch 2.11), a pickle of plain dicts. `segments` is the state
when the file was written, `device_traces` the history of requests on each device. `alloc` and the frees carry requested
bytes, `segment_*` what the driver gave or got back, `oom` a request that was refused.

An event takes 29 bytes of memory here and some hundred of the file, which is mapped. A stack is kept once. Nothing in
the file is run, and what is used of it is checked.
"""

from __future__ import annotations

import mmap
import re
import stat
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from fxmem.errors import UsageError
from fxmem.records import json_reader
from fxmem.records.pause_gc import pause_gc
from fxmem.records.plain_pickle import Content, PlainPickleError, References, Rows, stream
from fxmem.records.units import package_path

ALLOC, FREE, FREED, GROW, SHRINK, REFUSED = range(6)
"""What an event is: a block is allocated; the program frees it; it can be used again; a segment comes, or goes; a
request is refused."""
_ACTIONS: Final = {
    "alloc": ALLOC, "free_requested": FREE, "free_completed": FREED, "segment_alloc": GROW, "segment_map": GROW,
    "segment_free": SHRINK, "segment_unmap": SHRINK, "oom": REFUSED,
}  # fmt: skip
_FIELDS: Final = ("action", "addr", "size", "frames", "time_us", "device_free")
UNUSED, HELD, WAITING = range(3)
"""What a block is: in no use, held by the program, or freed and waiting for another stream."""
_STATES: Final = {"active_allocated": HELD, "active_pending_free": WAITING, "active_awaiting_free": WAITING}
_MOST_BYTES: Final = 1 << 50
_MOST_FRAMES: Final = 300
_MOST_TEXT: Final = 300
_BYTES_PER_ENTRY: Final = 16
"""A segment or a block takes more of the file than this; equal ones in two places count twice."""
_RELEASE: Final = 200_000
"""Events after which the pages of the file that were read are let go."""
NO_HISTORY: Final = "holds no history; call torch.cuda.memory._record_memory_history() before the step that it is of"
_EXPECTED = "expected a file written by torch.cuda.memory._dump_snapshot"


class StackFrame(NamedTuple):
    """One call of a stack."""

    name: str
    file: str
    line: int


class DumpedBlock(NamedTuple):
    """A stretch of a segment when the file was written."""

    address: int
    nbytes: int
    requested_bytes: int
    state: int
    stack: int


class DumpedSegment(NamedTuple):
    """A segment when the file was written."""

    nbytes: int
    blocks: Sequence[DumpedBlock]


@dataclass(frozen=True)
class Dump:
    """One device's part of a snapshot."""

    device: int
    others: int
    """Devices with a shorter history."""
    actions: npt.NDArray[np.int8]
    sizes: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.uint64]
    stacks: npt.NDArray[np.int32]
    """Of each event, the number of its stack."""
    free_bytes: dict[int, int]
    """Of the requests that were refused, by event, what the card had free."""
    step_ends: Sequence[int]
    """Events at which an optimizer's step had ended, where the file says so."""
    segments: Sequence[DumpedSegment]
    frames: Sequence[Sequence[StackFrame]]
    """Of each stack, innermost first."""
    allocator_settings: str


def is_pickle(path: Path) -> bool:
    """Whether a file begins as a pickle does; False where there is none."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            start = file.read(2)
    except (OSError, ValueError):
        return False
    return len(start) == 2 and start[0] == 0x80 and start[1] <= 5


@pause_gc()
def read_dump(path: Path, expected: str = _EXPECTED) -> Dump:
    """Read a snapshot: the device whose history is longest; without a history, the one with most bytes.

    Raises:
        UsageError: no such file, none that torch wrote, or one that holds nothing.
    """

    def refuse(why: str) -> NoReturn:
        raise UsageError(f"{expected}, got {str(path)!r}, which {why}")

    def tell(error: OSError | ValueError) -> UsageError:
        return UsageError(f"{expected}, got {str(path)!r}: {getattr(error, 'strerror', None) or error}")

    try:
        regular = str(path) != "-" and stat.S_ISREG((found := path.stat()).st_mode) and found.st_size
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise tell(error) from error
    try:
        if not regular:
            return _Reader().read(json_reader.read(path, expected))  # which opens no device, and waits for no pipe
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Reader(mapped).read(mapped)
    except PlainPickleError as error:
        refuse(str(error))
    except OSError as error:
        raise tell(error) from error


@dataclass
class _Columns:
    """A device's history, as it comes."""

    actions: array[int] = field(default_factory=lambda: array("b"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    stacks: array[int] = field(default_factory=lambda: array("i"))
    times: array[int] = field(default_factory=lambda: array("q"))
    free_bytes: dict[int, int] = field(default_factory=dict)


class _Reader:
    """Reads one file."""

    def __init__(self, mapped: mmap.mmap | None = None) -> None:
        self.mapped, self.read_events = mapped, 0
        self.columns: dict[int, _Columns] = {}
        self.lists: list[Any] = []
        """Every list of frames, as the file has it."""
        self.numbers: dict[int, int] = {}
        """By its identity, its place there."""

    def read(self, content: Content) -> Dump:
        """Read it all."""
        found, resolve = stream(content, "device_traces", _FIELDS, self.take)
        if type(found) is not dict or type(found.get("segments")) is not list:
            raise PlainPickleError("holds no snapshot: segments is missing")
        if type(found.get("device_traces")) is not list:
            raise PlainPickleError("holds no snapshot: device_traces is missing")
        device = max(self.columns, key=lambda each: len(self.columns[each].actions), default=None)
        if device is None or not self.columns[device].actions:
            device = _find_largest(found["segments"])
            self.take(device, [("free_completed", 0, 0, None, 0, None)])  # a history in which nothing changes
        columns = self.columns[device]
        segments = tuple(self.read_segments(found["segments"], device, len(content) // _BYTES_PER_ENTRY))
        frames, same = self.merge_stacks(resolve)
        frames.append(())  # that of -1
        renumbered = np.append(same, -1).astype(np.int32)
        return Dump(
            device=device,
            others=sum(1 for each, other in self.columns.items() if each != device and other.actions),
            actions=np.array(columns.actions, np.int8),
            sizes=np.array(columns.sizes, np.int64),
            addresses=np.array(columns.addresses, np.uint64),
            stacks=renumbered[np.array(columns.stacks, np.int32)],
            free_bytes=columns.free_bytes,
            step_ends=_find_step_ends(found.get("external_annotations"), device, columns.times),
            segments=[
                DumpedSegment(nbytes, [block._replace(stack=int(renumbered[block.stack])) for block in blocks])
                for nbytes, blocks in segments
            ],
            frames=frames,
            allocator_settings=_read_settings(found.get("allocator_settings")),
        )

    def take(self, device: int, rows: Rows) -> None:
        """Append events to a device's history."""
        columns = self.columns.setdefault(device, _Columns())
        self.read_events += len(rows)
        if self.mapped is not None and self.read_events > _RELEASE and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)  # what was read is not kept in memory
            self.read_events = 0
        kept = [row for row in rows if type(row[0]) is str and row[0] in _ACTIONS]
        if not kept:
            return
        actions, addresses, sizes, frames, times, free = zip(*kept, strict=True)
        codes = [_ACTIONS[each] for each in actions]
        if REFUSED in codes:
            begin = len(columns.actions)
            refused = {at for at, code in enumerate(codes) if code == REFUSED}
            columns.free_bytes |= {begin + at: _number(free[at] or 0, "device_free") for at in refused}
            addresses = tuple(0 if at in refused else each for at, each in enumerate(addresses))
        columns.actions.extend(codes)
        columns.sizes.extend(_numbers(sizes, "size"))
        columns.addresses.extend(_numbers(addresses, "addr", 1 << 64))
        columns.stacks.extend(map(self.number_stack, frames))
        columns.times.extend(each if type(each) is int and 0 <= each < 1 << 62 else 0 for each in times)

    def number_stack(self, frames: Any) -> int:
        """The number of a list of frames: one object has one. -1 for none."""
        if type(frames) is not References and type(frames) is not list:
            return -1
        number = self.numbers.setdefault(id(frames), len(self.lists))
        if number == len(self.lists):
            self.lists.append(frames)  # which keeps its identity
        return number

    def read_segments(self, segments: list[Any], device: int, most: int) -> Iterator[DumpedSegment]:
        """Read the state when the file was written, at most so many entries. Before torch 2.0 a block has its size
        alone."""
        most -= len(segments)
        for segment in segments:
            if type(segment) is not dict or type(segment.get("blocks")) is not list:
                raise PlainPickleError("holds no snapshot: blocks is missing")
            if segment.get("device", 0) != device:
                continue
            most -= len(segment["blocks"])
            if most < 0:
                raise PlainPickleError("holds more entries than a file of its length has reason to")
            address, blocks = _number(segment.get("address"), "address", 1 << 64), []
            for block in segment["blocks"]:
                if type(block) is not dict:
                    raise PlainPickleError("holds no snapshot: a block is none")
                size = _number(block.get("size"), "size")
                at = _number(block.get("address", address), "address", 1 << 64)
                requested = _number(block.get("requested_size", size), "requested_size")
                state = block.get("state")
                used = _STATES.get(state, UNUSED) if type(state) is str else UNUSED
                stack = self.number_stack(block.get("frames") or _read_old_frames(block.get("history")))
                blocks.append(DumpedBlock(at, size, requested, used, stack))
                address = at + size
            yield DumpedSegment(_number(segment.get("total_size"), "total_size"), blocks)

    def merge_stacks(
        self, resolve: Callable[[References], list[Any]]
    ) -> tuple[list[tuple[StackFrame, ...]], list[int]]:
        """The different stacks, and for each list its number among them."""
        frames: dict[int, StackFrame] = {}
        known: dict[tuple[StackFrame, ...], int] = {}
        same = []
        for each in self.lists:
            items = resolve(each) if type(each) is References else each
            stack = []
            for item in items[:_MOST_FRAMES]:
                frame = frames.get(id(item))
                if frame is None:
                    frame = frames[id(item)] = _read_frame(item)
                stack.append(frame)
            same.append(known.setdefault(tuple(stack), len(known)))
        return list(known), same


def _numbers(values: Sequence[Any], key: str, limit: int = _MOST_BYTES) -> Sequence[int]:
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) >= limit:
        raise PlainPickleError(f"holds no snapshot: {key} is no number of bytes")
    return values


def _number(value: Any, key: str, limit: int = _MOST_BYTES) -> int:
    return _numbers([value], key, limit)[0]


def _find_largest(segments: list[Any]) -> int:
    """The device with most bytes in segments."""
    sums = Counter[int]()
    for each in segments:
        if type(each) is dict:
            sums[_number(each.get("device", 0), "device")] += _number(each.get("total_size"), "total_size")
    if not sums:
        raise PlainPickleError(NO_HISTORY)
    return sums.most_common(1)[0][0]


def _read_old_frames(history: Any) -> Any:
    """The stack of a block in torch 1.13 and 2.0: that of the newest of the requests that it had."""
    newest = history[0] if type(history) is list and history else None
    return newest.get("frames") if type(newest) is dict else None


def _read_frame(item: Any) -> StackFrame:
    name, file, line = (item.get(key) for key in ("name", "filename", "line")) if type(item) is dict else ("", "", 0)
    if type(name) is not str or type(file) is not str or type(line) is not int:
        return StackFrame("", "", 0)
    return StackFrame(name[:_MOST_TEXT], file[-_MOST_TEXT:], line)


def _read_settings(settings: Any) -> str:
    found = settings.get("PYTORCH_CUDA_ALLOC_CONF", "") if type(settings) is dict else ""
    if type(found) is not str or len(found) > _MOST_TEXT:
        raise PlainPickleError("holds allocator settings that are none")
    return found


def _find_step_ends(annotations: Any, device: int, times: array[int]) -> list[int]:
    """The events at which the optimizer's steps had ended (`external_annotations`, torch 2.8)."""
    ends = []
    for each in annotations if type(annotations) is list else ():
        if type(each) is dict and each.get("stage") == "END" and each.get("device", device) == device:
            name, time = each.get("name"), each.get("time_us")
            if type(name) is str and name.startswith("Optimizer.step") and type(time) is int and 0 <= time < 1 << 62:
                ends.append(time)
    return [int(each) for each in np.searchsorted(np.array(times, np.int64), sorted(ends))]


_OPERATOR: Final = re.compile(r"(\w+Backward\d*)::apply|at::_ops::(\w+)::|at::native::(?:[\w: ]*::)?(\w+)")


def _shorten(name: str) -> str:
    """A C++ function without its result and its arguments."""
    return name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("(")[0]


def find_place(frames: Sequence[StackFrame]) -> str:
    """Where in the program a stack is: the user's innermost line, else a package's, else an operator, else empty."""
    installed, names = "", [""] * _OPERATOR.groups
    for name, file, line in frames:
        if file.endswith(".py"):
            if package_path(file) == file and "/lib/python" not in file:
                return f"{file}:{line}"
            installed = installed or f"{package_path(file)}:{line}"
        elif (found := _OPERATOR.search(_shorten(name))) is not None:
            names = [known or new or "" for known, new in zip(names, found.groups(), strict=True)]
    # The node of autograd says more than the operator that it calls, and that more than the operator's kernel.
    return installed or next(filter(None, names), "")


def describe_frames(frames: Sequence[StackFrame], most: int = 12) -> tuple[str, ...]:
    """The frames of Python, and operators and kernels of torch, as text."""
    shown = []
    for name, file, line in frames:
        if file.endswith(".py"):
            shown.append(f"{name} ({package_path(file)}:{line})")
        elif "at::native" in name or "at::_ops::" in name:
            shown.append(_shorten(name))
    return tuple(dict.fromkeys(shown))[:most]
