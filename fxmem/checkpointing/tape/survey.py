"""A survey of a model's forward: its operator calls, their values, and what autograd saves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem.checkpointing.tape.values import OpKey, ValueKey
from fxmem.planning import OperatorCall, OperatorValue
from fxmem.simulation.kernels import is_under_mode

_SUM, _SUM_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


class Survey:
    """What a `Tape` tells of a module's forward; of several, of the last."""

    def __init__(self) -> None:
        self.begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Survey:
        return self  # copies of the module report to the same place

    def begin(self) -> None:
        """Forget what was seen."""
        self._calls: list[tuple[OpKey, list[ValueKey], list[ValueKey]]] = []
        self._storages: dict[ValueKey, ValueKey] = {}
        self._allocated: dict[int, ValueKey] = {}
        self._nbytes: dict[ValueKey, int] = {}
        self._saved: set[ValueKey] = set()
        self._overwritten: set[ValueKey] = set()
        self._hidden: set[ValueKey] = set()
        self._sums: dict[OpKey, OpKey] = {}
        """Of each sum, in place or not, what it is where no tape is: see `is_under_mode`."""
        self._sum_counts = {_SUM: 0, _SUM_IN_PLACE: 0}

    def _note_sum(self, key: OpKey) -> bool:
        """Note a sum; whether it is one that is in place without a tape."""
        if key[0] not in self._sum_counts:
            return False
        is_linear = key[0] == _SUM and is_under_mode()
        name = _SUM_IN_PLACE if is_linear else key[0]
        self._sums[key] = name, self._sum_counts[name]
        self._sum_counts[name] += 1
        return is_linear

    def on_allocation(self, key: OpKey, tensors: Iterable[torch.Tensor]) -> None:
        """An operator that must not run again, or need not, has given these."""
        self._note_sum(key)
        for position, storage in enumerate(dict.fromkeys(map(torch_common.storage_key, tensors))):
            self._allocated[storage] = (*key, position)

    def on_hidden_write(self, key: ValueKey) -> None:
        """A storage no longer contains what its last recorded writer left there.

        What it was cannot be recomputed in its place, so it is left as it is.
        """
        self._hidden.add(key)

    def on_call(
        self, key: OpKey, sources: list[ValueKey], made: list[tuple[torch.Tensor, bool, ValueKey | None]]
    ) -> None:
        """An operator has run.

        Args:
            sources: what it read of what others made that can be recomputed.
            made: a tensor on each storage that now contains something new, whether it has allocated that, and, if it
                has written over something, over what.
        """
        keys: list[ValueKey] = []
        product = sources[0] if self._note_sum(key) and sources else None
        for position, (tensor, new, before) in enumerate(made):
            keys.append((*key, position))
            self._nbytes[keys[-1]] = tensor.untyped_storage().nbytes()
            before = product if before is None else before
            if before is not None:
                self._overwritten.add(before)
                storage = self._storages[before]
            else:
                storage = keys[-1] if new else self._allocated.get(torch_common.storage_key(tensor), keys[-1])
            self._storages[keys[-1]] = storage
        self._calls.append((key, sources, keys))

    def on_save(self, key: ValueKey) -> None:
        """Autograd saves it."""
        self._saved.add(key)

    def finish(self) -> tuple[list[OperatorCall], list[OperatorValue]]:
        """The calls and what they made, in order."""
        calls: list[OperatorCall] = []
        values: list[OperatorValue] = []
        index: dict[ValueKey, int] = {}
        for (name, number), sources, made in self._calls:
            for position, key in enumerate(made):
                index[key] = len(values)
                hidden, made_in = key in self._hidden, self._storages[key]
                storage = (*self._sums.get(made_in[:2], made_in[:2]), made_in[2])
                saved, overwritten = key in self._saved and not hidden, hidden or key in self._overwritten
                values.append(OperatorValue(len(calls), position, storage, saved, overwritten, self._nbytes[key]))
            read, unplanned = dict.fromkeys(index[source] for source in sources), self._sums.get((name, number))
            calls.append(OperatorCall(name, number, tuple(read), tuple(index[key] for key in made), unplanned))
        return calls, values
