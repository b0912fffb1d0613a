"""Forks of this process that do work and answer with a text; nothing is imported or pickled for them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from fxmem import errors
from fxmem.errors import AnalysisError, FxmemError, UsageError
from fxmem.simulation.code.source_lines import error_place
from fxmem.simulation.processes.descendants import adopt_orphans, end_descendants

_INTERVAL: Final = 1.0
"""Seconds between looks at a process that is being ended."""
_PDEATHSIG: Final = 1  # linux/prctl.h


class Forked:
    """A fork of this process that runs a function and ends with what it returns.

    Args:
        start: the function.
        is_left: whether it goes on where this process has ended; another clears up after both.
    """

    def __init__(self, start: Callable[[], int], *, is_left: bool = False) -> None:
        _flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # threads; none is needed there
            self.pid = os.fork()
        if self.pid == 0:
            _run_forked(start, None if is_left else parent)
        self._code: int | None = None
        self._descriptor = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    def wait(self, seconds: float) -> int | None:
        """Its exit code as soon as it is over; None after so many seconds."""
        until = time.monotonic() + seconds
        while self._code is None:
            left = until - time.monotonic()
            if self._descriptor is None:
                time.sleep(min(0.02, max(left, 0)))
            else:
                select.select([self._descriptor], [], [], max(left, 0))
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif left <= 0:
                break
        return self._code

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and what it has started, if it is still there."""
        if self._code is None and sys.platform == "linux":
            self.signal(signal.SIGSTOP)
            end_descendants(self.pid)
        self.signal(signal.SIGKILL)
        while self.wait(_INTERVAL) is None:
            pass
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _run_forked(start: Callable[[], int], parent: int | None) -> NoReturn:
    """Run a function in a fork, which ends with its parent, if that is given."""
    code = 1
    try:
        if sys.platform == "linux":  # ends this process when its parent is
            with contextlib.suppress(AttributeError, OSError):
                if parent is not None:
                    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
                adopt_orphans()
            if parent not in (None, os.getppid()):
                os._exit(1)
        atexit._clear()  # what the process that is forked from does at its end is its own
        code = start()
        _flush()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, KeyboardInterrupt):
            end_descendants(os.getpid())
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, full or closed
            stream.flush()


def may_run_backward() -> bool:
    """Whether autograd's C++ runs here: it does in no fork of a process in which its threads have run.

    Asked in a fork, since it starts threads where there are cards, and a process with threads gets no view of its own.
    """
    if not hasattr(os, "fork"):
        return True
    pid = os.fork()
    if pid == 0:
        code = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # C++ writes there where it refuses
        settle_threads(1)
        with contextlib.suppress(RuntimeError):
            torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def settle_threads(count: int) -> None:
    """Let torch have so many threads, in a fork, before autograd begins any.

    Each thread of autograd's asks for them, and the first that does so in a fork puts a new pool in the place of the
    old one; where two do at once, one finds none and ends the process (`pthreadpool()` of
    caffe2/utils/threadpool/pthreadpool-cpp.cc).
    """
    torch.set_num_threads(count)


# --- what it answers --------------------------------------------------------------------------------------------------


def answer_work(work: Callable[[], str]) -> dict[str, Any]:
    """Do the work; what it returned, or raised."""
    try:
        return {"text": work()}
    except BaseException as error:
        if not isinstance(error, (FxmemError, KeyboardInterrupt)):
            traceback.print_exc()
        place = error_place(error) if isinstance(error, KeyboardInterrupt) else ""
        return {"error": type(error).__name__, "text": str(error), "place": place}


def note_place(error: BaseException, place: str) -> None:
    """Let an error that ends fxmem say where the program was: `file:line`, or nothing where that is not known."""
    if place:
        error.add_note(f"the program was at {place}")


def read_answer(answer: Path, code: int) -> dict[str, Any]:
    """What the work answered; raises what it raised, or AnalysisError where the process has left no answer."""
    found = parse_answer(answer)
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    if found is None:
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise AnalysisError(f"the program's process {ended} before there was a prediction; its output says why")
    kind = found.get("error")
    if kind is None:
        return found
    if kind == KeyboardInterrupt.__name__:
        interrupt = KeyboardInterrupt()
        note_place(interrupt, found["place"])
        raise interrupt
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, FxmemError):
        raise known(found["text"])
    raise RuntimeError(f"{kind}: {found['text']}")


def format_answer(found: Mapping[str, Any]) -> bytes:
    """An answer as its file has it: a line of JSON, and its text as it is, which may be long."""
    text = str(found.get("text", "")).encode()
    return json.dumps({**found, "text": len(text)}).encode() + b"\n" + text


def parse_answer(answer: Path) -> dict[str, Any] | None:
    """What is in the file; None where nothing is, or not all yet."""
    with contextlib.suppress(OSError, ValueError):
        head, _, text = answer.read_bytes().partition(b"\n")
        found: dict[str, Any] = json.loads(head)
        return {**found, "text": text.decode()} if found["text"] == len(text) else None
    return None


# --- one analysis at a time -------------------------------------------------------------------------------------------


class _Turn:
    """A lock that knows which thread has it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: int | None = None


_turn = _Turn()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread is in here.

    Raises:
        UsageError: this thread is in here already: the outer analysis would count what the inner one runs.
    """
    turn, me = _turn, threading.get_ident()
    if turn.holder == me:
        what = "the model, its loss or its optimizer called fxmem while it was being analysed"
        raise UsageError(f"expected no analysis within another: {what}")
    with turn.lock:
        turn.holder = me
        try:
            yield
        finally:
            turn.holder = None


def _renew() -> None:
    """Replace the lock in a forked process: the thread that has it is not there."""
    global _turn
    _turn = _Turn()


if hasattr(os, "register_at_fork"):  # where there is no fork there is nothing to do
    os.register_at_fork(after_in_child=_renew)
