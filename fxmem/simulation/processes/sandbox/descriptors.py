"""Descriptors that the program's process was given, as by a shell's `7<>file` (Linux)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Collection, Mapping


def find_descriptors(kept: Collection[int | None], *, writes: bool, sends: bool) -> dict[int, str]:
    """Those by which a program might write to a file, or to the network: the file's path, or none.

    Args:
        kept: others are fxmem's own; where output goes is left alone.
        writes, sends: what it may do for real.
    """
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if number in (1, 2, *kept):
                continue
            if stat.S_ISREG(status.st_mode) and not writes and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE:
                file = os.readlink(f"/proc/self/fd/{number}")
                if os.path.exists(file):  # else nobody sees what is in it
                    found[number] = file
            elif stat.S_ISSOCK(status.st_mode) and not sends:
                with socket.socket(fileno=os.dup(number)) as other:
                    if other.family in (socket.AF_INET, socket.AF_INET6):
                        found[number] = ""
    return found


def part_descriptors(files: Mapping[int, str], find_place: Callable[[str], str]) -> None:
    """Let these lead to the program's own copies of the files, and connections nowhere."""
    for number, file in files.items():
        flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
        try:
            other = os.open(find_place(file), flags)
            os.lseek(other, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        except OSError:
            other = os.open(os.devnull, os.O_RDWR)
        os.dup2(other, number)
        os.close(other)
