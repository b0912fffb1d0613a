"""Attention keeps its matrix of scores: no kernel that avoids it takes this mask, dtype, dropout or layout."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, register
from fxmem.memory.user_code import find_place
from fxmem.records.names import MATH_ATTENTION
from fxmem.records.profile import Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for all such calls, at the line of the first, with their scores that are alive at the peak."""
    texts = (each.text for each in profile.assumptions if each.topic == "attention")
    why = next((each.removeprefix(MATH_ATTENTION) for each in texts if each.startswith(MATH_ATTENTION)), "")
    softmax = {index: op.node for index, op in enumerate(profile.ops) if op.name.startswith("aten._safe_softmax")}
    shapes = {
        (profile.storages[i].node, profile.storages[i].shape)
        for i in range(len(profile.storages))
        if profile.storages[i].op in softmax
    }
    alive = (profile.storages[each] for each in timeline.alive)
    if why and softmax:
        calls = len({*softmax.values()})
        yield Finding(
            cause="math-attention",
            text=f"attention runs unfused in {calls} call{'s' * (calls > 1)} and keeps its scores ({why})",
            place=find_place(profile, min(softmax.values())),
            nbytes=sum(each.nbytes for each in alive if (each.node, each.shape) in shapes),
            change="inputs that one of these kernels takes; fxmem advise tries each kernel",
        )


register("math-attention", find)
