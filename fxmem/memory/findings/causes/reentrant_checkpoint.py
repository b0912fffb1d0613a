"""A reentrant checkpoint is given nothing that needs a gradient: the parameters within get none."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.figures import find_place
from fxmem.memory.findings import Finding
from fxmem.records.profile import Kind, Phase, Profile, Timeline
from fxmem.records.units import group


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line whose checkpoints have parameters to train, none of which gets a gradient."""
    has_backward = {op.node for op in profile.ops if op.phase is Phase.BACKWARD}
    if not has_backward:
        return
    gradients = {each.name for each in profile.storages if each.kind is Kind.GRADIENT}
    weights = (each for each in profile.storages if each.kind is Kind.PARAMETER and not each.is_frozen)
    by_node = group((each.node, each) for each in weights)
    last = max(has_backward)
    found: dict[str, tuple[int, int]] = {}
    for region in profile.recomputed:
        nodes = range(region.first_node, region.last_node)
        # A backward came through what follows these nodes, and not through them.
        if last < nodes.stop or not has_backward.isdisjoint(nodes):
            continue
        trained = [each for node in nodes for each in by_node.get(node, ())]
        if trained and gradients.isdisjoint(f"{each.name}.grad" for each in trained):
            place = find_place(profile, region.first_node)
            count, nbytes = found.get(place, (0, 0))
            found[place] = count + 1, nbytes + sum(each.nbytes for each in trained)
    for place, (count, nbytes) in found.items():
        yield Finding(
            cause="reentrant-checkpoint",
            text=f"{count} checkpoint{'s' * (count > 1)} given no tensor that needs a gradient: the parameters within "
            "do not train",
            place=place,
            nbytes=nbytes,
            change="checkpoint(..., use_reentrant=False), or enable_input_require_grads() of a transformers model",
        )
