"""Replay a step's requests in a training loop on a model of torch's caching allocator.

The program asks for bytes; the allocator hands out blocks of rounded size, cut from segments that it got from the
driver and keeps. So a card reports larger numbers than the bytes requested, and all follow from the order of requests:

- *requested*: what the program asked for and has not given back;
- *allocated*: the blocks handed out (`torch.cuda.memory_allocated`);
- *reserved*: the segments from the driver (`torch.cuda.memory_reserved`).

`replay` runs the loop, `fits` asks whether it runs at all. `CachingAllocator` is the allocator by itself, and says what
is taken for granted of it; `AllocatorSettings` is `PYTORCH_CUDA_ALLOC_CONF`.
"""

from __future__ import annotations

from fxmem.memory.allocator.address_trace import AllocatorEvent, Levels, RecordedStep, levels, trace_step
from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.peak import CardRun, complete_timeline, known_levels, read_settings
from fxmem.memory.allocator.replay import ReplayedLoop, fits, replay
from fxmem.memory.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fxmem.memory.allocator.stats import BlockView, OutOfMemory, Segment, Stat, Stats
from fxmem.memory.allocator.training_loop import Occupancy, PhasePeak, Shortage

__all__ = [
    "DEFAULT_SETTINGS",
    "AllocatorEvent",
    "AllocatorSettings",
    "BlockView",
    "CachingAllocator",
    "CardRun",
    "Levels",
    "Occupancy",
    "OutOfMemory",
    "PhasePeak",
    "RecordedStep",
    "ReplayedLoop",
    "Segment",
    "Shortage",
    "Stat",
    "Stats",
    "complete_timeline",
    "fits",
    "known_levels",
    "levels",
    "read_settings",
    "replay",
    "trace_step",
]
