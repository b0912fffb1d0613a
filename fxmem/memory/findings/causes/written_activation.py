"""An activation is written out in several calls, each of which saves what one call would not: SiLU, GELU, Mish."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from fxmem.memory.figures import find_place, list_readers, name_call
from fxmem.memory.findings import ACTIVATIONS, Finding
from fxmem.memory.findings.trials import save_bytes
from fxmem.records.profile import Profile, Timeline

_WITHIN: Final = frozenset(
    "add sub mul div truediv pow square cube softplus sigmoid erf tanh imul iadd isub itruediv".split()
)
_SUMS: Final = {"add", "sub", "mul", "div", "truediv"}
_OF_TRANSFORMERS: Final = "gelu", "gelu_pytorch_tanh"
"""The activations of its configurations that are one call, of `gelu_python` and of `gelu_new`."""
_LONGEST: Final = 10
"""Calls that one is written with, at most."""


def find(profile: Profile, timeline: Timeline) -> Iterator[Finding]:
    """A finding for each line with such calls, where the peak is lower without what they save beside their input."""
    readers = list_readers(profile)
    saved = {storage for node in profile.nodes for storage in node.saved}
    lines = defaultdict[tuple[str, str], list[int]](list)
    for index, node in enumerate(profile.nodes):
        if name_call(node) in ("sigmoid", "erf", "tanh") and node.op != "call_module":
            for change, within, x in _find_written(profile, index, readers):
                own = [s for each in within for s in _list_storages(profile, each) if s in saved]
                # The input takes the place of one of them, where nothing else keeps it.
                is_kept = not saved.isdisjoint(_list_storages(profile, x))
                lines[find_place(profile, index), change] += own if is_kept else own[1:]
    for (place, change), own in lines.items():
        yield Finding(
            cause="written-activation",
            text="an activation is written out, and saves the results of its parts for backward",
            place=place,
            nbytes=sum(profile.storages[each].nbytes for each in {*own} & {*timeline.alive}),
            change=f"{_name(place, change)} in its place, which saves x alone; results differ by rounding",
            saved_bytes=save_bytes(profile, dict.fromkeys(own, 0)),
        )


def _name(place: str, change: str) -> str:
    """The change; in transformers' own code, the activation of the configuration that makes it."""
    is_theirs = place.startswith("transformers") and "gelu" in change
    return f'"{_OF_TRANSFORMERS["tanh" in change]}" as the activation of the configuration' if is_theirs else change


def _find_written(
    profile: Profile, function: int, readers: Mapping[int, list[int]]
) -> Iterator[tuple[str, set[int], int]]:
    """What one call does, the nodes that it would be without, and its input; nothing for another use of a function."""
    nodes, made = profile.nodes, function
    above = _list_above(profile, function)
    chain = {function}
    while len(chain) < _LONGEST and len(readers[made]) == 1 and nodes[made].leads_to_gradients:
        (made,) = readers[made]
        if name_call(nodes[made]) not in _WITHIN:
            return
        others = [each for each in nodes[made].inputs if each not in chain]
        for x in others:
            # A number times the input, as in `0.5 * x * (1 + tanh(...))`, is another part.
            part = {x} if x not in above and len(nodes[x].inputs) == 1 and nodes[x].inputs[0] in above else set[int]()
            x = nodes[x].inputs[0] if part else x
            within = chain | part | {each for each in above if x in _list_above(profile, each)}
            names = {name_call(nodes[each]) for each in within}
            change = next((call for call, (functions, _) in ACTIVATIONS.items() if functions == names - _SUMS), "")
            code = " ".join(source.code for each in within if (source := nodes[each].source) is not None)
            constants = ACTIVATIONS[change][1] if change else ""
            is_it = re.match(constants, code) if constants else names.isdisjoint(_SUMS)
            is_alone = all(each in within or each == made for one in within for each in readers[one])
            if change and is_it and x in above and is_alone and name_call(nodes[made]) in ("mul", "imul"):
                yield change, within, x
        if others:
            return
        chain.add(made)


def _list_above(profile: Profile, function: int) -> set[int]:
    """The nodes that a function's input is made of by sums, products and powers, with what these are made of."""
    found, todo = set[int](), [function]
    while todo and len(found) < _LONGEST:
        for each in profile.nodes[todo.pop()].inputs:
            if each not in found:
                found.add(each)
                if name_call(profile.nodes[each]) in _WITHIN and profile.nodes[each].op != "call_module":
                    todo.append(each)
    return found


def _list_storages(profile: Profile, index: int) -> list[int]:
    return [each.storage for each in profile.nodes[index].outputs if each.storage is not None]
