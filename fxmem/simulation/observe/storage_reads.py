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
        """Read by an operator after backward or in such a function. To fill with zeros is not to read."""
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
        if name in _COPYING:
            self._note_copy(given[0][0], made)
        elif name in _COPYING_INTO:
            into, of = given[0][0], given[0][1]
            for one, other in [(into, of)] if isinstance(into, torch.Tensor) else zip(into, of, strict=True):
                self._note_copy(other, self._find_storage(one))
        if (outside or self.in_function) and name not in _ZEROING:
            parts = (part for each in torch_common.iterate_tensors(given) for part in torch_wrappers.parts(each))
            self.read.update(index for part in parts if (index := self._find_storage(part)) is not None)

    def note_copy_to_host(self, into: torch.Tensor, of: torch.Tensor, *, outside: bool) -> None:
        """Note that a tensor of the host was filled from one of the card."""
        storage, source = into.untyped_storage(), self._find_storage(of)
        if source is not None:
            self._on_host[torch_common.storage_address(storage)] = weakref.ref(storage), source
        self.note("", (of,), None, outside=outside)

    def _note_copy(self, of: torch.Tensor, made: int | None) -> None:
        source = self._find_storage(of)
        if source is None and not torch_wrappers.is_fake(of) and self._on_host and of.layout is torch.strided:
            there, index = self._on_host.get(torch_common.storage_address(of.untyped_storage()), (None, None))
            source = index if there is not None and there() is not None else None
        if source is not None and made is not None and source != made:
            self.copied_from[made] = source
