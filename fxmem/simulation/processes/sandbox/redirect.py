"""Python's ways to files, redirected: what is written goes to a folder of its own, and is read from there.

Where a process has no view of its own (`overlay`): in a live process, and on systems without such namespaces. Held are
`open`, `os` and all that is built on them (pathlib, shutil, glob, tempfile, numpy, pickle), `torch.save` and
safetensors. Libraries that write by themselves, and child processes, are not, unless Landlock refuses them.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import io
import os
import shutil
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from fxmem._torch import common as torch_common
from fxmem.simulation.processes.sandbox.entries import Entries, Entry
from fxmem.simulation.processes.sandbox.written_files import Written, walk_files

_AS_THEY_ARE: Final = ("/dev", "/proc", "/run", "/sys")
_COMPILERS: Final = ("torchinductor_",)
"""How folders of compilers begin, below the one for temporary files."""
_READING: Final = ("stat", "access", "statvfs", "chdir", "pathconf", "getxattr", "listxattr")
_READING_LINKS: Final = ("lstat", "readlink")
_CHANGING: Final = ("chmod", "chown", "utime", "setxattr", "removexattr")
_CHANGING_LINKS: Final = ("lchmod", "lchown")
_LINKS: Final = 40
"""Symbolic links on one path, as the kernel follows them."""
_MAKING: Final = ("mkdir", "mkfifo", "mknod")
_REMOVING: Final = ("remove", "unlink", "rmdir")
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class _Here(threading.local):
    """What holds for the thread that asks."""

    is_at_work = False
    """Whether paths lead where they lead without a redirection."""


class Redirect:
    """A folder that lies over the file system, for this process's Python.

    Args:
        folder: an empty one, of this process alone.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._here = _Here()
        self._temporary = os.devnull
        self.is_guarded = False
        """Whether what is not redirected is refused."""
        self._removed: set[str] = set()
        self._made: set[str] = set()
        """New temporary files and folders, which are where the program made them: compilers read them there."""
        self._links: dict[tuple[int, int] | None, str] = {}
        """By file that has several names, the place of the one by which it was written: so the others lead there."""

    def written(self) -> Written:
        """Place and path of each file that was written."""
        return (each for each in walk_files(self.folder, "/") if not each[0].startswith(self._temporary + "/"))

    def make_temporary(self) -> str:
        """Make a folder for temporary files, which are not redirected: compilers read them where they are."""
        self._temporary = os.path.join(self.folder, ".fxmem-temporary")  # no path of the program's
        os.mkdir(self._temporary)
        return self._temporary

    @property
    def has_begun(self) -> bool:
        """Whether it has a folder for temporary files."""
        return self._temporary != os.devnull

    @property
    def removed(self) -> list[str]:
        """Files that were there and are no longer, as the program sees it."""
        return sorted(path for path in self._removed if os.path.lexists(path) and not os.path.isdir(path))

    def adopt(self, removed: Iterable[str], *, is_guarded: bool) -> None:
        """Take over what was found in another process: what is gone, and whether writes were refused."""
        self._removed.update(removed)
        self.is_guarded = is_guarded

    def patches(self) -> torch_common.Patches:
        """What the program runs inside."""
        owned = functools.partial(self._claim, by="owner")
        ways: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(_READING, functools.partial(self._following, self.find)),
            **dict.fromkeys(_READING_LINKS, functools.partial(self._with_path, self.find)),
            **dict.fromkeys(_CHANGING, functools.partial(self._following, owned)),
            **dict.fromkeys(_CHANGING_LINKS, functools.partial(self._with_path, owned)),
            "truncate": functools.partial(self._following, self._claim),
            **dict.fromkeys(_MAKING, functools.partial(self._with_path, self._claim_new)),
            **{name: functools.partial(self._with_path, functools.partial(self._drop, name)) for name in _REMOVING},
            **dict.fromkeys(("rename", "replace"), self._move),
            "link": self._link,
            "symlink": self._link_by_name,
            "open": self._open_descriptor,
            "listdir": self._listdir,
            "scandir": self._scandir,
        }
        for name, way in ways.items():
            if hasattr(os, name):
                yield torch_common.wrap(os, name, functools.partial(self._redirect, way))
        before, opens = open, functools.partial(self._redirect, self._open)
        for module, name in _find_keepers(before):
            yield torch_common.wrap(module, name, opens)
        if (numpy := sys.modules.get("numpy.lib._datasource")) is not None:  # a table has it there, since 1.14
            yield _held_by(numpy._file_openers._file_openers, before)
        yield torch_common.patch(io, "FileIO", self._opening_raw)

    def _redirect(self, way: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in the place of one of `os`; what this class itself calls meanwhile is the original."""
        if self._here.is_at_work:
            return original(*args, **kwargs)
        with self.pause():
            try:
                return way(original, *args, **kwargs)
            except OSError as error:
                if error.filename is not None and args and not isinstance(args[0], int):
                    error.filename = args[0]  # the path that the program has
                raise

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Inside, paths lead where they lead without this."""
        return torch_common.replace(self._here, "is_at_work", True)

    def place_to_read(self, path: Any) -> Any:
        """The place of a path, for a library that reads by itself."""
        with self.pause():
            return self._place(self.find, path)

    def place_to_write(self, path: Any) -> Any:
        """The place of a path, for a library that writes by itself; what was there before is not kept."""
        with self.pause():
            return self._place(self._replace, path)

    def place_to_change(self, path: str) -> str:
        """The place of a file that is written by other ways than these, with what was in it."""
        with self.pause():
            return str(self._place(self._claim, path))

    # --- where a path leads -------------------------------------------------------------------------------------------

    def _place(self, find: Callable[[str], str], path: Any, dir_fd: int | None = None, *, follows: bool = False) -> Any:
        """The place that `find` has for the path a program means; the path itself where that is redirected nowhere.

        What follows a symbolic link gets the place of what that leads to.
        """
        known = self._name(path, dir_fd, follows=follows)
        return path if known is None else find(known)

    def find(self, known: str) -> str:
        """The place of an absolute path that is read: where it was written to, else the path itself."""
        place = self.folder + known
        if os.path.lexists(place) or self._is_removed(known):
            return place
        linked = self._links.get(_file_of(known)) if self._links else None
        return known if linked is None or not os.path.lexists(linked) else linked

    def _replace(self, known: str) -> str:
        """The place of a path that is written anew."""
        return self._claim(known, keep=False)

    def _claim(self, known: str, *, keep: bool = True, by: Literal["file", "owner", "folder"] = "file") -> str:
        """The place of a path that is written: in the folder; what was there before is copied there, if it is kept.

        Who may do so for real is said by the file's rights, by its owner, or by the rights of its folder.
        """
        place, parent = self.folder + known, os.path.dirname(known)
        if self._is_made(known):
            return known
        if os.path.lexists(place):
            return place
        is_there = not self._is_removed(known) and os.path.lexists(known)
        if not os.path.isdir(self.find(parent)):
            return place  # which fails as the path itself would
        if not is_there and parent == os.path.realpath(tempfile.gettempdir()):
            self._made.add(known)
            return known
        self._make_folders(parent)
        if is_there and os.path.isdir(known) and not os.path.islink(known):
            self._make_folders(known)
        elif is_there:
            may = os.access(parent if by == "folder" else known, os.W_OK) or os.path.islink(known)
            if not may and not (by == "owner" and os.lstat(known).st_uid == os.geteuid()):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), known)
            other = self._links.get(file := _file_of(known))
            if other is not None and by != "folder" and os.path.lexists(other):
                os.link(other, place)
            elif keep:
                shutil.copy2(known, place, follow_symlinks=False)
            if by != "folder" and os.lstat(known).st_nlink > 1:
                self._links[file] = place
        return place

    def _claim_new(self, known: str) -> str:
        """The place of a path that must not be there yet."""
        if not self._is_made(known) and os.path.lexists(self.find(known)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), known)
        return self._claim(known)

    def _drop(self, name: str, known: str) -> str:
        """The place of a path that is removed: a file that stays is taken for gone."""
        if self._is_made(known):
            self._made.discard(known)
            return known
        place = self.folder + known
        if not os.path.lexists(self.find(known)):
            return place
        if name == "rmdir" and self._names(known):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), known)
        if not os.path.lexists(place):
            self._make_folders(os.path.dirname(known))
            if name == "rmdir":
                os.mkdir(place)
            elif os.path.isdir(known) and not os.path.islink(known):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), known)
            else:
                Path(place).touch()
        self._removed.add(known)
        return place

    def _name(self, path: Any, dir_fd: int | None = None, *, follows: bool = False) -> str | None:
        """The absolute path that a program means; None for what is redirected nowhere."""
        if isinstance(path, int) or path is None:
            return None
        name = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(name):
            name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
        name = os.path.abspath(name)
        if name.startswith(tuple(each + "/" for each in _AS_THEY_ARE)):
            return None
        folder, last = os.path.split(name)
        name = self._resolve(name) if follows else os.path.join(self._resolve(folder), last)
        if name.startswith(self._temporary + "/"):
            return None
        if name.startswith(self.folder + "/"):
            name = name[len(self.folder) :]
        return None if name.startswith(tuple(each + "/" for each in _AS_THEY_ARE)) else name

    def _resolve(self, name: str) -> str:
        """An absolute path without symbolic links, those that the program has made among them.

        As the system would follow such a link, it would leave the folder.
        """
        known, rest, links = "", name.split("/")[::-1], 0
        while rest:
            part = rest.pop()
            step = os.path.dirname(known) if part == ".." else f"{known}/{part}" if part not in ("", ".") else known
            place = self.find(step) if step != known and part != ".." else ""
            if place and links < _LINKS and os.path.islink(place):
                target, links = os.readlink(place), links + 1
                known = "" if os.path.isabs(target) else known
                rest += target.split("/")[::-1]
            else:
                known = step.rstrip("/")
        return known or "/"

    def _is_removed(self, known: str) -> bool:
        """Whether the real file there is gone, by itself or with a folder. It stays so."""
        while known not in self._removed:
            if known == "/":
                return False
            known = os.path.dirname(known)
        return True

    def _is_made(self, known: str) -> bool:
        """Whether it is a temporary file that the program or a compiler has made."""
        folder = os.path.realpath(tempfile.gettempdir()) + "/"
        if not known.startswith(folder):
            return False
        first = known[len(folder) :].partition("/")[0]
        return first.startswith(_COMPILERS) or folder + first in self._made

    def _make_folders(self, known: str) -> None:
        """Make a folder in ours that the program sees there, with its mode."""
        place = self.folder + known
        if not os.path.isdir(place):
            self._make_folders(os.path.dirname(known))
            os.mkdir(place)
            shutil.copymode(known, place)

    def _names(self, known: str) -> list[str]:
        """The names in a folder, as the program sees it."""
        ours = _list(self.folder + known)
        real = (each for each in _list(known) if not self._is_removed(os.path.join(known, each)))
        return [*ours, *(each for each in real if each not in ours)]

    # --- the functions ------------------------------------------------------------------------------------------------

    def _following(
        self,
        find: Callable[[str], str],
        original: Any,
        path: Any,
        *args: Any,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
        **kwargs: Any,
    ) -> Any:
        """As `_with_path`, of a function that follows a symbolic link unless it is told not to."""
        given = {} if follow_symlinks else {"follow_symlinks": False}
        return original(self._place(find, path, dir_fd, follows=follow_symlinks), *args, **given, **kwargs)

    def _with_path(
        self, find: Callable[[str], str], original: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any
    ) -> Any:
        """A function whose first argument is a path."""
        return original(self._place(find, path, dir_fd), *args, **kwargs)

    def _open(self, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("opener") is not None:  # opens what it is given by other ways: tempfile's gets a folder
            self._here.is_at_work = False
            return original(file, mode, *args, **kwargs)
        find = self.find
        if "x" in mode:
            find = self._claim_new
        elif "w" in mode:
            find = self._replace
        elif "a" in mode or "+" in mode:
            find = self._claim
        return original(self._place(find, file, follows="x" not in mode), mode, *args, **kwargs)

    def _opening_raw(self, original: type[io.FileIO]) -> type[io.FileIO]:
        redirect = functools.partial(self._redirect, self._open)

        class OfOriginals(type(original)):  # type: ignore[misc]
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, original)

        class FileIO(original, metaclass=OfOriginals):  # type: ignore[valid-type, misc]
            def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                redirect(super().__init__, file, mode, *args, **kwargs)

        return FileIO

    def _open_descriptor(
        self, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> Any:
        find = self.find
        if flags & os.O_CREAT and flags & os.O_EXCL:
            find = self._claim_new
        elif flags & _WRITES:
            is_there = os.path.exists(self._place(self.find, path, dir_fd, follows=True))
            find = self._replace if flags & os.O_TRUNC else self._claim
            if is_there and not flags & os.O_DIRECTORY:  # which a file without a name has
                flags |= os.O_CREAT  # an empty one of ours, in the place of what is cut
        follows = not flags & os.O_NOFOLLOW and find != self._claim_new
        return original(self._place(find, path, dir_fd, follows=follows), flags, mode)

    def _move(
        self, original: Any, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        known = self._name(src, src_dir_fd)
        place = src if known is None else self.find(known)
        if known is None or not os.path.lexists(place):
            original(place, dst)
            return
        if os.path.isdir(place) and not os.path.islink(place):
            self._here.is_at_work = False  # each file of the folder by itself
            if os.path.isdir(dst):
                os.rmdir(dst)  # which is empty, or cannot be replaced
            shutil.copytree(src, dst, symlinks=True)
            shutil.rmtree(src)
            return
        claim = functools.partial(self._claim, by="folder")
        place, target = claim(known), self._place(functools.partial(claim, keep=False), dst, dst_dir_fd)
        if self._is_made(known):
            shutil.move(place, target)
            self._made.discard(known)
        else:
            original(place, target)
            self._removed.add(known)

    def _link(
        self,
        original: Any,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Of a hard link's file, a copy is linked."""
        given = kwargs if dst_dir_fd is None else {"dst_dir_fd": dst_dir_fd, **kwargs}
        original(self._place(self._claim, src, src_dir_fd), self._place(self._claim_new, dst, dst_dir_fd), **given)

    def _link_by_name(
        self, original: Any, src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any
    ) -> None:
        """A symbolic link leads where the program says."""
        original(src, self._place(self._claim_new, dst, dir_fd), *args, **kwargs)

    def _listdir(self, original: Any, path: Any = None) -> list[Any]:
        known = self._name(_find_listed(path), follows=True)
        if known is None or not self._is_changed(known):
            return list(original(path))
        original(self.find(known))  # raises where it is no folder
        names = self._names(known)
        return [os.fsencode(each) for each in names] if isinstance(path, bytes) else names

    def _scandir(self, original: Any, path: Any = None) -> Any:
        known = self._name(_find_listed(path), follows=True)
        if known is None or not self._is_changed(known):
            return original(path)
        original(self.find(known)).close()
        shown = known if isinstance(path, int) else os.fspath("." if path is None else path)
        places = {each: self._place(self.find, os.path.join(known, each)) for each in self._names(known)}
        return Entries([Entry(name, shown, place) for name, place in places.items()])

    def _is_changed(self, known: str) -> bool:
        """Whether the program sees a folder otherwise than it is."""
        return os.path.lexists(self.folder + known) or self._is_removed(known)


def _find_keepers(function: Any) -> list[tuple[Any, str]]:
    """The modules that have a function, and by which name: some had it imported before it was replaced (tarfile)."""
    modules = [each for each in list(sys.modules.values()) if isinstance(each, types.ModuleType)]
    return [(each, name) for each in modules for name, value in list(vars(each).items()) if value is function]


@contextlib.contextmanager
def _held_by(table: dict[Any, Any], function: Any) -> Iterator[None]:
    """Inside, a table that has the built-in `open` has the one that there is now."""
    keys = [key for key, value in table.items() if value is function]
    table.update(dict.fromkeys(keys, builtins.open))
    try:
        yield
    finally:
        table.update(dict.fromkeys(keys, function))


def _find_listed(path: Any) -> Any:
    """The folder that `os.listdir` is asked for: this one, or that of a descriptor."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    return "." if path is None else path


def _file_of(path: str) -> tuple[int, int] | None:
    """What a path names, a link itself; None for nothing."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found.st_dev, found.st_ino
    return None


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
