"""Python's garbage collector, kept from running where it would find nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Rest:
    """Who is within `pause_gc`, on any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.collecting = False
        """Whether it ran before the first came."""


_rest = _Rest()


@contextmanager
def pause_gc(*, stays: bool = False) -> Iterator[None]:
    """Pause the garbage collector, on all threads, until the last one leaves. Also a decorator.

    For work that makes records by the ten thousand and no reference cycles. The collector starts by what has been made
    since it last ran, and then looks at all there is, a loaded torch included: half the time of accounting for an
    80-layer Llama, and of replaying the allocator for it, went there, two thirds of reading a report of 200,000 events,
    and a fifth of importing torch and torchvision.

    Args:
        stays: whether what is made inside is there to the end: it counts as old then, else the first collection
            afterwards looks at all of it.
    """
    with _rest.lock:
        if not _rest.inside:
            _rest.collecting = gc.isenabled()
            gc.disable()
        _rest.inside += 1
    try:
        yield
        if stays and not gc.get_freeze_count():  # a freeze of the caller's is not ours to undo
            gc.freeze()
            gc.unfreeze()  # which returns all to the oldest generation
    finally:
        with _rest.lock:
            _rest.inside -= 1
            if not _rest.inside and _rest.collecting:
                gc.enable()


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Collections inside look only at what was made inside; torch and a loaded model library are hundreds of thousands
    of objects."""
    if gc.get_freeze_count():
        yield  # a freeze of the caller's is not ours to undo
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def unfreeze_gc() -> Iterator[None]:
    """Inside, the collector sees what was frozen as well."""
    is_frozen = bool(gc.get_freeze_count())
    gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()
