"""The steady peaks of a step, allocated and reserved, and whether the loop runs."""

from __future__ import annotations

from collections.abc import Hashable

from fxmem.errors import UsageError
from fxmem.memory.allocator.caching_allocator import CachingAllocator
from fxmem.memory.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fxmem.memory.allocator.stats import OutOfMemory
from fxmem.memory.allocator.training_loop import Occupancy, PhasePeak, ReplayedStep, Shortage, TrainingLoop
from fxmem.records.profile import Bytes, Profile, Record


class ReplayedLoop(Record):
    """A training loop replayed through the allocator: the peaks of a step in its steady state.

    The peaks are what `torch.cuda.max_memory_allocated()`, `max_memory_reserved()` and `memory_stats()` report when
    `reset_peak_memory_stats()` is called after the warm-up steps and one more step runs. None: the step did not fit.
    """

    settings: AllocatorSettings
    capacity_bytes: Bytes | None
    requested_bytes: Bytes | None
    allocated_bytes: Bytes | None
    active_bytes: Bytes | None
    reserved_bytes: Bytes | None
    phases: tuple[PhasePeak, ...]
    """In the order of `Profile.phases`; empty when the step did not fit."""
    at_peak: Occupancy | None
    steps: int
    """How many steps were replayed, the one that did not fit included."""
    steady: bool
    """Whether a step ended with every block where an earlier step had left it: from there on the loop repeats itself,
    and the peaks are the largest over the steps that repeat. If not, they are the last step's."""
    warmup_steps: int | None
    """Steps before the repetition begins; None when it was not reached."""
    alloc_retries: int
    """How often, in the steps that the peaks are of, cached segments had to go back to the driver for a request to
    succeed. More than 0 is a step that fits, and is slow."""
    shortage: Shortage | None
    """None: it fits."""


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

    With `capacity_bytes` the driver refuses more than that. cuDNN's habit of taking a smaller workspace when memory is
    short is not modelled: a shortage on a workspace may not be the end on a real card.

    Raises: `UsageError` when the profile is not for a CUDA device, or `max_steps` is less than 1.
    """
    if profile.target.device != "cuda":
        raise UsageError(
            f"only CUDA targets have a caching allocator; this profile is for {profile.target.name!r}: analyse "
            "for a GPU"
        )
    if max_steps < 1:
        raise UsageError(f"max_steps must be at least 1, got {max_steps}")
    allocator = CachingAllocator(
        settings, capacity_bytes=capacity_bytes, device_bytes=_device_bytes(profile, capacity_bytes)
    )
    loop = TrainingLoop(profile, allocator)
    runs: list[ReplayedStep] = []
    seen: dict[Hashable, int] = {}
    warmup: int | None = None
    shortage: Shortage | None = None
    while warmup is None and len(runs) < max_steps:
        try:
            runs.append(loop.run_step())
        except OutOfMemory as error:
            shortage = loop.shortage(error)
            break
        state = loop.state()
        warmup = seen.get(state)
        seen[state] = len(runs)
    if shortage is not None:
        runs_shown: list[ReplayedStep] = []
    else:
        runs_shown = runs[warmup:] if warmup is not None else runs[-1:]
    return _result(settings, capacity_bytes, runs_shown, steps=loop.step, warmup=warmup, shortage=shortage)


def fits(profile: Profile, capacity_bytes: int, *, settings: AllocatorSettings = DEFAULT_SETTINGS) -> bool:
    """Whether a loop over this step runs when the driver can give its process `capacity_bytes`.

    That can be less than the reserved peak `replay` reports without a capacity: a short allocator gives its cache back
    and asks again. `replay(profile, capacity_bytes=…)` says what it costs, and what did not fit.
    """
    return replay(profile, settings=settings, capacity_bytes=capacity_bytes).shortage is None


def _device_bytes(profile: Profile, capacity_bytes: int | None) -> int | None:
    sizes = [size for size in (profile.target.memory_bytes, capacity_bytes) if size is not None]
    return max(sizes) if sizes else None


def _result(
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    runs: list[ReplayedStep],
    *,
    steps: int,
    warmup: int | None,
    shortage: Shortage | None,
) -> ReplayedLoop:
    top = max(runs, key=lambda run: run.at_peak.allocated_bytes, default=None)
    phases = tuple(
        PhasePeak(
            phase=same[0].phase,
            requested_bytes=max(peak.requested_bytes for peak in same),
            allocated_bytes=max(peak.allocated_bytes for peak in same),
            active_bytes=max(peak.active_bytes for peak in same),
            reserved_bytes=max(peak.reserved_bytes for peak in same),
        )
        for same in zip(*(run.phases for run in runs), strict=True)
    )
    return ReplayedLoop(
        settings=settings,
        capacity_bytes=capacity_bytes,
        requested_bytes=max((peak.requested_bytes for peak in phases), default=None),
        allocated_bytes=max((peak.allocated_bytes for peak in phases), default=None),
        active_bytes=max((peak.active_bytes for peak in phases), default=None),
        reserved_bytes=max((peak.reserved_bytes for peak in phases), default=None),
        phases=phases,
        at_peak=top.at_peak if top is not None else None,
        steps=steps,
        steady=warmup is not None,
        warmup_steps=warmup,
        alloc_retries=sum(run.alloc_retries for run in runs),
        shortage=shortage,
    )
