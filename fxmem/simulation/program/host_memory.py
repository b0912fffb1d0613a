"""The host's memory of a program that runs on a pretended card: measured where it is real, counted where it is not.

Resident memory is measured, ten times in a tenth of a second, in a thread of its own; the kernel's high-water mark shows
what came and went between. Pages of files are left out: a system drops them where it needs the room. fxmem's own memory
is in the same process and is taken off by a rule: what its modules take (`_OWN_BYTES`), and what it keeps of each node
of a round's graph (`_NODE_BYTES`). Both were measured, in an empty program and over GPT-2 of 12 and 48 layers
(torch 2.11 and 2.15, Linux on x86-64); `tests/simulation/program/test_host_memory.py` holds them to real runs.

Workers are other processes. Of what they have, their own counts (`Private_Clean` and `Private_Dirty`): the rest they
share with the process that they were forked from. A batch that waits for the program in shared memory is in no process's
resident memory, and is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.memory.pinned import PinnedPool
from fxmem.records.parts import HostMemory
from fxmem.records.pause_gc import pause_gc
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.observe.observer import Observer
from fxmem.simulation.source_lines import program_call

_OWN_BYTES: Final = 18 << 20
"""What fxmem's modules, and what only they import, take of a process: 17.2 MiB with torch 2.11, 20.0 with 2.15."""
_NODE_BYTES: Final = 24 << 10
"""What fxmem keeps of a node of the graph, its operators and storages, once a round is over: 24.4 and 24.1 KiB."""
_INTERVAL_S: Final = 0.01
_WORKERS_SHARE: Final = 20
"""Looking at workers takes one part of so many of the time: the kernel walks all their pages."""
_WORTH_A_LOOK: Final = 1000
"""A counted tensor is looked at at once where it lifts the peak by one part of so many."""


# --- what is counted --------------------------------------------------------------------------------------------------


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
        self._pinned_bytes = 0
        """Of tensors in pinned blocks."""
        self._pretended: dict[int, int] = {}
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

    def note_from_card(self, tensor: torch.Tensor, node: int) -> None:
        """Note a real tensor that came from the card, as the result of this node."""
        self.log.node = node
        self.log.note_tensors(tensor)

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
        for tensor in torch_common.iterate_tensors(value):
            storage = tensor.untyped_storage()
            self._pinned_bytes += storage.nbytes()
            weakref.finalize(storage, self._unpin, storage.nbytes(), self.pinned.malloc(storage.nbytes()))
        self.on_rise(0)

    def _unpin(self, nbytes: int, block: int) -> None:
        self._pinned_bytes -= nbytes
        self.pinned.free(block)

    def note_batch(self, loader: Any, batch: Any) -> None:
        """Note a batch that a data loader has handed out, and with the first those that its workers load ahead.

        As many wait as it lets its workers load: they are faster than the program.
        """
        plan = torch_programs.loading_plan(loader)
        sizes = [each.untyped_storage().nbytes() for each in torch_common.iterate_tensors(batch)]
        if plan.pins:
            self.note_pinned(batch)
        elif plan.workers:
            for tensor in torch_common.iterate_tensors(batch):
                nbytes = tensor.untyped_storage().nbytes()
                self.batches_bytes += nbytes
                weakref.finalize(tensor.untyped_storage(), self._drop_batches, nbytes)
        if plan.workers and plan.is_first:
            self.worker_batches_bytes = plan.ahead * sum(sizes) // plan.workers
            if plan.pins:
                blocks = [self.pinned.malloc(nbytes) for _ in range(plan.ahead) for nbytes in sizes]
                weakref.finalize(loader, lambda: [self.pinned.free(each) for each in blocks])
            else:
                self.batches_bytes += plan.ahead * sum(sizes)
                weakref.finalize(loader, self._drop_batches, plan.ahead * sum(sizes))
        self.on_rise(0)

    def _drop_batches(self, nbytes: int) -> None:
        self.batches_bytes -= nbytes


# --- what is measured -------------------------------------------------------------------------------------------------


class _Resident(NamedTuple):
    """A process, in bytes, by the names of /proc/PID/status."""

    anonymous: int
    shared: int
    of_files: int
    highest: int

    @property
    def total(self) -> int:
        return self.anonymous + self.shared + self.of_files


_STATUS: Final = ("RssAnon", "RssShmem", "RssFile", "VmHWM")


def _read_resident(process: str = "self") -> _Resident | None:
    """None where the system does not say."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
            found = dict(line.split(":", 1) for line in file if line.startswith(_STATUS))
        return _Resident(*(int(found[each].split()[0]) << 10 for each in _STATUS))
    except (OSError, KeyError, ValueError):
        return None


def _find_children() -> Iterator[int]:
    """The processes that this one has started."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())


def _read_private(process: int) -> int | None:
    """What a process shares with no other; None where it is over, or the system does not say."""
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith(("Private_Clean", "Private_Dirty"))]
        return sum(int(line[1]) << 10 for line in lines)
    except (OSError, ValueError):
        return None


@dataclasses.dataclass(frozen=True)
class _Peak:
    """The moment at which the program had most."""

    total: int = -1
    process: int | None = None
    files: int | None = None
    pretended: int = 0
    workers: tuple[int, ...] = ()
    batches: int = 0
    place: str = ""
    call: str = ""


class HostMeter:
    """Measures the host's memory while a program runs.

    Args:
        ledger: what is counted.
        pretended: bytes of the target's that are the host's, too: where the CPU is the target, all of them.
        nodes: how many nodes the graph of the round has.
    """

    def __init__(self, ledger: HostLedger, pretended: Callable[[], int], nodes: Callable[[], int]) -> None:
        self.ledger, self._find_pretended, self._count_nodes = ledger, pretended, nodes
        self._most_nodes = 0
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._highest = 0
        self._last: int | None = None
        """What the process had when it was last looked at."""
        self._after_round: int | None = None
        self._workers: dict[int, int] = {}
        self._next_workers = 0.0
        self._most_by_worker = 0
        self._peak = _Peak()
        self._is_known = True

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Measure what runs inside, in this thread."""
        first = _read_resident()
        self._is_known, self._highest = first is not None, first.highest if first else 0
        self._thread = threading.get_ident()
        self.ledger.on_rise = self._note_rise
        sampler = threading.Thread(target=self._repeat, name="fxmem host memory", daemon=True)
        if self._is_known:
            sampler.start()
        try:
            yield
        finally:
            self._over.set()
            self.look(workers=True)
            self.ledger.on_rise = lambda passing: None
            if self._is_known:
                sampler.join()

    def _repeat(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            with pause_gc():  # what is collected is the program's, in its own thread
                self.look(frame=sys._current_frames().get(self._thread))

    def note_round(self) -> None:
        """A round is over."""
        self._after_round = self.look()

    def _note_rise(self, passing: int) -> None:
        most = self._peak.total
        counted = self.ledger.counted_bytes + self._find_pretended() + self.ledger.batches_bytes + passing
        if (self._last or 0) + sum(self._workers.values()) + counted > most + most // _WORTH_A_LOOK:
            self.look(passing)

    def look(self, passing: int = 0, *, workers: bool = False, frame: types.FrameType | None = None) -> int:
        """Measure now; all that there is.

        Args:
            passing: bytes that are counted for this moment alone.
            workers: whether to look at workers in any case.
            frame: where the program is; None for the caller's.
        """
        with self._lock:
            found = _read_resident()
            self._most_nodes = max(self._most_nodes, self._count_nodes())
            self._find_workers(force=workers)
            pretended = self.ledger.pretended_bytes + self._find_pretended() + passing
            batches, process, lift = self.ledger.batches_bytes, None, 0
            if found is not None:
                # What came and went since the last look, of which the kernel kept the mark.
                lift = found.highest - found.total if found.highest > self._highest else 0
                self._highest = max(self._highest, found.highest)
                own = _OWN_BYTES + _NODE_BYTES * self._most_nodes
                process = max(found.anonymous + max(found.shared - batches, 0) + lift - own, 0)
                self._last = process - lift
            counted = self.ledger.counted_bytes - self.ledger.pretended_bytes + pretended
            total = (process or 0) + sum(self._workers.values()) + batches + counted
            if total > self._peak.total:
                place, call = program_call(frame or sys._getframe(1))
                files = None if found is None else found.of_files
                alive = tuple(self._workers.values())
                self._peak = _Peak(total, process, files, pretended, alive, batches, place, call)
            return total - lift - passing

    def _find_workers(self, *, force: bool) -> None:
        begun = time.monotonic()
        if not self._is_known or (begun < self._next_workers and not force):
            for process in [each for each in self._workers if not os.path.exists(f"/proc/{each}")]:
                del self._workers[process]
            return
        found = {process: _read_private(process) for process in _find_children()}
        self._workers = {process: nbytes for process, nbytes in found.items() if nbytes}
        self._most_by_worker = max([self._most_by_worker, *self._workers.values()])
        now = time.monotonic()
        self._next_workers = now + max(_WORKERS_SHARE * (now - begun), 10 * _INTERVAL_S)

    def record(self, limit_bytes: int | None) -> HostMemory:
        """What was found.

        Args:
            limit_bytes: what the host has; None where nothing is said.
        """
        peak, ledger = self._peak, self.ledger
        adds = ledger.worker_batches_bytes + self._most_by_worker if self._most_by_worker else None
        return HostMemory(
            peak_bytes=peak.total if self._is_known else None,
            after_bytes=self._after_round if self._is_known else None,
            place=peak.place,
            call=peak.call,
            process_bytes=peak.process,
            pretended_bytes=peak.pretended,
            workers=len(peak.workers),
            workers_bytes=sum(peak.workers),
            batches_bytes=peak.batches,
            worker_adds_bytes=adds,
            pinned_bytes=ledger.pinned.allocated_bytes,
            files_bytes=peak.files,
            limit_bytes=limit_bytes,
        )
