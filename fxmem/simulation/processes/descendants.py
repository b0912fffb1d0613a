"""The processes that a program starts, those that they start included: they end with it.

Only Linux says which these are (`/proc`); elsewhere none is found, and what a program starts lives on as it would
without fxmem.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Final

_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_GRACE_S: Final = 0.5
"""How long they have to end by themselves."""
_LIMIT_S: Final = 5.0
"""How long they are ended again and again: one may start another meanwhile."""
_INTERVAL_S: Final = 0.01

Processes = Mapping[int, str]
"""By number, when each began: a number may be used again."""


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends: none gets away, whatever session it is in.

    Raises:
        OSError, AttributeError: a system without this call.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def find_children(process: int | str = "self") -> Iterator[int]:
    """The processes that one has started, those that are over and not waited for included."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())


def find_descendants(process: int) -> dict[int, str]:
    """All that live below a process."""
    found: dict[int, str] = {}
    waiting = [process]
    while waiting:
        for child in find_children(waiting.pop()):
            begun = find_begin(child)
            if begun and child not in found:
                found[child] = begun
                waiting.append(child)
    return found


def end_processes(processes: Processes) -> None:
    """End these, as far as they are still there, and wait until they are over."""
    _signal(processes, signal.SIGKILL)
    started = time.monotonic()
    while any(map(_is_there, processes.items())) and time.monotonic() - started < _LIMIT_S:
        time.sleep(_INTERVAL_S)


def end_descendants(process: int) -> None:
    """End all below a process that starts no more itself: itself, or one that is stopped."""
    _signal(begun := find_descendants(process), signal.SIGTERM)
    started = time.monotonic()
    while found := find_descendants(process):
        passed = time.monotonic() - started
        if passed > _LIMIT_S:
            return
        _signal({number: at for number, at in found.items() if number not in begun or passed > _GRACE_S})
        time.sleep(_INTERVAL_S)


def end_tree(process: int, begun: str) -> None:
    """End a process that is no child of this one, with all below it."""
    if begun and begun == find_begin(process):
        _signal({process: begun}, signal.SIGSTOP)
        end_descendants(process)
        end_processes({process: begun})


def _signal(processes: Processes, number: int = signal.SIGKILL) -> None:
    for process, _ in filter(_is_there, processes.items()):
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _is_there(process: tuple[int, str]) -> bool:
    number, begun = process
    return find_begin(number) == begun


def find_begin(process: int) -> str:
    """When a process began, in ticks since the machine did; empty where it is over."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
