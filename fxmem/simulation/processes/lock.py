"""One analysis at a time: what an analysis replaces in torch, it replaces for the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fxmem.errors import UsageError


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
