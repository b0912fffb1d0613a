"""Namespaces of Linux for this process, which has one thread: of mounts, of users where it needs them, of networks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from pathlib import Path
from typing import Any, Final

_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000  # sched.h
_SET_FLAGS, _UP = 0x8914, 1  # linux/sockios.h, linux/if.h
_WHOLE_MAP: Final = ["0", "0", "4294967295"]
"""The users of the first namespace, each as itself."""


def unshare_mounts() -> bool:
    """Get mounts of one's own; whether this is the system's root, and needs no namespace of users. Raises OSError."""
    is_first = is_of_all_users()
    with contextlib.suppress(OSError):
        call("unshare", _NEWNS)
        return is_first
    _unshare_users(_NEWNS)
    return False


def cut_network() -> None:
    """Get a network of one's own, in which nothing is but this machine as seen from itself (`lo`).

    Raises:
        OSError: the system does not let this process have one.
    """
    import fcntl  # Windows has none

    try:
        call("unshare", _NEWNET)
    except OSError:
        _unshare_users(_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))


def was_refused() -> bool:
    """Whether a process has tried to reach something in this network, to which nothing leads from there."""
    counts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        names, values, *_ = Path("/proc/self/net/snmp").read_text(encoding="ascii").splitlines()
        counts |= zip(names.split(), values.split(), strict=True)
        for line in Path("/proc/self/net/snmp6").read_text(encoding="ascii").splitlines():
            name, value = line.split()
            counts[name] = value
    return any(counts.get(name, "0") != "0" for name in ("OutNoRoutes", "Ip6OutNoRoutes"))


def give_up_rights() -> None:
    """Give up what a namespace of users grants: the program has the rights that it has without us."""
    if os.getuid() != 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, linux/capability.h; this process
        call("capset", header, (ctypes.c_uint32 * 6)())


def is_of_all_users() -> bool:
    """Whether this process sees every user as the system does, and is in no namespace of few."""
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split() == _WHOLE_MAP


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _unshare_users(flag: int) -> None:
    """Get a namespace, and one of this user alone, in which he may have it."""
    user, group = os.getuid(), os.getgid()
    call("unshare", flag | _NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text, encoding="ascii")
