"""A model layer by layer, as a terminal table, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from rich.text import Text

from fxmem.memory.by_layer import layer_likeness
from fxmem.memory.figures import Flops
from fxmem.memory.module_tree import fold, mask_numbers, name_alike
from fxmem.records.breakdown import Layer, LayerReport
from fxmem.records.units import (
    exact_bytes,
    format_bytes,
    format_flops,
    format_shape,
    printable,
    short_bytes,
    spreadsheet_text,
)
from fxmem.show.export.markdown_parts import write_table
from fxmem.show.facts import flops_sum, header_facts
from fxmem.show.sections import Fact, TableColumn, make_table
from fxmem.show.text.tables import Column, choose_columns, facts, fit, name_cell, note, render, ruled_table

_COLUMNS: tuple[Column[Layer], ...] = (
    Column("Output shape", 15, lambda row: "" if row.output_shape is None else format_shape(row.output_shape), "left"),
    Column("Params", 7, lambda row: format_flops(row.params)),
    Column("MACs", 7, lambda row: flops_sum(Flops(row.macs, row.macs_unknown))),
    Column("FLOPs", 7, lambda row: flops_sum(Flops(row.forward_flops, row.forward_flops_unknown))),
    Column("Saved", 9, lambda row: short_bytes(row.saved_bytes)),
)
_MORE_COLUMNS: tuple[Column[Layer], ...] = (
    Column("Output", 9, lambda row: short_bytes(row.output_bytes)),
    Column("Bwd FLOPs", 9, lambda row: flops_sum(Flops(row.backward_flops, row.backward_flops_unknown))),
    Column("Weights", 9, lambda row: short_bytes(row.params_bytes)),
    Column("Calls", 5, lambda row: str(row.calls) if row.calls else ""),
)
_NARROWEST_NAMES = 30


def table(report: LayerReport, *, width: int = 100, depth: int | None = None, color: bool = False) -> str:
    """The layers as text whose lines are at most `width` columns wide.

    Args:
        report: from `fxmem.memory.by_layer.by_layer`.
        width: columns of the terminal, at least 60. Wider terminals get more columns: output bytes, backward FLOPs,
            bytes of the weights, calls.
        depth: levels of modules below the model to show. None: all modules, and the calls that compute or keep
            anything.
        color: whether to write ANSI colours.
    """
    width = max(width, 60)
    columns, names = choose_columns(_COLUMNS, _MORE_COLUMNS, width=width, narrowest=_NARROWEST_NAMES, gap=1)
    tree = ruled_table("Layer", names, columns, padding=0)
    for layer, title in _select_rows(report, depth):
        name = name_cell(title, layer.type if layer.type != layer.name else "", layer.depth, names)
        tree.add_row(name, *(Text(fit(printable(column.cell(layer)), column.width)) for column in columns))
    return render(
        [
            facts([*_most_kept(report, depth), *header_facts(report)]),
            tree,
            facts(_sums(report)),
            note(_legend(columns)),
        ],
        width,
        color,
    )


def markdown(report: LayerReport, *, depth: int | None = None) -> str:
    """The same rows as a Markdown table with every column."""
    columns = (*_COLUMNS, *_MORE_COLUMNS)
    rows = []
    for layer, title in _select_rows(report, depth):
        kind = f" ({layer.type})" if layer.type and layer.type != layer.name else ""
        name = "&nbsp;&nbsp;" * layer.depth + _markdown(title + kind)
        rows.append([name, *(_markdown(column.cell(layer)) for column in columns)])
    heads = [TableColumn(column.heading, is_number=column.justify == "right") for column in columns]
    sums = "\n".join(f"- {fact.label}: {_markdown(fact.text)}" for fact in _sums(report))
    return f"{write_table(make_table('Layers', [TableColumn('Layer'), *heads], rows))}\n\n{sums}\n"


def csv_text(report: LayerReport, *, depth: int | None = None) -> str:
    """One CSV row for each layer, with every field of its record.

    Equal siblings stand one by one; shapes are written as `32x3x224x224`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(Layer.model_fields)
    for layer in report.layers:
        if depth is None or layer.depth <= depth:
            shape = "" if layer.output_shape is None else format_shape(layer.output_shape)
            cells = (layer.model_dump(mode="json") | {"output_shape": shape}).values()
            writer.writerow(spreadsheet_text(cell) if isinstance(cell, str) else cell for cell in cells)
    return out.getvalue()


def _select_rows(report: LayerReport, depth: int | None) -> Iterator[tuple[Layer, str]]:
    """Layers to show, and their titles."""
    near = (layer for layer in report.layers if depth is None or layer.depth <= depth)
    rows = [layer for layer in near if layer.kind == "module" or _is_shown(layer)]
    for folded in fold(rows, label=lambda row: row.name, likeness=layer_likeness):
        layer = folded.rows[0]
        calls = f", {layer.calls} calls" if layer.calls > 1 else ""
        yield layer, folded.label + (f" x{folded.count}" if folded.count > 1 else calls)


def _is_shown(layer: Layer) -> bool:
    return bool(layer.forward_flops or layer.forward_flops_unknown or layer.output_bytes or layer.saved_bytes)


def _most_kept(report: LayerReport, depth: int | None) -> Iterator[Fact]:
    """The layer with none below it, down to a depth, that keeps most for backward; those alike are named with it."""
    near = [each for each in report.layers if depth is None or each.depth <= depth]
    below = [*(each.depth for each in near[1:]), 0]
    leaves = [each for each, following in zip(near, below, strict=True) if following <= each.depth]
    most = max(leaves, key=lambda each: each.saved_bytes)
    if not most.saved_bytes:
        return
    name, alike = mask_numbers(_full_name(most)), [each for each in leaves if each.saved_bytes == most.saved_bytes]
    names = [_full_name(each) for each in alike if mask_numbers(_full_name(each)) == name]
    each = " each" if len(names) > 1 else ""
    yield Fact("Most kept", printable(f"{name_alike(names)}: {format_bytes(most.saved_bytes)}{each}"))


def _full_name(layer: Layer) -> str:
    if layer.kind == "call":
        return f"{layer.name} of {layer.path}" if layer.path else layer.name
    return f"{layer.path or layer.name} ({layer.type})"


def _sums(report: LayerReport) -> Iterator[Fact]:
    total = report.total
    trained = "" if report.trained_params is None else f", of which {report.trained_params:,} get a gradient"
    params = f"{total.params:,}{trained}; {exact_bytes(total.params_bytes)}"
    yield Fact("Params", f"{params}; buffers {format_bytes(total.buffers_bytes)}")
    yield Fact("MACs", _count(total.macs, total.macs_unknown, "operator", "whose number is unknown"))
    forward = _count(total.forward_flops, total.forward_flops_unknown, "node", "without a formula")
    yield Fact("FLOPs", f"{forward} in forward")
    if report.step.mode == "train":
        backward = _count(total.backward_flops, total.backward_flops_unknown, "node", "without a formula")
        yield Fact("Backward", f"{backward} FLOPs")
    yield Fact("Output", f"{exact_bytes(total.output_bytes)} of results; input {format_bytes(report.input_bytes)}")
    if report.step.mode == "train":
        saved = f"{exact_bytes(total.saved_bytes)} kept for backward by the model"
        yield Fact("Saved", f"{saved}; what the loss keeps is not among it")


def _count(known: int, unknown: int, what: str, why: str) -> str:
    if not unknown:
        return f"{known:,}"
    return f"at least {known:,} (not counted: {unknown} {what}{'s' if unknown > 1 else ''} {why})"


def _legend(columns: Sequence[Column[Layer]]) -> str:
    macs = "MACs: multiply-adds of products, convolutions and attention."
    flops = "FLOPs: 1 multiply-add = 2, and everything else."
    output = "Output: new memory of results, what activations take without backward. "
    is_wide = any(column.heading == "Output" for column in columns)
    return f"{macs} {flops} {output if is_wide else ''}Saved: what is kept for backward."


def _markdown(text: str) -> str:
    """Untrusted text as a cell: nothing in it is markup."""
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>|#~" else char for char in printable(text))
