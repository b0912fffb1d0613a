"""cuDNN's answers on disk, so that a second analysis starts no child process.

One JSON file per library version, device and settings; inside, `ConvSignature.key` to the bytes of the plan and of
those that torch goes on to (`null` where cuDNN has no plan). A file is replaced atomically, so a reader never sees half
of one, and writers that race lose at worst each other's new entries, which are then asked again. Whatever cannot be
read, or was changed, counts as empty; whatever cannot be written is not kept: the cache never makes an analysis fail.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fxmem.errors import UsageError
from fxmem.records.files import read_kept, write_kept

_FORMAT = 5
"""One more where `driverless` changes: answers are kept as it corrects them."""
_MAX_ENTRIES = 10_000
"""Per file, the newest kept: about 2 MB."""
_MAX_FILES = 32
_PREFIX = "cudnn-"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where answers are kept: `$FXMEM_CACHE_DIR`, else `$XDG_CACHE_HOME/fxmem`, else `~/.cache/fxmem`.

    None, and nothing is kept, when `FXMEM_CACHE_DIR` is set to nothing or there is no home directory to begin at.
    """
    environ = os.environ if environ is None else environ
    try:
        if "FXMEM_CACHE_DIR" in environ:
            return Path(environ["FXMEM_CACHE_DIR"]).expanduser() if environ["FXMEM_CACHE_DIR"] else None
        if environ.get("XDG_CACHE_HOME"):
            return Path(environ["XDG_CACHE_HOME"]) / "fxmem"
        return Path.home() / ".cache" / "fxmem"
    except RuntimeError:
        return None


def load(directory: Path | None, name: str) -> dict[str, Sequence[int] | None]:
    """The entries of one file; empty when there is none that can be read."""
    if directory is None:
        return {}
    try:
        entries: dict[str, Sequence[int] | None] = json.loads(read_kept(_path(directory, name)))
    except (OSError, ValueError):
        return {}
    return entries


def store(directory: Path | None, name: str, entries: Mapping[str, Sequence[int] | None]) -> None:
    """Add entries to a file, dropping the oldest beyond the bound."""
    if directory is None or not entries:
        return
    merged = {**load(directory, name), **entries}
    with contextlib.suppress(OSError, UsageError):
        directory.mkdir(parents=True, exist_ok=True)
        write_kept(_path(directory, name), json.dumps(dict(list(merged.items())[-_MAX_ENTRIES:])))
        files = [path for path in directory.iterdir() if path.name.startswith(_PREFIX) and path.suffix == ".json"]
        for path in sorted(files, key=lambda path: path.lstat().st_mtime, reverse=True)[_MAX_FILES:]:
            path.unlink(missing_ok=True)


def _path(directory: Path, name: str) -> Path:
    return directory / f"{_PREFIX}{_FORMAT}-{name}.json"
