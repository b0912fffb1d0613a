"""cuDNN's answers on disk, so that a second analysis starts no child process.

One JSON file per library version, device and settings; inside, `ConvSignature.key` to bytes (`null` where cuDNN has no
plan). A file is replaced atomically, so a reader never sees half of one, and writers that race lose at worst each
other's new entries, which are then asked again. Whatever cannot be read counts as empty; whatever cannot be written is
not kept: the cache never makes an analysis fail.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_FORMAT = 2
"""One more where `driverless` changes: answers are kept as it corrects them."""
_MAX_ENTRIES = 10_000
"""Per file, the newest kept: about 2 MB."""
_MAX_FILES = 32
_PREFIX = "cudnn-"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where answers are kept: `$FXMEM_CACHE_DIR`, else `$XDG_CACHE_HOME/fxmem`, else `~/.cache/fxmem`.

    None, and nothing is kept, when `FXMEM_CACHE_DIR` is set to nothing or there is no home directory.
    """
    environ = os.environ if environ is None else environ
    if "FXMEM_CACHE_DIR" in environ:
        return Path(environ["FXMEM_CACHE_DIR"]).expanduser() if environ["FXMEM_CACHE_DIR"] else None
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "fxmem"
    try:
        return Path.home() / ".cache" / "fxmem"
    except RuntimeError:
        return None


def load(directory: Path | None, name: str) -> dict[str, int | None]:
    """The entries of one file; empty when there is none that can be read."""
    if directory is None:
        return {}
    try:
        content = json.loads((directory / f"{_PREFIX}{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = content.get("workspaces") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if value is None or (type(value) is int and value >= 0)}


def store(directory: Path | None, name: str, entries: Mapping[str, int | None]) -> None:
    """Add entries to a file, dropping the oldest beyond the bound."""
    if directory is None or not entries:
        return
    merged = {**load(directory, name), **entries}
    newest = dict(list(merged.items())[-_MAX_ENTRIES:])
    temporary = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=directory, prefix=_PREFIX, suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            json.dump({"format": _FORMAT, "workspaces": newest}, file)
        temporary.replace(directory / f"{_PREFIX}{name}.json")
        _drop_oldest(directory)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _drop_oldest(directory: Path) -> None:
    files = [path for path in directory.iterdir() if path.name.startswith(_PREFIX) and path.suffix in (".json", ".tmp")]
    by_age = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[_MAX_FILES:]:
        path.unlink(missing_ok=True)
