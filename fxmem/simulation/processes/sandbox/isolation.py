"""How a program is kept apart from the user's files and from the network."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import functools
import os
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.records.profile import NetworkReach, ProgramFiles, WrittenFile
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.processes.sandbox.landlock import command_that_refuses, refuse_connections
from fxmem.simulation.processes.sandbox.network import network_patches
from fxmem.simulation.processes.sandbox.outside import make_received, read_received, received_patches
from fxmem.simulation.processes.sandbox.redirect import Redirect
from fxmem.simulation.processes.sandbox.written_files import (
    REDIRECTED,
    Written,
    keep_downloads,
    keep_files,
    list_files,
    name_from_here,
)

# --- namespaces of Linux for this process, which has one thread -------------------------------------------------------
# Of mounts, of users where it needs them, of networks.


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


# --- how a program is kept apart from the user's files and from the network -------------------------------------------


_NOBODY: Final = 65534
"""The user and group that stand for all that a namespace has no number for (user_namespaces(7))."""


@dataclasses.dataclass(frozen=True)
class IsolationSettings:
    """What a program may do for real."""

    write: bool = False
    """Whether it writes its own files; else what it writes is kept apart from what is there."""
    network: bool = False
    """Whether it sends what it has made; else it only downloads."""
    keep_files: str | None = None
    """The folder to which what it wrote is moved; None drops it."""


@dataclasses.dataclass
class Isolation:
    """What the program runs inside."""

    redirect: Redirect | None = None
    """Where Python's ways to files lead; None where the process has a view of its own, or writes for real."""
    in_overlay: bool = False
    """Whether the process has such a view."""
    network: bool = True
    """Whether the program may send."""
    reach: NetworkReach | None = None
    """How much of the network the process is kept from; None before it is, or for nothing."""
    outside: int | None = None
    """The socket of the process that connects its downloads; None where it does so itself."""
    received: int | None = None
    """Where it notes what came from the network; None for nowhere."""
    has_begun: bool = False
    """Whether this process is apart already."""
    begun_ns: int = 0
    """When it was, by the clock that files have."""

    def unsent(self) -> Isolation:
        """The same, but that the program sends nothing."""
        return dataclasses.replace(self, network=False)

    def hold_network(self) -> None:
        """Keep this process, and those that it starts, from the network, as far as the system can."""
        if self.network or self.reach is not None:
            return
        self.reach = "python"
        with contextlib.suppress(OSError, AttributeError):
            try:
                cut_network()
                self.reach = "none"
            except OSError:
                refuse_connections()
                self.reach = "udp"

    def place_to_read(self, path: Any) -> Any:
        """Where a library that opens files by itself finds one."""
        return path if self.redirect is None else self.redirect.place_to_read(path)

    def place_to_write(self, path: Any) -> Any:
        """Where a library that opens files by itself writes one."""
        return path if self.redirect is None else self.redirect.place_to_write(path)

    def patches(self, notes: MadeUpNotes) -> torch_common.Patches:
        """Patches of Python's ways to files and of libraries that send; what is not sent is noted."""
        if self.redirect is not None:
            yield from self.redirect.patches()
            if not self.redirect.is_guarded and sys.platform == "linux":
                yield torch_common.wrap(subprocess.Popen, "__init__", functools.partial(_start_guarded, self.network))
                yield torch_common.wrap(os, "system", _call_shell)
        if self.in_overlay:
            # What works on a plain file system and not on an ordinary user's overlay.
            for name in ("rename", "replace"):
                yield torch_common.wrap(os, name, _move)
            _prepare_opens()
        if self.received is not None:
            yield from received_patches(self.received)
        if not self.network:
            yield from network_patches(notes, self.outside, refuses_all=self.reach == "udp")

    def find_written(self, settings: IsolationSettings, folders: Sequence[str] = ()) -> ProgramFiles | None:
        """What was written by the ways that are redirected, which may be so no longer; None where none are."""
        if self.redirect is None or self.received is None:
            return None
        redirect = self.redirect
        with redirect.pause():
            found = find_written(redirect.written, settings, folders or (os.getcwd(),), self.received, self.begun_ns)
            names = [name_from_here(each) for each in redirect.removed]
        there = {each.path for each in found.written}
        gone = tuple(WrittenFile(path=each, change="removed") for each in names if each not in there)
        native = "refused" if redirect.is_guarded else "real"
        return found.model_copy(update={"written": (*found.written, *gone), "native": native})


@contextlib.contextmanager
def isolate_block(settings: IsolationSettings) -> Iterator[Isolation]:
    """What a block of a live process is isolated by; what it has written goes with it."""
    if settings.write:
        yield Isolation(network=settings.network)
        return
    with (
        tempfile.TemporaryDirectory(prefix=REDIRECTED, ignore_cleanup_errors=True) as folder,
        make_received() as received,
    ):
        yield Isolation(Redirect(folder), network=settings.network, received=received.fileno())


def find_written(
    written: Callable[[], Written],
    settings: IsolationSettings,
    folders: Sequence[str],
    received: int,
    begun_ns: int = 0,
) -> ProgramFiles:
    """List what a program wrote, and move what is to stay: downloads, and what the settings ask for.

    Args:
        written: lists each file.
        settings: where they are kept.
        folders: the user's, whose temporary files are files like others.
        received: where it noted what came from the network.
        begun_ns: as of `list_files`.
    """
    downloads = read_received(received)
    files = list_files(written(), folders, downloads, begun_ns)
    keep_downloads(written(), downloads)
    if settings.keep_files is not None:
        keep_files(written(), files, settings.keep_files)
    return ProgramFiles(written=files, kept_in=settings.keep_files)


def _start_guarded(
    connects: bool,
    original: Callable[..., None],
    process: Any,
    args: Any,
    *further: Any,
    shell: bool = False,
    **settings: Any,
) -> None:
    """A child of a live process may write temporary files alone, and connect to nothing (Landlock)."""
    words = list(args) if isinstance(args, (list, tuple)) else [args]
    if shell:
        words = ["/bin/sh", "-c", *words]
    if not further and settings.get("executable") is None and shutil.which(os.fsdecode(words[0])):
        folders = (tempfile.gettempdir(), "/dev", "/proc", "/run")
        words = command_that_refuses(folders, list(map(os.fsdecode, words)), connects=connects)
    original(process, words, *further, **settings)


def _call_shell(_: Callable[..., int], command: Any) -> int:
    """`os.system`, by `subprocess`."""
    code = subprocess.call(command, shell=True)
    return -code if code < 0 else code << 8


def _move(original: Callable[..., None], src: Any, dst: Any, **folders: Any) -> None:
    """A folder that was there before cannot be moved (EXDEV), nor a file to another overlay: they are copied."""
    try:
        original(src, dst, **folders)
    except OSError as error:
        if error.errno != errno.EXDEV or folders:
            raise
        beside = f"{os.fsdecode(dst)}.{secrets.token_hex(4)}"
        if os.path.isdir(src) and not os.path.islink(src):
            shutil.copytree(src, beside, symlinks=True)
            original(beside, dst)
            shutil.rmtree(src)
        else:
            shutil.copy2(src, beside, follow_symlinks=False)
            original(beside, dst)
            os.unlink(src)


@functools.cache
def _prepare_opens() -> None:
    """From now on, files that cannot be copied up are made the user's own before they are opened to be written.

    A hook of the interpreter, so that `open` stays what it is: programs compare its type. The process is the program's.
    """
    if not is_of_all_users():
        sys.addaudithook(_prepare_open)


def _prepare_open(event: str, args: tuple[Any, ...]) -> None:
    """A file of another user or group cannot be copied up with these (EOVERFLOW): a copy of one's own replaces it."""
    if event != "open":
        return
    with contextlib.suppress(OSError, TypeError, ValueError):  # others may audit an `open` of their own
        place, _, flags = args
        if isinstance(place, int) or not flags & (os.O_WRONLY | os.O_RDWR):
            return
        file, status = os.fsdecode(place), os.stat(place)
        is_others = _NOBODY in (status.st_uid, status.st_gid)
        if is_others and stat.S_ISREG(status.st_mode) and os.access(file, os.R_OK | os.W_OK):
            beside = f"{file}.{secrets.token_hex(4)}"
            shutil.copy(file, beside)
            os.rename(beside, file)
