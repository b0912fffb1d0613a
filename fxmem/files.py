"""Writing files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fxmem.errors import UsageError

__all__ = ["write_bytes", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text beside `path` and move it into place; an interrupt leaves the old file. UsageError if it cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """The same for bytes."""
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"expected a file that can be written, got {str(path)!r}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, path)
    except OSError as error:
        raise UsageError(f"expected a file that can be written, got {str(path)!r}: {error.strerror}") from error
    finally:
        if os.path.exists(beside):
            os.unlink(beside)
