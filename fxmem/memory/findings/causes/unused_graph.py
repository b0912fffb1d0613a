"""A forward keeps what backward needs, and no backward follows: validation, inference, a teacher without `no_grad`."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.figures import find_outermost
from fxmem.memory.findings import Finding, is_cut_short
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, ModuleCall, Phase, Profile, ProgramRun, Timeline
from fxmem.records.units import OF_GRAPH


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line that calls a model so, with what is alive of it at the peak that nothing reads again.

    A line that also makes calls with a backward, or a graph that grows from step to step, may be trained by later.
    """
    program = profile.step.program
    if program is None or is_cut_short(profile, timeline) or any(each.is_graph for each in program.grown):
        return
    kept, at_peak = dict(find_kept(profile)), {*timeline.alive}
    found: dict[str, list[ModuleCall]] = {}
    for call in find_outermost(profile):
        if call.leads_to_gradients:
            found.setdefault("" if call.source is None else call.source.place, []).append(call)
    for place, calls in found.items():
        if all(each.lacks_backward for each in calls):
            nodes = {node for each in calls for node in range(each.first_node, each.last_node)}
            ends = {each: end for each, end in kept.items() if profile.storages[each].node in nodes}
            there = [each for each, end in ends.items() if each in at_peak and end <= timeline.peak.tick]
            yield Finding(
                cause="unused-graph",
                text=f"{calls[0].module} is called with gradients and no backward follows: it keeps what one would "
                "need",
                place=place,
                nbytes=sum(profile.storages[each].nbytes for each in there),
                change="with torch.no_grad(): around the call",
                # Of every call: the next one of a loop has a peak as high.
                saved_bytes=min(save_bytes(profile, ends), timeline.peak.requested_bytes - _find_least(program)),
            )


def _find_least(program: ProgramRun) -> int:
    """What the steps take in any case, where the profile is of what follows them."""
    if not program.shown or program.rounds[program.shown - 1].is_whole:
        return 0
    return max((each.requested_bytes for each in program.steps), default=0)


def find_kept(profile: Profile) -> Iterator[tuple[int, int]]:
    """Storages of results that are alive after the last node that reads them, each with the tick at which that has run.

    What the program keeps itself stays there without a graph. Nothing of a backward is there at all.
    """
    ends = {each.node: each.end for each in profile.ops if each.phase is not Phase.BACKWARD}
    last = dict[int, int]()
    for index, node in enumerate(profile.nodes):
        for each in node.inputs:
            for output in profile.nodes[each].outputs:
                if output.storage is not None:
                    last[output.storage] = index
    for index, of in enumerate(profile.storages):
        is_own = bool(of.holder) and not of.holder.startswith(OF_GRAPH)
        end = ends.get(last.get(index, of.node or 0), of.birth + 1)
        if of.kind not in (Kind.PARAMETER, Kind.BUFFER) and of.birth and end < of.death and not is_own:
            yield index, end
