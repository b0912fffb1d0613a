"""Blocks that wait for other streams before they are free."""

from __future__ import annotations

from fxmem.simulation.kernels.streams import Done


class StreamWaits:
    """The storages that other streams use, and since when their freed blocks wait for them."""

    def __init__(self) -> None:
        self.used_on: dict[int, dict[int, None]] = {}
        """By storage, the further streams that the program said use it."""
        self._waiting: dict[int, tuple[frozenset[int], int]] = {}
        """By freed storage, the streams that its block waits for, and since which moment of theirs."""
        self.free_by: dict[int, int] = {}
        """By freed storage whose block waited, the tick by which it was free."""

    def begin(self) -> None:
        """A step begins: nothing waits."""
        self._waiting.clear()
        self.free_by.clear()

    def note_use(self, storage: int, stream: int) -> None:
        """Another stream uses a storage."""
        self.used_on.setdefault(storage, {})[stream] = None

    def note_freed(self, storage: int, moment: int) -> None:
        """A storage that other streams use was freed at this moment of theirs."""
        self._waiting[storage] = frozenset(self.used_on[storage]), moment

    def note_wait(self, done: Done | None, tick: int) -> bool:
        """Note that the host has waited for streams: blocks that waited for the same are free. Whether there are any.

        Args:
            done: what is done by now, by stream; None: all.
            tick: now.
        """
        found = False
        for storage, (streams, moment) in list(self._waiting.items()):
            left = frozenset(each for each in streams if done is not None and done.get(each, 0) < moment)
            if left:
                self._waiting[storage] = left, moment
            else:
                del self._waiting[storage]
                self.free_by[storage], found = tick, True
        return found
