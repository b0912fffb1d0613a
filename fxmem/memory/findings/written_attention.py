"""Attention that is written out: a product, a softmax of it, and a product of that with the values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from fxmem.memory.figures import list_readers, name_call
from fxmem.records.profile import Node, Phase, Profile

_PRODUCTS: Final = frozenset("matmul bmm baddbmm einsum".split())
_ON_SCORES: Final = frozenset(
    """add sub mul div truediv iadd isub imul itruediv masked_fill where dropout to type float half bfloat16 view
    reshape contiguous clone type_as""".split()
)
"""What `scaled_dot_product_attention` does to scores as well, or what changes no number of them."""


def find_written_out(profile: Profile, *, is_wanted: bool = True) -> dict[int, tuple[int, ...]]:
    """Nodes that make scores of attention, or go on with them until their product with the values: by node, the last
    two sizes of the scores.

    Args:
        profile: of the step.
        is_wanted: only where a kernel that makes no scores would do.
    """
    readers = list_readers(profile)
    found: dict[int, tuple[int, ...]] = {}
    for index, node in enumerate(profile.nodes):
        if is_softmax(node) and node.outputs:  # else it ran out of memory
            found |= dict.fromkeys(_follow(profile, index, readers, is_wanted), node.outputs[0].shape[-2:])
    steps = defaultdict[int, list[str]](list)
    for op in profile.ops:
        if op.phase is Phase.FORWARD and (of := profile.nodes[op.node]).outputs and is_layer(of):
            steps[op.node].append(op.name.split(".")[1].lstrip("_"))
    for index, names in steps.items():
        at = names.index("softmax") if "softmax" in names else 0
        is_read = sum(name_call(profile.nodes[each]) == "getitem" for each in readers[index]) > 1
        is_read = is_read or _is_kept(profile, index)
        if not is_read and not _PRODUCTS.isdisjoint(names[:at]) and not _PRODUCTS.isdisjoint(names[at:]):
            found[index] = profile.nodes[index].outputs[-1].shape[-2:]
    return found


def is_softmax(node: Node) -> bool:
    """Whether a node is one softmax."""
    return name_call(node) == "softmax" and len(node.outputs) == 1


def is_layer(node: Node) -> bool:
    """Whether a node is a call of `nn.MultiheadAttention`, which is asked for its weights or not."""
    return node.op == "call_module" and node.module_type == "MultiheadAttention"


def _follow(profile: Profile, softmax: int, readers: Mapping[int, Sequence[int]], is_wanted: bool) -> set[int]:
    """The nodes from the product that makes scores to the one that reads the weights, without the last; empty where
    there are no such two, or where something else reads the weights.

    A kernel without scores would not do where something else reads them, as a next layer that adds them to its own
    (He et al., RealFormer, 2021), or where what is added is as large and a layer's own, as a second product (Dai et
    al., Transformer-XL, 2019): it would be saved in their place.
    """
    shape = profile.nodes[softmax].outputs[0].shape
    if _is_kept(profile, softmax):
        return set()
    found, products, todo, added = {softmax}, set[int](), [softmax], set[int]()
    while todo:
        for each in profile.nodes[todo.pop()].inputs:
            node = profile.nodes[each]
            if not node.outputs or prod(node.outputs[0].shape) != prod(shape):
                continue
            added.add(each)
            if node.outputs[0].shape[-2:] != shape[-2:]:
                continue
            if name_call(node) in _PRODUCTS:
                products.add(each)
            elif name_call(node) in _ON_SCORES and each not in found:
                found.add(each)
                todo.append(each)
    scores = {*products}
    for each in sorted(found - {softmax}):
        if not scores.isdisjoint(profile.nodes[each].inputs):  # no mask
            scores.add(each)
    others = {each for node in scores for each in readers.get(node, ())} - found - products
    own = {each for each in added - scores if len(readers[each]) == 1}
    if is_wanted and (len(products) > 1 or own or any(readers.get(each) for each in others)):
        return set()
    todo, is_read = [softmax], False
    while todo:
        for each in readers.get(todo.pop(), ()):
            if name_call(profile.nodes[each]) in _PRODUCTS:
                is_read = True
            elif name_call(profile.nodes[each]) in _ON_SCORES:
                found.add(each)
                todo.append(each)
            else:
                return set()
    return found | products if products and is_read else set()


def _is_kept(profile: Profile, index: int) -> bool:
    """Whether a program keeps the weights that a node returns, the last of its results; not in a mere variable."""
    weights = profile.nodes[index].outputs[-1].storage
    title = "" if weights is None else profile.storages[weights].title
    return bool(title) and not title.isidentifier()
