"""The host's memory of a program that runs on a pretended card: measured where it is real, counted where it is not.

Resident memory is measured a hundred times a second, in a thread of its own; the high-water mark of the kernel shows
what came and went between. Pages of files are left out: a system drops them where it needs the room. fxmem's own memory
is in the same process and is taken off by a rule: what its modules take (`_OWN_BYTES`), what it keeps of each node of a
round's graph (`_NODE_BYTES`), and torch._dynamo until the program would have imported it, with its first optimizer or a
library (`measure_dynamo`). The first two were measured, in an empty program and over GPT-2 of 12 and 48 layers (torch
2.11 and 2.15, Linux on x86-64); `tests/simulation/program/test_host_memory.py` holds all to real runs.

Workers are other processes. Of what they have, their own counts (`Private_Dirty`): the rest they share with the process
that they were forked from. A batch that waits for the program in shared memory is in no process's
resident memory, and is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
import types
import warnings
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
_THREADS: Final = 2
"""The one that measures, and the program's only one."""
_IMPORTERS: Final = "transformers timm torchvision peft diffusers lightning pytorch_lightning".split()
"""Libraries that import torch._dynamo where they are imported (transformers 5.17, timm 1.0, torchvision 0.26)."""
_INTERVAL_S: Final = 0.01
_MARKS_S: Final = 0.1
_PAGES_SHARE: Final = 20
"""Looking at the pages of workers takes one part of so many of the time: the kernel walks them all."""
_SAME_PLACE: Final = 100
"""A peak that is higher by less than one part of so many is that of the place before: it creeps up."""
_WORTH_A_LOOK: Final = 1000
"""A counted tensor is looked at at once where it lifts the peak by one part of so many."""


@functools.cache
def measure_dynamo() -> int:
    """Import torch._dynamo, which recordings need; what it takes, 0 where it was imported already or is not known."""
    before = _read_resident()
    torch_programs.import_dynamo()
    after = _read_resident()
    return 0 if before is None or after is None else max(after.anonymous - before.anonymous, 0)


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
        self._handed_out: list[weakref.ref[Any]] = []
        """The storages of the last batch from shared memory."""
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
        for storage in (each.untyped_storage() for each in torch_common.iterate_tensors(value)):
            self._pinned_bytes += storage.nbytes()
            weakref.finalize(storage, self._unpin, storage.nbytes())
            self._pin(storage, storage.nbytes())
        self.on_rise(0)

    def _unpin(self, nbytes: int) -> None:
        self._pinned_bytes -= nbytes

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
    """What a process shares with no other, without files' pages and batches; None where it is over, or the system does
    not say."""
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file if line.startswith(("Private_Dirty", "Pss_Shmem")))
        own, shared = (int(found.get(each, "0").split()[0]) << 10 for each in ("Private_Dirty", "Pss_Shmem"))
        return max(own - shared, 0)
    except (OSError, ValueError):
        return None


class _Worker(NamedTuple):
    """A worker, in bytes."""

    shares: int
    """What of its resident memory others have, too, when its pages were looked at."""
    nbytes: int
    """The most that it had beyond that, batches in shared memory aside."""


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
        has_made_optimizer: whether the program has made one.
        limit_bytes: what the host has; None where nothing is said.
    """

    def __init__(
        self,
        ledger: HostLedger,
        pretended: Callable[[], int],
        nodes: Callable[[], int],
        has_made_optimizer: Callable[[], bool],
        limit_bytes: int | None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.ledger, self._find_pretended, self._count_nodes = ledger, pretended, nodes
        self._has_made_optimizer = has_made_optimizer
        self._most_nodes = 0
        self._dynamo = measure_dynamo()
        """What torch._dynamo takes, until the program would have it."""
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # what is freed while it is held may run the program's own code
        self._over = threading.Event()
        self._highest = self._files = 0
        """The mark of the kernel, and pages of files, at the last look."""
        self._last: int | None = None
        """What the process had when it was last looked at."""
        self._after_round: int | None = None
        self._workers: dict[int, _Worker] = {}
        self._next_marks = self._next_pages = 0.0
        self._most_by_worker = 0
        self._peak = _Peak()
        self._placed = 0
        """The peak whose place is known."""
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
            with torch_common.wrap(os, "fork", self._fork) if hasattr(os, "fork") else contextlib.nullcontext():
                yield
        finally:
            self._over.set()
            self.look()
            self.ledger.on_rise = lambda passing: None
            if self._is_known:
                sampler.join()

    def _repeat(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            # What is collected is the program's, in its own thread.
            with self._lock, pause_gc():
                self._look(0, sys._current_frames().get(self._thread))

    def _fork(self, original: Callable[[], int]) -> int:
        """`os.fork`, while the other thread measures nothing: a fork would keep what it holds."""
        with self._lock, warnings.catch_warnings():
            if threading.active_count() == _THREADS:
                warnings.filterwarnings("ignore", "This process", DeprecationWarning)
            return original()

    def note_round(self) -> None:
        """A round is over."""
        self._after_round = self.look()

    def _note_rise(self, passing: int) -> None:
        most = self._peak.total
        counted = self.ledger.counted_bytes + self._find_pretended() + self.ledger.batches_bytes + passing
        if (self._last or 0) + sum(
            each.nbytes for each in self._workers.values()
        ) + counted > most + most // _WORTH_A_LOOK:
            self.look(passing)

    def look(self, passing: int = 0) -> int:
        """Measure now, in the program's own thread; all that there is.

        Args:
            passing: bytes that are counted for this moment alone.
        """
        with self._lock:
            return self._look(passing, sys._getframe(1))

    def _look(self, passing: int, frame: types.FrameType | None) -> int:
        found = _read_resident()
        self._most_nodes = max(self._most_nodes, self._count_nodes())
        self._find_workers()
        pretended = self.ledger.pretended_bytes + self._find_pretended() + passing
        batches, process, lift = self.ledger.batches_bytes, None, 0
        if found is not None:
            # What came and went since the last look, of which the kernel kept the mark.
            if found.highest > self._highest:
                dropped = max(self._files - found.of_files, 0)
                lift = max(found.highest - found.total - dropped, 0)
            self._highest, self._files = max(self._highest, found.highest), found.of_files
            process = max(found.anonymous + max(found.shared - batches, 0) + lift - self._own_bytes(), 0)
            self._last = process - lift
        counted = self.ledger.counted_bytes - self.ledger.pretended_bytes + pretended
        total = (process or 0) + sum(each.nbytes for each in self._workers.values()) + batches + counted
        if total > self._peak.total:
            place, call = self._peak.place, self._peak.call
            if total > self._placed + self._placed // _SAME_PLACE:
                found_at = program_call(frame)
                place, call = found_at if found_at[0] else (place, call)
                self._placed = total if found_at[0] else self._placed
            files = None if found is None else found.of_files
            alive = tuple(each.nbytes for each in self._workers.values())
            self._peak = _Peak(total, process, files, pretended, alive, batches, place, call)
        return total - lift - passing

    def _own_bytes(self) -> int:
        """What fxmem has in this process."""
        if self._dynamo and (self._has_made_optimizer() or any(each in sys.modules for each in _IMPORTERS)):
            self._dynamo = 0
        return _OWN_BYTES + _NODE_BYTES * self._most_nodes + self._dynamo

    def _find_workers(self) -> None:
        """Look at the workers' marks, which is cheap, and now and then at their pages, which is not."""
        begun = time.monotonic()
        if not self._is_known or begun < self._next_marks:
            return
        self._next_marks = begun + _MARKS_S
        is_due = begun >= self._next_pages
        found: dict[int, _Worker] = {}
        for process in _find_children():
            before, resident = self._workers.get(process), _read_resident(str(process))
            if resident is None:
                continue
            shares, most = (before.shares, before.nbytes) if before else (None, 0)
            if (shares is None or is_due) and (private := _read_private(process)) is not None:
                shares = resident.total - private
            if shares is not None:
                found[process] = _Worker(shares, max(most, resident.total - resident.shared - shares))
        self._workers = found
        self._most_by_worker = max([self._most_by_worker, *(each.nbytes for each in found.values())])
        if is_due:
            now = time.monotonic()
            self._next_pages = now + _PAGES_SHARE * (now - begun)

    def record(self) -> HostMemory:
        """What was found."""
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
            limit_bytes=self.limit_bytes,
        )
