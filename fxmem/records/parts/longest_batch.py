"""The batch of an epoch that decides, and a long run over batches of varied lengths."""

from __future__ import annotations

from fxmem.records.parts.base import Bytes, Count, Many, Record


class LengthChange(Record):
    """What a change of the allocator's settings, or of the batches, makes of a long run."""

    change: str
    """In words."""
    reserved_bytes: Bytes
    """After `LongestBatch.compared_steps` steps."""


class LongestBatch(Record):
    """The batch with the highest peak of an epoch whose batches have different lengths, and a run over many of them."""

    place: str = ""
    """`file:line` that goes through the loader; empty where that is not known."""
    batches: Count
    """Of the epoch, as far as it was read."""
    stopped: str = ""
    """Why the epoch was not read to its end; empty where it was."""
    number: int
    """The batch with the highest peak, from 1; the largest one where no peak is known."""
    shape: Many[int]
    """Of its largest tensor."""
    unproved: str = ""
    """Why nothing is known of lengths that were not run; empty where their sizes are proved."""
    requested_bytes: Bytes | None = None
    """Peak of the step with this batch; None where nothing is proved."""
    allocated_bytes: Bytes | None = None
    """None also without a card."""
    steps: Count = 0
    """Steps that were replayed."""
    reserved_bytes: Bytes | None = None
    """After these."""
    full_at: int | None = None
    """The step at which the card has no more memory; None where there is none within `steps`."""
    compared_steps: Count = 0
    """Steps over which changes are compared."""
    compared_bytes: Bytes | None = None
    """Reserved after these as it is."""
    changes: Many[LengthChange] = ()
    """What each would reserve, the least first."""
