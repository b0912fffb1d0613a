"""The tables of pages, as rows and cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fxmem.memory.figures import bytes_at_peak
from fxmem.memory.module_tree import call_name, describe
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Kind, Node, Peak, Profile, Timeline
from fxmem.records.units import format_bytes, format_flops, format_shape, percent, printable, short_bytes, to_words
from fxmem.show import facts

_MOST_ALIVE = 200
"""Rows of tensors; each is one size, kind, shape and line of source."""


class PageColumn(NamedTuple):
    """A column of a table."""

    heading: str = ""
    meaning: str = ""
    is_number: bool = False
    is_head: bool = False
    """Whether its cells head their rows."""
    style: str = ""
    """Class of cells of text: `o` for a shape, `s` for a source line."""

    @property
    def classes(self) -> str:
        """The classes of its cells."""
        return "r" if self.is_number else self.style


class PageCell(NamedTuple):
    """What stands in one cell."""

    text: str
    value: int | None = None
    """What a number is sorted by; None comes last."""
    notes: tuple[str, ...] = ()
    """Smaller, below it."""
    kind: Kind | None = None
    """Its colour stands in front."""


class PageRow(NamedTuple):
    """A row, with the attributes of its element."""

    cells: Sequence[PageCell]
    attributes: Mapping[str, str | None] = {}


class PageTable(NamedTuple):
    """A table."""

    label: str
    columns: Sequence[PageColumn]
    rows: Sequence[PageRow]
    name: str = ""
    """Id of its body, for the page's script, which sorts it; empty for a table that is not sorted."""
    sorted_by: int = 0
    order: str = "ascending"

    @property
    def has_heads(self) -> bool:
        """Whether any column has a heading."""
        return any(column.heading for column in self.columns)


_NODE_COLUMNS = (
    PageColumn("#", "place in the order of the run", is_number=True),
    PageColumn("Node", "path of the module called, or the call's name in the graph", is_head=True),
    PageColumn("What", "class of the module, or the function called"),
    PageColumn("Output", "shape and dtype of the first result", style="o"),
    PageColumn("Params", "parameters and buffers it is the first to read", is_number=True),
    PageColumn("Out bytes", "new memory its results bring", is_number=True),
    PageColumn("Saved", "new memory it keeps for backward", is_number=True),
    PageColumn("Scratch", "peak of what lives only inside it, forward or backward", is_number=True),
    PageColumn("Live", "most bytes alive while it runs", is_number=True),
    PageColumn("At peak", "of what is alive at the step's peak, what it brought", is_number=True),
    PageColumn("FLOPs forward", "1 multiply-add = 2", is_number=True),
    PageColumn("FLOPs backward", "1 multiply-add = 2", is_number=True),
    PageColumn("Source", "the line of Python that made the call", style="s"),
)
_ALIVE_COLUMNS = (
    PageColumn("Together", "bytes of all that are alike", is_number=True),
    PageColumn("Share", "of the peak", is_number=True),
    PageColumn("Each", "bytes of one", is_number=True),
    PageColumn("How many", "of the same size, kind, shape and source line", is_number=True),
    PageColumn("Kind", "what they are for"),
    PageColumn("Tensor", "shape and dtype", style="o"),
    PageColumn("Owner", "what brought the first of them", is_head=True),
    PageColumn("Source", "the line of Python it came from", style="s"),
)


# --- nodes ------------------------------------------------------------------------------------------------------------


def node_table(profile: Profile, timeline: Timeline) -> PageTable:
    """Every node of the graph, in the order of the run. A row's id is `n` and the node's index."""
    at_peak = bytes_at_peak(profile, timeline)
    peak = None if timeline.peak.op is None else profile.ops[timeline.peak.op].node
    rows = [_node_row(profile, index, at_peak[index], is_peak=index == peak) for index in range(len(profile.nodes))]
    return PageTable("Nodes of the graph", _NODE_COLUMNS, rows, name="rows")


def _node_row(profile: Profile, index: int, at_peak: int, *, is_peak: bool) -> PageRow:
    node = profile.nodes[index]
    is_module = node.op == "call_module"
    notes = (f"in {node.module}" if node.module and not is_module else "", "runs at the peak" if is_peak else "")
    owner = () if node.view_of is None else (f"in the memory of {profile.nodes[node.view_of].name}",)
    ran = node.op not in ("placeholder", "get_attr", "output")
    source = ("", "") if node.source is None else (node.source.place, node.source.code)
    cells = [
        PageCell(str(index), index),
        PageCell(node.module or node.name if is_module else node.name, notes=tuple(filter(None, notes))),
        PageCell((node.module_type if is_module else call_name(node)) or node.op),
        PageCell(_first_output(node), notes=owner),
        *map(
            _bytes_cell,
            (
                node.params_bytes,
                node.output_bytes,
                node.saved_bytes,
                node.scratch_bytes.max,
                node.live_bytes.max,
                at_peak,
            ),
        ),
        _flops_cell(node.forward_flops, ran=ran),
        _flops_cell(node.backward_flops, ran=node.live_bytes.backward is not None),
        PageCell(source[0], notes=tuple(filter(None, source[1:]))),
    ]
    attributes = {
        "id": f"n{index}",
        "data-name": printable(describe(node)),
        "data-module": printable(node.module),
        "class": "peak" if is_peak else None,
    }
    return PageRow(cells, attributes)


def _first_output(node: Node) -> str:
    if not node.outputs:
        return ""
    first, more = node.outputs[0], len(node.outputs) - 1
    return f"{format_shape(first.shape)} {first.dtype}" + (f" and {more} more" if more else "")


def _bytes_cell(nbytes: int) -> PageCell:
    return PageCell(short_bytes(nbytes), nbytes)


def _flops_cell(count: int | None, *, ran: bool) -> PageCell:
    """None is an unknown count only for what ran at all."""
    return PageCell(format_flops(count) if ran or count is not None else "", count)


# --- what is alive at the peak ----------------------------------------------------------------------------------------


def alive_table(profile: Profile, timeline: Timeline) -> tuple[PageTable, int]:
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
            PageCell(percent(together, whole), together),
            _bytes_cell(tensor.nbytes),
            PageCell(f"{count:,}", count),
            PageCell(tensor.kind_name, kind=tensor.kind),
            PageCell(tensor.tensor),
            PageCell(tensor.owner),
            PageCell(tensor.source),
        ]
        rows.append(PageRow(cells))
    table = PageTable("Tensors alive at the peak", _ALIVE_COLUMNS, rows, name="alive-rows", order="descending")
    return table, whole - sum(tensor.nbytes * (tensor.others + 1) for tensor in tensors)


def share_table(peak: Peak, *, headings: Sequence[str] = ("", "", "")) -> PageTable:
    """The kinds of storage alive at the peak, most bytes first."""
    columns = [
        PageColumn(headings[0], is_head=True),
        *(PageColumn(heading, is_number=True) for heading in headings[1:]),
    ]
    rows = [
        PageRow([PageCell(share.name, kind=share.kind), PageCell(format_bytes(share.nbytes)), PageCell(share.percent)])
        for share in facts.split(peak)
    ]
    return PageTable("The peak by kind", columns, rows)


def largest_table(profile: Profile, timeline: Timeline) -> PageTable:
    """The largest tensors alive at the peak."""
    columns = [PageColumn(is_number=True), *(PageColumn() for _ in range(4))]
    rows = [
        PageRow(
            [
                PageCell(text)
                for text in (
                    format_bytes(tensor.nbytes),
                    tensor.kind_name,
                    tensor.tensor,
                    tensor.owner + tensor.more,
                    tensor.source,
                )
            ]
        )
        for tensor in facts.largest_alive(profile, timeline)
    ]
    return PageTable("Largest alive at the peak", columns, rows)


# --- a plan -----------------------------------------------------------------------------------------------------------


def effect_table(before: Peak, after: Peak) -> PageTable:
    """The peak before and after a plan, whole and by kind."""
    lines = [
        ("Requested", before.requested_bytes, after.requested_bytes),
        ("Allocated", before.allocated_bytes, after.allocated_bytes),
        ("Reserved", before.reserved_bytes, after.reserved_bytes),
        *(
            (to_words(kind), before.by_kind.get(kind, 0), after.by_kind.get(kind, 0))
            for kind in Kind
            if kind in {*before.by_kind, *after.by_kind}
        ),
    ]
    columns = [
        PageColumn("At the peak", is_head=True),
        *(PageColumn(heading, is_number=True) for heading in ("Before", "After", "Change")),
    ]
    rows = [
        PageRow([PageCell(text) for text in (name, format_bytes(old), format_bytes(new), _change(old, new))])
        for name, old, new in lines
    ]
    return PageTable("The peak before and after the plan", columns, rows)


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return ""
    sign = "-" if new < old else "+" if new > old else ""
    share = f" ({sign}{percent(abs(new - old), old)})" if old and new != old else ""
    return f"{sign}{format_bytes(abs(new - old))}{share}"


def region_table(plan: Plan) -> PageTable:
    """The checkpointed regions of a plan."""
    remakes = any(region.remakes for region in plan.regions)
    is_selective = remakes or any(region.keeps for region in plan.regions)
    is_offloaded = any(region.offloads for region in plan.regions)
    columns = [
        PageColumn("Region", is_head=True),
        PageColumn("Nodes", is_number=True),
        PageColumn("Frees", is_number=True),
        PageColumn("FLOPs again", is_number=True),
        *([PageColumn("Results recomputed" if remakes else "Keeps results", is_number=True)] if is_selective else []),
        *([PageColumn("Results offloaded", is_number=True)] if is_offloaded else []),
        PageColumn("Source", style="s"),
    ]
    rows = [
        PageRow([PageCell(text) for text in _region_cells(region, is_selective, is_offloaded)])
        for region in plan.all_regions()
    ]
    return PageTable("Checkpointed regions", columns, rows)


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
