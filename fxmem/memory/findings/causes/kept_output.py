"""A result of a model is alive through what does not need it: logits of which the loss alone is used, in backward or in
the forward of another model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from fxmem.memory.figures import find_outermost, find_place
from fxmem.memory.findings import Finding
from fxmem.memory.findings.trials import save_bytes
from fxmem.memory.liveness import find_idle
from fxmem.records.profile import Phase, Profile, Timeline

_SHARE: Final = 10
"""Said where the peak is lower by this share, one in so many: most programs keep a small result."""
_LARGE: Final = 1 << 30
"""Or by so many bytes: logits of a large model with accumulation, beside what its layers save, are a twelfth."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line whose results a program still has in backward, or by a name in a later forward, where the
    peak is lower without them."""
    if profile.step.program is None or timeline.peak.phase not in (Phase.BACKWARD, Phase.FORWARD):
        return
    begun = min((each.first_node for each in find_outermost(profile) if each.leads_to_gradients), default=None)
    if begun is None:
        return
    losses = {index for node in profile.nodes if node.op == "loss" for index in node.inputs}
    peak = timeline.peak
    is_backward = peak.phase is Phase.BACKWARD
    returned = _find_returned(profile) if is_backward else set[int]()
    # What backward does not need at the peak, and once each other backward has begun.
    backwards = [each for each in profile.phases if each.phase is Phase.BACKWARD and each.begin + 1 < each.end]
    others = [each.begin + 1 for each in backwards if not each.begin <= peak.tick < each.end] if is_backward else []
    lines = defaultdict[str, dict[int, int]](dict)
    for index, end in find_idle(profile, peak.tick, *others).items():
        of = profile.storages[index]
        if of.node is not None and of.node >= begun and of.node not in losses:
            lines[find_place(profile, of.node)][index] = end
    for place, idle in lines.items():
        held = sorted({profile.storages[each].holder for each in idle} - {""})
        # What is held at the end of one micro-batch was held so in those before it.
        ends = {each: end for each, end in idle.items() if held or profile.storages[each].node in returned}
        there = [each for each in ends if profile.storages[each].birth <= peak.tick < profile.storages[each].death]
        saved = save_bytes(profile, ends) if there else 0
        if saved >= min(peak.requested_bytes // _SHARE, _LARGE) > 0:
            name = held[0] if held else ""
            loss = "" if name.isidentifier() or not is_backward else "keep the loss alone (loss = model(...).loss), or "
            at = find_place(profile, profile.ops[peak.op].node if peak.op is not None else None)
            through, before = ("backward", "backward()") if is_backward else (f"forward at {at}", "it")
            yield Finding(
                cause="kept-output",
                text=f"{name or 'a result'} is alive through {through}, which does not need it",
                place=place,
                nbytes=sum(profile.storages[each].nbytes for each in there),
                change=f"{loss}del {name.partition('[')[0].partition('.')[0] or 'it'} before {before}",
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
