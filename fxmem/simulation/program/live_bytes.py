"""How many bytes a program has alive at each moment, and where it was when they were the most."""

from __future__ import annotations

import sys

from fxmem.hardware.workspaces import HiddenMemory
from fxmem.records.profile import Phase
from fxmem.simulation.observe.event_log import LoggedOp, StepLog
from fxmem.simulation.observe.observer import Observer
from fxmem.simulation.source_lines import program_place


class LiveBytes(Observer):
    """The bytes requested and not freed; listens to a log."""

    log: StepLog

    def __init__(self) -> None:
        self.now = 0
        self.clear_highest()

    def clear_highest(self) -> None:
        """Let the most begin anew at what is alive now."""
        self.highest, self.phase, self.place = self.now, Phase.FORWARD, ""
        """The most, and where the program was then."""

    def on_storage(self, index: int, nbytes: int, stream: int) -> None:
        """A storage is allocated."""
        self.now += nbytes
        self._watch(self.now)

    def on_free(self, index: int) -> None:
        """A storage was freed."""
        self.now -= self.log.storages[index].nbytes

    def pass_through(self, op: LoggedOp, hidden: HiddenMemory) -> None:
        """Note the most that was alive within an operator: its kernel has buffers for itself."""
        storages = self.log.storages
        first = next((i for i in reversed(range(len(storages))) if storages[i].birth < op.begin), -1) + 1
        made = [0 if each.death is not None else each.nbytes for each in storages[first:]]
        live, most, own = self.now - sum(made), self.now, dict[str, int]()
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
        self._watch(max(most, live + sum(results)))

    def _watch(self, live: int) -> None:
        if live > self.highest:
            self.highest, self.phase = live, self.log.phase
            self.place = program_place(sys._getframe(2))
