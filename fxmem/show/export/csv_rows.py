"""One row per node, as comma-separated values (RFC 4180, but for its line ends: `\\n`).

Every field of `records.Node` in plain columns: bytes and FLOPs as whole numbers, an unknown one as an empty cell, never
0; several values in one cell divided by spaces. `index` is what `inputs` and `view_of` point at.

The text cells come from a model, and spreadsheets run what begins like a formula: such a cell gets an apostrophe in
front.
"""

from __future__ import annotations

import csv
from io import StringIO

from fxmem.memory.allocator import Settings
from fxmem.memory.figures import bytes_at_peak
from fxmem.records.profile import Node, Profile, Timeline
from fxmem.records.units import format_shape, spreadsheet_text

__all__ = ["cells", "rows"]

Cell = str | int | None


def rows(profile: Profile, timeline: Timeline, settings: Settings) -> str:
    """The table, its first row the names of the columns."""
    out = StringIO()
    table = [
        {"index": index, **cells(node), "peak_bytes": nbytes}
        for index, (node, nbytes) in enumerate(_with_peak(profile, timeline))
    ]
    writer = csv.DictWriter(out, fieldnames=["index", *_COLUMNS, "peak_bytes"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: spreadsheet_text(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in table
    )
    return out.getvalue()


def cells(node: Node) -> dict[str, Cell]:
    """A node's fields by column."""
    source = node.source
    return {
        "name": node.name,
        "op": node.op,
        "target": node.target,
        "module": node.module,
        "module_type": node.module_type,
        "source_file": None if source is None else source.file,
        "source_line": None if source is None else source.line,
        "source_function": None if source is None else source.function,
        "source_code": None if source is None else source.code,
        "inputs": " ".join(map(str, node.inputs)),
        "output_shapes": " ".join(format_shape(output.shape) for output in node.outputs),
        "output_dtypes": " ".join(output.dtype for output in node.outputs),
        "output_storages": " ".join(
            "none" if output.storage is None else str(output.storage) for output in node.outputs
        ),
        "view_of": node.view_of,
        "params_bytes": node.params_bytes,
        "output_bytes": node.output_bytes,
        "saved_bytes": node.saved_bytes,
        "saved_storages": " ".join(map(str, node.saved)),
        "scratch_forward_bytes": node.scratch_bytes.forward,
        "scratch_backward_bytes": node.scratch_bytes.backward,
        "forward_flops": node.forward_flops,
        "backward_flops": node.backward_flops,
        "live_forward_bytes": node.live_bytes.forward,
        "live_backward_bytes": node.live_bytes.backward,
    }


_COLUMNS = tuple(cells(Node(name="", op="output", target="")))


def _with_peak(profile: Profile, timeline: Timeline) -> zip[tuple[Node, int]]:
    return zip(profile.nodes, bytes_at_peak(profile, timeline), strict=True)
