"""A result of far more numbers than what it is made of: `cdist`, a broadcast or a product of all pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from fxmem.memory.figures import find_place, name_call
from fxmem.memory.findings import Finding, register
from fxmem.memory.findings.written_attention import find_written_out
from fxmem.records.profile import Profile, Timeline

_TIMES: Final = 50
"""So many times the bytes of its inputs."""
_SHARE: Final = 4
"""At least this share of the peak, one in so many."""
_PAIRS: Final = frozenset(
    """cdist pairwise_distance matmul bmm mm einsum outer sub add mul div pow eq ne lt gt le ge logical_and logical_or
    max min maximum minimum clamp where masked_fill gather""".split()
)


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line with such calls that has so much at the peak, with what is made of their results in the
    same module. Those that read parameters are meant so; attention that is written out has a cause of its own."""
    alive = defaultdict[int | None, int](int)
    for index in timeline.alive:
        alive[profile.storages[index].node] += profile.storages[index].nbytes
    read = dict[int, int]()
    """By node that makes such a result, or goes on with one, the bytes that it is made of."""
    lines = defaultdict[str, list[int]](list)
    """By line of those that make one, these and what goes on with them."""
    line_of = dict[int, str]()
    attention = find_written_out(profile, is_wanted=False)
    for index, node in enumerate(profile.nodes):
        if index in attention:
            continue
        nbytes = sum(_read_bytes(profile, each) for each in node.inputs)
        alike = (each for each in node.inputs if each in read and profile.nodes[each].module == node.module)
        before = None if node.op == "call_module" else next(alike, None)
        if before is not None and (node.view_of is not None or node.output_bytes >= _TIMES * read[before]):
            read[index], line_of[index] = read[before], line_of[before]
        elif name_call(node) in _PAIRS and node.outputs and 0 < _TIMES * nbytes <= node.output_bytes:
            read[index], line_of[index] = nbytes, find_place(profile, index)
        else:
            continue
        lines[line_of[index]].append(index)
    for place, found in lines.items():
        first, also = profile.nodes[found[0]], ", with what is made of it" if len(found) > 1 else ""
        nbytes = sum(alive[each] for each in found)
        if nbytes * _SHARE >= timeline.peak.requested_bytes:
            shape, times = "x".join(map(str, first.outputs[0].shape)), first.output_bytes // read[found[0]]
            yield Finding(
                cause="wide-result",
                text=f"{name_call(first)} makes {shape} numbers, {times} times the bytes of what it reads{also}",
                place=place,
                nbytes=nbytes,
                change="a part of the rows at a time, if all pairs are meant",
            )


def _read_bytes(profile: Profile, index: int) -> int:
    node = profile.nodes[index]
    if not node.outputs:  # one of several results, as of `q, k, v = x.chunk(3)`
        return sum(_read_bytes(profile, each) for each in node.inputs)
    storages = {each.storage for each in node.outputs if each.storage is not None}
    return sum(profile.storages[each].nbytes for each in storages)


register("wide-result", find)
