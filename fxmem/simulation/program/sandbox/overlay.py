"""A view of the file system whose writes go to folders of their own (Linux).

The process gets a mount namespace, and where it is not root a user namespace with it. Every folder that it sees is an
overlay (overlayfs, since Linux 5.11 for ordinary users): files are read where they are, and whatever is written,
renamed or removed, by whichever library or child process, is so in an upper folder alone. The old root is unmounted, so
no path leads around the overlays. What is pure interface stays as it is: /proc, /sys, /run and devices.

A file system that cannot be below an overlay is read-only.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import Any, Final

UPPER: Final = "upper"
"""In a layer's folder, what was written; `path` beside it names the folder above which it lies."""
ROOT: Final = "root"
"""In a layer's folder, the new root: what was written directly into folders that others are mounted in."""

_NEWNS, _NEWUSER = 0x00020000, 0x10000000  # sched.h
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE, _DETACH = 1, 32, 4096, 16384, 1 << 18, 2  # sys/mount.h
_PIVOT_ROOT: Final = {"x86_64": 155}
"""Its number by machine, since glibc has no function for it; 41 everywhere else (linux/unistd.h)."""
_WHOLE_MAP: Final = ["0", "0", "4294967295"]
"""The users of the first namespace, each as itself."""
_INTERFACES: Final = ("/dev", "/proc", "/run", "/sys")
_PSEUDO: Final = frozenset(
    "autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fuse.portal fusectl hugetlbfs "
    "mqueue nsfs proc pstore ramfs rpc_pipefs securityfs sysfs tracefs".split()
)
_SHARED_MEMORY: Final = "/dev/shm"
_MOST_COPIED: Final = 16 << 20
"""Bytes of a file in a folder that is no overlay, up to which it is copied; a larger one is read-only."""
_MOST_PREPARED: Final = 1_000
"""Folders below the working directory that are looked at for a group that is not the user's own."""


def enter_overlay(layers: list[str]) -> None:
    """Move this process, which has one thread, into such a view; what it writes goes below the folders of `layers`.

    Args:
        layers: empty folders of this process alone, on disks; of each overlay one is taken that does not lie below it.

    Raises:
        OSError: the system has no such namespaces or does not let this process have them. The process is as before, or
            of no use for anything else.
    """
    is_root = _unshare()
    _call("mount", None, b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None)
    folder = os.getcwd()
    new_root = os.path.join(layers[0], ROOT)
    os.mkdir(new_root)
    _mount(new_root, new_root, flags=_BIND)
    view = _View(new_root, layers, is_root=is_root)
    for entry in os.scandir("/"):
        view.add(entry)
    os.chdir(new_root)
    _call("syscall", _PIVOT_ROOT.get(os.uname().machine, 41), b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir(folder)
    if os.getuid() != 0:
        # Give up what a user namespace grants: the program has the rights that it has without us.
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, linux/capability.h; this process
        _call("capset", header, (ctypes.c_uint32 * 6)())


def is_of_all_users() -> bool:
    """Whether this process sees every user as the system does, and is in no namespace of few."""
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split() == _WHOLE_MAP


def read_mounts() -> dict[str, tuple[str, bool]]:
    """By mount point, the kind of file system, and whether it is read-only; the topmost of several at one place."""
    found = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            words = line.split(" ")
            kind = words[words.index("-") + 1]
            found[_unescape(words[4])] = kind, "ro" in words[5].split(",")
    return found


class _View:
    """The new root while it is put together.

    Args:
        root: where it is.
        layers: folders for what is written.
        is_root: whether this is the superuser, who needs no user namespace.
    """

    def __init__(self, root: str, layers: list[str], *, is_root: bool) -> None:
        self._root = root
        self._layers = layers
        self._is_root = is_root
        self._mounts = read_mounts()
        self._count = 0

    def add(self, entry: os.DirEntry[str]) -> None:
        """Put a file, a link or a folder of the old root at its place."""
        place = self._root + entry.path
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), place)
        elif entry.is_dir(follow_symlinks=False):
            os.mkdir(place)
            shutil.copymode(entry.path, place)
            self._add_folder(entry.path)
        elif entry.is_file(follow_symlinks=False):
            self._add_file(entry, place)

    def _add_file(self, entry: os.DirEntry[str], place: str) -> None:
        """Copy a file whose folder is no overlay, or show it read-only."""
        if entry.stat().st_size <= _MOST_COPIED and entry.path not in self._mounts:
            with contextlib.suppress(OSError):
                shutil.copy2(entry.path, place)
                return
        Path(place).touch()
        self._show_read_only(entry.path)

    def _add_folder(self, path: str) -> None:
        inner = [each for each in self._mounts if each.startswith(path + "/")]
        kind, is_read_only = self._mounts.get(path, ("", False))
        if path in _INTERFACES or kind in _PSEUDO or is_read_only:
            _mount(path, self._root + path, flags=_BIND | _REC)
            inner = [each for each in inner if self._holds_files(each, path)]
        elif not os.path.isdir(path):
            self._show_read_only(path)
        elif inner and not self._is_root:
            # A folder in which something is mounted cannot be below an overlay of a user namespace: mount(2), EINVAL.
            try:
                entries = list(os.scandir(path))
            except PermissionError:
                self._show_read_only(path)
                return
            for entry in entries:
                self.add(entry)
            return
        else:
            self._cover(path)
        for each in inner:
            if not any(each.startswith(other + "/") for other in inner):
                self._add_folder(each)

    def _holds_files(self, mount: str, path: str) -> bool:
        """Whether a mount within an interface may hold a user's files. A stick does, at /run/media."""
        kind, is_read_only = self._mounts[mount]
        is_interface = path in _INTERFACES and kind == "tmpfs" and mount != _SHARED_MEMORY
        return not (is_read_only or is_interface or kind in _PSEUDO) and os.path.isdir(mount)

    def _cover(self, path: str) -> None:
        """Mount an overlay over a folder."""
        # Not below the path: overlays must not overlap.
        layer = next((each for each in self._layers if not each.startswith(path + "/")), None)
        if layer is None:
            raise OSError(f"every folder for what is written lies below {path}")
        self._count += 1
        base = os.path.join(layer, str(self._count))
        os.mkdir(base)
        if path == _SHARED_MEMORY:  # is memory, and stays memory
            _mount("tmpfs", base, "tmpfs")
        else:
            Path(base, "path").write_bytes(os.fsencode(path))
        upper, work = os.path.join(base, UPPER), os.path.join(base, "work")
        for each in (upper, work):
            os.mkdir(each)
        shutil.copymode(path, upper)
        if not self._is_root:
            _prepare_folders(path, upper)
        folders = [os.open(each, os.O_PATH | os.O_DIRECTORY) for each in (path, upper, work)]
        try:
            # By descriptor: a comma or a colon in a name would end the option.
            options = "lowerdir=/proc/self/fd/{},upperdir=/proc/self/fd/{},workdir=/proc/self/fd/{}".format(*folders)
            options += ",redirect_dir=on" if self._is_root else ",userxattr"
            _mount("overlay", self._root + path, "overlay", 0, options)
        except OSError:
            if (os.getcwd() + "/").startswith(path + "/"):
                raise  # a program writes there above all
            self._show_read_only(path)
        finally:
            for descriptor in folders:
                os.close(descriptor)

    def _show_read_only(self, path: str) -> None:
        place = self._root + path
        _mount(path, place, flags=_BIND | _REC)
        # What the mount forbids must stay forbidden in a user namespace.
        forbids = os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
        _mount(None, place, flags=_REMOUNT | _BIND | _RDONLY | forbids)


def _prepare_folders(lower: str, upper: str) -> None:
    """Make the folders of another owner or group at and below the working directory.

    An overlay copies a folder up with its owner and group before it writes there, which a user namespace that has
    neither refuses (EOVERFLOW). A folder that is there already it takes.
    """
    here = os.getcwd()
    if not (here + "/").startswith(lower + "/"):
        return
    below = (each for each, _, _ in os.walk(here))
    for path in itertools.islice(below, _MOST_PREPARED):
        status = os.stat(path)
        if (status.st_uid, status.st_gid) != (os.getuid(), os.getgid()) and os.access(path, os.W_OK):
            _make_folder(os.path.relpath(path, lower), lower, upper)


def _make_folder(path: str, lower: str, upper: str) -> None:
    """Make a folder in the upper layer, and its parents, with their modes."""
    place = os.path.join(upper, path)
    if not os.path.isdir(place):
        _make_folder(os.path.dirname(path), lower, upper)
        os.mkdir(place)
        os.chmod(place, stat.S_IMODE(os.stat(os.path.join(lower, path)).st_mode) & 0o777)


# --- system calls -----------------------------------------------------------------------------------------------------


def _unshare() -> bool:
    """Get namespaces of this process alone; whether it is the system's root, and needs none for users."""
    is_first = is_of_all_users()
    with contextlib.suppress(OSError):
        _call("unshare", _NEWNS)
        return is_first
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEWNS | _NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    return False


def _call(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _mount(source: str | None, place: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    words = (None if each is None else os.fsencode(each) for each in (source, place, kind))
    _call("mount", *words, ctypes.c_ulong(flags), None if options is None else os.fsencode(options))


def _unescape(word: str) -> str:
    """A path as proc(5) has it, with octal escapes."""
    raw = os.fsencode(word)
    for code in (b" ", b"\t", b"\n", b"\\"):
        raw = raw.replace(b"\\%03o" % ord(code), code)
    return os.fsdecode(raw)
