"""A sharded model is gathered at once, or kept so: no block is a unit of its own, what gathers frees late, or gradients
wait for the last micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.memory.figures import find_place
from fxmem.memory.findings import Finding
from fxmem.records.profile import Kind, Phase, Profile, Storage, Timeline

_MOST: Final = 0.8
"""Who has this share of the model gathered at once has all of it."""
_MUCH: Final = 0.4
"""The same, of what is gathered from forward to backward."""
_DEEPSPEED: Final = "stage3_max_reuse_distance and stage3_prefetch_bucket_size of 0, both, in zero_optimization"
"""Of 12 layers of 2048, `fxmem run` with DeepSpeed 0.19.8: 1.38 GiB less at the peak; one of them alone does not do."""
_CHANGES: Final = {
    ", shards": (_DEEPSPEED, _DEEPSPEED),
    "_fsdp_wrapped_module": (
        "auto_wrap_policy=ModuleWrapPolicy({Block}), and sharding_strategy=FULL_SHARD",
        "an auto_wrap_policy that wraps the embedding and the head, too",
    ),
    "": (
        "fully_shard(block) of each block before the model, and reshard_after_forward=True",
        "fully_shard of the embedding and of the head by themselves",
    ),
}
"""By what the name of a parameter has in it, what to change: DeepSpeed's ZeRO-3, FSDP1, `fully_shard`."""


_SHARE: Final = 10
"""Gradients that wait are said from this share of the peak on, one in so many."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where that is so at the peak."""
    gathered = [each for each in profile.storages if each.kind is Kind.UNSHARDED]
    if not gathered:
        return
    shards = [each.shape for each in profile.storages if each.kind is Kind.PARAMETER and each.shape]
    of_fsdp1 = (each for each in profile.storages if each.kind is Kind.PARAMETER and "_fsdp_wrapped" in each.name)
    flat = {f"{each.name}.grad": each.shape for each in of_fsdp1}
    held = (profile.storages[index] for index in timeline.alive if profile.storages[index].kind is Kind.GRADIENT)
    # A gradient that no parameter has: of a weight of which parameters are the shards; FSDP1's, of its flat parameter.
    waits = [
        each
        for each in held
        if flat.get(each.name, each.shape) < each.shape
        or (not each.name and any(len(of) > 1 and of[1:] == each.shape[1:] and of < each.shape for of in shards))
    ]
    nbytes = sum(each.nbytes for each in waits)
    if waits and nbytes * _SHARE >= timeline.peak.requested_bytes:
        yield Finding(
            cause="fsdp-gather",
            text=f"{len(waits)} gradients stay whole on each card, from the first micro-batch to the last",
            place=find_place(profile, waits[0].node),
            nbytes=nbytes,
            change="set_requires_gradient_sync(True), or no no_sync(), in each: sharded ones, sent each time",
        )
    forward = next((span for span in profile.phases if span.phase is Phase.FORWARD), None)
    alive = [profile.storages[index] for index in timeline.alive if profile.storages[index].kind is Kind.UNSHARDED]
    if forward is None or len(alive) < 2:
        return
    whole = sum(each.nbytes for each in gathered if each.birth < forward.end)
    nbytes = sum(each.nbytes for each in alive)
    throughout = [each for each in alive if each.birth < forward.end < each.death]
    names = [each.name for each in profile.storages if each.kind is Kind.PARAMETER]
    blocks, ends = next(change for mark, change in _CHANGES.items() if any(mark in name for name in ["", *names]))
    if nbytes >= _MOST * whole and len({each.shape for each in alive}) > 1:
        yield Finding(cause="fsdp-gather", text="the whole model is gathered at once", nbytes=nbytes, change=blocks)
    elif throughout and (kept := sum(each.nbytes for each in throughout)) >= _MUCH * whole:
        text = f"{len(throughout)} tensors stay gathered from forward to backward, one of {_shape(throughout)}"
        yield Finding(cause="fsdp-gather", text=text, nbytes=kept, change=ends)


def _shape(storages: list[Storage]) -> str:
    largest = max(storages, key=lambda each: each.nbytes)
    return f"{largest.shape[0]:,} numbers" if len(largest.shape) == 1 else "x".join(map(str, largest.shape))
