"""What `os.scandir` returns of a folder whose files lie in two places."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


class Entry:
    """As `os.DirEntry`.

    Args:
        name: in the folder.
        folder: as it was asked for.
        place: where its file is.
    """

    def __init__(self, name: str, folder: Any, place: str) -> None:
        self.name: Any = os.fsencode(name) if isinstance(folder, bytes) else name
        self.path: Any = os.path.join(folder, self.name)
        self._place = place

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As `os.stat`."""
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """The number of its inode."""
        return os.lstat(self._place).st_ino

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return os.path.islink(self._place)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        return os.path.isdir(self._place) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file."""
        return os.path.isfile(self._place) and (follow_symlinks or not self.is_symlink())

    def is_junction(self) -> bool:
        """No; Windows has those."""
        return False


class Entries(Iterator[Entry], contextlib.AbstractContextManager[Any]):
    """As what `os.scandir` returns."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Entry:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""
