"""The history of a pretended card's memory, as `torch.cuda.memory._record_memory_history` keeps it, and its snapshot.

Format: the `Snapshot` of `torch.cuda.memory._snapshot` (torch 2.11), which pytorch.org/memory_viz and `fxmem validate
--snapshot` read. Frames are the program's own; events have no time, since nothing was run.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from typing import Any

from fxmem.simulation.card.card_memory import BlockEvent, CardMemory
from fxmem.simulation.code.source_lines import user_frame

_MOST_FRAMES = 64
Frames = list[dict[str, str | int]]


class MemoryHistory:
    """What a program's card allocates and frees while the program has it recorded.

    Args:
        memory: the card's.
    """

    def __init__(self, memory: CardMemory) -> None:
        self._memory = memory

    def record(self, enabled: Any = "all", *_: Any, max_entries: int = sys.maxsize, **__: Any) -> None:
        """`_record_memory_history`: from now on, or no longer for None."""
        self._memory.record_blocks(max_entries, None if enabled is None else _list_frames)

    def snapshot(self, *_: Any, **__: Any) -> dict[str, Any]:
        """`_snapshot`: the state now, and the history."""
        self._memory.ask_cudnn()
        blocks = self._memory.blocks
        places, events = (blocks.places, blocks.events) if blocks else ({}, ())
        return {
            "segments": [each.describe([], lambda at: places.get(at, [])) for each in self._memory.segments()],
            "device_traces": [[each for event in events for each in _describe(event)]],
            "allocator_settings": {"PREDICTED": "by fxmem; no GPU was used"},
            "external_annotations": [],
        }

    def dump(self, filename: Any = "dump_snapshot.pickle", *_: Any, **__: Any) -> None:
        """`_dump_snapshot`."""
        with open(filename, "wb") as file:
            pickle.dump(self.snapshot(), file, protocol=4)


def _describe(event: BlockEvent) -> Iterator[dict[str, Any]]:
    for action in ("free_requested", "free_completed") if event.action == "free" else (event.action,):
        size, stream = event.nbytes, event.stream
        yield {
            "action": action,
            "addr": event.address,
            "size": size,
            "stream": stream,
            "frames": event.place,
            "time_us": 0,
        }


def _list_frames() -> Frames:
    """The program's own frames, the innermost first."""
    frames: Frames = []
    frame = user_frame(sys._getframe(1))
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = user_frame(frame.f_back)
    return frames
