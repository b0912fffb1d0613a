"""What is known of a call of an operator beside its results."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class OpFacts:
    """What is noted of an op beside its results: a function of the op, its arguments' metadata and its other
    arguments."""

    flops: int | None
    """None where it computes and has no formula."""
    moved_bytes: int
    """What its kernel reads and writes."""
    host_bytes: int = 0
    """What of it crosses the link between the card and the host's memory."""
    hidden: Any = None
    """The memory that its kernel allocates without a tensor, as `inspect` describes it; None for none."""
