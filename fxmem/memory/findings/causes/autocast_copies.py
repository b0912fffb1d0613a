"""Autocast takes more than it saves: the copies of the weights in half precision are larger than what they halve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.memory.findings import Finding
from fxmem.records.profile import Kind, Profile, Timeline

_HALF: Final = ("bfloat16", "float16")


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the copies of float32 weights outweigh all other results in half precision."""
    alive = [profile.storages[index] for index in timeline.alive]
    weights = {each.shape for each in alive if each.kind is Kind.PARAMETER and each.dtype == "float32"}
    saved = [each for each in alive if each.kind in (Kind.SAVED, Kind.TEMPORARY) and each.dtype in _HALF]
    casts = {index for index, op in enumerate(profile.ops) if op.name.startswith("aten._to_copy")}
    copies = sum(each.nbytes for each in saved if each.shape in weights and each.op in casts)
    if copies > (halved := sum(each.nbytes for each in saved) - copies):
        yield Finding(
            cause="autocast-copies",
            text="autocast keeps copies of the weights in half precision, which are more than what it halves",
            nbytes=copies - halved,
            change="larger batches, weights in bfloat16, or no autocast",
        )
