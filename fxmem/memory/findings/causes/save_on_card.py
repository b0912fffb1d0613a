"""What a program saves is whole on the card once more: gathered from its shards, or copied, before it is written."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.figures import find_place_of_peak
from fxmem.memory.findings import Finding
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Phase, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where the peak is within a save, by what it has made until then: on their way to the host, tensors are
    on the card one at a time, the largest at the most."""
    if timeline.peak.phase is not Phase.SAVE:
        return
    begin = max(span.begin for span in profile.phases if span.phase is Phase.SAVE and span.begin <= timeline.peak.tick)
    made = [index for index in timeline.alive if profile.storages[index].birth >= begin]
    rest = sorted(made, key=lambda index: profile.storages[index].nbytes)[:-1]
    if rest:
        yield Finding(
            cause="save-on-card",
            text="what is saved is whole on the card once more",
            place=find_place_of_peak(profile, timeline.peak),
            nbytes=sum(profile.storages[index].nbytes for index in made),
            change="take each tensor to the host as soon as it is made: .cpu(), StateDictOptions(cpu_offload=True), "
            "FullStateDictConfig(offload_to_cpu=True)",
            saved_bytes=save_bytes(profile, dict.fromkeys(rest, 0)),
        )
