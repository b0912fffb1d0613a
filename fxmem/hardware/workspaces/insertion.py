"""A profile with the memory its ops allocate unseen written into its log.

Each hidden buffer becomes a storage of kind `workspace` whose live range lies inside its op's ticks, in the order torch
allocates and frees; later ticks move up. What is kept for good is there before the step and after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxmem.hardware.workspaces.hidden_memory import HiddenEvent, HiddenMemory
from fxmem.records.profile import Kind, Op, Profile, Storage


def insert_workspaces(profile: Profile, memory: Mapping[int, HiddenMemory], held: Mapping[str, int]) -> Profile:
    """The same step with hidden buffers as storages.

    Args:
        profile: a profile without workspaces.
        memory: by index of the op, what it hides. Buffers of unknown size are left out.
        held: name and bytes of what is there all the time.
    """
    if not memory and not held:
        return profile
    log = _Log()
    ops, shift_before = [], [0]
    for index, op in enumerate(profile.ops):
        ops.append(log.run(index, op, memory[index].events if index in memory else ()))
        shift_before.append(log.shift)
    log.keep(profile.ticks + 1)
    ticks = profile.ticks + log.shift
    storages = [
        s.model_copy(update={"birth": log.moved[s.birth] if s.birth else 0, "death": log.moved[s.death]})
        for s in profile.storages
    ]
    residents = [
        Storage(nbytes=nbytes, kind=Kind.WORKSPACE, birth=0, death=ticks, name=name) for name, nbytes in held.items()
    ]
    spans = tuple(
        span.model_copy(
            update={"begin": span.begin + shift_before[span.first_op], "end": span.end + shift_before[span.last_op]}
        )
        for span in profile.phases
    )
    return profile.model_copy(
        update={"ticks": ticks, "ops": tuple(ops), "storages": (*storages, *log.added, *residents), "phases": spans}
    )


class _Log:
    """Copies a log tick by tick, making room as it goes."""

    def __init__(self) -> None:
        self.moved: list[int] = []
        """Where each old tick is now."""
        self.shift = 0
        """How many ticks were put in so far."""
        self.added: list[Storage] = []
        self._tick = 0

    def keep(self, until: int) -> None:
        """The old ticks before `until` follow."""
        self.moved += (tick + self.shift for tick in range(self._tick, until))
        self._tick = max(self._tick, until)

    def run(self, index: int, op: Op, events: Sequence[HiddenEvent]) -> Op:
        """One op with its hidden events; its range ends before the buffers it leaves to go at its return."""
        self.keep(op.begin)
        begin = op.begin + self.shift
        buffers: dict[str, Storage] = {}
        for event in events:
            if event.action == "output" and self._tick < op.end:
                self.keep(self._tick + 1)
            elif event.action == "alloc" and event.nbytes:
                birth = self._insert()
                buffers[event.name] = Storage(
                    nbytes=event.nbytes,
                    kind=Kind.WORKSPACE,
                    birth=birth,
                    death=birth,
                    op=index,
                    node=op.node,
                    name=event.name,
                )
            elif event.action == "free" and event.name in buffers:
                self._end(buffers.pop(event.name))
        self.keep(op.end)
        end = op.end + self.shift
        for buffer in buffers.values():
            self._end(buffer)
        return op.model_copy(update={"begin": begin, "end": end})

    def _insert(self) -> int:
        self.shift += 1
        return self._tick + self.shift - 1

    def _end(self, buffer: Storage) -> None:
        self.added.append(buffer.model_copy(update={"death": self._insert()}))
