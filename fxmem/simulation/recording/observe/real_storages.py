"""Storages with values, and the fake ones that stand for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch

from fxmem._torch import common as torch_common

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
