"""A result of far more numbers than what it is made of, or of which the diagonal alone is read: all pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from fxmem.memory.figures import find_place, list_readers, name_call
from fxmem.memory.findings import Finding
from fxmem.memory.findings.written_attention import find_written_out
from fxmem.records.profile import Node, Profile, Timeline

_TIMES: Final = 50
"""So many times the numbers of its inputs."""
_SHARE: Final = 4
"""At least this share of the peak, one in so many."""
_PAIRS: Final = frozenset(
    """cdist pairwise_distance matmul bmm mm einsum outer sub add mul div pow eq ne lt gt le ge logical_and logical_or
    max min maximum minimum clamp where masked_fill gather""".split()
)
_OF_DIAGONAL: Final = {
    "getitem": "rows and columns by index at once, x[torch.arange(n), index]",
    **dict.fromkeys(("matmul", "mm"), "(a * b.mT).sum(-1)"),
}
"""How the diagonal of what these calls make is made alone."""
_READS_DIAGONAL: Final = frozenset("diagonal diag trace".split())


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line with such calls that has so much at the peak, with what is made of their results in the
    same module. Those that read parameters are meant so; attention that is written out has a cause of its own."""
    alive = defaultdict[int | None, int](int)
    for index in timeline.alive:
        alive[profile.storages[index].node] += profile.storages[index].nbytes
    read = dict[int, int]()
    """By node that makes such a result, or goes on with one, the numbers that it is made of."""
    lines = defaultdict[str, list[int]](list)
    """By line of those that make one, these and what goes on with them."""
    line_of = dict[int, str]()
    attention, diagonal = find_written_out(profile, is_wanted=False), _find_diagonal(profile)
    for index, node in enumerate(profile.nodes):
        if index in attention:
            continue
        numbers, made = sum(_count(profile, each) for each in node.inputs), _count(profile, index)
        alike = (each for each in node.inputs if each in read and profile.nodes[each].module == node.module)
        before = None if node.op == "call_module" else next(alike, None)
        if before is not None and (node.view_of is not None or made >= _TIMES * read[before]):
            read[index], line_of[index] = read[before], line_of[before]
        elif index in diagonal or (name_call(node) in _PAIRS and node.output_bytes and 0 < _TIMES * numbers <= made):
            read[index], line_of[index] = numbers, find_place(profile, index)
        else:
            continue
        lines[line_of[index]].append(index)
    rows, in_parts = list[tuple[str, str, Sequence[int], str, int, str]](), "a part of the rows at a time"
    for place, found in lines.items():
        first, also = profile.nodes[found[0]], ", with what is made of it" if len(found) > 1 else ""
        nbytes, is_whole, name = sum(alive[each] for each in found), found[0] not in diagonal, name_call(first)
        times = _count(profile, found[0]) // (read[found[0]] or 1)
        what = f"{times} times those that it reads{also}" if is_whole else "whose diagonal alone is read"
        change = f"{in_parts}, if all pairs are meant" if is_whole else _OF_DIAGONAL[name]
        rows.append((place, name, first.outputs[0].shape, what, nbytes, change))
    for of in (profile.storages[index] for index in timeline.alive):
        if of.birth and of.made_at and of.op is not None:  # in what backward calls, which has no nodes
            op = profile.ops[of.op]
            times = of.nbytes // max((op.moved_bytes or 2 * of.nbytes) - of.nbytes, 1)
            what = f"{times} times those that it reads, in what backward calls" if times >= _TIMES else ""
            rows.append((of.made_at, op.name.split(".")[1], of.shape, what, of.nbytes, in_parts))
    for place, name, shape, what, nbytes, change in rows:
        if what and nbytes * _SHARE >= timeline.peak.requested_bytes:
            text = f"{name} makes {'x'.join(map(str, shape))} numbers, {what}"
            yield Finding(cause="wide-result", text=text, place=place, nbytes=nbytes, change=change)


def _count(profile: Profile, index: int) -> int:
    """The numbers in the storages of a node's results."""
    node = profile.nodes[index]
    if not node.outputs:  # one of several results, as of `q, k, v = x.chunk(3)`
        return sum(_count(profile, each) for each in node.inputs)
    storages = {each.storage for each in node.outputs if each.storage is not None}
    return sum(prod(profile.storages[each].shape) for each in storages)


def _find_diagonal(profile: Profile) -> set[int]:
    """Nodes that make a matrix of which the diagonal alone is read."""
    nodes, readers = profile.nodes, list_readers(profile)
    found = {index for index, by in readers.items() if all(name_call(nodes[each]) in _READS_DIAGONAL for each in by)}
    kept = {index for index, each in enumerate(profile.storages) if each.holder}

    def is_matrix(node: Node) -> bool:
        is_made = node.output_bytes and kept.isdisjoint(each.storage for each in node.outputs)
        return bool(is_made and name_call(node) in _OF_DIAGONAL and len(node.outputs[0].shape) == 2)

    return {index for index in found if is_matrix(profile.nodes[index])}
