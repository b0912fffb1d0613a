"""A report as a file that another tool opens.

Each format is one module of `formats/`, whose name it has, with a function `write(profile, timeline, settings) -> str`;
one that gives bytes is registered by its module. These functions are pure, linear in what the report holds (but for
sorting), and need no torch.
`register` adds a format of your own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fxmem.memory.allocator import DEFAULT_SETTINGS, AllocatorSettings
from fxmem.records import files, registry
from fxmem.records.profile import Profile, Timeline
from fxmem.records.registry import Registry

__all__ = ["EXPORTERS", "Exporter", "export", "register", "save"]

Write = Callable[[Profile, Timeline, AllocatorSettings], str | bytes]


@dataclass(frozen=True)
class Exporter:
    """What writes one format: see `register`."""

    name: str
    write: Write
    binary: bool = False


EXPORTERS: Registry[Exporter] = registry.EXPORTERS


def register(name: str, write: Write, *, binary: bool = False) -> None:
    """Add a format, for `Analysis.export(path, to=name)` and `fxmem export --to name`.

    The command line finds one of another package by an entry point of the group `fxmem.exporters`, which bears the
    format's name and whose loading registers it.

    Args:
        name: of the format.
        write: the file's content from what was predicted, its timeline and the CUDA caching allocator's settings.
        binary: it gives bytes, not text.

    Raises:
        UsageError: another format has this name.
    """
    EXPORTERS.register(name, Exporter(name, write, binary))


EXPORTERS.add = register


def export(
    profile: Profile, timeline: Timeline, to: str, *, settings: AllocatorSettings = DEFAULT_SETTINGS
) -> str | bytes:
    """The report in another tool's format.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's byte counts as well.
        to: a name of `EXPORTERS`.
        settings: the CUDA caching allocator's, for the addresses in `memory-viz`; should be those that the peak's
            allocated bytes are of.

    Returns:
        Bytes for a binary format (of fxmem's own, `memory-viz` alone), text for all others.

    Raises:
        UsageError: no such format.
    """
    return EXPORTERS.get(to).write(profile, timeline, settings)


def save(
    profile: Profile, timeline: Timeline, path: Path, to: str, *, settings: AllocatorSettings = DEFAULT_SETTINGS
) -> None:
    """Write it to a file, whole or not at all. Arguments and errors as for `export`, and UsageError for a file that
    cannot be written."""
    content = export(profile, timeline, to, settings=settings)
    files.write_bytes(path, content if isinstance(content, bytes) else content.encode())
