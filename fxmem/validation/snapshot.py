"""Turns a memory snapshot of a card into a measurement of one step: `torch.cuda.memory._dump_snapshot`, by anyone.

The format is described in `fxmem.memory.snapshots.reader`. What was alive at any moment of the history follows from the
state at its end, read backwards.

The history may be longer than one step. The step is where the predicted sizes are found again: runs of `_RUN` sizes
that the prediction has once vote for a beginning, and the last beginning with at least half of the most votes counts.
So a history of several steps gives the last whole one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pydantic import ValidationError

from fxmem.errors import UsageError
from fxmem.memory.log_diff import LogEvent, count_by_phase, predicted_events
from fxmem.memory.snapshots import ALLOC, FREE, GROW, HELD, NO_HISTORY, SHRINK, StackFrame, describe_frames, read_dump
from fxmem.records.profile import Phase, Profile
from fxmem.records.units import exact_bytes
from fxmem.records.validation import Machine, Measurement

_EXPECTED = "expected --snapshot to name a file written by torch.cuda.memory._dump_snapshot"
_RUN = 8
_FRAMES = 24
_REQUESTS = {ALLOC: 1, FREE: -1}
_SEGMENTS = {GROW: 1, SHRINK: -1}


@dataclass(frozen=True, slots=True)
class Request:
    """One event of the history."""

    nbytes: int
    """Signed requested bytes; of a segment, 0."""
    address: int
    reserved: int
    """Signed bytes of segments; of a block, 0."""
    frames: Sequence[StackFrame]


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
    stacks: tuple[Sequence[StackFrame], ...]
    """By event."""

    def frames(self, event: int) -> tuple[str, ...]:
        """Return the frames of an event as text, innermost first.

        Those of the allocator and of the interpreter are left out.
        """
        return describe_frames(self.stacks[event], _FRAMES)


# --- the file ---------------------------------------------------------------------------------------------------------


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot: the device whose history is longest.

    Raises:
        UsageError: no such file, none that torch wrote, or one without a history.
    """
    dump = read_dump(path, _EXPECTED)
    if not dump.sizes.any():
        raise UsageError(f"{_EXPECTED}, got {str(path)!r}, which {NO_HISTORY}")
    columns = (dump.actions, dump.sizes, dump.addresses, dump.stacks)
    history = tuple(
        Request(_REQUESTS.get(action, 0) * nbytes, address, _SEGMENTS.get(action, 0) * nbytes, dump.frames[stack])
        for action, nbytes, address, stack in zip(*(each.tolist() for each in columns), strict=True)
        if nbytes and (action in _REQUESTS or action in _SEGMENTS)
    )
    more, s = dump.others, "s" * (dump.others != 1)
    notes = [f"{more} other device{s}: device {dump.device} has the longest history"] * bool(more)
    blocks = {
        block.address: block.requested_bytes
        for segment in dump.segments
        for block in segment.blocks
        if block.state == HELD and block.requested_bytes
    }
    segments = tuple(segment.nbytes for segment in dump.segments)
    return Snapshot(path.name, history, blocks, segments, dump.allocator_settings, tuple(notes))


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
