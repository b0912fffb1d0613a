"""A forward keeps what backward needs, and no backward follows: validation, inference, a teacher without `no_grad`."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.findings import Finding, is_cut_short, register
from fxmem.memory.findings.trials import save_bytes
from fxmem.memory.user_code import find_outermost
from fxmem.records.profile import Kind, Phase, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line that calls a model so, with what is alive of it at the peak that nothing reads again."""
    if profile.step.program is None or is_cut_short(profile, timeline):
        return
    has_backward, kept = _find_backward(profile), dict(_find_kept(profile, timeline))
    found: dict[str, tuple[str, dict[int, int]]] = {}
    for call in find_outermost(profile):
        nodes = range(call.first_node, call.last_node)
        if call.leads_to_gradients and has_backward.isdisjoint(_find_readers(profile, nodes)):
            place = "" if call.source is None else call.source.place
            ends = {each: end for each, end in kept.items() if profile.storages[each].node in nodes}
            found.setdefault(place, (call.module, {}))[1].update(ends)
    for place, (module, ends) in found.items():
        yield Finding(
            cause="unused-graph",
            text=f"{module} is called with gradients and no backward follows: it keeps what one would need",
            place=place,
            nbytes=sum(profile.storages[each].nbytes for each in ends),
            change="with torch.no_grad(): around the call",
            saved_bytes=save_bytes(profile, ends),
        )


def _find_readers(profile: Profile, nodes: range) -> set[int]:
    """These nodes, and all that read what they make: a backward that ended early came as far as some of them."""
    found = set(nodes)
    for index in range(nodes.stop, len(profile.nodes)):
        if not found.isdisjoint(profile.nodes[index].inputs):
            found.add(index)
    return found


def _find_backward(profile: Profile) -> set[int]:
    """Nodes with a backward: one of the phase, or of `torch.autograd.grad`, whose ops come after a later node's."""
    found, furthest = set[int](), -1
    for op in profile.ops:
        if op.phase is Phase.BACKWARD or op.node < furthest:
            found.add(op.node)
        furthest = max(furthest, op.node)
    return found


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
