"""Folders in which a program's writes lie, outside its view: what it wrote, and what becomes of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fxmem.simulation.processes.sandbox.overlay import ROOT, UPPER
from fxmem.simulation.processes.sandbox.written_files import PREFIX, Written, walk_layer

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
