"""FSDP gathers most of the model at once: no block is a unit of its own, or the embedding is the root's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.memory.findings import Finding, register
from fxmem.records.profile import Kind, Phase, Profile, Storage, Timeline

_MOST: Final = 0.8
"""Who has this share of the model gathered at once has all of it."""
_MUCH: Final = 0.4
"""The same, of what is gathered from forward to backward."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where that is so at the peak."""
    forward = next((span for span in profile.phases if span.phase is Phase.FORWARD), None)
    gathered = [each for each in profile.storages if each.kind is Kind.UNSHARDED]
    alive = [profile.storages[index] for index in timeline.alive if profile.storages[index].kind is Kind.UNSHARDED]
    if forward is None or len(alive) < 2:
        return
    whole = sum(each.nbytes for each in gathered if each.birth < forward.end)
    nbytes = sum(each.nbytes for each in alive)
    throughout = [each for each in alive if each.birth < forward.end < each.death]
    if nbytes >= _MOST * whole and len({each.shape for each in alive}) > 1:
        text, change = "the whole model is gathered at once", "fully_shard(block) of each block before the model"
        yield Finding(cause="fsdp-gather", text=text, nbytes=nbytes, change=f"{change}, and reshard_after_forward=True")
    elif throughout and (kept := sum(each.nbytes for each in throughout)) >= _MUCH * whole:
        yield Finding(
            cause="fsdp-gather",
            text=f"{len(throughout)} tensors stay gathered from forward to backward, one of {_shape(throughout)}",
            nbytes=kept,
            change="fully_shard of the embedding and of the head by themselves",
        )


def _shape(storages: list[Storage]) -> str:
    largest = max(storages, key=lambda each: each.nbytes)
    return f"{largest.shape[0]:,} numbers" if len(largest.shape) == 1 else "x".join(map(str, largest.shape))


register("fsdp-gather", find)
