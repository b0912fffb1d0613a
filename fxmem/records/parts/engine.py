"""A serving engine on the card of the program that trains."""

from __future__ import annotations

from fxmem.records.parts.base import Bytes, Count, Record


class EngineUse(Record):
    """A serving engine that a program starts in its own process.

    What the driver keeps for it beside torch's allocator is not counted: CUDA graphs, workspaces of its kernels.
    """

    name: str
    """The engine's package."""
    release: str
    """The package and the release whose sources were read."""
    place: str
    """`file:line` of the program that starts it."""
    utilization: float
    """The share of the card that it may use, `gpu_memory_utilization`."""
    max_batched_tokens: Count
    max_seqs: Count
    weights_bytes: Bytes
    """Its own copy of the model, and its tables."""
    profile_peak_bytes: Bytes
    """What its profile run allocates at its peak beside the weights."""
    kv_bytes: Bytes
    """Its blocks of keys and values."""
    can_sleep: bool
    """Whether it was built with `enable_sleep_mode`."""
    sleeps: Count = 0
    """How often it was put to sleep."""
    level: Count = 0
    """Of its last sleep: 1 keeps the weights on the host, 2 drops them. 0: none."""
    start_free_bytes: Bytes
    """What was free on the card when it started: its share must not be more."""
    most_utilization: float | None = None
    """The largest share with which nothing of this run would have asked for more than the card has, in thousandths. A
    lower bound: what torch's allocator reserves is not given back for it. None where a request was refused."""
