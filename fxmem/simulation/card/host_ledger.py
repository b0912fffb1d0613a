"""`HostLedger`: what a program has on the host that no measurement of its process has, counted.

Workers are other processes. A batch that waits for the program in shared memory is in no process's resident memory.
What workers will copy of a list that they read is counted before it is read.
"""

from __future__ import annotations

import mmap
import multiprocessing
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.memory.allocator_acts import PinnedPool
from fxmem.simulation.asked import legal_values
from fxmem.simulation.card.python_objects import count_copied
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.recording.observe.observer import Observer


def make_zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros on the host, of the layout of a tensor. Where no values are made, they are mapped, and take no memory until
    they are written to: a laptop has no room for all that a pipeline moves off a card."""
    layout = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device="meta")
    if like.numel() <= legal_values.MOST:
        return torch.zeros_like(layout, device="cpu")
    nbytes = layout.untyped_storage().nbytes()
    mapped = torch.frombuffer(mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY), dtype=like.dtype)
    return mapped.new_empty(0).set_(mapped.untyped_storage(), 0, layout.shape, layout.stride())


def _is_mapped(tensor: torch.Tensor) -> bool:
    return not tensor.untyped_storage().resizable()


class HostLedger(Observer):
    """Tensors on the host: those without memory here, those that came from the card, and what is pinned."""

    def __init__(self) -> None:
        self.log = StepLog(torch.device("cpu"), observers=(self,))
        """Of what came from the card and is real, and of what is pretended."""
        self.log.setting_up = False
        self.pretended_bytes = 0
        self.pinned = PinnedPool()
        self.batches_bytes = 0
        """Of batches in shared memory."""
        self.worker_batches_bytes = 0
        """Of those that a worker of the last loader loads ahead."""
        self.copied_bytes: int | None = 0
        """The most that workers copy of what their loaders' datasets keep; None: not known."""
        self._copies = 0
        """The same of the loaders that there are."""
        self._pinned_bytes = 0
        """Of tensors in pinned blocks."""
        self._handed_out: list[weakref.ref[Any]] = []
        """The storages of the last batch from shared memory."""
        self._pretended: dict[int, int] = {}
        self._stand_ins: list[torch.UntypedStorage] = []
        """What is mapped in the place of weights; it stays, so that its addresses are no other's."""
        self.on_rise: Callable[[int], None] = lambda passing: None
        """Called where more is pretended, with bytes that are there for this moment alone."""

    def on_free(self, index: int) -> None:
        """A tensor was freed."""
        self.pretended_bytes -= self._pretended.pop(index, 0)

    @property
    def counted_bytes(self) -> int:
        """What no measurement of the process has: what is pretended, and what pinned blocks have beyond tensors."""
        return self.pretended_bytes + self.pinned.allocated_bytes - self._pinned_bytes

    def note_pretended(self, value: Any) -> None:
        """Note tensors on the host that take no memory here."""
        log, first = self.log, len(self.log.storages)
        log.note_tensors(value)
        for index in range(first, len(log.storages)):
            self._pretended[index] = log.storages[index].nbytes
            self.pretended_bytes += log.storages[index].nbytes
        if len(log.storages) > first:
            self.on_rise(0)

    def note_zeros(self, zeros: torch.Tensor) -> None:
        """Note what `make_zeros` made."""
        (self.note_pretended if _is_mapped(zeros) else self.log.note_tensors)(zeros)

    def fill(self, tensors: Iterable[torch.Tensor], *, resizes: bool = False) -> None:
        """Give memory to those tensors that have none: somebody may write to them, or resize them."""
        for tensor in tensors if self._pretended else ():
            if (index := self.log.find_storage(tensor)) in self._pretended:
                with torch_common.no_modes(), torch_common.pause_observers():
                    storage = tensor.untyped_storage()
                    torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
                    if resizes and _is_mapped(tensor):
                        tensor.set_(tensor.clone().untyped_storage())
                self.on_free(index)

    def note_stand_in(self, storage: torch.UntypedStorage) -> None:
        """Note a file that stands in for weights, which are no numbers of anyone's."""
        self._stand_ins.append(storage)

    def copy_stand_in(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """A copy of weights that a file stands in for, or of such a copy: it takes no memory until it is written to.
        None for all else."""
        if not self._stand_ins or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return None
        is_mapped = any(0 <= tensor.data_ptr() - each.data_ptr() < each.nbytes() for each in self._stand_ins)
        if not is_mapped and self.log.find_storage(tensor) not in self._pretended:
            return None
        with torch_common.no_modes():
            copied = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype or tensor.dtype)
        self.note_pretended(copied)
        return copied

    def note_from_card(self, tensor: torch.Tensor, node: int, *, is_zeros: bool) -> None:
        """Note a real tensor that came from the card, as the result of this node."""
        self.log.node = node
        (self.note_zeros if is_zeros else self.log.note_tensors)(tensor)

    def note_made(self, args: Any, result: Any, node: int) -> None:
        """Note what was made of tensors that came from the card."""
        if len(self.log.storages) and any(
            self.log.find_storage(each) is not None for each in torch_common.iterate_tensors(args)
        ):
            self.log.node = node
            self.log.note_tensors(result)

    def pass_through(self, nbytes: int) -> None:
        """Note bytes that are on the host for this moment: what is on its way from the card to a file."""
        self.on_rise(nbytes)

    def note_pinned(self, value: Any) -> None:
        """Note tensors in pinned memory."""
        for storage in (each.untyped_storage() for each in torch_common.iterate_tensors(value)):
            self._pinned_bytes += storage.nbytes()
            weakref.finalize(storage, self._unpin, storage.nbytes())
            self._pin(storage, storage.nbytes())
        self.on_rise(0)

    def _unpin(self, nbytes: int) -> None:
        self._pinned_bytes -= nbytes

    def note_loader(self, iterator: Any, loader: Any) -> None:
        """Note what the workers of a loader that begins will copy of its dataset, where they are forked."""
        workers = loader.num_workers
        if not workers:  # then nothing has settled how processes start, and to ask would
            return
        if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
            return
        nbytes = count_copied(loader.dataset)
        if nbytes is None or self.copied_bytes is None:
            self.copied_bytes = None
        else:
            self._copies += workers * nbytes
            self.copied_bytes = max(self.copied_bytes, self._copies)
            weakref.finalize(iterator, self._drop_copies, workers * nbytes)

    def _drop_copies(self, nbytes: int) -> None:
        self._copies -= nbytes

    def note_batch(self, loader: Any, batch: Any) -> None:
        """Note a batch that a data loader has handed out, and with the first those that its workers load ahead.

        As many wait as it lets its workers load: they are faster than the program. They wait in shared memory, or, once
        a thread of the loader has copied them there, in pinned memory. In the place of one that is handed out, another
        waits by the time that the next one is asked for.
        """
        plan = torch_programs.loading_plan(loader)
        storages = [each.untyped_storage() for each in torch_common.iterate_tensors(batch)]
        if not plan.workers:
            if plan.pins:
                self.note_pinned(batch)
            return
        keep = self._pin if plan.pins else self._share
        for storage in filter(None, (each() for each in self._handed_out)):
            keep(storage, storage.nbytes())
        self._handed_out = [weakref.ref(each) for each in storages]
        if plan.is_first:
            for nbytes in [each.nbytes() for each in storages] * plan.ahead:
                keep(loader, nbytes)
            self.worker_batches_bytes = plan.ahead * sum(each.nbytes() for each in storages) // plan.workers
        self.on_rise(0)

    def _share(self, owner: Any, nbytes: int) -> None:
        """Shared memory has so much as long as its owner is there."""
        self.batches_bytes += nbytes
        weakref.finalize(owner, self._drop_batches, nbytes)

    def _pin(self, owner: Any, nbytes: int) -> None:
        """A pinned block is in use as long as its owner is there."""
        weakref.finalize(owner, self.pinned.free, self.pinned.malloc(nbytes))

    def _drop_batches(self, nbytes: int) -> None:
        self.batches_bytes -= nbytes
