"""What the user's own code may change in this process, put back afterwards."""

from __future__ import annotations

import contextlib
import importlib
import random
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import torch


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
        if torch.get_default_device() != default_device:
            torch.set_default_device(None if default_device.type == "cpu" else default_device)
        torch.set_default_dtype(default_dtype)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        random.setstate(python_state)
        sys.path[:] = path


@contextlib.contextmanager
def without_network() -> Iterator[None]:
    """Keep this thread from resolving host names. Switch huggingface_hub, if it is installed, to its offline mode.

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
