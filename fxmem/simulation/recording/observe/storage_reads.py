"""What operators outside of forward and backward read, and which storages were copied from which."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers

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
        self.read: set[int] = set()
        """Read in this step by an operator after backward or in such a function; of gradients, in one before as well.
        To fill with zeros is not to read."""
        self.copied_from: dict[int, int] = {}
        """By storage, the one that all of it was copied from last, by way of the host too."""
        self._on_host: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By address, the host's storages that were copied from the card, and from which."""

    def note(self, name: str, given: Any, made: int | None, *, outside: bool) -> None:
        """Note what an operator was given.

        Args:
            name: of the operator.
            given: its arguments, positional ones first.
            made: the storage that it allocated, if one.
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
            self.read.update(index for part in parts if (index := self._find_storage(part)) is not None)

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
