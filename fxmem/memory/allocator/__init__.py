"""Allocated and reserved bytes: a profile's step in a training loop, on PyTorch's CUDA caching allocator.

The program asks for bytes; the allocator hands out blocks of rounded size, cut from segments that it got from the
driver and keeps. So a card reports larger numbers than the bytes requested, and all follow from the order of requests:

- *requested*: what the program asked for and has not given back;
- *allocated*: the blocks handed out (`torch.cuda.memory_allocated`);
- *reserved*: the segments held (`torch.cuda.memory_reserved`).

`replay` runs the loop, `fits` asks whether it runs at all. `CachingAllocator` is the allocator by itself, and says what
is taken for granted of it; `Settings` is `PYTORCH_CUDA_ALLOC_CONF`.
"""

from __future__ import annotations

from fxmem.memory.allocator.address_trace import Event, Levels, RecordedStep, levels, recorded_step
from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.peak import complete_timeline, levels_of, settings_of
from fxmem.memory.allocator.replay import Replay, fits, replay
from fxmem.memory.allocator.settings import DEFAULT_SETTINGS, Settings
from fxmem.memory.allocator.stats import BlockView, OutOfMemory, Segment, Stat, Stats
from fxmem.memory.allocator.training_loop import Occupancy, PhasePeak, Shortage

__all__ = [
    "DEFAULT_SETTINGS",
    "BlockView",
    "CachingAllocator",
    "Event",
    "Levels",
    "Occupancy",
    "OutOfMemory",
    "PhasePeak",
    "RecordedStep",
    "Replay",
    "Segment",
    "Settings",
    "Shortage",
    "Stat",
    "Stats",
    "complete_timeline",
    "fits",
    "levels",
    "levels_of",
    "recorded_step",
    "replay",
    "settings_of",
]
