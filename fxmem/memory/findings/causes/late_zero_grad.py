"""Gradients of the step before are alive through forward: they are cleared after it, or filled with zeros."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, register
from fxmem.records.profile import Kind, Phase, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the peak is in forward, and gradients were there before the step began."""
    if timeline.peak.phase is not Phase.FORWARD:
        return
    alive = [profile.storages[index] for index in timeline.alive]
    nbytes = sum(each.nbytes for each in alive if each.kind is Kind.GRADIENT and each.birth == 0)
    if nbytes:
        yield Finding(
            cause="late-zero-grad",
            text="the gradients of the step before are alive through forward",
            nbytes=nbytes,
            change="optimizer.zero_grad() after optimizer.step(), and set_to_none as it is by default",
        )


register("late-zero-grad", find)
