"""What is wrong with a step: a cause, its line, its bytes, and a change."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fxmem.records.parts import Bytes, Record

BytesOf = Literal["peak", "step", "optimizer", "batch", "pass", "reserved", "host"]
"""What the bytes of a finding are of: the peak, how many more there are after each step, batch of evaluation or pass of
a loop, what the allocator has reserved, the host's memory."""


class Finding(Record):
    """Something about a step that costs memory and is probably not meant."""

    cause: str
    """Short and stable, the name under which it is registered: `unused-graph`."""
    text: str
    """What happens, in a sentence without an end. Untrusted text."""
    place: str = ""
    """`file:line` of the user's own code; empty where that is not known."""
    nbytes: Bytes
    of: BytesOf = "peak"
    change: str
    """What to write, or to do."""
    saved_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """How much lower the peak of requested bytes is with the change, as the record was tried with it; of `reserved`,
    the reserved bytes. None: not tried."""
