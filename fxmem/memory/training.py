"""Which part of a step trains, and which has a backward for nothing."""

from __future__ import annotations

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
    spans = [(each.begin, each.end) for each in profile.phases if each.phase is Phase.BACKWARD]
    unnamed = (each for each in profile.storages if each.is_read and not each.name)
    return any(each.kind is Kind.GRADIENT or any(a <= each.birth < b for a, b in spans) for each in unnamed)


def find_unread(profile: Profile) -> list[int]:
    """Gradients of parameters that the step uses which nothing reads: no optimizer, no copy, no norm over all. None
    where none is read, as the step may be a part of one."""
    program = profile.step.program
    if program is None or profile.step.ranks is not None or len(program.optimizers) != 1:
        return []
    read = _list_read(profile)
    used = {f"{each.name}.grad" for each in profile.storages if each.kind is Kind.PARAMETER and each.node is not None}
    gradients = ((index, each) for index, each in enumerate(profile.storages) if each.kind is Kind.GRADIENT)
    return [index for index, each in gradients if read and each.name in used - read]


def _list_read(profile: Profile) -> set[str]:
    return {each.name for each in profile.storages if each.kind is Kind.GRADIENT and each.is_read}


def find_idle(profile: Profile) -> tuple[list[ModuleCall], set[int]]:
    """Outermost calls whose backward makes unread gradients alone, as a teacher's without `no_grad`; and the nodes
    whose backward is needed. Left out are calls in a line that makes others as well."""
    unread, read = {profile.storages[each].name for each in find_unread(profile)}, _list_read(profile)
    needed = find_needed(profile, {each.removesuffix(".grad") for each in read})
    idle: list[ModuleCall] = []
    busy = {each.source for index, each in enumerate(profile.nodes) if index in needed}
    for call in find_outermost(profile) if unread and not reads_other_gradients(profile) else ():
        nodes = range(call.first_node, call.last_node)
        of_call = (each for each in profile.storages if each.kind is Kind.PARAMETER)
        own = {f"{p.name}.grad" for p in of_call if p.node in nodes or p.name.startswith(f"{call.module}.")}
        if own & unread and not own & read and needed.isdisjoint(nodes):
            idle.append(call)
        else:
            busy.add(call.source)
    return [each for each in idle if each.source not in busy], needed
