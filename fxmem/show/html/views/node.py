"""A node of the graph: what it is and what it takes."""

from __future__ import annotations

from fxmem.memory.module_tree import describe
from fxmem.records.profile import Node
from fxmem.records.units import exact_bytes, format_flops, format_shape
from fxmem.show.facts import describe_source
from fxmem.show.html.page import fragment
from fxmem.show.sections import Fact, Section, TableColumn, make_table, numbers


def view(node: Node) -> str:
    """Show a node."""
    outputs = [f"{format_shape(output.shape)} {output.dtype}" for output in node.outputs]
    rows = [
        Fact("Node", describe(node)),
        Fact("Call", f"{node.op} {node.target}"),
        *([Fact("Module", node.module + f" ({node.module_type})" * bool(node.module_type))] if node.module else []),
        *([Fact("Output", ", ".join(outputs))] if outputs else []),
        *([Fact("Source", describe_source(node.source))] if node.source else []),
        Fact("FLOPs", f"forward {format_flops(node.forward_flops)}, backward {format_flops(node.backward_flops)}"),
    ]
    buffers = f", {exact_bytes(node.buffers_bytes)} of them buffers" if node.buffers_bytes else ""
    figures = [
        ("Params", exact_bytes(node.params_bytes), f"parameters and buffers it is the first to read{buffers}"),
        ("Output", exact_bytes(node.output_bytes), "new memory its results bring"),
        ("Saved", exact_bytes(node.saved_bytes), "new memory it keeps for backward"),
        ("Scratch", exact_bytes(node.scratch_bytes.max), "peak of what lives only inside it"),
        ("Live", exact_bytes(node.live_bytes.max), "most bytes alive while it runs"),
    ]
    columns = [TableColumn("Memory", is_head=True), *numbers("Bytes"), TableColumn("What")]
    return fragment(Section(facts=rows), Section(make_table("Memory", columns, figures)))
