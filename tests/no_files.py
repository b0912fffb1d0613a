"""What may stand in a file's place and is none, on a Unix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe that nothing writes to": os.mkfifo if os.name == "posix" else Path.touch,
    "a link to a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a link to an empty device": lambda path: path.symlink_to("/dev/null"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a directory": Path.mkdir,
}
"""By name, what makes it at a path."""
