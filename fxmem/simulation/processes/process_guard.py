"""What the user's own code may change in this process, put back afterwards."""

from __future__ import annotations

import _thread
import contextlib
import functools
import importlib
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, TextIO

import torch

from fxmem._torch import common as torch_common

_LOSE_INTERRUPTS: Final = frozenset({"__torch_dispatch__", "find_torch_dispatch_rule", "_on_death", "__del__"})
"""Functions that C++ calls where it ends the process for an exception, or drops it.

Torch asks a fake tensor for its device from within `InputMetadata` of torch/csrc/autograd/input_metadata.h, by
`find_torch_dispatch_rule` and `__torch_dispatch__`. Callbacks of weak references and `__del__` run wherever an object
is freed.
"""
_MUST_NOT_RAISE: Final = _LOSE_INTERRUPTS | {"__enter__", "__exit__"}
"""These and the functions that set the state of torch or of warnings, or put it back, as a whole."""
_INTERVAL: Final = 0.001
"""Seconds after which a postponed interrupt is sent again."""
_MOST_TIMES: Final = 1_000
"""How often an interrupt is postponed: a program's own operator may never end."""


@contextlib.contextmanager
def process_unchanged(stdout: TextIO | None = None) -> Iterator[None]:
    """Restore afterwards what building a model or a batch may change.

    That is random states, default dtype and device, grad mode and `sys.path`.
    Random states are those of Python, NumPy (if it is imported) and torch, CUDA's only if CUDA is already in use.
    Meanwhile standard output goes to `stdout`, by default to standard error: standard output carries the result.
    """
    path = list(sys.path)
    python_state = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    default_dtype, default_device = torch.get_default_dtype(), torch.get_default_device()
    grad_enabled = torch.is_grad_enabled()
    try:
        with torch.random.fork_rng(devices=devices), contextlib.redirect_stdout(stdout or sys.stderr):
            yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        if default_device.type == "cpu":
            # Code that set the CPU explicitly has left a function mode, which turns the fast path of attention off.
            torch.set_default_device(None)
        elif torch.get_default_device() != default_device:
            torch.set_default_device(default_device)
        torch.set_default_dtype(default_dtype)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        random.setstate(python_state)
        sys.path[:] = path


@contextlib.contextmanager
def postpone_interrupts() -> Iterator[None]:
    """Let SIGINT wait where C++ calls Python. An exception there would end the process, or be lost.

    It is handled right after, by the handler that was there before. Only the main thread handles signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupts, drop = _Interrupts(handler), sys.unraisablehook

    def note_dropped(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            interrupts.postpone()
        else:
            drop(dropped)

    ours = interrupts.handle
    signal.signal(signal.SIGINT, ours)
    sys.unraisablehook = note_dropped
    try:
        yield
    finally:
        interrupts.close()
        if sys.unraisablehook is note_dropped:
            sys.unraisablehook = drop
        if signal.getsignal(signal.SIGINT) == ours:
            signal.signal(signal.SIGINT, handler)
        if interrupts.waiting:
            handler(signal.SIGINT, sys._getframe())


class _Interrupts:
    """Interrupts of the thread that makes this, and the one that waits."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_open = True
        """Whether a signal may be sent; guarded by the lock."""
        self._is_resent = False
        self._times = 0
        self.waiting = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, now or later."""
        resent, self._is_resent = self._is_resent, False
        if resent and not self.waiting:
            return  # sent once more just when it was handled
        if self._times < _MOST_TIMES and _must_not_raise(frame):
            self.postpone()
        else:
            self.waiting, self._times = False, 0
            self._handler(number, frame)

    def postpone(self) -> None:
        """Have the interrupt sent again until it can be handled. A sleeping program wakes for a signal only."""
        self._times += 1
        if not self.waiting:
            self.waiting = True
            _thread.start_new_thread(self._resend, ())  # takes no lock that the interrupted code may have

    def close(self) -> None:
        """Send no signal from here on."""
        with self._lock:
            self._is_open = False

    def _resend(self) -> None:
        send: Callable[[], None] = _thread.interrupt_main
        if sys.platform != "win32":
            send = functools.partial(signal.pthread_kill, self._thread, signal.SIGINT)
        while True:
            time.sleep(_INTERVAL)
            with self._lock:
                if not (self.waiting and self._is_open):
                    return
                # No call between the question and the signal: after one, the other thread may handle an interrupt.
                self._is_resent = True
                send()


def _must_not_raise(frame: FrameType | None) -> bool:
    """Whether an exception must not be raised here: lost, the end of the process, or torch half changed."""
    while frame is not None:
        if frame.f_code.co_name in _MUST_NOT_RAISE:
            return True
        frame = frame.f_back
    return False


def without_network() -> contextlib.AbstractContextManager[None]:
    """Keep this thread from resolving host names. Switch huggingface_hub, if it is installed, to its offline mode.

    Both are undone at the end; the environment is not touched. What is refused raises a `ConnectionError`.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("fxmem downloads nothing")

    changes: list[contextlib.AbstractContextManager[None]] = [
        torch_common.wrap(socket, "getaddrinfo", refuse, here=True)
    ]
    with contextlib.suppress(ImportError):
        hub = importlib.import_module("huggingface_hub.constants")
        changes.append(torch_common.replace_all([(hub, "HF_HUB_OFFLINE", True)]))
    return torch_common.nested(*changes)
