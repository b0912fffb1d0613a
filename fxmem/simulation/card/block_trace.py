"""What a program allocates and frees, step by step: from it further steps of other lengths are made."""

from __future__ import annotations

from collections.abc import Mapping

from fxmem.hardware.workspaces import HeldBuffer, Seen
from fxmem.memory.allocator_acts import Act, Empty, Free, Hold, RunKernel
from fxmem.simulation.recording.observe.observer import Observer


class BlockTrace(Observer):
    """Set-up and the steps of a program as acts; listens to its log."""

    def __init__(self) -> None:
        self.rounds: list[list[Act]] = [[]]
        """Set-up, then each step that is kept, and what has come since."""
        self._waiting: list[tuple[int, int, int]] = []
        self._held: set[str] = set()

    def on_storage(self, index: int, nbytes: int, stream: int) -> None:
        """Note an allocation of the operator that runs; its kernel's buffers may come first."""
        if self._waiting and self._waiting[-1][2] != stream:
            self.run_operator()
        self._waiting.append((index, nbytes, stream))

    def on_free(self, index: int) -> None:
        """A storage was freed."""
        self.run_operator()
        self.rounds[-1].append(Free(index))

    def run_operator(self, seen: Seen | None = None, stream: int = 0) -> None:
        """An operator has run, with what it hides."""
        made, self._waiting = self._waiting, []
        hidden, call = (None, None) if seen is None else (seen.memory, seen.call)
        if made or hidden is not None or call is not None:
            storages, nbytes, streams = zip(*made, strict=True) if made else ((), (), (stream,))
            self.rounds[-1].append(RunKernel(storages, nbytes, streams[0], hidden, call))

    def hold(self, workspaces: Mapping[str, HeldBuffer]) -> None:
        """A library keeps these from now on, once by its name."""
        for name, buffer in workspaces.items():
            if name not in self._held:
                self._held.add(name)
                self.rounds[-1].append(Hold(buffer.nbytes, buffer.stream))

    def empty_cache(self) -> None:
        """The program empties the allocator's cache."""
        self.run_operator()
        self.rounds[-1].append(Empty())

    def since(self, number: int) -> tuple[list[Act], int]:
        """The acts of this round after its first so many, and how many it has now."""
        self.run_operator()
        return self.rounds[-1][number:], len(self.rounds[-1])

    def end_setup(self) -> None:
        """What comes before the first step is over."""
        self.run_operator()
        self.rounds.append([])

    def end_round(self, *, keeps: bool) -> None:
        """A step is over.

        Args:
            keeps: whether its acts are looked at later.
        """
        self.run_operator()
        if len(self.rounds) == 1:  # nothing came before it
            self.rounds.insert(0, [])
        if not keeps:
            del self.rounds[-1]
        self.rounds.append([])
