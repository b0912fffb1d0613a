"""Storages beyond their birth and end: values that they have, sizes that are bounded, who reads them, which streams
they wait for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.kernels.streams import Done

# --- storages with values, and the fake ones that stand for them ------------------------------------------------------


Watch = TypeVar("Watch")


class RealStorages(Generic[Watch]):
    """The real storages of a step: those that fakes stand for, and files in memory.

    Args:
        watched: of all that was noted, by address.
    """

    def __init__(self, watched: Callable[[], Mapping[int, Watch]]) -> None:
        self._watched = watched
        self._twins: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """By address, the fake storages that stand for real ones, and those."""
        self._mappings: list[tuple[int, int, weakref.ref[Any]]] = []
        """Files in memory: where each begins and ends, and its storage."""
        self.mapped: dict[int, str] = {}
        """By storage, the names of files in memory."""

    def find(self, tensor: torch.Tensor, storage: Any, address: int) -> tuple[Watch | None, bool]:
        """The watch of the real storage behind a tensor's, and whether that one stands for it."""
        if not (self._twins or self._mappings):
            return None, False
        if (twin := self._twins.get(address)) is not None:
            return self._find_real(twin[1]), True
        return (None if isinstance(tensor, torch_common.FakeTensor) else self._find_real(storage)), False

    def _find_real(self, storage: Any) -> Watch | None:
        """The watch of a real storage, or of the file in memory that it is a part of."""
        watched = self._watched()
        watch = watched.get(torch_common.storage_address(storage))
        if watch is not None or storage.resizable():
            return watch
        at = storage.data_ptr()
        found = (mapping() for begin, end, mapping in self._mappings if begin <= at < end)
        mapping = next((each for each in found if each is not None), None)
        return None if mapping is None else watched.get(torch_common.storage_address(mapping))

    def note_twin(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Note that a fake tensor stands for a real one, whose memory was noted or is not of torch's allocator."""
        if real.layout is not torch.strided:
            return
        storage = real.untyped_storage()
        if storage.resizable() and torch_common.storage_address(storage) not in self._watched():
            return  # dropped as soon as it has become the fake
        address = torch_common.storage_key(fake)

        def forget(_: Any) -> None:
            self._twins.pop(address, None)

        self._twins[address] = weakref.ref(fake.untyped_storage(), forget), storage

    def note_mapping(self, index: int, name: str, storage: Any) -> None:
        """Note that a storage is a file that is mapped into memory."""
        self.mapped[index] = name
        begin = storage.data_ptr()
        self._mappings = [each for each in self._mappings if each[2]() is not None]
        self._mappings.append((begin, begin + storage.nbytes(), weakref.ref(storage)))


# --- sizes that depend on data, at the largest they can be ------------------------------------------------------------


class BoundedSizes:
    """Sizes that depend on data, and what follows from them.

    Args:
        is_bounded: whether a tensor's storage has such a size.
    """

    def __init__(self, is_bounded: Callable[[torch.Tensor], bool]) -> None:
        self._is_bounded = is_bounded
        self.sizes: set[int] = set()
        self.is_making = False
        """Whether the operator that runs makes such sizes, or follows from them."""

    def note(self, result: Any) -> None:
        """Note that what is made now has such shapes."""
        self.is_making = True
        self.sizes.update(size for tensor in torch_common.iterate_tensors(result) for size in tensor.shape if size > 1)

    def begin_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run: it may read a tensor of such a size, or be told to make one."""
        self.is_making = bool(self.sizes) and (
            any(map(self._is_bounded, torch_common.iterate_tensors((args, kwargs))))
            or any(
                size in self.sizes
                for each in (*args, *kwargs.values())
                for size in (each if type(each) in (list, tuple) else (each,))
                if type(size) is int
            )
        )


# --- what operators outside of forward and backward read, and which storages were copied from which -------------------


_ZEROING: Final = frozenset({"aten.zero_.default", "aten._foreach_zero_.default"})
_COPYING: Final = frozenset({"aten.clone.default", "aten._to_copy.default"})
_COPYING_INTO: Final = frozenset({"aten.copy_.default", "aten._foreach_copy_.default"})


class StorageReads:
    """The storages that a program's operators read.

    Args:
        find_storage: the index of the storage that a tensor lies in; None for none.
    """

    def __init__(self, find_storage: Callable[[torch.Tensor], int | None]) -> None:
        self._find_storage = find_storage
        self.in_function = False
        """Whether a function of the program's runs that backward calls."""
        self.read: dict[int, int] = {}
        """By storage that an operator after backward or in such a function has read in this step, the tick of the last
        one; of gradients that one before has read, 0. To fill with zeros is not to read."""
        self.copied_from: dict[int, int] = {}
        """By storage, the one that all of it was copied from last, by way of the host too."""
        self._on_host: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By address, the host's storages that were copied from the card, and from which."""

    def note(self, name: str, given: Any, made: int | None, tick: int, *, outside: bool) -> None:
        """Note what an operator was given.

        Args:
            name: of the operator.
            given: its arguments, positional ones first.
            made: the storage that it allocated, if one.
            tick: when it ran.
            outside: whether it is no part of forward or backward.
        """
        if name in _COPYING and made is not None:
            self._note_copy(made, given[0][0])
        elif name in _COPYING_INTO:
            into, of = given[0][0], given[0][1]
            for one, other in [(into, of)] if isinstance(into, torch.Tensor) else zip(into, of, strict=True):
                self.note_copy_into(one, other)
        if (outside or self.in_function) and name not in _ZEROING:
            parts = (part for each in torch_common.iterate_tensors(given) for part in torch_wrappers.parts(each))
            self.read.update((index, tick) for part in parts if (index := self._find_storage(part)) is not None)

    def note_copy_into(self, into: torch.Tensor, of: torch.Tensor) -> None:
        """Note that a tensor, of the host or the card, was filled from another."""
        if (made := self._find_storage(into)) is not None:
            self._note_copy(made, of)
        elif (source := self._find_storage(of)) is not None and into.layout is torch.strided:
            storage = into.untyped_storage()
            self._on_host[torch_common.storage_address(storage)] = weakref.ref(storage), source

    def _note_copy(self, made: int, of: torch.Tensor) -> None:
        source = self._find_storage(of)
        if source is None and self._on_host and of.layout is torch.strided:
            there, index = self._on_host.get(torch_common.storage_address(of.untyped_storage()), (None, None))
            source = index if there is not None and there() is not None else None
        if source is not None and source != made:
            self.copied_from[made] = source


# --- blocks that wait for other streams before they are free ----------------------------------------------------------


class StreamWaits:
    """The storages that other streams use, and since when their freed blocks wait for them."""

    def __init__(self) -> None:
        self.used_on: dict[int, dict[int, None]] = {}
        """By storage, the further streams that the program said use it."""
        self._waiting: dict[int, tuple[frozenset[int], int]] = {}
        """By freed storage, the streams that its block waits for, and since which moment of theirs."""
        self.free_by: dict[int, int] = {}
        """By freed storage whose block waited, the tick by which it was free."""

    def begin(self) -> None:
        """A step begins: nothing waits."""
        self._waiting.clear()
        self.free_by.clear()

    def note_use(self, storage: int, stream: int) -> None:
        """Another stream uses a storage."""
        self.used_on.setdefault(storage, {})[stream] = None

    def note_freed(self, storage: int, moment: int) -> None:
        """A storage that other streams use was freed at this moment of theirs."""
        self._waiting[storage] = frozenset(self.used_on[storage]), moment

    def note_wait(self, done: Done | None, tick: int) -> bool:
        """Note that the host has waited for streams: blocks that waited for the same are free. Whether there are any.

        Args:
            done: what is done by now, by stream; None: all.
            tick: now.
        """
        found = False
        for storage, (streams, moment) in list(self._waiting.items()):
            left = frozenset(each for each in streams if done is not None and done.get(each, 0) < moment)
            if left:
                self._waiting[storage] = left, moment
            else:
                del self._waiting[storage]
                self.free_by[storage], found = tick, True
        return found
