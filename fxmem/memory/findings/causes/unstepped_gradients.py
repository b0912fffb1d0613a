"""Gradients that nothing reads: only a part of what the step differentiates was given to the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding
from fxmem.memory.findings.causes.unused_graph import find_kept
from fxmem.memory.findings.trials import save_bytes
from fxmem.memory.training import find_idle, find_unread, list_read
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import group


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding where gradients of the step are read, and those of other parameters that it uses are not: one for each
    line whose calls have a backward for those alone, with what they save for it, or one for all."""
    unread, read, kept = find_unread(profile), list_read(profile), dict(find_kept(profile))
    lines = group((each.source.place, each) for each in find_idle(profile)[0] if each.source is not None)
    for place, calls in (*lines.items(), ("", [])):
        within = tuple(f"{each.module}." for each in calls) or ""
        own = [each for each in unread if profile.storages[each].name.startswith(within)]
        if not calls:
            # What something reads at another time trains.
            own = [each for each in own if profile.storages[each].name not in read]
        if not own:
            continue
        unread = [each for each in unread if each not in own]
        nodes = {node for each in calls for node in range(each.first_node, each.last_node)}
        ends = {each: 0 for each in own if not profile.storages[each].is_read} | {
            each: end for each, end in kept.items() if profile.storages[each].node in nodes
        }
        there = [each for each in timeline.alive if each in ends and ends[each] <= timeline.peak.tick]
        names = dict.fromkeys(profile.storages[each].name for each in own)
        nothing = "nothing reads" + (" before they are freed" if names.keys() & read else ", no optimizer either")
        first, off = profile.storages[own[0]].name.removesuffix(".grad"), "requires_grad_(False) of what does not train"
        yield Finding(
            cause="unstepped-gradients",
            text=f"{len(names)} parameters get gradients that {nothing}, {first} among them"
            + (f": {calls[0].module} keeps what its backward needs" if calls else ""),
            place=place,
            nbytes=sum(profile.storages[each].nbytes for each in there),
            change="with torch.no_grad(): around the call" if calls else f"{off}, before its first forward",
            saved_bytes=save_bytes(profile, ends),
        )
