"""A shortage under prediction: where it runs out, who holds the memory there, and the smallest change that fits.

Lines of a snapshot are those of the prediction that have the same number and file name; of several, the one with most
folders in common, for the program may lie elsewhere on the card's machine. What backward allocates has no line on a
card, where torch runs it on a thread of its own: a snapshot names its operators, and then it has none here either.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath

from fxmem.hardware.context import give_room, room_bytes
from fxmem.memory.budget import Budget
from fxmem.memory.figures import find_place
from fxmem.memory.findings import find
from fxmem.records.advice import Suggestion
from fxmem.records.profile import Kind, Phase, Profile, Storage, Timeline
from fxmem.records.shortage import JoinedLine, OutOfMemoryMessage, PeakHolder, Reproduction, SnapshotReport
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.whatif.advice import make_bench, try_changes
from fxmem.whatif.program_step import ProgramStep

_PLACE = re.compile(r"out at (.+?:\d+)\b")
_LINE = re.compile(r".+:\d+")
_HOLDERS = 40


def reproduce(
    step: ProfiledStep,
    message: OutOfMemoryMessage | None,
    snapshot: SnapshotReport | None = None,
    *,
    quick: bool,
    progress: Callable[[str], None],
    found: Callable[[Suggestion], None],
) -> Reproduction:
    """Predict a step in the room that a message leaves it, and try changes until it fits.

    Args:
        step: a program or a model, on the card of the message.
        message: says what else is on the card; None: a context alone.
        snapshot: what the card held.
        quick: try changes of one line that often decide, and no checkpoints.
        progress: is told what is tried.
        found: is given each change that frees memory.
    """
    step, room = leave_room(step, message)
    profile = step.profile
    budget = Budget(room)
    fits = budget.keeps(profile, step.peak)
    place = "" if fits else find_refusal(step)
    said = "" if message is None else message.place
    advice = try_changes(make_bench(step), budget, plans=not quick, quick=quick, progress=progress, found=found)
    return Reproduction(
        target=profile.target.name,
        room_bytes=room,
        fits=fits,
        place=place,
        shortage="" if fits else step.peak.shortage,
        same_line=_is_same_line(place, said) if place and said else None,
        holders=hold_at_peak(profile, step.timeline),
        lines=() if snapshot is None else join_lines(snapshot, profile, step.timeline),
        found=find(profile, step.timeline),
        advice=advice,
    )


def leave_room(step: ProfiledStep, message: OutOfMemoryMessage | None) -> tuple[ProfiledStep, int]:
    """The step on what a message leaves of its card, and the bytes that the allocator has there.

    A program runs out at the request that is refused there, which is seldom that of the peak. A model is what it is.
    """
    target = step.program.target if isinstance(step, ProgramStep) else step.profile.target
    free = room_bytes(target) or 0
    room = free
    if message is not None and message.capacity_bytes is not None and message.outside_bytes is not None:
        room = max(message.capacity_bytes - message.outside_bytes, 1)
    if room != free and target.memory_bytes is not None and isinstance(step, ProgramStep):
        return step.vary(target=give_room(target, room)), room
    return step, room


def find_refusal(step: ProfiledStep) -> str:
    """Where a step that does not fit runs out, `file:line`; empty where no line is known.

    Where the program says so itself, else the line of the peak.
    """
    if (said := _PLACE.search(step.peak.shortage)) is not None:
        return said[1]
    profile, op = step.profile, step.peak.op
    return find_place(profile, None if op is None else profile.ops[op].node)


def _is_same_line(place: str, said: str) -> bool:
    """Whether two places are one line; the folders of another machine may differ."""
    (file, _, line), (other, _, number) = place.rpartition(":"), said.rpartition(":")
    return line == number and PurePath(file).name == PurePath(other).name


def hold_at_peak(profile: Profile, timeline: Timeline) -> tuple[PeakHolder, ...]:
    """What is alive at the peak, by kind and by the line that made it."""
    groups: dict[tuple[Kind, str], list[Storage]] = {}
    for index in timeline.alive:
        storage = profile.storages[index]
        groups.setdefault((storage.kind, _find_place(profile, storage)), []).append(storage)
    holders = (
        PeakHolder(
            kind=kind,
            holder=max(alike, key=lambda each: each.nbytes).holder or "",
            place=place,
            nbytes=sum(each.nbytes for each in alike),
            count=len(alike),
        )
        for (kind, place), alike in groups.items()
    )
    return tuple(sorted(holders, key=lambda each: (-each.nbytes, each.kind, each.place)))[:_HOLDERS]


def join_lines(snapshot: SnapshotReport, profile: Profile, timeline: Timeline) -> tuple[JoinedLine, ...]:
    """What a card held at its peak beside what is predicted at the same lines."""
    is_by_thread = any(line.place and _LINE.fullmatch(line.place) is None for line in snapshot.lines)
    predicted = Counter[str]()
    for index in timeline.alive:
        storage = profile.storages[index]
        is_lost = is_by_thread and storage.op is not None and profile.ops[storage.op].phase is Phase.BACKWARD
        predicted["" if is_lost else _find_place(profile, storage)] += storage.nbytes
    measured = Counter[str]()
    for line in snapshot.lines:
        measured[_find_line(line.place, [*predicted])] += line.nbytes
    measured[""] += max(snapshot.peak_bytes - measured.total(), 0)
    joined = (
        JoinedLine(place=place, measured_bytes=measured[place], predicted_bytes=predicted[place])
        for place in predicted | measured
    )
    return tuple(sorted(joined, key=lambda each: (-max(each.measured_bytes, each.predicted_bytes), each.place)))


def _find_place(profile: Profile, storage: Storage) -> str:
    """The line that a storage was made for: its node's, or that of the operator that allocated it unseen."""
    node = storage.node if storage.node is not None or storage.op is None else profile.ops[storage.op].node
    return find_place(profile, node)


def _find_line(said: str, places: Sequence[str]) -> str:
    """The place among these that a snapshot means; what it says where none is, and empty where that is no line."""
    if _LINE.fullmatch(said) is None:
        return ""
    alike = [place for place in places if _is_same_line(place, said)]
    return max(alike, key=lambda place: _count_common(place, said), default=said)


def _count_common(place: str, said: str) -> int:
    """How many parts two paths end with alike."""
    pairs = zip(reversed(PurePath(place).parts), reversed(PurePath(said).parts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
