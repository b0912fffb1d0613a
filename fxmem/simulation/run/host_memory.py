"""The host's memory of a program that runs on a pretended card: measured where it is real, counted where it is not.

Resident memory is measured a hundred times a second, in a thread of its own; the high-water mark of the kernel shows
what came and went between. Pages of files are left out: a system drops them where it needs the room. fxmem's own memory
is in the same process and is taken off by a rule: what its modules take (`_OWN_BYTES`), what it keeps of each node of a
round's graph (`_NODE_BYTES`), and torch._dynamo until the program would have imported it, with its first optimizer or a
library (`measure_dynamo`). The first two were measured, in an empty program and over GPT-2 of 12 and 48 layers (torch
2.11 and 2.15, Linux on x86-64); `tests/simulation/program/test_host_memory.py` holds all to real runs.

Workers are other processes. Of what they have, their own counts (`Private_Dirty`): the rest they share with the process
that they were forked from. What is counted is in `HostLedger`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.hardware.workspaces import ASKING
from fxmem.records.parts import HostUse
from fxmem.records.pause_gc import pause_gc
from fxmem.simulation.card.machine import PretendedMachine
from fxmem.simulation.code.source_lines import program_call
from fxmem.simulation.processes.descendants import find_children
from fxmem.simulation.processes.fork import settle_threads
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.run.round_listener import RoundListener, RoundOver

_OWN_BYTES: Final = 18 << 20
"""What fxmem's modules, and what only they import, take of a process: 17.2 MiB with torch 2.11, 20.0 with 2.15."""
_NODE_BYTES: Final = 24 << 10
"""What fxmem keeps of a node of the graph, its operators and storages, once a round is over: 24.4 and 24.1 KiB."""
_THREADS: Final = 2
"""The one that measures, and the program's only one."""
_IMPORTERS: Final = "transformers timm torchvision peft diffusers lightning pytorch_lightning".split()
"""Libraries that import torch._dynamo where they are imported (transformers 5.17, timm 1.0, torchvision 0.26)."""
_FORK: Final[Any] = getattr(os, "fork", None)
"""None where there is none."""
_INTERVAL_S: Final = 0.01
_STATUS_BYTES: Final = 4096
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


def _read_field(text: bytes, name: bytes) -> int:
    """A line of /proc/PID/status in bytes. Raises ValueError where there is none."""
    begin = text.index(name) + len(name)
    return int(text[begin : text.index(b" kB", begin)]) << 10


def _read_resident(process: str = "self") -> _Resident | None:
    """None where the system does not say."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            text = file.read()
        return _Resident(*(_read_field(text, name) for name in (b"RssAnon:", b"RssShmem:", b"RssFile:", b"VmHWM:")))
    except (OSError, ValueError):
        return None


def _read_private(process: int) -> int | None:
    """What a process shares with no other, without files' pages and batches; None where it is over, or the system does
    not say."""
    try:
        with open(f"/proc/{process}/smaps_rollup", "rb") as file:
            text = file.read()
        return max(_read_field(text, b"Private_Dirty:") - _read_field(text, b"Pss_Shmem:"), 0)
    except (OSError, ValueError):
        return None


class _Workers:
    """The processes that a program has started, and what they have beyond what they share with it."""

    def __init__(self) -> None:
        self.are_there = False
        """Whether there may be any: nobody looks for them before."""
        self.nbytes = self.count = 0
        self.most_bytes = 0
        """Of one of them, ever."""
        self._shares: dict[int, int] = {}
        """What others have of its resident memory, too, when its pages were looked at last."""
        self._next_marks = self._next_pages = 0.0

    def sample(self) -> None:
        """Look at their resident memory, which is cheap, and now and then at their pages, which is not."""
        begun = time.monotonic()
        if not self.are_there or begun < self._next_marks:
            return
        self._next_marks = begun + _MARKS_S
        is_due = begun >= self._next_pages
        shares: dict[int, int] = {}
        beyond = []
        for process in find_children():
            if process in ASKING or (resident := _read_resident(str(process))) is None:
                continue
            known = self._shares.get(process)
            if (known is None or is_due) and (private := _read_private(process)) is not None:
                known = resident.total - resident.shared - private
            if known is not None:
                shares[process] = known
                beyond.append(max(resident.total - resident.shared - known, 0))
        self._shares, self.count, self.nbytes = shares, len(beyond), sum(beyond)
        self.most_bytes = max([self.most_bytes, *beyond])
        if is_due:
            now = time.monotonic()
            self._next_pages = now + _PAGES_SHARE * (now - begun)


class HostMeter(RoundListener):
    """Measures the host's memory while a program runs.

    The thread that looks makes no object that Python's garbage collector counts, unless there is a new peak: it would
    move the moments at which what the program has dropped is freed.

    Args:
        machine: that the program runs on.
        recording: of it.
        limit_bytes: what the host has; None where nothing is said.
        measures: whether processes are looked at; else what is counted is all that is known.
    """

    def __init__(
        self, machine: PretendedMachine, recording: Recording, limit_bytes: int | None, *, measures: bool = True
    ) -> None:
        self._measures = measures
        self.limit_bytes = limit_bytes
        self.ledger, self._machine, self._recording = machine.border.host, machine, recording
        self._most_nodes = 0
        self._dynamo = measure_dynamo()
        """What torch._dynamo takes, until the program would have it."""
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # what is freed while it is held may run the program's own code
        self._is_over = False
        self._status: int | None = None
        """The file that says what the process has, while it is open."""
        self._is_known = False
        """Whether there is such a file."""
        self._process = self._files = self._highest = self._lift = 0
        """What the process has, the pages of files, the kernel's mark, and how far that is above what it has now, where
        it rose since the last look."""
        self._workers = _Workers()
        self._by_round: list[int] = []
        self._round = 0
        """The number of the one that runs."""
        self._most = -1
        """All that the program had at the peak."""
        self._peak: dict[str, Any] = {"process_bytes": None}
        """What that was: fields of the record."""
        self._placed, self._place = 0, ("", "")
        """The peak whose place is known, and that, as of `program_call`."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Measure what runs inside, in this thread."""
        if self._measures and (first := _read_resident()) is not None:
            self._is_known, self._highest = True, first.highest
            self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._thread, self.ledger.on_rise = threading.get_ident(), self._note_rise
        sampler = threading.Thread(target=self._repeat, name="fxmem host memory", daemon=True)
        if self._is_known:
            sampler.start()
        try:
            with torch_common.wrap(os, "fork", self._fork) if hasattr(os, "fork") else contextlib.nullcontext():
                yield
        finally:
            self._is_over = True
            self.sample()
            self.ledger.on_rise = lambda passing: None
            if self._status is not None:
                sampler.join()
                os.close(self._status)
                self._status = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside is not the program's, and leaves nothing: nobody looks, and its high-water mark is none."""
        with self._lock:
            self.sample()
            yield
            if self._status is not None:
                self._highest = max(self._highest, _read_field(os.pread(self._status, _STATUS_BYTES, 0), b"VmHWM:"))

    def sample(self, passing: int = 0) -> int:
        """Measure now, in the program's own thread; all that there is.

        Args:
            passing: bytes that are counted for this moment alone.
        """
        with self._lock:
            total = self._measure() + passing
            if total + self._lift > self._most:
                self._note_peak(total + self._lift, passing, lambda: sys._getframe(1))
            return total - passing

    def note_optimizer(self) -> None:
        """With an optimizer the program would have imported torch._dynamo."""
        self._dynamo = 0

    def note_round(self, over: RoundOver) -> None:
        """Measure what is there after it."""
        self._round = over.number + 1
        self._by_round.append(self.sample())

    def _note_rise(self, passing: int) -> None:
        self._workers.are_there |= self.ledger.worker_batches_bytes > 0
        most = self._most + self._most // _WORTH_A_LOOK
        if self._process + self._workers.nbytes + self._count() + passing > most:
            self.sample(passing)

    def _repeat(self) -> None:
        while not self._is_over:
            time.sleep(_INTERVAL_S)
            with self._lock:
                total = self._measure() + self._lift
                if total > self._most:
                    with pause_gc():  # what is collected is the program's, in its own thread
                        self._note_peak(total, 0, lambda: sys._current_frames().get(self._thread))

    def _fork(self, original: Callable[[], int]) -> int:
        """`os.fork`, while the other thread measures nothing: a fork would keep what it holds."""
        self._workers.are_there = True
        with self._lock, warnings.catch_warnings():
            if threading.active_count() == _THREADS:
                warnings.filterwarnings("ignore", "This process", DeprecationWarning)
            return original()

    def look_ahead(self) -> bool | None:
        """Fork this process, for a look that is no worker of the program's: None there, here whether it ended well."""
        with self._lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # threads; none is needed there
            process = _FORK()
            ASKING.add(process)
        if not process:
            settle_threads(1)
            return None
        try:
            return os.waitpid(process, 0)[1] == 0
        finally:
            ASKING.discard(process)

    def _find_pretended(self) -> int:
        """Bytes of the target's that are the host's, too: where the CPU is the target, all of them."""
        return self._machine.live.now if self._machine.memory is None else 0

    def _count(self) -> int:
        """What is counted, and not measured."""
        return self.ledger.counted_bytes + self.ledger.batches_bytes + self._find_pretended()

    def _measure(self) -> int:
        """Look at the process and its workers; what there is, without what came and went since the last look."""
        self._most_nodes = max(self._most_nodes, len(self._recording.tracer.nodes))
        if self._measures:
            self._workers.sample()
        if self._status is not None:
            text = os.pread(self._status, _STATUS_BYTES, 0)
            anonymous, shared = _read_field(text, b"RssAnon:"), _read_field(text, b"RssShmem:")
            files, highest = _read_field(text, b"RssFile:"), _read_field(text, b"VmHWM:")
            self._lift = 0
            if highest > self._highest:  # pages of files that were dropped meanwhile are part of it
                self._lift = max(highest - anonymous - shared - files - max(self._files - files, 0), 0)
            self._highest, self._files = max(self._highest, highest), files
            # Batches that the program has looked at are mapped, and counted already.
            self._process = max(anonymous + max(shared - self.ledger.batches_bytes, 0) - self._own_bytes(), 0)
        return self._process + self._workers.nbytes + self._count()

    def _own_bytes(self) -> int:
        """What fxmem has in this process."""
        if self._dynamo:
            for name in _IMPORTERS:
                if name in sys.modules:
                    self._dynamo = 0
        return _OWN_BYTES + _NODE_BYTES * self._most_nodes + self._dynamo

    def _note_peak(self, total: int, passing: int, find_frame: Callable[[], types.FrameType | None]) -> None:
        if total > self._placed + self._placed // _SAME_PLACE:
            # A frame that is held while its function returns keeps what the function had: none is held here.
            found = program_call(find_frame())
            if found[0]:
                self._placed, self._place = total, found
        known = self._is_known
        self._most = total
        self._peak = {
            "peak_round": self._round if known else None,
            "process_bytes": self._process + self._lift if known else None,
            "files_bytes": self._files if known else None,
            "pretended_bytes": self.ledger.pretended_bytes + self._find_pretended() + passing,
            "workers": self._workers.count,
            "workers_bytes": self._workers.nbytes,
            "batches_bytes": self.ledger.batches_bytes,
        }

    def record(self) -> HostUse:
        """What was found."""
        ledger, known, (place, call) = self.ledger, self._is_known, self._place
        adds = ledger.worker_batches_bytes + self._workers.most_bytes if self._workers.most_bytes else None
        return HostUse(
            **self._peak,
            peak_bytes=self._most if known else None,
            after_bytes=self._by_round[-1] if known and self._by_round else None,
            by_round=tuple(self._by_round) if known else (),
            place=place,
            call=call,
            worker_adds_bytes=adds,
            copied_bytes=ledger.copied_bytes,
            pinned_bytes=ledger.pinned.allocated_bytes,
            limit_bytes=self.limit_bytes,
        )
