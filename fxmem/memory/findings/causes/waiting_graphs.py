"""Several graphs wait for one backward: losses of batches that share nothing are added up before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from fxmem.memory import liveness
from fxmem.memory.figures import find_outermost, find_place, leads, name_call
from fxmem.memory.findings import Finding, is_cut_short
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Kind, Phase, Profile, Timeline

_SHARE: Final = 10
"""Said where the peak is lower by this share, one in so many."""
_SUMS: Final = frozenset(
    "add radd iadd sub neg sum mean stack cat getitem to float view reshape squeeze unsqueeze".split()
)
"""What may be done to losses so that the gradient of each stays what it is."""
_FACTORS: Final = frozenset("mul rmul imul div truediv itruediv".split())
"""The same, by a number or a tensor that no gradient leads to."""
_OWN: Final = (Kind.OUTPUT, Kind.SAVED, Kind.TEMPORARY, Kind.WORKSPACE)


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each backward in which graphs end that meet in a sum of their losses alone, where the peak is lower
    with one of them at a time, beside all gradients."""
    if profile.step.program is None or profile.step.ranks is not None or is_cut_short(profile, timeline):
        return
    ran = defaultdict[int, list[int]](list)
    furthest = -1
    for op in profile.ops:
        if op.phase is Phase.BACKWARD:
            ran[op.node] += op.begin, op.end
        elif op.phase is Phase.FORWARD and op.node < furthest:
            return  # torch.autograd.grad, whose gradients forward itself reads
        else:
            furthest = max(furthest, op.node)
    weights = {each.shape for each in profile.storages if each.kind is Kind.PARAMETER}
    made = defaultdict[int | None, list[int]](list)
    for index, each in enumerate(profile.storages):
        # What has a weight's shape may be autocast's copy of it, which other graphs read as well.
        if each.birth and each.kind in _OWN and each.shape not in weights:
            made[each.node].append(index)
    spans = [span for span in profile.phases if span.phase is Phase.BACKWARD]
    together = defaultdict[int, list[set[int]]](list)
    """By backward, the graphs that end there."""
    for part in _find_parts(profile):
        ticks = [tick for node in part & ran.keys() for tick in ran[node]]
        begin, end = min(ticks, default=0), max(ticks, default=0)
        for at, span in enumerate(spans if ticks else ()):
            if span.begin <= begin and end <= span.end:
                together[at].append(part)
    alive, most = {*timeline.alive}, timeline.peak.requested_bytes
    for parts in filter(lambda parts: _follow(profile, parts), together.values()):
        own = [{index for node in part for index in made[node]} for part in parts]
        waits = sorted(sum(profile.storages[index].nbytes for index in each & alive) for each in own)[:-1]
        if sum(waits) * _SHARE >= most > 0 and (saved := _try(profile, own)) * _SHARE >= most:
            yield Finding(
                cause="waiting-graphs",
                text=f"{len(parts)} graphs that share nothing wait for one backward" + _find_sum(profile, parts),
                place=_find_call(profile, min(parts[-1])),
                nbytes=sum(waits),
                change="backward() of each loss before the next forward: the gradients add up to the same",
                saved_bytes=saved,
            )


def _find_call(profile: Profile, node: int) -> str:
    """The line of the outermost call of a model that has a node; the node's own where there is none."""
    source = next((each.source for each in find_outermost(profile) if each.first_node <= node < each.last_node), None)
    return find_place(profile, node) if source is None else source.place


def _find_sum(profile: Profile, parts: Sequence[set[int]]) -> str:
    """Where the losses of graphs are put together first."""
    within = set[int]().union(*parts)
    for index in range(max(parts[0]), len(profile.nodes)):
        if index not in within and sum(leads(profile, each) for each in profile.nodes[index].inputs) > 1:
            return f" of the sum of their losses, {find_place(profile, index)}"
    return ""


def _follow(profile: Profile, parts: Sequence[set[int]]) -> bool:
    """Whether none reads what a later one makes, as a target detached from it: its loss cannot be had before that."""
    begins = {node: min(part) for part in parts for node in part}
    for part in parts:
        begin, waiting = min(part), [*part]
        seen = {*part}
        while waiting:
            for each in {*profile.nodes[waiting.pop()].inputs} - seen:
                seen.add(each)
                if begins.get(each, begin) > begin:
                    return False
                waiting.append(each)
    return True


def _try(profile: Profile, own: Sequence[set[int]]) -> int:
    """How much lower the peak is with the storages of one graph at a time, beside all gradients."""
    early = (each.model_copy(update={"birth": 0}) if each.kind is Kind.GRADIENT else each for each in profile.storages)
    beside = profile.model_copy(update={"storages": tuple(early)})
    more = max(liveness.live_bytes(beside)) - max(liveness.live_bytes(profile))
    return min(save_bytes(beside, dict.fromkeys(set().union(*own) - each, 0)) for each in own) - more


def _find_parts(profile: Profile) -> list[set[int]]:
    """The graphs that a backward goes through, without the sums in which they end: sets of nodes that share none."""
    leading = {index for index in range(len(profile.nodes)) if leads(profile, index)}
    readers = defaultdict[int, list[int]](list)
    for index, node in enumerate(profile.nodes):
        if name_call(node) == "setitem":
            leading |= {index, *node.inputs}  # who reads what is written to is a reader of all
        for each in node.inputs:
            readers[each].append(index)
    sums = set[int]()
    for index in sorted(leading, reverse=True):
        if _is_sum(profile, index, leading) and all(each in sums for each in readers[index] if each in leading):
            sums.add(index)
    part_of: dict[int, set[int]] = {}
    for index in sorted(leading - sums):
        before = {id(part_of[each]): part_of[each] for each in profile.nodes[index].inputs if each in part_of}
        largest = max(before.values(), key=len, default=set[int]())
        for part in ({index}, *before.values()):
            if part is not largest:
                largest |= part
                part_of.update(dict.fromkeys(part, largest))
    return [*{id(part): part for part in part_of.values()}.values()]


def _is_sum(profile: Profile, index: int, leading: set[int]) -> bool:
    """Whether a node adds losses up, or scales one: of what it reads, numbers lead to gradients alone."""
    of = profile.nodes[index]
    inputs, name = [each for each in of.inputs if each in leading], name_call(of)
    is_linear = name in _SUMS or (name in _FACTORS and inputs == [*of.inputs[:1]])
    return is_linear and all(
        prod(made.shape) == 1 or name_call(profile.nodes[each]) in ("stack", "cat")
        for each in inputs
        for made in profile.nodes[each].outputs
    )
