"""`NodeLedger`: for which node of the graph a program works, and what each node returns and saves."""

from __future__ import annotations

import bisect
import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.wrappers import known_shape
from fxmem.records.profile import Kind, Phase
from fxmem.simulation.recording.observe.event_log import LOSS, StepLog
from fxmem.simulation.recording.observe.observer import Observer


class NodeLedger(Observer):
    """Listens to the tracer and the autograd engine of a program.

    Args:
        log: has the storages and ops that are for the nodes.
    """

    saves_by_launch = False
    """Whether what autograd saves belongs to the node that allocated it: of compiled code, whose whole graph is one
    node of autograd."""

    def __init__(self, log: StepLog) -> None:
        self.log = log
        self.results: dict[int, list[tuple[tuple[int, ...], str, int | None]]] = {}
        """By node, shape, dtype and storage of the tensors it returned."""
        self.backward_node = -1
        """Number of the node of autograd whose gradient was computed last."""
        self.goes_back = False
        """Whether a backward has come to the graph of an earlier run."""
        self.begin()

    def begin(self) -> None:
        """Forget the last run, but for results that are alive: what the program read before is not read anew."""
        self.log.node = LOSS
        self.restored: dict[tuple[int, int], None] = {}
        """Node and storage, where its backward read what had not been saved."""
        self.differentiated: set[int] = set()
        """Nodes that a backward came to, of `torch.autograd.grad` and of torch.func, too."""
        self.without_gradient: set[int] = set()
        """Nodes that returned tensors to none of which a gradient leads."""
        self._begun_at = torch_autograd.next_sequence_number()
        self._sequence: list[int] = [0]
        self._sequence_node: list[int] = [LOSS]
        self.saved: dict[int, dict[int, None]] = {}
        """By node, the storages that it saves for backward."""
        self.saved_at_end: dict[int, int] = {}
        """The storages that are saved at the end of forward, and the node that each counts for."""
        self._live_saved: list[tuple[_Kept, int, int]] = []
        self._announced, self._announced_at = LOSS, 0
        """The node announced last, and how many of these there were then."""
        storages = self.log.storages
        self.results = {
            node: results
            for node, results in self.results.items()
            if all(index is None or storages[index].death is None for _, _, index in results)
        }

    # --- calls --------------------------------------------------------------------------------------------------------

    def op_count(self) -> int:
        """How many ops have run."""
        return len(self.log.ops)

    def current_call(self) -> int:
        """The node that ops and storages are for."""
        return self.log.node

    def resume_call(self, node: int) -> None:
        """Work for this node again."""
        self.log.node = node

    def on_call(self, node: int) -> None:
        """Work for this node from here on."""
        self.log.node = node
        if node != self._announced:
            self._announced, self._announced_at = node, len(self._live_saved)
        number = torch_autograd.next_sequence_number()
        if self._sequence[-1] == number:
            self._sequence_node[-1] = node
        else:
            self._sequence.append(number)
            self._sequence_node.append(node)

    def on_result(self, node: int, first_op: int, result: Any) -> None:
        """The node returned; correct what was logged under the number announced for it."""
        announced, log = self.log.node, self.log
        if announced != node and first_op < len(log.ops):
            for index in range(first_op, len(log.ops)):
                log.ops[index].node = node
            for storage in reversed(log.storages):
                if storage.birth < log.ops[first_op].begin and storage.death != 0:  # what was refused never was
                    break
                storage.node = node
            moved = self.saved.pop(announced, None)
            if moved is not None:
                self.saved[node] = moved
                late = self._live_saved[self._announced_at :]
                self._live_saved[self._announced_at :] = [(r, node if n == announced else n, s) for r, n, s in late]
            self._sequence_node[-1] = node
            log.node = node
        tensors = list(torch_common.iterate_tensors(result))
        if tensors and not any(each.requires_grad for each in tensors):
            self.without_gradient.add(node)
        self.results.setdefault(node, [(known_shape(t), str(t.dtype)[6:], log.note_storage(t)) for t in tensors])

    @contextlib.contextmanager
    def observe_recomputation(self) -> Iterator[None]:
        """What runs inside recomputes what had been freed."""
        self.log.recomputing += 1
        try:
            yield
        finally:
            self.log.recomputing -= 1

    def find_name(self, tensor: torch.Tensor) -> str:
        """The name of what a tensor lies in, or of its holder; else of the operator that made it."""
        indices = (self.log.find_storage(part) for part in _iterate_parts(tensor))
        index = next((each for each in indices if each is not None), None)
        if index is None:
            return ""
        storage = self.log.storages[index]
        return storage.name or storage.holder or self.log.find_maker(tensor).removeprefix("aten.").partition(".")[0]

    # --- autograd -----------------------------------------------------------------------------------------------------

    def on_backward_node(self, sequence_number: int) -> None:
        """Work for the node whose gradient is computed next. In forward, as in a loss of gradients, the node stays."""
        self.log.first_of_backward_node, self.backward_node = len(self.log.storages), sequence_number
        node = self._sequence_node[bisect.bisect_right(self._sequence, sequence_number) - 1]
        self.differentiated.add(node)
        self.goes_back = self.goes_back or sequence_number < self._begun_at
        if self.log.phase is not Phase.FORWARD:
            self.log.node = node

    def on_save(self, value: Any, handle: weakref.ref[Any]) -> None:
        """A node saves these tensors for backward."""
        if not self.saves_by_launch:
            self._save(value, handle)
            return
        for tensor in torch_common.iterate_tensors(value):
            index = self.log.note_storage(tensor)
            node = None if index is None else self.log.storages[index].node
            if node is None:
                continue
            before, self.log.node = self.log.node, node
            self._save(tensor, handle)
            self.log.node = before

    def _save(self, value: Any, handle: weakref.ref[Any]) -> None:
        log = self.log
        for tensor in _iterate_parts(value):
            index = log.note_part(tensor)
            if index is None or (storage := log.storages[index]).birth == 0:
                continue
            self.saved.setdefault(self.log.node, {})[index] = None
            if self.log.recomputing and log.phase is Phase.BACKWARD:
                self.restored[self.log.node, index] = None
            if storage.kind is None:
                storage.kind = Kind.SAVED
            if log.phase is Phase.FORWARD:
                kept = _Kept(handle(), self._note_end)
                kept.end = math.inf
                self._live_saved.append((kept, self.log.node, index))

    def on_unpack(self, tensor: torch.Tensor) -> None:
        """The program's own unpack hook returned this tensor to the node that runs."""
        index = self.log.note_storage(tensor)
        if index is not None:
            self.restored[self.log.node, index] = None

    def find_kept(self, saved: Iterable[tuple[int, Any]]) -> dict[int, int]:
        """The storages of saved tensors, with the number of the node of autograd that keeps each."""
        parts = ((part, number) for number, value in saved for part in _iterate_parts(value))
        found = ((self.log.find_storage(part), number) for part, number in parts)
        return {index: number for index, number in found if index is not None}

    def end_of_forward(self) -> None:
        """Settle which node owns each saved storage: the first to save it that still keeps it.

        Of a round with several forwards, the one that saves most counts.
        """
        saved: dict[int, int] = {}
        for reference, node, index in self._live_saved:
            handle = reference()
            if handle is not None and handle.value is not None:
                saved.setdefault(index, node)
        self._live_saved = []
        if self.log.sum_bytes(saved) >= self.log.sum_bytes(self.saved_at_end):
            self.saved_at_end = saved

    def end_without_backward(self, tick: int) -> None:
        """As `end_of_forward`, of a forward whose graph nothing goes back through: what was kept at a tick counts."""
        storages = self.log.storages
        for kept, node, index in self._live_saved:
            death = storages[index].death
            is_alive = storages[index].birth <= tick and (death is None or death > tick)
            if is_alive and kept.end > tick:
                self.saved_at_end.setdefault(index, node)
        self._live_saved = []

    def _note_end(self, kept: weakref.ref[Any]) -> None:
        assert isinstance(kept, _Kept)
        kept.end = self.log.tick

    def mark_outputs(self, node: int) -> None:
        """Mark what this node returned as the model's output."""
        for _, _, index in self.results.get(node, ()):
            if index is not None and self.log.storages[index].birth > 0:
                self.log.storages[index].kind = Kind.OUTPUT


def _iterate_parts(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nested value, wrappers taken apart."""
    return (part for found in torch_common.iterate_tensors(value) for part in torch_wrappers.parts(found))


class _Kept(weakref.ref[Any]):
    """A weak reference to the handle of what autograd saved, with the tick at which it was gone."""

    __slots__ = ("end",)
    end: float
