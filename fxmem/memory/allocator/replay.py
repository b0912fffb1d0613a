"""The steady peaks of a step, allocated and reserved, and whether the loop runs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from fxmem.errors import UsageError
from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fxmem.memory.allocator.stats import OutOfMemory
from fxmem.memory.allocator.training_loop import PEAKS, Shortage, TrainingLoop
from fxmem.records.profile import MeasuredPhase, Profile


@dataclass(frozen=True)
class ReplayedLoop:
    """A training loop replayed through the allocator: the peaks of a step in its steady state.

    The peaks are what `torch.cuda.max_memory_allocated()`, `max_memory_reserved()` and `memory_stats()` report when
    `reset_peak_memory_stats()` is called after the warm-up steps and one more step runs. None: the step did not fit.
    """

    phases: tuple[MeasuredPhase, ...]
    """In the order of `Profile.phases`; empty when the step did not fit. Where the loop repeats itself, the largest
    over the steps that repeat, else those of the last step."""
    steps: int
    """How many steps were replayed, the one that did not fit included."""
    warmup_steps: int | None
    """Steps before one that ends with every block where an earlier step had left it: from there on the loop repeats
    itself. None when that was not reached."""
    shortage: Shortage | None = None
    """None: it fits."""
    smaller_plans: int = 0
    """How many convolutions, alike ones counted once, run by plans with a smaller workspace, for want of room."""
    first_bytes: int | None = None
    """Reserved by the first step. Later ones add what finds no free block that is large enough; which those are depends
    on every size before. None when the step did not fit."""

    @property
    def requested_bytes(self) -> int | None:
        """Of the phase that has most."""
        return max((peak.requested_bytes for peak in self.phases), default=None)

    @property
    def allocated_bytes(self) -> int | None:
        """Of the phase that has most."""
        return max((peak.allocated_bytes for peak in self.phases), default=None)

    @property
    def reserved_bytes(self) -> int | None:
        """Of the phase that has most."""
        return max((peak.reserved_bytes for peak in self.phases), default=None)


_known: dict[tuple[int, AllocatorSettings, int | None, int], ReplayedLoop] = {}
"""By profile and what is asked of it: its peak and what is found in it ask for the same."""


def replay(
    profile: Profile,
    *,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    capacity_bytes: int | None = None,
    max_steps: int = 8,
) -> ReplayedLoop:
    """Replay the step as a loop until the allocator's state repeats or `max_steps` are over.

    What the loop does beyond the log:
    - What outlives every step (parameters, buffers, inputs, persistent workspaces) is placed once, before the first
      step: parameters and buffers by index, inputs, workspaces, the rest.
    - Optimizer state is placed in the first step when its optimizer phase begins, one after another, with the gradients
      alive, as `torch.optim` creates it. So the first step's layout, which later steps inherit, is the real one.
    - What the step leaves behind (born in it, dead at its end) goes when the function returns, in order of birth;
      unless the step also begins with such a storage left over (same kind, name and size, else the same size): then it
      stays and becomes that one. The first step finds none: nothing ran before it.
    - What a step finds left over without leaving such a one behind (a new batch each time) is placed when a step
      begins.

    With `capacity_bytes` the driver refuses more than that. A convolution whose workspace finds no room takes the next
    plan that does, where these are known (`Storage.smaller_bytes`).

    Raises: `UsageError` when the profile is not for a CUDA device, or `max_steps` is less than 1.
    """
    if profile.target.device != "cuda":
        raise UsageError(
            f"only CUDA targets have a caching allocator; this profile is for {profile.target.name!r}: analyse "
            "for a GPU"
        )
    if max_steps < 1:
        raise UsageError(f"max_steps must be at least 1, got {max_steps}")
    key = id(profile), settings, capacity_bytes, max_steps
    if key not in _known:
        _known[key] = _replay(profile, settings, capacity_bytes, max_steps)
        weakref.finalize(profile, _known.pop, key)
    return _known[key]


def _replay(profile: Profile, settings: AllocatorSettings, capacity_bytes: int | None, max_steps: int) -> ReplayedLoop:
    memory = profile.target.memory_bytes
    loop = TrainingLoop(profile, CachingAllocator(settings, capacity_bytes=capacity_bytes, device_bytes=memory))
    try:
        runs, warmup = loop.run_steps(max_steps)
    except OutOfMemory as error:
        return ReplayedLoop((), loop.step, None, loop.shortage(error))
    phases = (
        MeasuredPhase(phase=same[0].phase, **{name: max(getattr(peak, name) for peak in same) for name in PEAKS})
        for same in zip(*runs[-1 if warmup is None else warmup :], strict=True)
    )
    first = max(peak.reserved_bytes for peak in runs[0])
    return ReplayedLoop(tuple(phases), loop.step, warmup, smaller_plans=len(loop.plans), first_bytes=first)
