"""Refuses writes outside some folders, and connections, to this process and those that it starts (Landlock).

The guard where a process has no view or no network of its own: what is not redirected, a library's own code or a child
process, gets an error (EACCES) and changes nothing. Since Linux 5.13; connections by TCP since 6.7, to whatever
address, and no datagrams.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # syscalls of every machine (asm-generic/unistd.h)
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVS = 1, 1, 38  # linux/landlock.h, linux/prctl.h
_WRITING: Final = sum(1 << bit for bit in (1, *range(4, 13)))  # write a file; remove and make of every kind
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""Link and move between folders (second version); truncate (third)."""
_CONNECT, _CONNECTS_SINCE = 1 << 1, 4


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def refuse_writes(outside: Iterable[str]) -> None:
    """Refuse writes outside these folders, for the rest of the process's life.

    Raises:
        OSError: this system has no Landlock.
    """
    version = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    _restrict(_WRITING | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0), outside)


def refuse_connections() -> None:
    """Refuse connections by TCP, for the rest of the process's life.

    Raises:
        OSError: this system has no Landlock that does.
    """
    if _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION) < _CONNECTS_SINCE:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _restrict(0, (), _CONNECT)


def _restrict(handled: int, outside: Iterable[str], connects: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 2)(handled, connects)  # struct landlock_ruleset_attr
    size = ctypes.sizeof(attributes) if connects else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    try:
        for folder in outside:
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_PATH)
                try:
                    _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(_PathBeneath(handled, descriptor)), 0)
                finally:
                    os.close(descriptor)
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def command_that_refuses(outside: Sequence[str], words: Sequence[str], *, connects: bool) -> list[str]:
    """The command of a process that refuses writes outside folders, and connections, then becomes another."""
    return [sys.executable, "-I", "-S", __file__, *outside, "--", str(int(connects)), *words]


def _call(number: int, *arguments: object) -> int:
    answer = int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer


if __name__ == "__main__":
    cut = sys.argv.index("--")
    with contextlib.suppress(OSError):
        refuse_writes(sys.argv[1:cut])
        if not int(sys.argv[cut + 1]):
            refuse_connections()
    os.execvp(sys.argv[cut + 2], sys.argv[cut + 2 :])
