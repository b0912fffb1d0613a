"""One row per node.

Comma-separated values (RFC 4180, but for its line ends: `\\n`). Every field of `fxmem.records.profile.Node` in plain
columns: bytes and FLOPs as whole numbers, an unknown one as an empty cell, never 0; several values in one cell divided
by spaces. `index` is what `inputs` and `view_of` point at.
"""

from __future__ import annotations

import csv
from io import StringIO

from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.figures import bytes_at_peak
from fxmem.memory.graph import node_attributes
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.records.units import spreadsheet_text
from fxmem.show.export import register


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """The table, its first row the names of the columns."""
    out = StringIO()
    table = [
        {"index": index, **node_attributes(node), "peak_bytes": nbytes}
        for index, (node, nbytes) in enumerate(zip(profile.nodes, bytes_at_peak(profile, timeline), strict=True))
    ]
    writer = csv.DictWriter(out, fieldnames=["index", *_COLUMNS, "peak_bytes"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: spreadsheet_text(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in table
    )
    return out.getvalue()


_COLUMNS = tuple(node_attributes(Node(name="", op="output", target="")))


register("csv", write)
