"""What a program's allocator is asked for in one step, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fxmem.hardware.hidden_memory import HiddenMemory


class Free(NamedTuple):
    """A storage is freed."""

    storage: int


class Hold(NamedTuple):
    """A library's workspace is allocated, for good."""

    nbytes: int
    stream: int


class Empty(NamedTuple):
    """The program empties the allocator's cache."""


class RunKernel(NamedTuple):
    """An operator allocates its outputs, and what its kernel has for itself."""

    storages: tuple[int, ...]
    """The numbers of its outputs."""
    nbytes: tuple[int, ...]
    stream: int
    hidden: HiddenMemory | None = None
    call: tuple[str, Sequence[Any], Any] | None = None
    """Operator, arguments and result that `hidden` follows from, tensors as layouts; None where it does not."""


Act = Free | Hold | Empty | RunKernel
"""One thing that a step asks of the allocator."""
