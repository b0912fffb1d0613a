"""A result of a model is alive through backward, which does not need it: logits of which the loss alone is used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from fxmem.memory.findings import Finding, register
from fxmem.memory.findings.trials import save_bytes
from fxmem.memory.last_use import find_idle
from fxmem.memory.user_code import find_outermost, find_place
from fxmem.records.profile import Phase, Profile, Timeline

_SHARE: Final = 10
"""Said where the peak is lower by this share, one in so many: most programs keep a small result."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line whose results a program still has in backward, where the peak is lower without them."""
    if profile.step.program is None or timeline.peak.phase is not Phase.BACKWARD:
        return
    begun = min((each.first_node for each in find_outermost(profile) if each.leads_to_gradients), default=None)
    losses = {index for node in profile.nodes if node.op == "loss" for index in node.inputs}
    idle = find_idle(profile, timeline.peak.tick)
    returned, lines = _find_returned(profile) if idle else set(), defaultdict[str, dict[int, int]](dict)
    for index, end in idle.items():
        of = profile.storages[index]
        if begun is None or of.node is None or of.node < begun or of.node in losses:
            continue
        if of.holder or of.node in returned:
            lines[find_place(profile, of.node)][index] = end
    for place, ends in lines.items():
        saved = save_bytes(profile, ends)
        if saved * _SHARE >= timeline.peak.requested_bytes:
            held = sorted({profile.storages[each].holder for each in ends} - {""})
            yield Finding(
                cause="kept-output",
                text=f"{held[0] if held else 'a result'} is alive through backward, which does not need it",
                place=place,
                nbytes=sum(profile.storages[each].nbytes for each in ends),
                change=f"keep the loss alone (loss = model(...).loss), or del {_find_name(held)} before backward()",
                saved_bytes=saved,
            )


def _find_returned(profile: Profile) -> set[int]:
    """Nodes whose results leave the outermost call that made them, and those of no call."""
    calls = {node: call for call in find_outermost(profile) for node in range(call.first_node, call.last_node)}
    found, read = {*range(len(profile.nodes))} - calls.keys(), set[int]()
    for index, node in enumerate(profile.nodes):
        read.update(node.inputs)
        found.update(each for each in node.inputs if calls.get(each) is not calls.get(index))
    return found | calls.keys() - read


def _find_name(held: list[str]) -> str:
    return held[0].partition("[")[0].partition(".")[0] if held else "it"


register("kept-output", find)
