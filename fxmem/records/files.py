"""Writing files whole or not at all, and reading back what fxmem keeps for itself."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path

from fxmem.errors import UsageError

_MOST_KEPT_BYTES = 256 << 20


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text beside `path` and move it into place; an interrupt leaves the old file. UsageError if it cannot
    be written.

    Half of a surrogate pair, which UTF-8 has no form for, is spelled out.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """The same for bytes. A symbolic link stays one; what it points to is replaced."""
    beside = None
    try:
        whole = Path(os.path.realpath(path))
        # Named before it is made, so that no interrupt can leave a file of unknown name.
        beside = whole.with_name(f".fxmem-{secrets.token_hex(8)}.tmp")
        with open(beside, "xb") as file:
            file.write(data)
        os.replace(beside, whole)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UsageError(
            f"expected a file that can be written, got {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    finally:
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)


def write_kept(path: Path, text: str) -> None:
    """Write text for `read_kept`. A link at `path` is replaced, not followed. UsageError if it cannot be written."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    write_text(path, f"{_digest(text)} {text}")


def read_kept(path: Path) -> str:
    """Read the text that `write_kept` wrote.

    Raises:
        OSError: there is no such file, or what is there is a link, a pipe, a device, a directory or too long.
        ValueError: it was changed since, or others wrote it.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_KEPT_BYTES:
        raise OSError(f"no regular file, or too long: {path}")
    digest, _, text = path.read_text(encoding="utf-8").partition(" ")
    if digest != _digest(text):
        raise ValueError(f"changed since it was written: {path}")
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
