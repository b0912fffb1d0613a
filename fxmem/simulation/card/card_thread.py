"""Threads of a program: the one that runs it may use the card.

The work of a thread pool is done where it is handed in, at once: libraries load the weights of a model so. So is that
of a thread which is given tensors on the card, as those are that draw or save what they are given. A thread of the
program's own that uses the card otherwise is refused, since what it would allocate, and when, cannot be observed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError
from fxmem.simulation.code.source_lines import program_place

_WAKE: Final[int | None] = getattr(signal, "SIGUSR2", None)
"""Not SIGINT, which programs handle, and which a shell has what it runs in the background ignore. None on
Windows, where no signal can be sent to a thread."""


class CardThread:
    """The thread that is recorded: the one that makes this."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_open = False
        """Whether the program runs; guarded by the lock, so that nothing wakes what runs after it."""
        self._refusal: AnalysisError | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """The program runs inside; it ends with what another thread was refused with."""
        with self._wakeable():
            self._is_open = True
            try:
                yield
            except BaseException:
                if self._refusal is not None:
                    raise self._refusal from None
                raise
            finally:
                with self._lock:
                    self._is_open = False
        if self._refusal is not None:
            raise self._refusal

    @contextlib.contextmanager
    def _wakeable(self) -> Iterator[None]:
        """Let another thread wake this one where it waits, by a signal: nothing else ends `queue.get()`."""
        if _WAKE is None or self._thread != threading.main_thread().ident:
            yield
            return

        def wake(*_: Any) -> None:
            if self._is_open and self._refusal is not None:
                raise self._refusal

        before = signal.signal(_WAKE, wake)
        try:
            yield
        finally:
            signal.signal(_WAKE, signal.SIG_DFL if before is None else before)

    def require(self, *_: Any, **__: Any) -> None:
        """Refuse work on the card by any other thread, and end the program.

        Raises:
            AnalysisError: another thread asks.
        """
        if threading.get_ident() == self._thread:
            return
        if self._refusal is None:
            place = program_place(sys._getframe(1))
            self._refusal = AnalysisError(
                f"expected a program whose main thread alone uses the card; {threading.current_thread().name!r} does "
                f"at {place or 'no line of its own'}. Let other threads hand over tensors of the host, and move them "
                f"to the card in the main thread."
            )
            with self._lock:
                if _WAKE is not None and self._is_open and self._thread == threading.main_thread().ident:
                    signal.pthread_kill(self._thread, _WAKE)
        raise self._refusal

    def patches(self) -> torch_common.Patches:
        """Thread pools, and threads that are given tensors on the card, work in the thread that hands work in."""

        def submit(original: Any, pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or pool._initializer is not None:
                return original(pool, function, *args, **kwargs)
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future

        def start(original: Callable[[Any], None], thread: Any) -> None:
            given = torch_common.iterate_tensors((getattr(thread, "_args", ()), getattr(thread, "_kwargs", {})))
            if threading.get_ident() == self._thread and any(isinstance(x, torch_common.FakeTensor) for x in given):
                try:
                    thread.run()
                except Exception:
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
                thread._target, thread._args, thread._kwargs = None, (), {}  # `run` has used them up
            original(thread)

        yield torch_common.wrap(concurrent.futures.ThreadPoolExecutor, "submit", submit)
        yield torch_common.wrap(threading.Thread, "start", start)
