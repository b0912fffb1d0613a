"""The tables of a page: every node, and every tensor that is alive at the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fxmem.memory import facts as findings
from fxmem.memory.figures import bytes_at_peak
from fxmem.memory.module_tree import call_name
from fxmem.records.profile import Kind, Node, Profile, SourceLine, Timeline
from fxmem.records.units import exact_bytes, format_flops, format_shape, percent, printable, short_bytes
from fxmem.show.palette import KINDS

__all__ = ["alive_table", "bytes_cell", "cell", "node_table", "place", "safe", "sortable", "swatch"]

_MOST_ALIVE = 200
"""Rows of tensors; each is one size, kind, shape and line of source."""

_NODE_COLUMNS = (
    ("#", "number", "place in the order of the run"),
    ("Node", "text", "path of the module called, or the call's name in the graph"),
    ("What", "text", "class of the module, or the function called"),
    ("Output", "text", "shape and dtype of the first result"),
    ("Params", "number", "parameters and buffers it is the first to read"),
    ("Out bytes", "number", "new memory its results bring"),
    ("Saved", "number", "new memory it keeps for backward"),
    ("Scratch", "number", "peak of what lives only inside it, forward or backward"),
    ("Live", "number", "most bytes alive while it runs"),
    ("At peak", "number", "of what is alive at the step's peak, what it brought"),
    ("FLOPs forward", "number", "1 multiply-add = 2"),
    ("FLOPs backward", "number", "1 multiply-add = 2"),
    ("Source", "text", "the line of Python that made the call"),
)


def safe(text: str) -> str:
    """Untrusted text as HTML."""
    return escape(printable(text), quote=True)


def cell(text: str, classes: str = "", *, value: int | None = None, is_number: bool = False) -> str:
    """A cell; of numbers, `value` is what it is sorted by, and None comes last."""
    kind = f' class="{classes}"' if classes else ""
    data = "" if not is_number else f' data-v="{"" if value is None else value}"'
    return f"<td{kind}{data}>{safe(text)}</td>"


def bytes_cell(nbytes: int) -> str:
    """A cell of bytes."""
    return cell(short_bytes(nbytes), "r", value=nbytes, is_number=True)


def sortable(
    label: str,
    columns: Sequence[tuple[str, str, str]],
    rows: Iterator[str],
    *,
    name: str,
    sorted_by: int = 0,
    order: str = "ascending",
) -> str:
    """A table whose columns (heading, `number` or `text`, meaning) a script can sort; `name` is the id of its body."""
    heads = "".join(
        f'<th scope="col" data-sort="{kind}" '
        f'title="{safe(meaning)}"{f" aria-sort={chr(34)}{order}{chr(34)}" if index == sorted_by else ""}'
        f"{' class=' + chr(34) + 'r' + chr(34) if kind == 'number' else ''}>{safe(heading)}</th>"
        for index, (heading, kind, meaning) in enumerate(columns)
    )
    return (
        f'<table class="data sortable" aria-label="{safe(label)}"><thead><tr>{heads}</tr></thead><tbody '
        f'id="{name}">{"".join(rows)}</tbody></table>'
    )


def swatch(kind: Kind) -> str:
    """A square in the kind's colour, beside which its name stands."""
    return f'<span class="swatch" style="background:{KINDS[kind]}"></span>'


def place(source: SourceLine | None) -> str:
    """Where a line is; empty for none."""
    return "" if source is None else source.place


# --- nodes ------------------------------------------------------------------------------------------------------------


def node_table(profile: Profile, timeline: Timeline) -> str:
    """Every node of the graph in the order of the run, `n` and its index as id."""
    at_peak = bytes_at_peak(profile, timeline)
    peak = None if timeline.peak.op is None else profile.ops[timeline.peak.op].node
    rows = (
        _node(profile, index, node, at_peak[index], is_peak=index == peak) for index, node in enumerate(profile.nodes)
    )
    return sortable("Nodes of the graph", _NODE_COLUMNS, rows, name="rows")


def _node(profile: Profile, index: int, node: Node, at_peak: int, *, is_peak: bool) -> str:
    title = node.module or node.name if node.op == "call_module" else node.name
    inside = f"in {node.module}" if node.module and node.op != "call_module" else ""
    mark = "runs at the peak" if is_peak else ""
    notes = "".join(f"<small>{safe(note)}</small>" for note in (inside, mark) if note)
    what = node.module_type if node.op == "call_module" else call_name(node)
    first = node.outputs[0] if node.outputs else None
    output = (
        ""
        if first is None
        else f"{format_shape(first.shape)} {first.dtype}"
        + (f" and {len(node.outputs) - 1} more" if len(node.outputs) > 1 else "")
    )
    owner = (
        "" if node.view_of is None else f"<small>{safe(f'in the memory of {profile.nodes[node.view_of].name}')}</small>"
    )
    figures = (
        node.params_bytes,
        node.output_bytes,
        node.saved_bytes,
        node.scratch_bytes.max,
        node.live_bytes.max,
        at_peak,
    )
    code = "" if node.source is None or not node.source.code else f"<small>{safe(node.source.code)}</small>"
    return (
        f'<tr id="n{index}" data-name="{safe(findings.describe(node))}" '
        f'data-module="{safe(node.module)}"{" class=peak" if is_peak else ""}>'
        f"{cell(str(index), 'r', value=index, is_number=True)}"
        f'<th scope="row">{safe(title)}{notes}</th>'
        f'{cell(what or node.op)}<td class="o">{safe(output)}{owner}</td>'
        f"{''.join(map(bytes_cell, figures))}"
        f"{_flops(node.forward_flops, ran=node.op not in ('placeholder', 'get_attr', 'output'))}"
        f"{_flops(node.backward_flops, ran=node.live_bytes.backward is not None)}"
        f'<td class="s">{safe(place(node.source))}{code}</td></tr>'
    )


def _flops(count: int | None, *, ran: bool) -> str:
    """None is an unknown count only for what ran at all."""
    return cell(format_flops(count) if ran or count is not None else "", "r", value=count, is_number=True)


# --- tensors ----------------------------------------------------------------------------------------------------------


def alive_table(profile: Profile, timeline: Timeline) -> str:
    """What is alive at the peak, those alike in one row, what takes most first; and how much is not listed."""
    groups = findings.largest_alive(profile, timeline, len(timeline.alive))
    tensors = sorted(groups, key=lambda tensor: -tensor.nbytes * (tensor.others + 1))[:_MOST_ALIVE]
    listed = sum(tensor.nbytes * (tensor.others + 1) for tensor in tensors)
    whole = timeline.peak.requested_bytes
    columns = (
        ("Together", "number", "bytes of all that are alike"),
        ("Share", "number", "of the peak"),
        ("Each", "number", "bytes of one"),
        ("How many", "number", "of the same size, kind, shape and source line"),
        ("Kind", "text", "what they are for"),
        ("Tensor", "text", "shape and dtype"),
        ("Owner", "text", "what brought the first of them"),
        ("Source", "text", "the line of Python it came from"),
    )

    def rows() -> Iterator[str]:
        for tensor in tensors:
            count = tensor.others + 1
            kind = Kind(tensor.kind.replace(" ", "_"))
            yield (
                f"<tr>{bytes_cell(tensor.nbytes * count)}"
                f"{cell(percent(tensor.nbytes * count, whole), 'r', value=tensor.nbytes * count, is_number=True)}"
                f"{bytes_cell(tensor.nbytes)}{cell(f'{count:,}', 'r', value=count, is_number=True)}"
                f"<td>{swatch(kind)}{safe(tensor.kind)}</td>"
                f'{cell(tensor.tensor, "o")}<th scope="row">{safe(tensor.owner)}</th>{cell(tensor.source, "s")}</tr>'
            )

    rest = whole - listed
    more = f"<p>Not listed: {safe(exact_bytes(rest))} in smaller rows.</p>" if rest else ""
    table = sortable("Tensors alive at the peak", columns, rows(), name="alive-rows", order="descending")
    return f'<div class="scroll nodes" tabindex="0" role="region" aria-labelledby="alive">{table}</div>{more}'
