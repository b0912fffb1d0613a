"""The tables of pages, as rows and cells."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.memory.figures import bytes_at_peak
from fxmem.memory.module_tree import call_name, describe
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes, format_flops, percent, printable, short_bytes, to_words
from fxmem.show import facts
from fxmem.show.sections import Cell, Table, TableColumn, TableRow, make_table, numbers

_MOST_ALIVE = 200
"""Rows of tensors; each is one size, kind, shape and line of source."""
_NODE_COLUMNS = (
    TableColumn("#", "place in the order of the run", is_number=True),
    TableColumn("Node", "path of the module called, or the call's name in the graph", is_head=True),
    TableColumn("What", "class of the module, or the function called"),
    TableColumn("Output", "shape and dtype of the first result", style="o"),
    TableColumn("Params", "parameters and buffers it is the first to read", is_number=True),
    TableColumn("Out bytes", "new memory its results bring", is_number=True),
    TableColumn("Saved", "new memory it keeps for backward", is_number=True),
    TableColumn("Scratch", "peak of what lives only inside it, forward or backward", is_number=True),
    TableColumn("Live", "most bytes alive while it runs", is_number=True),
    TableColumn("At peak", "of what is alive at the step's peak, what it brought", is_number=True),
    TableColumn("FLOPs forward", "1 multiply-add = 2", is_number=True),
    TableColumn("FLOPs backward", "1 multiply-add = 2", is_number=True),
    TableColumn("Source", "the line of Python that made the call", style="s"),
)
_ALIVE_COLUMNS = (
    TableColumn("Together", "bytes of all that are alike", is_number=True),
    TableColumn("Share", "of the peak", is_number=True),
    TableColumn("Each", "bytes of one", is_number=True),
    TableColumn("How many", "of the same size, kind, shape and source line", is_number=True),
    TableColumn("Kind", "what they are for"),
    TableColumn("Tensor", "shape and dtype", style="o"),
    TableColumn("Owner", "what brought the first of them", is_head=True),
    TableColumn("Source", "the line of Python it came from", style="s"),
)


# --- nodes ------------------------------------------------------------------------------------------------------------


def node_table(profile: Profile, timeline: Timeline) -> Table:
    """Every node of the graph, what brought most of the peak first. A row's id is `n` and the node's index."""
    at_peak = bytes_at_peak(profile, timeline)
    peak = None if timeline.peak.op is None else profile.ops[timeline.peak.op].node
    order = sorted(range(len(profile.nodes)), key=lambda index: -at_peak[index])
    rows = [_node_row(profile, index, at_peak[index], is_peak=index == peak) for index in order]
    by = next(place for place, column in enumerate(_NODE_COLUMNS) if column.heading == "At peak")
    return Table("Nodes of the graph", _NODE_COLUMNS, rows, name="rows", sorted_by=by, order="descending")


def _node_row(profile: Profile, index: int, at_peak: int, *, is_peak: bool) -> TableRow:
    node = profile.nodes[index]
    is_module = node.op == "call_module"
    notes = (f"in {node.module}" if node.module and not is_module else "", "runs at the peak" if is_peak else "")
    owner = () if node.view_of is None else (f"in the memory of {profile.nodes[node.view_of].name}",)
    source = ("", "") if node.source is None else (node.source.place, node.source.code)
    most = node.scratch_bytes.max, node.live_bytes.max
    cells = [
        Cell(str(index), index),
        Cell(node.module or node.name if is_module else node.name, notes=tuple(filter(None, notes))),
        Cell((node.module_type if is_module else call_name(node)) or node.op),
        Cell(facts.describe_outputs([node]), notes=owner),
        *map(_bytes_cell, (node.params_bytes, node.output_bytes, node.saved_bytes, *most, at_peak)),
        _flops_cell(node.forward_flops, ran=node.op not in ("placeholder", "get_attr", "output")),
        _flops_cell(node.backward_flops, ran=node.live_bytes.backward is not None),
        Cell(source[0], notes=tuple(filter(None, source[1:]))),
    ]
    attributes = {
        "id": f"n{index}",
        "data-name": printable(describe(node)),
        "data-module": printable(node.module),
        "class": "peak" if is_peak else None,
    }
    return TableRow(cells, attributes)


def _bytes_cell(nbytes: int) -> Cell:
    return Cell(short_bytes(nbytes), nbytes)


def _flops_cell(count: int | None, *, ran: bool) -> Cell:
    """None is an unknown count only for what ran at all."""
    return Cell(format_flops(count) if ran or count is not None else "", count)


# --- what is alive at the peak ----------------------------------------------------------------------------------------


def alive_table(profile: Profile, timeline: Timeline) -> tuple[Table, int]:
    """What is alive at the peak, and how many bytes are not listed. Equal tensors share a row; most bytes come
    first."""
    groups = facts.largest_alive(profile, timeline, len(timeline.alive))
    tensors = sorted(groups, key=lambda tensor: -tensor.nbytes * (tensor.others + 1))[:_MOST_ALIVE]
    whole = timeline.peak.requested_bytes
    rows = []
    for tensor in tensors:
        count = tensor.others + 1
        together = tensor.nbytes * count
        cells = [
            _bytes_cell(together),
            Cell(percent(together, whole), together),
            _bytes_cell(tensor.nbytes),
            Cell(f"{count:,}", count),
            Cell(to_words(tensor.kind), kind=tensor.kind),
            Cell(tensor.tensor),
            Cell(tensor.owner),
            Cell(tensor.source),
        ]
        rows.append(TableRow(cells))
    table = Table("Tensors alive at the peak", _ALIVE_COLUMNS, rows, name="alive-rows", order="descending")
    return table, whole - sum(tensor.nbytes * (tensor.others + 1) for tensor in tensors)


def largest_table(profile: Profile, timeline: Timeline) -> Table:
    """The largest tensors alive at the peak."""
    columns = [TableColumn(is_number=True), *(TableColumn() for _ in range(4))]
    rows = (
        [format_bytes(each.nbytes), to_words(each.kind), each.tensor, each.owner + each.more, each.source]
        for each in facts.largest_alive(profile, timeline)
    )
    return make_table("Largest alive at the peak", columns, rows)


# --- a plan -----------------------------------------------------------------------------------------------------------


def region_table(plan: Plan) -> Table:
    """The checkpointed regions of a plan."""
    remakes = any(region.remakes for region in plan.regions)
    is_selective = remakes or any(region.keeps for region in plan.regions)
    is_offloaded = any(region.offloads for region in plan.regions)
    columns = [
        TableColumn("Region", is_head=True),
        *numbers("Nodes", "Frees", "FLOPs again"),
        *(numbers("Results recomputed" if remakes else "Keeps results") if is_selective else []),
        *(numbers("Results offloaded") if is_offloaded else []),
        TableColumn("Source", style="s"),
    ]
    rows = (_region_cells(region, is_selective, is_offloaded) for region in plan.all_regions())
    return make_table("Checkpointed regions", columns, rows)


def _region_cells(region: Region, is_selective: bool, is_offloaded: bool) -> Iterator[str]:
    yield region.title
    yield f"{region.last_node - region.first_node:,}"
    yield format_bytes(region.freed_bytes)
    yield format_flops(region.extra_flops)
    if is_selective:
        yield str(len(region.remakes or region.keeps) or "")
    if is_offloaded:
        yield str(len(region.offloads) or "")
    yield "" if region.source is None else region.source.place
