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


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """The table, its first row the names of the columns."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["index", *_COLUMNS, "peak_bytes"])
    for index, (node, nbytes) in enumerate(zip(profile.nodes, bytes_at_peak(profile, timeline), strict=True)):
        row = [index, *node_attributes(node).values(), nbytes]
        writer.writerow(spreadsheet_text(cell) if isinstance(cell, str) else cell for cell in row)
    return out.getvalue()


_COLUMNS = tuple(node_attributes(Node(name="", op="output", target="")))
