"""A view of the file system whose writes go to folders of their own (Linux).

The process gets a mount namespace, and where it is not root a user namespace with it. Every folder that it sees is an
overlay (overlayfs, since Linux 5.11 for ordinary users): files are read where they are, and whatever is written,
renamed or removed, by whichever library or child process, is so in an upper folder alone. The old root is unmounted, so
no path leads around the overlays. What is pure interface stays as it is: /proc, /sys and devices, and /run where the
program may send. A socket in an overlay is another than the one below it, which nobody reaches.

A file system that cannot be below an overlay is read-only.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from fxmem.simulation.processes.sandbox.isolation import call, give_up_rights, unshare_mounts
from fxmem.simulation.processes.sandbox.written_files import PREFIX, Written, walk_layer

UPPER: Final = "upper"
"""In a layer's folder, what was written; `path` beside it names the folder above which it lies."""
ROOT: Final = "root"
"""In a layer's folder, the new root: what was written directly into folders that others are mounted in."""

_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE, _DETACH = 1, 32, 4096, 16384, 1 << 18, 2  # sys/mount.h
_PIVOT_ROOT: Final = {"x86_64": 155}
"""Its number by machine, since glibc has no function for it; 41 everywhere else (linux/unistd.h)."""
_INTERFACES: Final = ("/dev", "/proc", "/sys")
_SOCKETS: Final = "/run"
"""Where the system's services have theirs."""
_PSEUDO: Final = frozenset(
    "autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fuse.portal fusectl hugetlbfs "
    "mqueue nsfs proc pstore ramfs rpc_pipefs securityfs sysfs tracefs".split()
)
_SHARED_MEMORY: Final = "/dev/shm"
_MOST_COPIED: Final = 16 << 20
"""Bytes of a file in a folder that is no overlay, up to which it is copied; a larger one is read-only."""
_MOST_PREPARED: Final = 2_000
"""Folders of a mount that are looked at for another owner or group than the user's own, the uppermost first."""
_SYSTEM: Final = ("/bin", "/boot", "/etc", "/lib", "/lib64", "/sbin", "/usr")
"""Folders in which a user has none of his own."""


def enter_overlay(layers: list[str], folders: Iterable[str] = (), *, sends: bool = True) -> None:
    """Move this process, which has one thread, into such a view; what it writes goes below the folders of `layers`.

    Args:
        layers: empty folders of this process alone, on disks; of each overlay one is taken that does not lie below it.
        folders: where the program writes, if it may; here as well.
        sends: whether it may reach the sockets of the system's services.

    Raises:
        OSError: the system has no such namespaces or does not let this process have them, or one of the folders could
            not be written to. The process is as before, or of no use for anything else.
    """
    tried = [os.path.join(each, f".{secrets.token_hex(8)}") for each in folders if os.access(each, os.W_OK)]
    is_root = unshare_mounts()
    call("mount", None, b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None)
    folder = os.getcwd()
    interfaces = (*_INTERFACES, _SOCKETS) if sends else _INTERFACES
    new_root = os.path.join(layers[0], ROOT)
    view = _View(new_root, layers, interfaces, is_root=is_root)
    os.mkdir(new_root)
    _mount(new_root, new_root, flags=_BIND)
    for entry in os.scandir("/"):
        view.add(entry)
    os.chdir(new_root)
    call("syscall", _PIVOT_ROOT.get(os.uname().machine, 41), b".", b".")
    call("umount2", b".", _DETACH)
    os.chdir(folder)
    give_up_rights()
    for each in tried:
        _try_to_write(each)


def read_mounts() -> dict[str, tuple[str, bool]]:
    """By mount point, the kind of file system, and whether it is read-only; the topmost of several at one place."""
    found = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            words = line.split(" ")
            found[_unescape(words[4])] = words[words.index("-") + 1], "ro" in words[5].split(",")
    return found


class _View:
    """The new root while it is put together.

    Args:
        root: where it will be; it is no mount yet, else what it lies in would be a folder with a mount of its own.
        layers: folders for what is written.
        interfaces: folders that stay as they are.
        is_root: whether this is the superuser, who needs no user namespace.
    """

    def __init__(self, root: str, layers: list[str], interfaces: Sequence[str], *, is_root: bool) -> None:
        self._root = root
        self._layers = layers
        self._interfaces = interfaces
        self._is_root = is_root
        self._mounts = read_mounts()
        self._count = 0

    def add(self, entry: os.DirEntry[str]) -> None:
        """Put a file, a link or a folder of the old root at its place, unless another process has removed it."""
        place = self._root + entry.path
        try:
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), place)
            elif entry.is_dir(follow_symlinks=False):
                os.mkdir(place)
                self._copy_rights(entry.path, place)
                self._add_folder(entry.path)
            elif entry.is_file(follow_symlinks=False):
                self._add_file(entry, place)
        except FileNotFoundError:
            if os.path.lexists(entry.path):
                raise
            with contextlib.suppress(OSError):
                (os.rmdir if os.path.isdir(place) else os.unlink)(place)

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
        if path in self._interfaces or kind in _PSEUDO or is_read_only:
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
        is_interface = path in self._interfaces and kind == "tmpfs" and mount != _SHARED_MEMORY
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
        self._copy_rights(path, upper)
        if not self._is_root:
            self._prepare_folders(path, upper)
        folders = [os.open(each, os.O_PATH | os.O_DIRECTORY) for each in (path, upper, work)]
        try:
            # By descriptor: a comma or a colon in a name would end the option.
            options = "lowerdir=/proc/self/fd/{},upperdir=/proc/self/fd/{},workdir=/proc/self/fd/{}".format(*folders)
            options += ",redirect_dir=on,index=on" if self._is_root else ",userxattr"
            _mount("overlay", self._root + path, "overlay", 0, options)
        except OSError:
            if (os.getcwd() + "/").startswith(path + "/"):
                raise  # a program writes there above all
            self._show_read_only(path)
        finally:
            for descriptor in folders:
                os.close(descriptor)

    def _copy_rights(self, path: str, place: str) -> None:
        """Let this user do in a new folder, which is his, what he may do in the one that it stands for."""
        rights = stat.S_IMODE(os.stat(path).st_mode)
        if not self._is_root:
            may = sum(each for each in (os.R_OK, os.W_OK, os.X_OK) if os.access(path, each))
            rights = may << 6 | rights & 0o077
        os.chmod(place, rights)

    def _prepare_folders(self, lower: str, upper: str) -> None:
        """Make the folders that this user may write to below ones of others, and those of others.

        An overlay copies a folder up with its owner and group before it writes there, which a user namespace that has
        neither refuses (EOVERFLOW). A folder that is there already it takes.
        """
        here = os.path.join(os.getcwd(), "")
        waiting = collections.deque([here.rstrip("/") or "/", lower] if here.startswith(lower + "/") else [lower])
        for _ in range(0 if lower in _SYSTEM else _MOST_PREPARED):
            if not waiting:
                return
            path = waiting.popleft()
            with contextlib.suppress(OSError):
                status = os.stat(path)
                if os.access(path, os.W_OK):
                    self._make_folder(os.path.relpath(path, lower), lower, upper)
                if (status.st_uid, status.st_gid) != (os.getuid(), os.getgid()) or (path + "/").startswith(here):
                    with os.scandir(path) as entries:
                        waiting.extend(each.path for each in entries if each.is_dir(follow_symlinks=False))

    def _make_folder(self, path: str, lower: str, upper: str) -> None:
        """Make a folder in the upper layer, and its parents."""
        place = os.path.join(upper, path)
        if not os.path.isdir(place):
            self._make_folder(os.path.dirname(path), lower, upper)
            os.mkdir(place)
            self._copy_rights(os.path.join(lower, path), place)

    def _show_read_only(self, path: str) -> None:
        place = self._root + path
        _mount(path, place, flags=_BIND | _REC)
        # What the mount forbids must stay forbidden in a user namespace.
        forbids = os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
        _mount(None, place, flags=_REMOUNT | _BIND | _RDONLY | forbids)


def _try_to_write(file: str) -> None:
    """Make a file and remove it, where the system may still refuse a copy of a folder (EOVERFLOW)."""
    try:
        Path(file).touch()
        os.unlink(file)
    except OSError as error:
        if error.errno == errno.EOVERFLOW:
            raise


# --- system calls -----------------------------------------------------------------------------------------------------


def _mount(source: str | None, place: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    words = (None if each is None else os.fsencode(each) for each in (source, place, kind))
    call("mount", *words, ctypes.c_ulong(flags), None if options is None else os.fsencode(options))


def _unescape(word: str) -> str:
    """A path as proc(5) has it, with octal escapes."""
    raw = os.fsencode(word)
    for code in (b" ", b"\t", b"\n", b"\\"):
        raw = raw.replace(b"\\%03o" % ord(code), code)
    return os.fsdecode(raw)


# --- folders in which a program's writes lie, outside its view: what it wrote, and what becomes of it -----------------


_PLACES: Final = ("/var/tmp", "/tmp")
"""Folders for layers beside the one for temporary files: two that do not lie below each other are needed."""


class Layers:
    """The folders of one program, each on a disk of this machine; removed by `close`.

    Folders whose process was killed are removed by the next one of the same user. A lock says whose process lives.

    Args:
        places: where they are made, beside the folder for temporary files.
    """

    def __init__(self, places: Iterable[str] = _PLACES) -> None:
        self.folders: list[str] = []
        self._locks: list[int] = []
        for place in dict.fromkeys(os.path.realpath(each) for each in (*places, tempfile.gettempdir())):
            if os.path.isdir(place) and os.access(place, os.W_OK):
                _remove_abandoned(place)
                self.folders.append(tempfile.mkdtemp(prefix=PREFIX, dir=place))
                while (lock := _lock(self.folders[-1])) is None:  # another process took it for abandoned
                    self.folders[-1] = tempfile.mkdtemp(prefix=PREFIX, dir=place)
                self._locks.append(lock)
        self._free_bytes = self.free_bytes()

    def free_bytes(self) -> int:
        """What is free on the fullest of the disks that they lie on."""
        statuses = [os.statvfs(folder) for folder in self.folders]
        return min((each.f_bavail * each.f_frsize for each in statuses), default=0)

    @property
    def are_full(self) -> bool:
        """Whether half of what was free is taken."""
        return self.free_bytes() < self._free_bytes // 2

    def written(self) -> Written:
        """What was written, moved or removed."""
        for folder in self.folders:
            for name in os.listdir(folder):
                base = os.path.join(folder, name)
                if name == ROOT:
                    yield from walk_layer(base, "/", "/")
                elif os.path.isfile(os.path.join(base, "path")):
                    path = os.fsdecode(Path(base, "path").read_bytes())
                    yield from walk_layer(os.path.join(base, UPPER), path, path)

    def remove(self) -> None:
        """Remove all that lies there."""
        for folder in self.folders:
            _remove(folder)

    def close(self) -> None:
        """Remove all of it."""
        self.remove()
        for lock in self._locks:
            os.close(lock)


# --- the folders ------------------------------------------------------------------------------------------------------


def _lock(folder: str) -> int | None:
    """Lock a folder until this process and its forks are over; None where another has it, or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(place: str) -> None:
    for name in os.listdir(place):
        folder = os.path.join(place, name)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            if name.startswith(PREFIX) and os.lstat(folder).st_uid == os.getuid():
                lock = _lock(folder)
                if lock is not None:
                    _remove(folder)
                    os.close(lock)


def _remove(folder: str) -> None:
    """Remove a folder, with what an overlay or the program has left in it without rights."""
    for inside, names, _ in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # before it is looked into
                if not os.path.islink(place := os.path.join(inside, name)):
                    os.chmod(place, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
