"""Replay a step's requests in a training loop on a model of torch's caching allocator.

The program asks for bytes; the allocator hands out blocks of rounded size, cut from segments that it got from the
driver and keeps. So a card reports larger numbers than the bytes requested, and all follow from the order of requests:

- *requested*: what the program asked for and has not given back;
- *allocated*: the blocks handed out (`torch.cuda.memory_allocated`);
- *reserved*: the segments from the driver (`torch.cuda.memory_reserved`).

`replay` runs the loop. `CachingAllocator` is the allocator by itself, and says what
is taken for granted of it; `AllocatorSettings` is `PYTORCH_CUDA_ALLOC_CONF`.
"""

from fxmem.memory.allocator.caching_allocator import CachingAllocator as CachingAllocator
from fxmem.memory.allocator.peak import CardRun as CardRun
from fxmem.memory.allocator.peak import Levels as Levels
from fxmem.memory.allocator.peak import RecordedStep as RecordedStep
from fxmem.memory.allocator.peak import complete_timeline as complete_timeline
from fxmem.memory.allocator.peak import known_levels as known_levels
from fxmem.memory.allocator.peak import levels as levels
from fxmem.memory.allocator.peak import read_settings as read_settings
from fxmem.memory.allocator.peak import replay as replay
from fxmem.memory.allocator.peak import trace_step as trace_step
from fxmem.memory.allocator.settings import DEFAULT_SETTINGS as DEFAULT_SETTINGS
from fxmem.memory.allocator.settings import AllocatorSettings as AllocatorSettings
from fxmem.memory.allocator.stats import OutOfMemory as OutOfMemory
from fxmem.memory.allocator.stats import PoolCounts as PoolCounts
from fxmem.memory.allocator.stats import Segment as Segment
from fxmem.memory.allocator.stats import Stats as Stats
