"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from fxmem.errors import UsageError


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
