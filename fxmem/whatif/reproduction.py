"""A shortage under prediction: where it runs out, who holds the memory there, and the smallest change that fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath

from fxmem.hardware.context import room_bytes
from fxmem.memory.budget import Budget
from fxmem.memory.findings import find
from fxmem.memory.user_code import find_place
from fxmem.records.advice import Suggestion
from fxmem.records.explanation import PeakHolder, Reproduction
from fxmem.records.profile import Kind, Profile, Storage, Timeline
from fxmem.records.shortage import OutOfMemoryMessage
from fxmem.simulation.profiled_step import ProfiledStep
from fxmem.whatif.advice import make_bench, try_changes
from fxmem.whatif.program_step import ProgramStep

_PLACE = re.compile(r"out at (.+?:\d+)\b")
_HOLDERS = 40


def reproduce(
    step: ProfiledStep,
    message: OutOfMemoryMessage | None,
    *,
    quick: bool,
    progress: Callable[[str], None],
    found: Callable[[Suggestion], None],
) -> Reproduction:
    """Predict a step in the room that a message leaves it, and try changes until it fits.

    Args:
        step: a program or a model, on the card of the message.
        message: says what else is on the card; None: a context alone.
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
        context = target.memory_bytes - free
        return step.vary(target=target.model_copy(update={"memory_bytes": room + context})), room
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
        groups.setdefault((storage.kind, find_place(profile, storage.node)), []).append(storage)
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
