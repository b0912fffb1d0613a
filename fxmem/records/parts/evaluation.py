"""What follows an epoch of a program: passes over other loaders, which train nothing."""

from __future__ import annotations

from fxmem.records.parts.base import Bytes, Count, Many, Record
from fxmem.records.parts.growth import Growth


class EvaluationPass(Record):
    """A pass over a loader after the epoch, of whose batches the first ones ran."""

    place: str = ""
    """`file:line` that goes through the loader; empty where that is not known."""
    batches: Count | None = None
    """Of the whole pass; None where its loader does not say."""
    ran: Count
    """Batches that ran."""
    requested_bytes: Bytes
    """The most requested at once until then, from the last step before it on."""
    growth_bytes: Bytes | None = None
    """How many bytes more are alive after each batch than after the one before. None: not known."""
    grown: Many[Growth] = ()
    """Who keeps more after each batch, the most first; batches are the steps of these."""
    end_bytes: Bytes | None = None
    """The most requested at once in the whole pass; None where something grows and its end is not known."""

    reserved_bytes: Bytes | None = None
    """The most reserved until the last batch is over, where further batches were replayed; None where their sizes do
    not grow evenly, and off a card."""
    full_at: Count | None = None
    """The batch that the card had no room for in this replay; None for none."""

    @property
    def is_carried_on(self) -> bool:
        """Whether batches that did not run leave something more: what the program makes of all of it (one tensor, by
        `torch.cat`) is of those that ran."""
        return bool(self.growth_bytes) and (self.batches is None or self.ran < self.batches)

    def find_full(self, room_bytes: int) -> int | None:
        """The batch at which a card is full; None for none of the pass.

        Args:
            room_bytes: what the allocator may have there.
        """
        if self.full_at is not None:
            return self.full_at
        if self.end_bytes is None or self.end_bytes <= room_bytes or not self.growth_bytes:
            return None
        return self.ran + 1 + max(room_bytes - self.requested_bytes, 0) // self.growth_bytes
