"""The weights are on the card twice: a checkpoint that was loaded there, or a copy of the best model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxmem.memory.findings import Finding
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Profile, Timeline

_MOST = 0.9
"""A copy of this share of the weights is one of the weights."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each thing that a program keeps such a copy in: what was copied from the weights, or what they
    were copied from, of as many bytes, and not read by the step, as an average is."""
    if profile.step.program is None:
        return
    storages = profile.storages
    weights = {index for index in timeline.alive if storages[index].kind is Kind.PARAMETER}
    origins = {storages[index].copy_of: index for index in weights}
    held = defaultdict[str, dict[int, int]](dict)
    for index in timeline.alive:
        each = storages[index]
        of = each.copy_of if each.copy_of in weights else origins.get(index)
        is_kept = index not in weights and each.holder and not each.name and not each.birth and not each.is_read
        if of is not None and is_kept and storages[of].nbytes == each.nbytes:
            held[_find_owner(each.holder)][of] = index
    whole = sum(storages[index].nbytes for index in weights)
    whole_of = dict[str, dict[int, int]]()
    """A copy by the name that has most of it: of a state's tensors, the variable of a loop has the last one."""
    for owner, copies in sorted(held.items(), key=lambda each: -len(each[1])):
        name = next((each for each, others in whole_of.items() if others.keys().isdisjoint(copies)), owner)
        whole_of.setdefault(name, {}).update(copies)
    for owner, copies in whole_of.items():
        nbytes = sum(storages[index].nbytes for index in copies)
        if nbytes >= _MOST * whole:
            yield Finding(
                cause="weights-twice",
                text=f"{owner} has a copy of all weights, which no operation of the step reads",
                place=next((storages[each].made_at for each in copies.values() if storages[each].made_at), ""),
                nbytes=nbytes,
                change="map_location='cpu' where it is loaded, .cpu() where it is copied, or del after its use",
                saved_bytes=save_bytes(profile, dict.fromkeys(copies.values(), 0)),
            )


def _find_owner(holder: str) -> str:
    """The program's own name for it: `ck['model']['0.weight']` is of `ck`."""
    return holder.partition("[")[0].partition(".")[0]
