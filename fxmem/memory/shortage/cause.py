"""The cause of a shortage, by the numbers of its message alone.

What is asked in this order: does the request fit the card at all; was it refused although the bytes were free (a limit,
or something that the message does not show); would the allocator's unused bytes have been enough, were they in one
piece; would the bytes of other processes; would what the process itself holds outside the allocator? Else the program
is too large for the card.
"""

from __future__ import annotations

import functools
from typing import Final

from fxmem.hardware.context import known_context_sizes
from fxmem.records.shortage import Cause, OutOfMemoryMessage

_ROOM: Final = 32
"""Free bytes beyond the request that are this share of the card, one in so many, are room; less is a full card, of
which the driver keeps a little for itself."""
_IN_PIECES: Final = 10
"""The allocator's unused bytes are the cause where they are this share of what it reserved, one in so many."""
_OTHERS: Final = 4
"""Other processes are the cause where they hold this share of the card, one in so many. On a desktop, the display and
Windows have up to a sixth of a small card."""
_OTHERS_KNOWN: Final = 10
"""The same where the message says what the process has itself."""
_DISPLAY: Final = 1 << 30
"""So much of a card may be its display's, which nobody ends."""
_ROUNDING: Final = 16 << 20
"""What a sum of three sizes may be off, each rounded to 0.01 GiB."""


def find_cause(message: OutOfMemoryMessage) -> OutOfMemoryMessage:
    """The message, with what follows from its numbers."""
    sums = _complete(message)
    return sums.model_copy(update={"cause": _decide(sums)})


def _complete(message: OutOfMemoryMessage) -> OutOfMemoryMessage:
    """Fill in the numbers that follow from the others."""
    allocated, cached, reserved = message.allocated_bytes, message.cached_bytes, message.reserved_bytes
    if reserved is None and allocated is not None and cached is not None:
        reserved = allocated + cached
    elif cached is None and allocated is not None and reserved is not None:
        cached = max(reserved - allocated, 0)
    capacity, free, outside = message.capacity_bytes, message.free_bytes, message.outside_bytes
    if message.api == "MPS":  # the limit is what there is
        free = (
            None
            if None in (message.limit_bytes, allocated, outside)
            else _less(message.limit_bytes, allocated, outside)
        )
    if outside is None and capacity is not None and free is not None and reserved is not None:
        outside = _less(capacity, free, reserved)
    process, others = message.process_bytes, message.others
    if process is None and reserved is not None:
        # In a container the process does not find itself by its number among those of the driver.
        own = [each for each in others if each.nbytes + _ROUNDING >= reserved]
        if len(own) == 1:
            process, others = own[0].nbytes, tuple(each for each in others if each is not own[0])
    asked = message.requested_bytes
    missing = None if asked is None or free is None else asked - free
    return message.model_copy(
        update={
            "cached_bytes": cached,
            "reserved_bytes": reserved,
            "outside_bytes": outside,
            "free_bytes": free,
            "process_bytes": process,
            "others": others,
            "missing_bytes": missing,
            "missing_packed_bytes": None if missing is None or cached is None else missing - cached,
        }
    )


def _less(whole: int | None, *parts: int | None) -> int:
    return max((whole or 0) - sum(each or 0 for each in parts), 0)


def others_bytes(message: OutOfMemoryMessage) -> int | None:
    """What other processes hold of the card; where the process is not told apart, what it cannot be itself."""
    if message.outside_bytes is None or message.reserved_bytes is None:
        return None
    own = (
        most_context_bytes()
        if message.process_bytes is None
        else max(message.process_bytes - message.reserved_bytes, 0)
    )
    return max(message.outside_bytes - own, 0)


def context_bytes(message: OutOfMemoryMessage) -> int | None:
    """What the process holds outside the allocator; None where the message does not tell it from other processes."""
    if message.api == "MPS":  # Metal counts what this process has, and no other's
        return message.outside_bytes
    if message.process_bytes is None or message.reserved_bytes is None:
        return None
    return max(message.process_bytes - message.reserved_bytes, 0)


@functools.cache
def most_context_bytes() -> int:
    """The most that one process without a process group was measured to take beside its allocator."""
    return max(each.nbytes for each in known_context_sizes() if each.state == "working")


def _decide(message: OutOfMemoryMessage) -> Cause:
    asked, capacity, missing = message.requested_bytes, message.capacity_bytes, message.missing_bytes
    if message.cause != "unknown":  # its format says so
        return message.cause
    room = message.limit_bytes if capacity is None else capacity
    if room is None and message.reserved_bytes is not None and message.free_bytes is not None:
        room = message.reserved_bytes + message.free_bytes  # a snapshot does not say how large the card is
    if asked is None or room is None:
        return "unknown"
    if asked > room:
        return "request"
    allocated, cached = message.allocated_bytes or 0, message.cached_bytes or 0
    if allocated > room:  # Windows lends the host's memory
        return "size"
    if missing is None:  # what was free is not said (XPU until 2.13)
        return "size" if allocated + asked > room else "unknown"
    reserved, limit = message.reserved_bytes or 0, message.limit_bytes
    if limit is not None and capacity is not None and reserved + asked + _ROUNDING > limit and missing <= 0:
        return "limit"
    if -missing * _ROOM >= room:
        return "free"
    others, context = others_bytes(message) or 0, context_bytes(message)
    if missing <= cached and cached * _IN_PIECES >= reserved >= others and reserved:
        return "fragmentation"
    enough = missing <= others + cached
    if enough and others >= (room / _OTHERS if context is None else max(room / _OTHERS_KNOWN, _DISPLAY)):
        return "other-process"
    beyond = (context or 0) - most_context_bytes()
    share = _OTHERS if message.api == "MPS" else _OTHERS_KNOWN  # Metal's graphs have up to a fifth
    if missing <= beyond + cached and beyond * share >= room:
        return "context"
    return "size"
