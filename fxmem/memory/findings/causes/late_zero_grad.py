"""Gradients of the step before are alive through forward: they are cleared after it, or filled with zeros."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, register
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Phase, Profile, Storage, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the peak is in forward, and gradients were there before the step began."""
    if timeline.peak.phase is not Phase.FORWARD:
        return
    left = [index for index in timeline.alive if _is_left(profile.storages[index])]
    if left:
        yield Finding(
            cause="late-zero-grad",
            text="the gradients of the step before are alive through forward",
            nbytes=sum(profile.storages[index].nbytes for index in left),
            change="optimizer.zero_grad() after optimizer.step(), and set_to_none as it is by default",
            saved_bytes=_try(profile, left),
        )


def _is_left(storage: Storage) -> bool:
    return storage.kind is Kind.GRADIENT and storage.birth == 0


def _try(profile: Profile, left: list[int]) -> int:
    """Those that the step clears are gone before it, those that it fills are there from backward on."""
    backward = next((span.begin for span in profile.phases if span.phase is Phase.BACKWARD), profile.ticks)
    cleared = [index for index in left if profile.storages[index].death < profile.ticks]
    return save_bytes(profile, dict.fromkeys(cleared, 0), later={*left} - {*cleared}, begin=backward)


register("late-zero-grad", find)
