"""The history of a pretended card's memory, as `torch.cuda.memory._record_memory_history` keeps it, and its snapshot.

Format: the `Snapshot` of `torch.cuda.memory._snapshot` (torch 2.11), which pytorch.org/memory_viz and `fxmem validate
--snapshot` read. Frames are the program's own; events have no time, since nothing was run. cuDNN is asked for its
workspaces when the first round is over: until then they are not in the history, and what is freed later may lie
elsewhere than where it was allocated.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from typing import Any

from fxmem.simulation.program.card_memory import CardMemory
from fxmem.simulation.source_lines import user_frame

_MOST_FRAMES = 64
Frames = list[dict[str, str | int]]


class MemoryHistory:
    """What a program's card allocates and frees while the program has it recorded.

    Args:
        memory: the card's.
    """

    def __init__(self, memory: CardMemory) -> None:
        self._memory = memory
        self._events: deque[dict[str, Any]] = deque()
        self._frames: dict[int, Frames] = {}
        """By address of what was allocated meanwhile, where that was."""

    def record(self, enabled: Any = "all", *_: Any, max_entries: int = sys.maxsize, **__: Any) -> None:
        """`_record_memory_history`: from now on, or no longer for None."""
        self._memory.run_operator()
        self._memory.on_block = None if enabled is None else self._note
        self._events = deque(self._events if enabled is None else (), max_entries)

    def snapshot(self, *_: Any, **__: Any) -> dict[str, Any]:
        """`_snapshot`: the state now, and the history."""
        self._memory.run_operator()
        return {
            "segments": [each.describe([], self._find_frames) for each in self._memory.segments()],
            "device_traces": [list(self._events)],
            "allocator_settings": {"PREDICTED": "by fxmem; no GPU was used"},
            "external_annotations": [],
        }

    def dump(self, filename: Any = "dump_snapshot.pickle", *_: Any, **__: Any) -> None:
        """`_dump_snapshot`."""
        with open(filename, "wb") as file:
            pickle.dump(self.snapshot(), file, protocol=4)

    def _find_frames(self, address: int) -> Frames:
        return self._frames.get(address, [])

    def _note(self, action: str, address: int, nbytes: int, stream: int) -> None:
        frames = _list_frames()
        if action == "alloc":
            self._frames[address] = frames
        actions = ("free_requested", "free_completed") if action == "free" else (action,)
        for each in actions:
            event = {"action": each, "addr": address, "size": nbytes, "stream": stream, "frames": frames, "time_us": 0}
            self._events.append(event)


def _list_frames() -> Frames:
    """The program's own frames, the innermost first."""
    frames: Frames = []
    frame = user_frame(sys._getframe(1))
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = user_frame(frame.f_back)
    return frames
