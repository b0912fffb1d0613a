"""Gradients of the step before are alive through forward: they are cleared after it, or filled with zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.memory.findings import Finding
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Phase, Profile, Timeline

_ZEROING: Final = frozenset({"aten.zero_.default", "aten._foreach_zero_.default"})


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the peak is in forward, and gradients were there before the step began.

    Those that no backward of the step adds to are freed before the first one, or filled with zeros: what is neither,
    as what no optimizer has, may be a sum over steps.
    """
    begin = next((span.begin for span in profile.phases if span.phase is Phase.BACKWARD), None)
    if timeline.peak.phase is not Phase.FORWARD or begin is None:
        return
    is_filled = profile.step.program is None or any(each.name in _ZEROING for each in profile.ops)
    seen = {output.storage for node in profile.nodes for output in node.outputs}  # those that forward reads
    alive = ((index, profile.storages[index]) for index in timeline.alive if index not in seen)
    left = {index: each for index, each in alive if each.kind is Kind.GRADIENT and each.birth == 0}
    cleared = {index: 0 for index, each in left.items() if each.death <= begin}
    filled = [
        index
        for index, each in left.items()
        if is_filled and each.death >= profile.ticks and (each.is_read or profile.step.program is None)
    ]
    if cleared or filled:
        yield Finding(
            cause="late-zero-grad",
            text="the gradients of the step before are alive through forward",
            nbytes=sum(left[index].nbytes for index in (*cleared, *filled)),
            change="optimizer.zero_grad() after optimizer.step(), and set_to_none as it is by default",
            saved_bytes=save_bytes(profile, cleared, later=filled, begin=begin),
        )
