"""Copies of saved results in the host's memory: sent there in forward, fetched back in backward.

A result that is offloaded is copied to pinned memory on a stream of its own while the forward goes on, and its storage
on the card is freed when the copy is done: the stream of the program waits for the second last copy whenever one more
begins, so at most `SENT_AHEAD` storages live longer than the program needs them. Backward begins to
fetch the first `FETCHED_AHEAD` results in the plan's order when it asks for any, and one more with each that it asks
for.

- All memory of the card is allocated on the program's stream, and a copy waits for what that stream did before. So a
  block is free for the program's next allocation at once, as without offloading, and no `record_stream` delays it: the
  order of allocations is the same in every step.
- The bytes that come back are those that went. On a device without streams (the CPU) copies are made at once.
- Pinned memory stays with the model for the next step. torch's host allocator gives each request the next power of two
  of bytes (`allocate` in aten/src/ATen/core/CachingHostAllocator.h, torch 2.11).
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem.hardware.catalogue import FETCHED_AHEAD, SENT_AHEAD

# --- how a tensor lies in its storage ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor of this geometry in the storage of `base`."""
        if base.dtype != self.dtype:
            base = whole_storage(base).view(self.dtype)
        return base.as_strided(self.size, self.stride, self.offset)


def read_layout(tensor: torch.Tensor) -> StridedLayout:
    """How `tensor` lies in its storage."""
    return StridedLayout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage of `tensor`, in a row."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((count,), (1,), 0)


# --- copies of saved results in the host's memory: sent there in forward, fetched back in backward --------------------


class HostMemory:
    """Pinned memory of one model, used again in every step.

    A step whose results have other sizes gives up as many of the blocks that the last one left as it takes new ones.
    With the memory goes the stream of the copies.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}

    def __reduce__(self) -> Any:
        return HostMemory, ()  # copies and pickles begin without any

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for the elements of a whole storage."""
        kind = tensor.device, tensor.dtype, tensor.numel()
        if kind not in self._free and self._free:
            self._pop(next(iter(self._free)))  # torch keeps it for as long as it is being read
        if kind in self._free:
            return self._pop(kind)
        is_pinned = tensor.is_cuda and not isinstance(tensor, torch_common.FakeTensor)
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)

    def _pop(self, kind: tuple[torch.device, torch.dtype, int]) -> torch.Tensor:
        found = self._free[kind].pop()
        if not self._free[kind]:
            del self._free[kind]
        return found

    def give_back(self, device: torch.device, host: torch.Tensor) -> None:
        """Keep host memory for the next that takes as much. Copies follow each other on one stream, so what is still
        being read is not written to."""
        if not isinstance(host, torch_common.FakeTensor):
            self._free.setdefault((device, host.dtype, host.numel()), []).append(host)

    def stream(self, device: torch.device) -> Any:
        """The stream of copies from and to a device; None where there are no streams."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class HostCopies:
    """The copies of one forward.

    Args:
        memory: for their contents.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._in_flight: deque[tuple[torch.Tensor, int, Any]] = deque()
        """Tensors on storages of which a copy is under way, with their versions and the event of its end."""
        self._waiting: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()
        """The copies that are alive, by their places in the order of being fetched."""
        self._is_backward = False

    def send(self, tensor: torch.Tensor, place: int) -> HostCopy:
        """Begin to copy the storage of `tensor` to the host; `place`: how many others are fetched before."""
        while len(self._in_flight) >= SENT_AHEAD:
            self._settle()
        source = whole_storage(torch_common.detached_sharing_version(tensor))
        host = self.memory.take(source)
        done = _copy(self.memory.stream(tensor.device), host, source)
        self._in_flight.append((source, torch_autograd.version(source), done))
        if done is None:
            self._settle()
        copy = self._waiting[place] = HostCopy(self, host, tensor.device, place)
        return copy

    def begin_backward(self) -> None:
        """Begin the first fetches, once."""
        if not self._is_backward:
            self._is_backward = True
            self.fetch_ahead(0)

    def fetch_ahead(self, place: int) -> None:
        """Begin to fetch the copies from this place on, as many as are fetched ahead."""
        for each in range(place, place + FETCHED_AHEAD):
            found = self._waiting.get(each)
            if found is not None and found.is_wanted:
                found.begin_fetch()

    def finish(self) -> None:
        """Let go of all storages that are being copied; the program's stream waits for the copies."""
        while self._in_flight:
            self._settle()

    def _settle(self) -> None:
        source, version, done = self._in_flight.popleft()
        if done is not None:
            torch.cuda.current_stream(source.device).wait_event(done)
        if torch_autograd.version(source) != version:
            raise RuntimeError(
                f"a result ({source.numel()} elements of {source.dtype}) has been written to after autograd had saved "
                "it and while it was being copied to the host; fxmem.uncheckpoint(model), or plan without host memory"
            )


class HostCopy:
    """The contents of one storage in the host's memory; freed with the last that may ask for it.

    Args:
        copies: that it is one of.
        host: the contents.
        device: the storage's.
        place: how many others are fetched before.
    """

    def __init__(self, copies: HostCopies, host: torch.Tensor, device: torch.device, place: int) -> None:
        self._copies, self._host, self._device, self._place = copies, host, device, place
        self._fetched: torch.Tensor | None = None
        self._ready: Any = None
        """The event of the end of a fetch that nothing has waited for."""
        self._askers = 0

    def __del__(self) -> None:
        self._wait()  # what was fetched and never asked for is freed now, and the program may write there
        self._copies.memory.give_back(self._device, self._host)

    @property
    def is_wanted(self) -> bool:
        """Whether something that stands for it has not been asked yet."""
        return self._askers > 0

    def represent(self, tensor: torch.Tensor) -> HostStandIn:
        """What autograd keeps for `tensor`, which lies in the storage."""
        self._askers += 1
        return HostStandIn(self, read_layout(tensor))

    def find_tensor(self, *, is_last: bool = False) -> torch.Tensor:
        """A tensor on a storage with the contents, on the device.

        It stays there until all that stand for it have been asked; `is_last`: this is one of them.
        """
        found = self.begin_fetch()
        self._wait()
        self._askers -= is_last
        if self._askers <= 0:
            self._fetched = None
        self._copies.fetch_ahead(self._place + 1)
        return found

    def _wait(self) -> None:
        """Have the program's stream wait for a fetch under way."""
        if self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready)
            self._ready = None

    def begin_fetch(self) -> torch.Tensor:
        """Begin to copy it back; what it is copied to."""
        if self._fetched is None:
            fetched = torch.empty(self._host.numel(), dtype=self._host.dtype, device=self._device)
            self._ready = _copy(self._copies.memory.stream(self._device), fetched, self._host)
            self._fetched = fetched
        return self._fetched


class HostStandIn:
    """What stands for a saved tensor whose storage waits in the host's memory."""

    __slots__ = ("_copy", "_is_asked", "_layout")

    def __init__(self, copy: HostCopy, layout: StridedLayout) -> None:
        self._copy, self._layout, self._is_asked = copy, layout, False

    def find_tensor(self) -> torch.Tensor:
        """The tensor."""
        with torch.no_grad():
            found = self._layout.view(self._copy.find_tensor(is_last=not self._is_asked))
        self._is_asked = True
        return found


def _copy(stream: Any, to: torch.Tensor, source: torch.Tensor) -> Any:
    """Copy on a stream, after what the program's own has done; the event of its end, None where it has ended."""
    with torch.no_grad():
        if stream is None:
            to.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()
