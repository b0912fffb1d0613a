"""What a program wrote: the list that a report has, what is kept of it, and downloads, which belong to the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence

from fxmem.hardware.workspaces import cache_directory
from fxmem.records.profile import FileChange, WrittenFile

PREFIX = "fxmem-aside-"
"""How the name of a folder begins in which an overlay's writes lie; one without a lock is abandoned."""
REDIRECTED = "fxmem-redirected-"
"""How the name of a folder begins to which writes are redirected."""
Written = Iterator[tuple[str, str]]
"""Of each file that was written, the place where it lies and the path that the program has for it."""


def walk_files(folder: str, path: str) -> Written:
    """Place and path of each file in a folder that the program has at `path`."""
    for inside, _, names in os.walk(folder):
        for name in names:
            place = os.path.join(inside, name)
            yield place, os.path.normpath(os.path.join(path, os.path.relpath(place, folder)))


def list_files(written: Written, folders: Sequence[str]) -> tuple[WrittenFile, ...]:
    """What a program wrote, without caches, bytecode and temporary files.

    Args:
        written: place and path of each file.
        folders: the user's, where temporary files are files like others.
    """
    found = []
    for place, path in written:
        if _is_passing(path, folders):
            continue
        before, now = os.lstat(path) if os.path.lexists(path) else None, os.lstat(place)
        name = name_from_here(path)
        if stat.S_ISCHR(now.st_mode):  # a whiteout: what the overlay has in the place of a file that is removed
            if before is not None:
                found.append(WrittenFile(path=name, change="removed"))
        elif before is None or not _are_alike(path, before, place, now):
            change: FileChange = "new" if before is None else "changed"
            found.append(WrittenFile(path=name, nbytes=now.st_size, change=change))
    return tuple(sorted(found, key=lambda each: each.path))


def _are_alike(path: str, before: os.stat_result, place: str, now: os.stat_result) -> bool:
    """Whether a file is a copy that nothing was written to."""
    if stat.S_ISLNK(before.st_mode) and stat.S_ISLNK(now.st_mode):
        return os.readlink(path) == os.readlink(place)
    return (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)


def name_from_here(path: str) -> str:
    """A path from the working directory, where it lies below it."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def keep_files(written: Written, files: Sequence[WrittenFile], folder: str) -> None:
    """Move what a program wrote to a folder: what lay below the working directory by that path, all else by its own."""
    wanted = {each.path for each in files if each.change != "removed"}
    for place, path in list(written):
        if (name := name_from_here(path)) in wanted:
            _move(place, os.path.join(folder, name.lstrip("/")))


def keep_downloads(written: Written) -> None:
    """Move new files of download caches to where they belong.

    What was there before stays as it is, but for fxmem's own cache.
    """
    ours = cache_directory()
    for place, path in list(written):
        is_ours = ours is not None and _is_below(path, str(ours.absolute()))
        is_new = is_ours or (_is_cached(path) and not os.path.lexists(path))
        if is_new and not stat.S_ISCHR(os.lstat(place).st_mode):
            with contextlib.suppress(OSError):
                _move(place, path)


def download_folders() -> tuple[str, ...]:
    """Folders in which downloads are kept, whatever program made them; nothing in them is computed on a card."""
    home, environ = os.path.expanduser("~"), os.environ
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    hub = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    data = environ.get("HF_DATASETS_CACHE") or os.path.join(hub, "datasets")
    ours = cache_directory()
    return (
        environ.get("HF_HUB_CACHE") or os.path.join(hub, "hub"),
        os.path.join(hub, "xet"),
        os.path.join(data, "downloads"),
        os.path.join(environ.get("TORCH_HOME") or os.path.join(cache, "torch"), "hub"),
        environ.get("NLTK_DATA") or os.path.join(home, "nltk_data"),
        *(os.path.join(cache, name) for name in ("clip", "matplotlib", "whisper")),
        *(() if ours is None else (str(ours.absolute()),)),
    )


def _is_cached(path: str) -> bool:
    """Whether a file is a download, or the bytecode of an installed package."""
    if path.endswith(".pyc"):
        return any(_is_below(path, sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    return any(_is_below(path, each) for each in download_folders())


def _is_passing(path: str, folders: Sequence[str]) -> bool:
    if path.endswith(".pyc") or "/__pycache__/" in path or _is_cached(path) or f"/{PREFIX}" in path:
        return True
    is_temporary = any(_is_below(path, os.path.realpath(each)) for each in ("/tmp", "/var/tmp", tempfile.gettempdir()))
    return is_temporary and not any(_is_below(path, each) for each in folders)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def _move(place: str, to: str) -> None:
    os.makedirs(os.path.dirname(to), exist_ok=True)
    if os.path.lexists(to) and not os.path.isdir(to):
        os.unlink(to)
    shutil.move(place, to)
