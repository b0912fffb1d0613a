"""A frozen part saves activations for backward, although nothing before it trains: its input wants a gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fxmem.memory.figures import find_outermost, find_place
from fxmem.memory.findings import Finding
from fxmem.memory.findings.trials import save_bytes
from fxmem.memory.training import find_needed, reads_other_gradients
from fxmem.records.profile import Kind, Phase, Profile, Timeline


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for what such parts have saved at the peak, where the step trains parameters further on.

    The gradient of an input is for nothing where nothing reads it. A reentrant checkpoint may be what wants it, for
    else the parameters within do not train.
    """
    parameters = [each for each in profile.storages if each.kind is Kind.PARAMETER]
    gradients = {each.name for each in profile.storages if each.kind is Kind.GRADIENT}
    trained = {each.name for each in parameters if f"{each.name}.grad" in gradients}
    if not trained or len(trained) == len(parameters) or profile.step.ranks is not None or profile.recomputed:
        return
    if reads_other_gradients(profile):
        return
    has_backward = {op.node for op in profile.ops if op.phase is Phase.BACKWARD}
    needed, frozen = find_needed(profile, trained), _find_frozen(profile)
    idle = has_backward & frozen - needed
    saved = {index for node in idle for index in profile.nodes[node].saved}
    saved -= {index for node in needed for index in profile.nodes[node].saved}
    kept = [index for index in timeline.alive if index in saved and profile.storages[index].kind is Kind.SAVED]
    if kept:
        first = min(idle)
        call = next((each for each in find_outermost(profile) if each.first_node <= first < each.last_node), None)
        yield Finding(
            cause="frozen-saves",
            text=f"{call.module if call and call.module else 'a frozen part'} saves activations for a gradient of its "
            "input: nothing before it trains",
            place=find_place(profile, first),
            nbytes=sum(profile.storages[index].nbytes for index in kept),
            change="an input that needs no gradient, or torch.no_grad() around the frozen part",
            saved_bytes=save_bytes(profile, {index: profile.storages[index].birth + 1 for index in kept}),
        )


def _find_frozen(profile: Profile) -> set[int]:
    """Nodes within outermost calls whose first parameters are frozen, and none is read that trains."""
    of_node = defaultdict[int, set[bool]](set)
    for each in profile.storages:
        if each.kind is Kind.PARAMETER and each.node is not None:
            of_node[each.node].add(each.is_frozen)
    first = min((node for node, frozen in of_node.items() if frozen == {True}), default=len(profile.nodes))
    return set(range(first, len(profile.nodes)))
