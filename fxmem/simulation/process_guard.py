"""What the user's own code may change in this process, put back afterwards."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch


@contextlib.contextmanager
def process_unchanged() -> Iterator[None]:
    """Restore afterwards what building a model or a batch may change.

    That is random states, default dtype and device, grad mode and `sys.path`.
    Random states are those of Python, NumPy (if it is imported) and torch, CUDA's only if CUDA is already in use.
    Meanwhile standard output goes to standard error, because standard output carries the result.
    """
    path = list(sys.path)
    python_state = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    default_dtype, default_device = torch.get_default_dtype(), torch.get_default_device()
    grad_enabled = torch.is_grad_enabled()
    try:
        with torch.random.fork_rng(devices=devices), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        torch.set_grad_enabled(grad_enabled)
        if torch.get_default_device() != default_device:
            torch.set_default_device(None if default_device.type == "cpu" else default_device)
        torch.set_default_dtype(default_dtype)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        random.setstate(python_state)
        sys.path[:] = path


_held: list[Callable[[], object]] = []
"""The handling of an interrupt that waits to be raised between two operators."""


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Let SIGINT wait until the next operator or the end; a second one is handled at once.

    Torch's C++ calls Python where an exception aborts the process or is lost: what is freed runs callbacks. A handler
    that raises, as Python's own raises KeyboardInterrupt, must not run there. Only the main thread handles signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        handle = functools.partial(handler, number, frame)
        if _held:
            _held.clear()
            handle()
        else:
            _held.append(handle)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        handle_held_interrupt()


def handle_held_interrupt() -> None:
    """Run the handler of an interrupt that waits, if one does."""
    if _held:
        _held.pop()()


@contextlib.contextmanager
def without_network() -> Iterator[None]:
    """Keep this thread from resolving host names, and switch huggingface_hub to its offline mode if it is installed.

    Both are undone at the end; the environment is not touched. What is refused raises a `ConnectionError`.
    """
    thread, resolve = threading.get_ident(), socket.getaddrinfo

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise ConnectionError("fxmem downloads nothing")
        return resolve(*args, **kwargs)

    hub: Any = None
    with contextlib.suppress(ImportError):
        hub = importlib.import_module("huggingface_hub.constants")
    offline = getattr(hub, "HF_HUB_OFFLINE", None)
    socket.getaddrinfo = refuse
    if hub is not None:
        hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        socket.getaddrinfo = resolve
        if hub is not None:
            hub.HF_HUB_OFFLINE = offline
