"""A profile with the memory its ops allocate unseen written into its log.

Each hidden buffer becomes a storage of kind `workspace` whose live range lies inside its op's ticks, in the order torch
allocates and frees; later ticks move up. What is held for good is there before the step and after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxmem.records import Kind, Profile, Storage
from fxmem.workspaces.hidden import HiddenMemory

__all__ = ["with_workspaces"]


def with_workspaces(profile: Profile, memory: Mapping[int, HiddenMemory], held: Mapping[str, int]) -> Profile:
    """The same step with hidden buffers as storages.

    Args:
        profile: a profile without workspaces.
        memory: by index of the op, what it hides. Buffers of unknown size are left out.
        held: name and bytes of what is there all the time.
    """
    moved = list(range(profile.ticks + 1))
    shift = tick = 0
    ops, added, shift_after = [], [], [0]
    for index, op in enumerate(profile.ops):
        for old in range(tick, op.begin):
            moved[old] = old + shift
        tick = op.begin
        begin = op.begin + shift
        open_buffers: dict[str, tuple[int, int]] = {}

        def close(name: str, index: int = index, node: int = op.node, open_buffers: dict[str, tuple[int, int]] = open_buffers) -> None:
            nonlocal shift
            nbytes, birth = open_buffers.pop(name)
            added.append(Storage(nbytes=nbytes, kind=Kind.WORKSPACE, birth=birth, death=tick + shift, op=index, node=node, name=name))
            shift += 1

        for event in memory[index].events if index in memory else ():
            if event.action == "output" and tick < op.end:
                moved[tick] = tick + shift
                tick += 1
            elif event.action == "alloc" and event.nbytes:
                open_buffers[event.name] = event.nbytes, tick + shift
                shift += 1
            elif event.action == "free" and event.name in open_buffers:
                close(event.name)
        for old in range(tick, op.end):
            moved[old] = old + shift
        tick = op.end
        # The op's range ends before its buffers go: they are alive while it runs.
        end = op.end + shift
        for name in list(open_buffers):
            close(name)
        ops.append(op.model_copy(update={"begin": begin, "end": end}))
        shift_after.append(shift)
    for old in range(tick, profile.ticks + 1):
        moved[old] = old + shift
    ticks = profile.ticks + shift
    storages = [s.model_copy(update={"birth": moved[s.birth] if s.birth else 0, "death": moved[s.death]}) for s in profile.storages]
    residents = [Storage(nbytes=nbytes, kind=Kind.WORKSPACE, birth=0, death=ticks, name=name) for name, nbytes in held.items()]
    spans = tuple(span.model_copy(update={"begin": span.begin + shift_after[span.first_op], "end": span.end + shift_after[span.last_op]}) for span in profile.phases)
    return profile.model_copy(update={"ticks": ticks, "ops": tuple(ops), "storages": (*storages, *added, *residents), "phases": spans})
