"""Turns a memory snapshot of a card into a measurement of one step: `torch.cuda.memory._dump_snapshot`, by anyone.

Format: the `Snapshot` of `torch.cuda.memory._snapshot` (torch 2.11), a pickle of plain dicts. `segments` is the state
when the file was written, `device_traces` the history of requests on each device; `alloc` and `free_requested` carry
requested bytes, `segment_*` what the driver gave or got back. What was alive at any moment of the history follows
from the state at its end, read backwards.

The history may be longer than one step. The step is where the predicted sizes are found again: runs of `_RUN` sizes
that the prediction has once vote for a beginning, and the last beginning with at least half of the most votes counts.
So a history of several steps gives the last whole one.

The file is data of anybody's: `plain_pickle` reads it, every field that is used is checked, and no value is walked
through more often than the file is long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from fxmem.errors import UsageError
from fxmem.memory.log_diff import LogEvent, count_by_phase, predicted_events
from fxmem.records import json_reader
from fxmem.records.pause_gc import pause_gc
from fxmem.records.plain_pickle import PlainPickleError, load
from fxmem.records.profile import Phase, Profile
from fxmem.records.units import exact_bytes, package_path
from fxmem.records.validation import Machine, Measurement

_EXPECTED = "expected --snapshot to name a file written by torch.cuda.memory._dump_snapshot"
_MOST_BYTES = 1 << 50
"""Of one block, one segment or one address's distance: more than any card has."""
_BYTES_PER_ENTRY = 16
"""Entries of a history or a state take more of the file than this."""
_RUN = 8
_FRAMES = 24
_MOST_TEXT = 300
_REQUESTS = {"alloc": 1, "free_requested": -1}
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_ALIVE = "active_allocated"


@dataclass(frozen=True, slots=True)
class Request:
    """One event of the history."""

    nbytes: int
    """Signed requested bytes; of a segment, 0."""
    address: int
    reserved: int
    """Signed bytes of segments; of a block, 0."""
    frames: object
    """As the file has them, not yet looked at."""


@dataclass(frozen=True)
class Snapshot:
    """What one device's part of a file says."""

    name: str
    history: tuple[Request, ...]
    blocks: Mapping[int, int]
    """Requested bytes of what is alive when the file is written, by address."""
    segments: tuple[int, ...]
    """Bytes of each segment at that moment."""
    allocator_settings: str
    notes: tuple[str, ...]
    """What the file does not show."""


@dataclass(frozen=True)
class MeasuredStep:
    """A measurement, and where in the card's program each of its events happened."""

    measurement: Measurement
    stacks: tuple[object, ...]
    """By event, the frames as the file has them."""

    def frames(self, event: int) -> tuple[str, ...]:
        """Return the frames of an event as text, innermost first.

        Those of the allocator and of the interpreter are left out.
        """
        return tuple(_frames(self.stacks[event]))


# --- the file ---------------------------------------------------------------------------------------------------------


@pause_gc()
def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot: the device whose history is longest.

    Raises:
        UsageError: no such file, none that torch wrote, or one without a history.
    """
    content = json_reader.read(path, _EXPECTED)

    def refuse(why: str) -> NoReturn:
        raise UsageError(f"{_EXPECTED}, got {str(path)!r}, which {why}")

    try:
        found = load(content)
    except PlainPickleError as error:
        refuse(str(error))
    try:
        return _Reader(found, len(content)).snapshot(path.name)
    except _WrongFieldError as error:
        refuse(str(error))


class _WrongFieldError(ValueError):
    """A field that is not what torch writes; the message is a part of a sentence."""


class _Reader:
    """Checks what is used of a file."""

    def __init__(self, content: Any, length: int) -> None:
        self._content = content
        self._entries = length // _BYTES_PER_ENTRY

    def snapshot(self, name: str) -> Snapshot:
        """Return the part of the device with the longest history."""
        if type(self._content) is not dict:
            raise _WrongFieldError("holds no snapshot")
        traces = [self._list(trace, "a history") for trace in self._list_field(self._content, "device_traces")]
        device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
        history = tuple(self._history(traces[device])) if traces else ()
        if not any(request.nbytes for request in history):
            raise _WrongFieldError(
                "holds no history; call torch.cuda.memory._record_memory_history() before the step that it is of"
            )
        others = sum(1 for index, trace in enumerate(traces) if trace and index != device)
        notes = [f"{others} other device{'s' * (others != 1)}: device {device} has the longest history"] * bool(others)
        blocks: dict[int, int] = {}
        segments = []
        for segment in self._list_field(self._content, "segments"):
            if self._number(segment, "device", 0) == device:
                segments.append(self._number(segment, "total_size"))
                blocks |= self._blocks(segment)
        return Snapshot(name, history, blocks, tuple(segments), self._settings(), tuple(notes))

    def _history(self, trace: list[Any]) -> Iterator[Request]:
        for entry in trace:
            action = self._field(entry, "action")
            if isinstance(action, str) and (action in _REQUESTS or action in _SEGMENTS):
                nbytes, address = self._number(entry, "size"), self._number(entry, "addr")
                block, segment = _REQUESTS.get(action, 0) * nbytes, _SEGMENTS.get(action, 0) * nbytes
                if nbytes:
                    yield Request(block, address, segment, entry.get("frames"))

    def _blocks(self, segment: dict[str, Any]) -> dict[int, int]:
        """Requested bytes by address. Before torch 2.0 a block has its size alone, and its address follows."""
        found = {}
        address = self._number(segment, "address")
        for block in self._list_field(segment, "blocks"):
            size = self._number(block, "size")
            at = self._number(block, "address", address)
            if self._field(block, "state") == _ALIVE:
                found[at] = self._number(block, "requested_size", size)
            address = at + size
        return {at: nbytes for at, nbytes in found.items() if nbytes}

    def _settings(self) -> str:
        """`PYTORCH_CUDA_ALLOC_CONF` of the process; empty where the file does not say."""
        settings = self._content.get("allocator_settings")
        text = settings.get("PYTORCH_CUDA_ALLOC_CONF", "") if type(settings) is dict else ""
        if type(text) is not str or len(text) > _MOST_TEXT:
            raise _WrongFieldError("holds allocator settings that are none")
        return text

    def _list_field(self, record: Any, key: str) -> list[Any]:
        return self._list(self._field(record, key), key)

    def _list(self, value: Any, what: str) -> list[Any]:
        """A list whose items are looked at once; equal lists in two places count twice."""
        if type(value) is not list:
            raise _WrongFieldError(f"holds no snapshot: {what} is no list")
        self._entries -= len(value)
        if self._entries < 0:
            raise _WrongFieldError("holds more entries than a file of its length has reason to")
        return value

    def _field(self, record: Any, key: str) -> Any:
        if type(record) is not dict or key not in record:
            raise _WrongFieldError(f"holds no snapshot: {key} is missing")
        return record[key]

    def _number(self, record: Any, key: str, default: int | None = None) -> int:
        value = self._field(record, key) if default is None or type(record) is not dict else record.get(key, default)
        limit = 1 << 64 if key in ("addr", "address") else _MOST_BYTES
        if type(value) is not int or not 0 <= value < limit:
            raise _WrongFieldError(f"holds no snapshot: {key} is no number of bytes")
        return value


# --- the step ---------------------------------------------------------------------------------------------------------


def measured_step(profile: Profile, snapshot: Snapshot) -> MeasuredStep:
    """The part of a history that is the step of `profile`, as a measurement.

    The phases are those of the predicted blocks that the history has as well. Of the card, only what the file says is
    in the record.

    Raises:
        UsageError: by the file, the step takes no memory, or less than none.
    """
    predicted = predicted_events(profile)
    begin, end, notes = _find_step(predicted, snapshot.history)
    start, reserved, older, contradictions = _step_state(snapshot, begin)
    requests = [request for request in snapshot.history[begin:end] if request.nbytes]
    events = [request.nbytes for request in requests]
    live = list(accumulate(events, initial=sum(start.values())))
    by_phase = count_by_phase(predicted, events)
    phases = [phase for phase, count in by_phase.items() for _ in range(count)]
    peaks: dict[Phase, int] = {}
    for phase, alive in zip(phases, live[1:], strict=True):
        peaks[phase] = max(peaks.get(phase, 0), alive)
    top = live.index(max(live)) - 1
    if older:
        notes.append(
            f"{exact_bytes(sum(older))} in {len(older):,} blocks are older than the history: the file has their sizes, "
            f"not what allocated them"
        )
    if contradictions:
        notes.append(f"{contradictions:,} requests do not fit the state that the file ends with")
    if not any(request.frames for request in requests):
        notes.append("no stacks: recorded with context=None")
    notes.append("allocated bytes and the process's: a history has what is requested and what is reserved")
    most_reserved = max(accumulate((request.reserved for request in snapshot.history[begin:end]), initial=reserved))
    try:
        measurement = Measurement(
            model=profile.model,
            step=profile.step,
            machine=Machine(
                device="cuda", name=f"the card of {snapshot.name}", allocator_settings=snapshot.allocator_settings
            ),
            resident_bytes=live[0],
            resident_by_kind={},
            resident_sizes=tuple(sorted(start.values(), reverse=True)),
            retained_bytes=live[-1] - live[0],
            peak_bytes=max(live),
            peak_phase=phases[top] if top >= 0 else Phase.FORWARD,
            peak_op="",
            peak_by_phase=peaks,
            peak_without_kernel_scratch_bytes=max(live),
            peak_without_scratch_bytes=max(live),
            reserved_bytes=most_reserved,
            events=tuple(events),
            events_by_phase=by_phase,
            segments=tuple(sorted(snapshot.segments, reverse=True)),
            notes=(*snapshot.notes, *notes),
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _contradiction(snapshot, ".".join(map(str, first["loc"]))) from error
    if not most_reserved:
        raise _contradiction(snapshot, "reserved_bytes")
    return MeasuredStep(measurement, tuple(request.frames for request in requests))


def _contradiction(snapshot: Snapshot, field: str) -> UsageError:
    return UsageError(
        f"{_EXPECTED}, got {snapshot.name!r}, whose history and segments contradict each other: {field} would be no "
        f"number of bytes above zero"
    )


def _step_state(snapshot: Snapshot, begin: int) -> tuple[dict[int, int], int, list[int], int]:
    """What is alive and reserved when event `begin` comes; sizes of what is older than the history; contradictions."""
    alive, reserved, contradictions = dict(snapshot.blocks), sum(snapshot.segments), 0
    at_begin, reserved_at_begin, older = alive, reserved, set(alive)
    for index in reversed(range(len(snapshot.history))):
        request = snapshot.history[index]
        reserved -= request.reserved
        if index < begin:
            older.discard(request.address)
        if request.nbytes > 0:
            contradictions += alive.pop(request.address, None) != request.nbytes
        elif request.nbytes < 0:
            contradictions += request.address in alive
            alive[request.address] = -request.nbytes
        if index == begin:
            at_begin, reserved_at_begin, older = dict(alive), reserved, set(alive)
    return at_begin, reserved_at_begin, [at_begin[address] for address in older], contradictions


def _find_step(predicted: Sequence[LogEvent], history: Sequence[Request]) -> tuple[int, int, list[str]]:
    """The events of the history that are the step, with notes."""
    sizes = [event.nbytes for event in predicted if event.nbytes > 0]
    places = [index for index, request in enumerate(history) if request.nbytes > 0]
    found = _find_run(sizes, [history[place].nbytes for place in places])
    if found is None:
        return 0, len(history), ["where the step begins: no run of predicted sizes is in the history, all is compared"]
    first, last = found
    if len(places) - last <= _RUN:  # the end is where the last run says, give or take what only one side has after it
        last = len(places)
    notes = []
    if first < 0:
        notes.append(f"the step's first {-first:,} requests: the history begins later")
    if first > 0 or last < len(places):
        notes.append(
            f"the step is taken to be requests {max(first, 0) + 1:,} to {min(last, len(places)):,} of {len(places):,} "
            f"in the history"
        )
    begin = places[max(first, 0)]
    end = places[last] if last < len(places) else len(history)
    return begin, end, notes


def _find_run(predicted: Sequence[int], measured: Sequence[int]) -> tuple[int, int] | None:
    """The half-open range of the last whole run of `predicted` in `measured`; it may reach beyond either end."""
    run = min(_RUN, len(predicted))
    if not run:
        return None
    pieces = [tuple(predicted[at : at + run]) for at in range(len(predicted) - run + 1)]
    once = {piece for piece, count in Counter(pieces).items() if count == 1}
    place = {piece: at for at, piece in enumerate(pieces) if piece in once}
    votes = []
    for at in range(len(measured) - run + 1):
        mine = place.get(tuple(measured[at : at + run]))
        if mine is not None:
            votes.append((at - mine, mine, at))
    runs: list[list[tuple[int, int, int]]] = []
    for vote in sorted(votes):
        if not runs or vote[0] - runs[-1][-1][0] > len(predicted) // 2:
            runs.append([])
        runs[-1].append(vote)
    if not runs:
        return None
    most = max(len(run) for run in runs)
    chosen = [run for run in runs if 2 * len(run) >= most][-1]
    first, last = min(chosen, key=lambda vote: vote[1]), max(chosen, key=lambda vote: vote[1])
    return first[2] - first[1], last[2] + len(predicted) - last[1]


# --- stacks -----------------------------------------------------------------------------------------------------------


def _frames(stack: object) -> Iterator[str]:
    """Frames as `name (file:line)`, at most `_FRAMES`: operators and kernels of torch, and Python's own frames."""
    kept = 0
    for frame in stack[:_MOST_TEXT] if type(stack) is list else ():
        name, file, line = (
            (frame.get(key) for key in ("name", "filename", "line")) if type(frame) is dict else ("",) * 3
        )
        if type(name) is not str or type(file) is not str or type(line) is not int or kept == _FRAMES:
            continue
        if "at::" in name or file.endswith(".py"):
            kept += 1
            place = f" ({package_path(file)}:{line})" if file.endswith(".py") else ""
            yield f"{_short_name(name)}{place[:_MOST_TEXT]}"


def _short_name(name: str) -> str:
    """A C++ function without its arguments and its result; a Python function as it is."""
    plain = name[:_MOST_TEXT].replace("(anonymous namespace)::", "").partition("(")[0]
    return plain.removeprefix("void ")
