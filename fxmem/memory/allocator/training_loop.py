"""The training loop that a profile's step is in, run on the caching allocator."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.stats import OutOfMemory
from fxmem.memory.figures import find_place
from fxmem.memory.module_tree import describe
from fxmem.records.profile import Kind, MeasuredPhase, Phase, PhaseSpan, Profile, Storage
from fxmem.records.units import GRAPH_INPUT, format_bytes


@dataclass(frozen=True)
class Shortage:
    """The request that did not fit, and the state it met."""

    step: int
    """1-based: the first step of the loop, or a later one."""
    phase: Phase | None
    """None: while parameters, buffers and inputs were placed, before the first step."""
    storage: int
    """Index into `Profile.storages`."""
    op: str | None
    """Operator that asked; None for what no operator of the step allocates."""
    node: str | None
    """Name of the node that operator runs for, else of the storage's node."""
    where: str
    """The module or function that asked, with the user's line, as far as they are known."""
    refused: OutOfMemory

    @property
    def sentence(self) -> str:
        """A sentence without its full stop."""
        refused = self.refused
        when = f"in {self.phase} of step {self.step}" if self.phase is not None else "before the first step"
        sizes = f"{format_bytes(refused.segment_bytes)}, {format_bytes(refused.free_bytes)} are free"
        return f"It runs out {when}{f' at {self.where}' if self.where else ''}: asks for {sizes}"


PEAKS: Final = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")
"""The numbers of an allocator whose peaks are kept."""
PLACING_ORDER: Final = {Kind.PARAMETER: 0, Kind.BUFFER: 0, Kind.INPUT: 1, Kind.WORKSPACE: 2}
"""What is allocated before the first step comes in this order; other kinds follow."""


class TrainingLoop:
    """The loop's state between steps: which storage is where."""

    def __init__(self, profile: Profile, allocator: CachingAllocator) -> None:
        self.profile = profile
        self.step = 0
        self._allocator = allocator
        self._address = [0] * len(profile.storages)
        self._owner: dict[int, int] = {}
        self._spans = profile.phases or (
            PhaseSpan(phase=Phase.FORWARD, begin=0, end=profile.ticks, first_op=0, last_op=len(profile.ops)),
        )
        self._placing = 0
        self.plans: dict[tuple[int, ...], int] = {}
        """By the workspaces of a convolution's plans, that of the one which is taken for want of room."""
        self._phase: Phase | None = None
        self._tick = 0
        self._sort_storages()

    def _sort_storages(self) -> None:
        storages, end = self.profile.storages, self.profile.ticks
        residents = [i for i, s in enumerate(storages) if s.birth == 0 and s.death >= end]
        residents.sort(key=lambda i: (PLACING_ORDER.get(storages[i].kind, 3), i))
        optimizes = any(span.phase is Phase.OPTIMIZER for span in self._spans)
        late = {i for i in residents if optimizes and storages[i].kind is Kind.OPTIMIZER_STATE}
        self._late = [i for i in residents if i in late]
        # A library's workspace takes what is free when its first op runs, and splits it for good.
        first = {i for i in residents if storages[i].op is not None}
        self._residents = [i for i in residents if i not in late | first]
        self._leftovers = [i for i, s in enumerate(storages) if s.birth == 0 and s.death < end]
        left_behind = sorted(
            (i for i, s in enumerate(storages) if s.birth > 0 and s.death >= end), key=lambda i: storages[i].birth
        )
        self._becomes = _pairs(storages, left_behind, self._leftovers)
        self._dropped = [i for i in left_behind if i not in self._becomes]
        carried = set(self._becomes.values())
        self._renewed = [i for i in self._leftovers if i not in carried]
        # At one tick comes before goes, should a log ever have both: an op allocates before its inputs are freed.
        births, deaths = [], []
        for i, storage in enumerate(storages):
            if storage.nbytes or not storage.other_bytes:
                if storage.birth > 0:
                    births.append((storage.birth, False, i))
                if storage.death < end:
                    deaths.append((storage.death, True, i))
        self._events = events = sorted([*births, *deaths])
        placed = [(self.profile.ops[op].end, False, i) for i in first if (op := storages[i].op) is not None]
        self._first_events = [*events]
        # After the op's own output, before what the next op allocates at the same tick.
        for before, event in enumerate(sorted(placed, key=lambda event: event[0])):
            self._first_events.insert(bisect_left(events, event[:2]) + before, event)

    def run_steps(self, most: int) -> tuple[list[tuple[MeasuredPhase, ...]], int | None]:
        """Run steps until the allocator's state is as it was after an earlier one; `most` at most.

        Returns the peaks of each by phase, and how many steps come before the repetition; None where there is none.
        """
        runs: list[tuple[MeasuredPhase, ...]] = []
        seen: dict[Hashable, int] = {}
        while len(runs) < most:
            runs.append(self.run_step())
            state = self.state()
            if state in seen:
                return runs, seen[state]
            seen[state] = len(runs)
        return runs, None

    def run_step(self) -> tuple[MeasuredPhase, ...]:
        """One step of the loop; its peaks by phase. Raises `OutOfMemory`; `shortage` then says where."""
        self.step += 1
        if self.step == 1:
            for storage in self._residents:
                self._place(storage)
        self._phase, self._tick = self._spans[0].phase, 0
        for storage in self._renewed:
            self._place(storage)
        peaks = []
        position = 0
        events = self._first_events if self.step == 1 else self._events
        for span, following in zip(self._spans, [*self._spans[1:], None], strict=True):
            self._allocator.reset_peak_stats()
            self._phase, self._tick = span.phase, span.begin
            if self.step == 1 and span.phase is Phase.OPTIMIZER:
                for storage in self._late:
                    self._place(storage)
                self._late = []
            until = following.begin if following is not None else self.profile.ticks + 1
            while position < len(events) and (event := events[position])[0] < until:
                self._tick, gone, storage = event
                if gone:
                    self._free(storage)
                else:
                    self._place(storage)
                position += 1
            found = self._allocator.stats()._asdict()
            peaks.append(MeasuredPhase(phase=span.phase, **{name: found[name].peak for name in PEAKS}))
        self._return_from_function()
        return tuple(peaks)

    def _return_from_function(self) -> None:
        for storage in self._dropped:
            self._free(storage)
        for storage, successor in self._becomes.items():
            address, self._address[storage] = self._address[storage], 0
            self._address[successor] = address
            self._owner[address] = successor

    def _place(self, storage: int) -> None:
        self._placing = storage
        placed = self.profile.storages[storage]
        if self.step == 1 and placed.name == GRAPH_INPUT:
            return  # the first step runs the graph without recording it
        if placed.smaller_bytes:
            address = self._place_workspace(placed)
        else:
            address = self._allocator.malloc(placed.nbytes, placed.stream)
        self._address[storage] = address
        self._owner[address] = storage

    def _place_workspace(self, placed: Storage) -> int:
        """Where there is no room for a plan's workspace torch takes the next one that has some, and keeps to it
        (`run_single_conv` and `try_configs`, aten/src/ATen/native/cudnn/Conv_v8.cpp)."""
        sizes = placed.nbytes, *placed.smaller_bytes
        for nbytes in (self.plans.get(sizes, placed.nbytes), *placed.smaller_bytes):
            try:
                address = self._allocator.malloc(nbytes, placed.stream)
            except OutOfMemory as error:
                refused = error
                continue
            if nbytes != placed.nbytes:
                self.plans[sizes] = nbytes
            return address
        raise refused

    def _free(self, storage: int) -> None:
        self._allocator.free(self._address[storage])
        self._owner.pop(self._address[storage], None)
        self._address[storage] = 0

    def state(self) -> Hashable:
        """Everything the next step depends on: which storage is where, which blocks are free, and other plans.

        Of a cudaMalloc'd segment only its place among the others counts, so its address is left out; an expandable one
        never moves. The age of free blocks is left out too: it moves nothing but garbage collection, and with that on,
        a repetition is likely rather than certain.
        """
        segments = tuple(
            (
                segment.large,
                segment.stream,
                segment.address if segment.expandable else None,
                *((block.size, self._owner.get(block.address)) for block in segment.blocks),
            )
            for segment in self._allocator.snapshot()
        )
        return segments, tuple(self.plans.items())

    def shortage(self, error: OutOfMemory) -> Shortage:
        """The request that `error` refused."""
        storage = self.profile.storages[self._placing]
        op = self.profile.ops[storage.op] if storage.op is not None else None
        node = op.node if op is not None else storage.node
        return Shortage(
            step=self.step,
            phase=self._phase,
            storage=self._placing,
            op=op.name if op is not None else None,
            node=self.profile.nodes[node].name if node is not None else None,
            where="" if node is None else self._describe(node),
            refused=error.with_traceback(None),  # its frames would keep the loop
        )

    def _describe(self, node: int) -> str:
        place = find_place(self.profile, node)
        return f"{describe(self.profile.nodes[node])}{f' ({place})' if place else ''}"


def _pairs(storages: tuple[Storage, ...], left_behind: list[int], leftovers: list[int]) -> dict[int, int]:
    """Pair what a step leaves behind with what the next finds left over.

    Two of the same kind, name and size are one; of what remains, two of the same size: what a program still holds of
    the step before, such as its logits, has lost its name by then.
    """
    found: dict[int, int] = {}

    def label(index: int) -> Hashable:
        return storages[index].kind, storages[index].name, storages[index].nbytes

    for key in (label, lambda index: storages[index].nbytes):
        waiting: defaultdict[Hashable, list[int]] = defaultdict(list)
        taken = set(found.values())
        for i in reversed(leftovers):
            if i not in taken:
                waiting[key(i)].append(i)
        for i in left_behind:
            if i not in found and (same := waiting[key(i)]):
                found[i] = same.pop()
    return found
