"""The target of a loss keeps a graph: a Q-value of the next state that the network makes which is to learn from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fxmem.memory.figures import find_outermost, find_place, leads, name_call
from fxmem.memory.findings import Finding, is_cut_short
from fxmem.memory.findings.causes.unused_graph import find_kept
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Profile, Timeline

_LOSSES: Final = frozenset("mse_loss mseloss smooth_l1_loss smoothl1loss huber_loss huberloss".split())
"""Their second argument is the target."""
_KINDS: Final = {"add": "+", "radd": "+", "mul": "*", "rmul": "*", "view": "", "squeeze": "", "unsqueeze": ""}
"""What is done to a value of the next state before it is a target."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each loss whose target is a reward and a discounted value, by Bellman's equation, and has a graph
    through calls of a model that makes the prediction, too. What else two results of a model have in common, as two
    views of an image, may be meant to train both."""
    if profile.step.program is None or is_cut_short(profile, timeline):
        return
    kept, at_peak = dict(find_kept(profile)), {*timeline.alive}
    for index, node in enumerate(profile.nodes):
        if name_call(node) not in _LOSSES or len(node.inputs) < 2 or not _is_bellmans(profile, node.inputs[1]):
            continue
        predicted, target = (_find_graph(profile, each) for each in node.inputs[:2])
        target -= predicted
        calls = [(each, {*range(each.first_node, each.last_node)}) for each in find_outermost(profile)]
        learns = {each.module for each, nodes in calls if nodes & predicted}
        call = next((each for each, nodes in calls if nodes & target and each.module in learns), None)
        ends = {each: end for each, end in kept.items() if profile.storages[each].node in target}
        if call is not None and call.source is not None:
            there = [each for each in ends if each in at_peak and ends[each] <= timeline.peak.tick]
            yield Finding(
                cause="trained-target",
                text=f"the target of {name_call(node)} at {find_place(profile, index)} keeps a graph: {call.module} is "
                "called with gradients for what it is to learn",
                place=call.source.place,
                nbytes=sum(profile.storages[each].nbytes for each in there),
                change="with torch.no_grad(): around the call",
                saved_bytes=save_bytes(profile, ends),
            )


def _is_bellmans(profile: Profile, index: int) -> bool:
    """Whether a node adds a tensor that has no gradient to products of one that has."""
    done = ""
    while leads(profile, index) and (kind := _KINDS.get(name_call(profile.nodes[index]))) is not None:
        inputs = profile.nodes[index].inputs
        leading = [each for each in inputs if leads(profile, each)]
        if len(leading) != 1:
            break
        done += "" if kind == "+" and len(inputs) == 1 else kind  # a number is no reward
        (index,) = leading
    return leads(profile, index) and re.fullmatch(r"\+\*+", done) is not None


def _find_graph(profile: Profile, index: int) -> set[int]:
    """The nodes that a backward from a node goes through."""
    found, waiting = set[int](), [index]
    while waiting:
        if leads(profile, each := waiting.pop()) and each not in found:
            found.add(each)
            waiting += profile.nodes[each].inputs
    return found
