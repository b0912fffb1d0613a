"""What a program wrote: the list that a report has, what is kept of it, and downloads, which belong to the machine."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from fxmem.hardware.workspaces import cache_directory
from fxmem.records.profile import FileChange, WrittenFile
from fxmem.simulation.processes.sandbox.outside import digest_file

PREFIX = "fxmem-aside-"
"""How the name of a folder begins in which an overlay's writes lie; one without a lock is abandoned."""
REDIRECTED = "fxmem-redirected-"
"""How the name of a folder begins to which writes are redirected."""
GIVEN_COMMIT: Final = "0" * 40
"""The commit of a repository that stands in for one of the Hugging Face hub."""
_OPAQUE: Final = ("trusted.overlay.opaque", "user.overlay.opaque")
_MOVED: Final = "trusted.overlay.redirect"
_OF_FONTS: Final = "*/matplotlib/fontlist-v*.json"
"""What Matplotlib finds of a machine's fonts, in seconds."""


Downloads = Collection[tuple[int, bytes]]
"""Length and digest of what came from the network."""


class WrittenPlace(NamedTuple):
    """A file that was written, moved or removed."""

    place: str
    """Where it lies; empty where it is removed."""
    path: str
    """The path that the program has for it."""
    is_ours: bool = True
    """Whether it lies apart; a file in a folder that was moved lies where it was."""


Written = Iterator[WrittenPlace]


def walk_files(folder: str, path: str, *, is_ours: bool = True) -> Written:
    """Each file in a folder that the program has at `path`."""
    for inside, folders, names in os.walk(folder):
        for name in (*names, *(each for each in folders if os.path.islink(os.path.join(inside, each)))):
            place = os.path.join(inside, name)
            yield WrittenPlace(place, os.path.normpath(os.path.join(path, os.path.relpath(place, folder))), is_ours)


def walk_layer(upper: str, lower: str, path: str, top: str = "") -> Written:
    """What an overlay's upper folder has of one that the program has at `path`.

    Args:
        upper, lower: the folders that are seen as one there; `lower` is empty where that one was removed before.
        top: the lowest of the lower folders, by which a moved one says where it was.
    """
    top = top or lower
    ours: dict[str, os.DirEntry[str]] = {}
    with contextlib.suppress(OSError):  # that this user may not read
        ours = {each.name: each for each in os.scandir(upper)}
    for name, entry in ours.items():
        known, below, status = os.path.join(path, name), os.path.join(lower, name), entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # a whiteout
            yield from _walk_removed(known)
        elif stat.S_ISDIR(status.st_mode):
            yield from walk_layer(entry.path, _find_lower(entry.path, below if lower else "", top), known, top)
        else:
            yield WrittenPlace(entry.path, known)
    if lower != path:
        theirs = _list(lower)
        for name in theirs - ours.keys():
            place, known = os.path.join(lower, name), os.path.join(path, name)
            is_folder = os.path.isdir(place) and not os.path.islink(place)
            yield from walk_files(place, known, is_ours=False) if is_folder else [WrittenPlace(place, known, False)]
        for name in _list(path) - theirs - ours.keys():
            yield from _walk_removed(os.path.join(path, name))


def _walk_removed(path: str) -> Written:
    """A file that was there and is removed, or those of a folder."""
    if os.path.isdir(path) and not os.path.islink(path):
        yield from (WrittenPlace("", each.path) for each in walk_files(path, path))
    elif os.path.lexists(path):
        yield WrittenPlace("", path)


def _find_lower(folder: str, below: str, top: str) -> str:
    """The folder that one of an upper layer is seen as one with; empty for none."""
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name, follow_symlinks=False) == b"y":
                return ""
    with contextlib.suppress(OSError):
        moved = os.fsdecode(os.getxattr(folder, _MOVED, follow_symlinks=False))
        below = top + moved if moved.startswith("/") else os.path.join(os.path.dirname(below), moved)
    return below if os.path.isdir(below) and not os.path.islink(below) else ""


def _list(folder: str) -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir(folder)) if folder else set()
    return set()


def list_files(
    written: Written, folders: Sequence[str], received: Downloads, begun_ns: int = 0
) -> tuple[WrittenFile, ...]:
    """What a program wrote, without downloads, bytecode and temporary files.

    Args:
        written: each file.
        folders: the user's, where temporary files are files like others.
        received: what came from the network.
        begun_ns: when the program began, by the clock that files have. What was copied for it before, and not touched
            since, it has not written, though others may write to the original.
    """
    found = []
    for place, path, _ in written:
        if _is_passing(path, folders) or (place and _is_cached(path) and not _is_made(place, path, received)):
            continue
        before, name = os.lstat(path) if os.path.lexists(path) else None, name_from_here(path)
        if not place:
            found.append(WrittenFile(path=name, change="removed"))
        elif before is None or not _are_alike(path, before, place, begun_ns):
            change: FileChange = "new" if before is None else "changed"
            found.append(WrittenFile(path=name, nbytes=os.lstat(place).st_size, change=change))
    return tuple(sorted(found, key=lambda each: each.path))


def _are_alike(path: str, before: os.stat_result, place: str, begun_ns: int) -> bool:
    """Whether a file is a copy that nothing was written to."""
    now = os.lstat(place)
    if now.st_ctime_ns < begun_ns:
        return True
    if stat.S_ISLNK(before.st_mode) and stat.S_ISLNK(now.st_mode):
        return os.readlink(path) == os.readlink(place)
    return (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)


def name_from_here(path: str) -> str:
    """A path from the working directory, where it lies below it."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def keep_files(written: Written, files: Sequence[WrittenFile], folder: str) -> None:
    """Move what a program wrote to a folder: what lay below the working directory by that path, all else by its own."""
    wanted = {each.path for each in files if each.change != "removed"}
    for each in list(written):
        if each.place and (name := name_from_here(each.path)) in wanted:
            _move(each, os.path.join(folder, name.lstrip("/")))


def keep_downloads(written: Written, received: Downloads) -> None:
    """Move what came from the network, unchanged, to the download caches where it belongs, and bytecode of packages.

    What was there before stays as it is, but for fxmem's own cache. Whatever else a program puts there may be made up,
    and is dropped.
    """
    links = []
    for each in list(written):
        if not each.place or not each.is_ours:
            continue
        is_ours, is_new = _is_below(each.path, _own_cache()), not os.path.lexists(each.path)
        if os.path.islink(each.place):
            links += [each] if is_new and _is_cached(each.path) else []
            continue
        is_download = _is_cached(each.path) and _is_download(each.place, each.path, received)
        if is_ours or (is_new and (_is_bytecode(each.path) or is_download)):
            with contextlib.suppress(OSError):
                _move(each, each.path)
    for each in links:  # of the Hugging Face hub, to what it has downloaded
        with contextlib.suppress(OSError):
            if os.path.exists(os.path.join(os.path.dirname(each.path), os.readlink(each.place))):
                _move(each, each.path)


def _is_download(place: str, path: str, received: Downloads) -> bool:
    """Whether a file of a cache is as it came from the network; a list of fonts is as good."""
    status = os.lstat(place)
    if not stat.S_ISREG(status.st_mode):
        return False
    if status.st_size in (nbytes for nbytes, _ in received) and (status.st_size, digest_file(place)) in received:
        return True
    return fnmatch.fnmatch(path, _OF_FONTS)


def _is_made(place: str, path: str, received: Downloads) -> bool:
    """Whether the program may have made what is in a file of a cache: it is no download, no link, and not empty."""
    status = os.lstat(place)
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and not _is_download(place, path, received)


def download_folders() -> tuple[str, ...]:
    """Folders in which downloads are kept, whatever program made them."""
    home, environ = os.path.expanduser("~"), os.environ
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    hub = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    data = environ.get("HF_DATASETS_CACHE") or os.path.join(hub, "datasets")
    return (
        environ.get("HF_HUB_CACHE") or os.path.join(hub, "hub"),
        os.path.join(hub, "xet"),
        os.path.join(data, "downloads"),
        os.path.join(environ.get("TORCH_HOME") or os.path.join(cache, "torch"), "hub"),
        environ.get("NLTK_DATA") or os.path.join(home, "nltk_data"),
        *(os.path.join(cache, name) for name in ("clip", "matplotlib", "whisper")),
    )


def _own_cache() -> str:
    """Fxmem's own; a folder that is nowhere if it has none."""
    ours = cache_directory()
    return os.devnull if ours is None else str(ours.absolute())


def _is_bytecode(path: str) -> bool:
    """Whether a file is the bytecode of an installed package."""
    folders = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    return path.endswith(".pyc") and any(_is_below(path, each) for each in folders)


def _is_cached(path: str) -> bool:
    return any(_is_below(path, each) for each in download_folders())


def _is_passing(path: str, folders: Sequence[str]) -> bool:
    if path.endswith(".pyc") or "/__pycache__/" in path or _is_below(path, _own_cache()) or f"/{PREFIX}" in path:
        return True
    if _is_cached(path) and (f"/snapshots/{GIVEN_COMMIT}/" in path or path.endswith("/refs/main")):
        return True
    is_temporary = any(_is_below(path, os.path.realpath(each)) for each in ("/tmp", "/var/tmp", tempfile.gettempdir()))
    return is_temporary and not any(_is_below(path, each) for each in folders)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def _move(file: WrittenPlace, to: str) -> None:
    os.makedirs(os.path.dirname(to), exist_ok=True)
    if os.path.lexists(to) and not os.path.isdir(to):
        os.unlink(to)
    if file.is_ours:
        shutil.move(file.place, to)
    else:
        shutil.copy2(file.place, to, follow_symlinks=False)
