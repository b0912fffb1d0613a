"""A report as a file that another tool opens.

One module per format, each with one function `(profile, timeline, settings) -> str | bytes`, pure and linear in what
the report holds (but for sorting). None of them needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from fxmem.errors import UsageError
from fxmem.memory.allocator import DEFAULT_SETTINGS, Settings
from fxmem.records import files
from fxmem.records.profile import Profile, Timeline
from fxmem.show import graph
from fxmem.show.export import csv_rows, graphml, markdown, memory_viz, model_explorer, perfetto, speedscope

__all__ = ["EXPORTERS", "FORMATS", "Exporter", "Format", "export", "save"]

Format = Literal[
    "memory-viz", "perfetto", "speedscope", "model-explorer", "model-explorer-data", "csv", "graphml", "dot", "markdown"
]
FORMATS: tuple[Format, ...] = get_args(Format)
"""What can be written."""


Exporter = Callable[[Profile, Timeline, Settings], str | bytes]
"""What writes one format."""

EXPORTERS: dict[Format, Exporter] = {
    "memory-viz": memory_viz.snapshot,
    "perfetto": perfetto.trace,
    "speedscope": speedscope.flamegraphs,
    "model-explorer": model_explorer.graph,
    "model-explorer-data": model_explorer.node_data,
    "csv": csv_rows.rows,
    "graphml": graphml.document,
    "dot": lambda profile, timeline, _: graph.dot_source(profile, timeline),
    "markdown": markdown.summary,
}


def export(profile: Profile, timeline: Timeline, to: Format, *, settings: Settings = DEFAULT_SETTINGS) -> str | bytes:
    """The report in another tool's format.

    Args:
        profile: what was predicted. timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's
        byte counts as well. to: one of `FORMATS`. settings: the CUDA caching allocator's, for the addresses in
        `memory-viz`; should be those that the peak's allocated bytes are of.

    Returns:
        Bytes for `memory-viz`, text for all others.

    Raises:
        UsageError: no such format.
        EnvironmentLacksError: `graphml` without networkx.
    """
    if to not in EXPORTERS:
        raise UsageError(f"expected a format of {', '.join(FORMATS)}; got {to!r}")
    return EXPORTERS[to](profile, timeline, settings)


def save(
    profile: Profile, timeline: Timeline, path: Path, to: Format, *, settings: Settings = DEFAULT_SETTINGS
) -> None:
    """Write it to a file, whole or not at all. Arguments and errors as for `export`, and UsageError for a file that
    cannot be written."""
    content = export(profile, timeline, to, settings=settings)
    files.write_bytes(path, content if isinstance(content, bytes) else content.encode())
