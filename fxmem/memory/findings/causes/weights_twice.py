"""The weights are on the card twice: a checkpoint that was loaded there, a copy of the best model, an average."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from fxmem.memory.findings import Finding, register
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Profile, Timeline

_MOST = 0.9
"""Who holds tensors of the shapes of this share of the weights holds a copy of them."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each thing that a program keeps such a copy in.

    Flat ones alone, as a rank's shard is, say no more than a length, which buffers of gradients have as well.
    """
    if profile.step.program is None:
        return
    alive = [profile.storages[index] for index in timeline.alive]
    weights = Counter((each.shape, each.nbytes) for each in alive if each.kind is Kind.PARAMETER)
    whole = sum(nbytes * count for (_, nbytes), count in weights.items())
    held = defaultdict[str, list[int]](list)
    for index in timeline.alive:
        each = profile.storages[index]
        if each.holder and not each.name and each.kind in (Kind.BUFFER, Kind.TEMPORARY, Kind.OUTPUT):
            held[_find_owner(each.holder)].append(index)
    for owner, indices in held.items():
        copies = [profile.storages[index] for index in indices]
        tensors = Counter((each.shape, each.nbytes) for each in copies)
        alike = tensors & weights
        nbytes = sum(nbytes * count for (_, nbytes), count in alike.items())
        if whole and nbytes >= _MOST * whole and any(len(shape) > 1 for shape, _ in alike):
            yield Finding(
                cause="weights-twice",
                text=f"{owner} has tensors of all shapes of the weights: they are on the card twice",
                place=next((each.made_at for each in copies if each.made_at), ""),
                nbytes=nbytes,
                change="map_location='cpu' where it is loaded, .cpu() where it is copied, or del after its use",
                saved_bytes=save_bytes(profile, dict.fromkeys(indices, 0)),
            )


def _find_owner(holder: str) -> str:
    """The program's own name for it: `ck['model']['0.weight']` is of `ck`."""
    return holder.partition("[")[0].partition(".")[0]


register("weights-twice", find)
