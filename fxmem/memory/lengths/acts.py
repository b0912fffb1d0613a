"""What a program's allocator is asked for in one step, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fxmem.hardware.hidden_memory import HiddenMemory, Signature


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


class Requests:
    """The allocations and frees of one operator.

    A buffer of the kernel has the number -1 - n, for the n-th one; an output its place among the outputs.

    Args:
        asked: workspaces of cuDNN that are known.
    """

    def __init__(self, asked: Mapping[Signature, int | None]) -> None:
        self._asked = asked

    def expand(self, count: int, hidden: HiddenMemory | None) -> Iterator[tuple[int, int]]:
        """Number and bytes of each allocation, -1 bytes for a free; of an output, None of its bytes are known here: 0.

        Args:
            count: how many outputs there are.
            hidden: what the kernel has for itself.
        """
        own: dict[str, int] = {}
        outputs = iter(range(count))
        number = 0
        for event in () if hidden is None else hidden.events:
            if event.action == "output":
                if (output := next(outputs, None)) is not None:
                    yield output, 0
            elif event.action == "free":
                if event.name in own:
                    yield own.pop(event.name), -1
            else:
                nbytes = event.nbytes
                if nbytes is None and event.signature is not None:
                    nbytes = self._asked.get(event.signature)
                if nbytes:
                    number -= 1
                    own[event.name] = number
                    yield number, nbytes
        for output in outputs:
            yield output, 0
        for left in reversed(own.values()):
            yield left, -1
