"""The memory that ops allocate unseen, written into the log of a step.

Each hidden buffer becomes a storage of kind `workspace` whose live range lies inside its op's ticks, in the order torch
allocates and frees; later ticks move up. What is kept for good is there before the step and after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxmem.hardware.hidden_memory import HeldBuffer, HiddenEvent, HiddenMemory
from fxmem.records.profile import Kind, PhaseSpan, Storage


class TimedOp(NamedTuple):
    """When an op runs, and the node that it runs for."""

    node: int
    begin: int
    end: int
    stream: int = 0


class BareLog(NamedTuple):
    """A step's log before hidden buffers were put in."""

    ops: Sequence[TimedOp]
    phases: Sequence[PhaseSpan]
    ticks: int
    moved: Sequence[int]
    """Where each of its ticks is now."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkspaceLog:
    """Hidden buffers, and the ticks of everything else beside them."""

    ticks: int
    moved: Sequence[int]
    """Where each old tick is now."""
    ops: Sequence[tuple[int, int]]
    """Begin and end of each op."""
    phases: tuple[PhaseSpan, ...]
    storages: tuple[Storage, ...]
    """The hidden buffers."""


def insert_workspaces(
    ops: Sequence[TimedOp],
    phases: Sequence[PhaseSpan],
    ticks: int,
    memory: Mapping[int, HiddenMemory],
    held: Mapping[str, HeldBuffer],
) -> WorkspaceLog:
    """Put hidden buffers into the log of a step.

    Args:
        ops: of the log, with its `phases` and how many `ticks` it has, without workspaces.
        memory: by index of the op, what it hides. Buffers of unknown size are left out.
        held: by name, what is there all the time from the first step on.
    """
    log = _Log()
    spans, shift_before = [], [0]
    passing = _Passing(ops, {name: buffer for name, buffer in held.items() if buffer.needed_by})
    for index, op in enumerate(ops):
        spans.append(log.run(index, op, memory[index].events if index in memory else ()))
        passing.follow(index, log)
        shift_before.append(log.shift)
    log.keep(ticks + 1)
    ticks += log.shift
    residents = [
        _workspace(name, buffer.nbytes, 0, buffer.op, None, buffer.stream).model_copy(update={"death": ticks})
        for name, buffer in held.items()
        if not buffer.needed_by
    ]
    moves = (
        {"begin": phase.begin + shift_before[phase.first_op], "end": phase.end + shift_before[phase.last_op]}
        for phase in phases
    )
    moved_phases = (phase.model_copy(update=move) for phase, move in zip(phases, moves, strict=True))
    return WorkspaceLog(ticks, log.moved, spans, tuple(moved_phases), (*log.added, *residents))


def _workspace(name: str, nbytes: int, birth: int, op: int | None, node: int | None, stream: int) -> Storage:
    return Storage(
        nbytes=nbytes, kind=Kind.WORKSPACE, birth=birth, death=birth, op=op, node=node, name=name, stream=stream
    )


class _Passing:
    """Buffers that a CUDA graph holds to its end: its recording gives cuBLAS's workspaces back (`clear_cublas_manager`
    of torch/_inductor/cudagraph_trees.py)."""

    def __init__(self, ops: Sequence[TimedOp], buffers: Mapping[str, HeldBuffer]) -> None:
        self._ops = ops
        self._buffers = {name: (buffer, set(buffer.needed_by)) for name, buffer in buffers.items()}
        self._there: dict[str, Storage] = {}

    def follow(self, index: int, log: _Log) -> None:
        """Allocate what an op needs, and free all after its graph's last op."""
        for name, (buffer, needed_by) in self._buffers.items():
            if index in needed_by and name not in self._there:
                node, stream = self._ops[index].node, buffer.stream
                self._there[name] = _workspace(name, buffer.nbytes, log.insert(), index, node, stream)
        if index + 1 == len(self._ops) or self._ops[index + 1].stream != self._ops[index].stream:
            for there in self._there.values():
                log.end(there)
            self._there.clear()


class _Log:
    """Copies a log tick by tick, making room as it goes."""

    def __init__(self) -> None:
        self.moved: list[int] = []
        self.shift = 0
        """How many ticks were put in so far."""
        self.added: list[Storage] = []
        self._tick = 0

    def keep(self, until: int) -> None:
        """The old ticks before `until` follow."""
        if until > self._tick:
            self.moved += range(self._tick + self.shift, until + self.shift)
            self._tick = until

    def run(self, index: int, op: TimedOp, events: Sequence[HiddenEvent]) -> tuple[int, int]:
        """Where one op with its hidden events begins and ends; it ends before the buffers that it leaves to go at its
        return."""
        self.keep(op.begin)
        begin = op.begin + self.shift
        buffers: dict[str, Storage] = {}
        for event in events:
            if event.action == "output" and self._tick < op.end:
                self.keep(self._tick + 1)
            elif event.action == "alloc" and (event.nbytes or any(event.other_bytes)):
                made = _workspace(event.name, event.nbytes or 0, self.insert(), index, op.node, op.stream)
                plans = {"other_bytes": event.other_bytes, "smaller_bytes": event.smaller_bytes}
                buffers[event.name] = made.model_copy(update=plans)
            elif event.action == "free" and event.name in buffers:
                self.end(buffers.pop(event.name))
        self.keep(op.end)
        end = op.end + self.shift
        for buffer in reversed(buffers.values()):
            self.end(buffer)
        return begin, end

    def insert(self) -> int:
        """Put a tick in here."""
        self.shift += 1
        return self._tick + self.shift - 1

    def end(self, buffer: Storage) -> None:
        """A hidden buffer goes here."""
        self.added.append(buffer.model_copy(update={"death": self.insert()}))
