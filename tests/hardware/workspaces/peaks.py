"""What hidden memory amounts to."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.hardware.hidden_memory import HiddenMemory


def peak_bytes(memory: HiddenMemory, outputs: Sequence[int] = ()) -> int:
    """Most bytes the op has allocated at once, outputs of given size included. Unknown sizes count as nothing."""
    live, peak, left = 0, 0, iter(outputs)
    sizes: dict[str, int] = {}
    for event in memory.events:
        if event.action == "free":
            live -= sizes.pop(event.name)
        elif event.action == "output":
            live += next(left, 0)
        else:
            sizes[event.name] = event.nbytes or 0
            live += sizes[event.name]
        peak = max(peak, live)
    return peak
