"""The log of a program: a `StepLog` that knows at each moment how much is alive, and tells the card's allocator."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.hardware.workspaces import HiddenMemory
from fxmem.records.profile import Kind, Phase
from fxmem.simulation.observe.event_log import LoggedOp, StepLog
from fxmem.simulation.observe.source_lines import program_place
from fxmem.simulation.program.card_memory import CardMemory


class HighWater:
    """The most bytes alive since they were last cleared, and where the program was then."""

    def __init__(self, requested: int) -> None:
        self.requested = requested
        self.phase = Phase.FORWARD
        self.place = ""

    def watch(self, live: int, phase: Phase) -> None:
        """Note what is alive now where it is the most."""
        if live > self.requested:
            self.requested, self.phase = live, phase
            self.place = program_place(sys._getframe(2))


class ProgramLog(StepLog):
    """The log of one program.

    Args:
        device: whose memory is counted.
        memory: the card's; None for the CPU.
    """

    kept_kinds = (*StepLog.kept_kinds, Kind.OUTPUT)

    def __init__(self, device: torch.device, memory: CardMemory | None) -> None:
        self.memory = memory
        self.live = 0
        """Bytes requested and not freed."""
        self.high_water = HighWater(0)
        super().__init__(device)

    def enter(self, storage: Any, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Log the allocation of a storage; its index."""
        if self.memory is not None:
            self.memory.request(len(self.nbytes), nbytes, self.streams.current)
        index = super().enter(storage, nbytes, shape, dtype)
        self.live += nbytes
        self.high_water.watch(self.live, self.phase)
        return index

    def pass_through(self, op: LoggedOp, hidden: HiddenMemory) -> None:
        """Note the most that was alive within an operator: its kernel has buffers for itself."""
        first = next((index for index in reversed(range(len(self.birth))) if self.birth[index] < op.begin), -1) + 1
        made = [0 if self.death[index] is not None else self.nbytes[index] for index in range(first, len(self.nbytes))]
        live, most, own = self.live - sum(made), self.live, dict[str, int]()
        results = iter(made)
        for event in hidden.events:
            if event.action == "output":
                live += next(results, 0)
            elif event.action == "free":
                live -= own.pop(event.name, 0)
            elif event.nbytes:
                own[event.name] = event.nbytes
                live += event.nbytes
            most = max(most, live)
        self.high_water.watch(max(most, live + sum(results)), self.phase)

    def discard(self, first: int) -> None:
        """Forget the storages from this one on: the card had no memory for them."""
        for index in range(first, len(self.nbytes)):
            if self.death[index] is None:
                self.birth[index] = self.death[index] = 0
                self.live -= self.nbytes[index]
        self._watched = {address: watch for address, watch in self._watched.items() if watch.index < first}

    def _on_death(self, watch: weakref.ref[Any]) -> None:
        index: int = watch.index  # type: ignore[attr-defined]
        if self._open and self.death[index] is None:
            super()._on_death(watch)
            self.live -= self.nbytes[index]
            if self.memory is not None:
                self.memory.free(index)

    def _note_storage(self, tensor: torch.Tensor) -> int | None:
        # Real tensors are the host's, on a CPU all that its allocator gave: not numpy's, nor a file's pages.
        is_targets = isinstance(tensor, torch_common.FakeTensor) or (
            self.memory is None and tensor.layout is torch.strided and tensor.untyped_storage().resizable()
        )
        return super()._note_storage(tensor) if is_targets else None

    def relabel(self, tensor: torch.Tensor, kind: Kind, name: str, over: tuple[Kind | None, ...] | None = None) -> None:
        """Set kind and name of a tensor's storages: of any, or of those that have one of the kinds `over`."""
        for path, part in torch_wrappers.named_parts(tensor):
            index = self._note_storage(part)
            if index is not None and (over is None or self.kind[index] in over):
                self.kind[index], self.name[index] = kind, f"{name}.{path}".rstrip(".")

    def end_of_forward(self) -> None:
        """Settle what is saved, as `StepLog` does; of a round with several forwards, the one that saves most counts."""
        before, self.saved_at_end = self.saved_at_end, {}
        super().end_of_forward()
        if sum(map(self.nbytes.__getitem__, before)) > sum(map(self.nbytes.__getitem__, self.saved_at_end)):
            self.saved_at_end = before
