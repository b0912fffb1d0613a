"""What a program takes of the host's memory."""

from __future__ import annotations

from pydantic import Field

from fxmem.records.parts.base import Bytes, Count, Many, Record
from fxmem.records.parts.growth import Growth


class HostUse(Record):
    """The most that a program had at once in the host's memory, its loader's workers included.

    Pages of files are not counted, which a system drops where it needs the room: libraries, mapped checkpoints.
    """

    peak_bytes: Bytes | None
    """All that follows, but for the pages of files. None where the system does not say what a process has."""
    after_bytes: Bytes | None = None
    """The same when its last round was over; None where there was none, or that is not known."""
    by_round: Many[Bytes] = Field(default=(), exclude_if=lambda value: not value)
    """The same whenever a round was over, set-up before the first."""
    peak_round: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """The number of the round in which the peak came: 0 for set-up. None where that is not known."""
    place: str = ""
    """`file:line` of the program that ran then; empty where none of its own did."""
    call: str = ""
    """What that line had called (`from_pretrained`); empty for nothing in Python. Untrusted text."""
    process_bytes: Bytes | None
    """Measured: the resident memory of the process at the peak, without what fxmem itself has there."""
    pretended_bytes: Bytes = 0
    """Counted at the peak: tensors on the host that have no memory here, such as a model before it moves to a card."""
    workers: Count = 0
    """Other processes that the program had at the peak, its loaders' workers above all."""
    workers_bytes: Bytes = 0
    """Measured: what they had for themselves, and share with no other process."""
    batches_bytes: Bytes = 0
    """Counted: batches in shared memory, those that the program holds and those that wait for it."""
    worker_adds_bytes: Bytes | None = None
    """What one more worker of the last data loader adds: its own memory and the batches that it loads ahead. None
    where no loader had workers, or the system does not say."""
    copied_bytes: Bytes | None = Field(default=0, exclude_if=lambda value: value == 0)
    """Counted: what forked workers of loaders may have more, once each has read all of its dataset: to read a Python
    object writes its count of references, so that the worker gets a copy of its page.
    By a sample; an upper bound. None: too many to look at."""
    pinned_bytes: Bytes = 0
    """Counted: the most that PyTorch's allocator of pinned memory had, in its powers of two."""
    files_bytes: Bytes | None = None
    """Measured: pages of files in memory at the peak, which the sum leaves out. None where they are not known."""
    limit_bytes: Bytes | None = None
    """What the host has, as the user says; None where nothing is said."""
    growth_bytes: Bytes | None = None
    """How many bytes more of what came from the card are kept on the host after each step: as `growth_bytes` of the
    card."""
    grown: Many[Growth] = ()
    """Who keeps it, the most first."""

    @property
    def fits(self) -> bool | None:
        """Whether it fits the limit; None where either is not known, or `is_open`."""
        if self.limit_bytes is None or self.peak_bytes is None or self.most_bytes is None:
            return None
        return False if self.peak_bytes > self.limit_bytes else self.most_bytes <= self.limit_bytes or None

    @property
    def is_open(self) -> bool:
        """Whether it fits the limit as it was seen, and not where workers copy as much as they may."""
        return self.fits is None and self.limit_bytes is not None and self.peak_bytes is not None

    @property
    def most_bytes(self) -> int | None:
        """The peak where each worker has read all of its dataset, as far as that is known."""
        return None if self.peak_bytes is None else self.peak_bytes + (self.copied_bytes or 0)
