"""Which part of a step trains, and which has a backward for nothing."""

from __future__ import annotations

import bisect

from fxmem.memory.figures import find_outermost
from fxmem.records.profile import Kind, ModuleCall, Phase, Profile


def find_needed(profile: Profile, trained: set[str]) -> set[int]:
    """Nodes that read what trains, parameters by their names, or what such a node makes: their backward is needed."""
    modules = {name.rpartition(".")[0] for name in trained}
    held = {index for index, each in enumerate(profile.storages) if each.name in trained}
    found = set[int]()
    for index, node in enumerate(profile.nodes):
        reads = node.op in ("loss", "optimizer") or not found.isdisjoint(node.inputs)
        if reads or node.target in modules or any(each.storage in held for each in node.outputs):
            found.add(index)
    return found


def reads_other_gradients(profile: Profile) -> bool:
    """Whether a gradient is read that is no parameter's, as an input's is."""
    spans = _list_backwards(profile)
    unnamed = (each for each in profile.storages if each.is_read and not each.name)
    return any(each.kind is Kind.GRADIENT or any(a <= each.birth < b for a, b in spans) for each in unnamed)


def find_unread(profile: Profile) -> list[int]:
    """Gradients of parameters that the step uses which nothing reads: no optimizer, no copy, no norm over all; and
    those that are freed unread, as a generator's are after its critic's backward. None where none is read, as the step
    may be a part of one."""
    program = profile.step.program
    if program is None or profile.step.ranks is not None or not program.optimizers:
        return []
    read = list_read(profile)
    used = {f"{each.name}.grad" for each in profile.storages if each.kind is Kind.PARAMETER and each.node is not None}
    gradients = ((index, each) for index, each in enumerate(profile.storages) if each.kind is Kind.GRADIENT)
    is_one = len(program.optimizers) == 1
    return [
        index
        for index, each in gradients
        if read and each.name in used and (each.is_discarded or (is_one and each.name not in read))
    ]


def list_read(profile: Profile) -> set[str]:
    """Names of the gradients that something reads."""
    return {each.name for each in profile.storages if each.kind is Kind.GRADIENT and each.is_read}


def find_idle(profile: Profile) -> tuple[list[ModuleCall], set[int]]:
    """Outermost calls whose backward makes unread gradients alone, as a teacher's without `no_grad`; and the nodes
    whose backward is needed. Left out are calls in a line that makes others as well."""
    unread = {*find_unread(profile)}
    if not unread or reads_other_gradients(profile):
        return [], find_needed(profile, {each.removesuffix(".grad") for each in list_read(profile)})
    gradients = [(index, each) for index, each in enumerate(profile.storages) if each.kind is Kind.GRADIENT]
    parameters = [each for each in profile.storages if each.kind is Kind.PARAMETER]
    through, needed = _find_through(profile), set[int]()
    read, wasted = list[set[str]](), list[set[str]]()
    backwards = _list_backwards(profile)
    for number, (begin, end) in enumerate(backwards):
        there = [(index, each) for index, each in gradients if each.birth < end and begin < each.death]
        after = backwards[number + 1][0] if number + 1 < len(backwards) else profile.ticks
        # What is read at some time, and freed unread at last, is for nothing in its last backward alone.
        wasted.append({g.name for index, g in there if index in unread and (not g.is_read or g.death <= after)})
        read.append({each.name for _, each in there} - wasted[-1])
        needs = find_needed(profile, {each.removesuffix(".grad") for each in read[-1]}) if wasted[-1] else through
        needed.update(node for node in needs if number in through[node])
    needed.update(node for node, numbers in through.items() if not numbers)
    idle: list[ModuleCall] = []
    busy = {each.source for index, each in enumerate(profile.nodes) if index in needed}
    for call in find_outermost(profile):
        nodes = range(call.first_node, call.last_node)
        own = {f"{p.name}.grad" for p in parameters if p.node in nodes or p.name.startswith(f"{call.module}.")}
        numbers = {number for node in nodes for number in through[node]}
        if needed.isdisjoint(nodes) and all(own & wasted[each] and not own & read[each] for each in numbers):
            idle.append(call)
        else:
            busy.add(call.source)
    return [each for each in idle if each.source not in busy], needed


def _find_through(profile: Profile) -> dict[int, set[int]]:
    """By node, the backwards of the step that its own ran in; of one without, the next after it."""
    begins = [begin for begin, _ in _list_backwards(profile)]
    found, tick = {index: set[int]() for index in range(len(profile.nodes))}, 0
    begun = dict[int, int]()
    for op in profile.ops:
        if op.phase is Phase.BACKWARD:
            found[op.node].add(bisect.bisect_right(begins, op.begin) - 1)
        else:
            begun.setdefault(op.node, op.begin)
    for node, numbers in found.items():
        tick = max(tick, begun.get(node, 0))
        if not numbers and (after := bisect.bisect_right(begins, tick)) < len(begins):
            numbers.add(after)
    return found


def _list_backwards(profile: Profile) -> list[tuple[int, int]]:
    return [(each.begin, each.end) for each in profile.phases if each.phase is Phase.BACKWARD]
