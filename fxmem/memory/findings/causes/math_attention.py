"""Attention keeps its matrix of scores: it is written out, or no kernel that avoids it takes the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fxmem.memory.figures import find_place
from fxmem.memory.findings import Finding
from fxmem.memory.findings.written_attention import find_written_out, is_layer, is_softmax
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.records.units import MATH_ATTENTION, package_path

_SHARE: Final = 10
"""What is written out is said from this share of the peak on, one in so many."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for all calls of `scaled_dot_product_attention` that are unfused, at the line of the first, with their
    scores that are alive at the peak; another for those that are written out, where nothing else reads the weights."""
    texts = (each.text for each in profile.assumptions if each.topic == "attention")
    why = next((each.removeprefix(MATH_ATTENTION) for each in texts if each.startswith(MATH_ATTENTION)), "")
    softmax = {index: op.node for index, op in enumerate(profile.ops) if op.name.startswith("aten._safe_softmax")}
    shapes = {(each.node, each.shape) for each in profile.storages if each.op in softmax}
    alive = [profile.storages[each] for each in timeline.alive]
    if why and softmax:
        yield Finding(
            cause="math-attention",
            text=f"attention runs unfused in {_count({*softmax.values()})} and keeps its scores ({why})",
            place=find_place(profile, min(softmax.values())),
            nbytes=sum(each.nbytes for each in alive if (each.node, each.shape) in shapes),
            change="inputs that one of these kernels takes; fxmem advise tries each kernel",
        )
    written = find_written_out(profile)
    nbytes = sum(each.nbytes for each in alive if each.node in written and each.shape[-2:] == written[each.node])
    if written and nbytes * _SHARE >= timeline.peak.requested_bytes:
        first = min(written)
        calls = {index for index in written if is_softmax(profile.nodes[index]) or is_layer(profile.nodes[index])}
        yield Finding(
            cause="math-attention",
            text=f"attention is written out in {_count(calls)} and keeps its scores",
            place=find_place(profile, first),
            nbytes=nbytes,
            change=_find_change(profile.nodes[first]),
        )


def _count(calls: set[int]) -> str:
    return f"{len(calls)} call{'s' * (len(calls) > 1)}"


def _find_change(node: Node) -> str:
    if is_layer(node):
        return "need_weights=False in the call: nothing reads the weights that it returns"
    if node.source is not None and package_path(node.source.file).startswith("transformers"):
        return 'attn_implementation="sdpa"'
    return "F.scaled_dot_product_attention(q, k, v, attn_mask=...), which has kernels that make no scores"
