"""A forward keeps what backward needs, and no backward follows: validation, inference, a teacher without `no_grad`."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, is_cut_short, register
from fxmem.memory.findings.trials import save_bytes
from fxmem.memory.user_code import find_outermost
from fxmem.records.profile import Kind, ModuleCall, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line that calls a model so, with what is alive of it at the peak that nothing reads again.

    A line that also makes calls with a backward, or a graph that grows from step to step, may be trained by later.
    """
    program = profile.step.program
    if program is None or is_cut_short(profile, timeline) or any(each.is_graph for each in program.grown):
        return
    kept = dict(_find_kept(profile, timeline))
    found: dict[str, list[ModuleCall]] = {}
    for call in find_outermost(profile):
        if call.leads_to_gradients:
            found.setdefault("" if call.source is None else call.source.place, []).append(call)
    for place, calls in found.items():
        if all(each.lacks_backward for each in calls):
            nodes = {node for each in calls for node in range(each.first_node, each.last_node)}
            ends = {each: end for each, end in kept.items() if profile.storages[each].node in nodes}
            yield Finding(
                cause="unused-graph",
                text=f"{calls[0].module} is called with gradients and no backward follows: it keeps what one would "
                "need",
                place=place,
                nbytes=sum(profile.storages[each].nbytes for each in ends),
                change="with torch.no_grad(): around the call",
                saved_bytes=save_bytes(profile, ends),
            )


def _find_kept(profile: Profile, timeline: Timeline) -> Iterator[tuple[int, int]]:
    """Storages of results that are alive at the peak although no node reads them from there on, each with the tick at
    which what read it last has run."""
    ends = {each.node: each.end for each in profile.ops}
    last = dict[int, int]()
    for index, node in enumerate(profile.nodes):
        for each in node.inputs:
            for output in profile.nodes[each].outputs:
                if output.storage is not None:
                    last[output.storage] = index
    op = timeline.peak.op
    now = -1 if op is None else profile.ops[op].node
    for storage in timeline.alive:
        of = profile.storages[storage]
        if of.kind not in (Kind.PARAMETER, Kind.BUFFER) and of.birth and last.get(storage, -1) < now:
            yield storage, ends.get(last.get(storage, of.node or 0), of.birth + 1)


register("unused-graph", find)
