"""A profile as a table: the tree of modules, then the peak, assumptions and unknowns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from fxmem.memory.by_layer import Row, fold_small, module_rows, select_rows, step_rows, total_row
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes, printable, short_bytes, to_words
from fxmem.show import facts as findings
from fxmem.show.facts import flops_sum
from fxmem.show.plan_facts import finding_facts
from fxmem.show.run_facts import made_up, run_facts
from fxmem.show.text.tables import (
    GAP,
    LABEL,
    Column,
    choose_columns,
    facts,
    fit,
    fit_left,
    grid,
    item_list,
    label_content,
    name_cell,
    note,
    numbered,
    render,
    ruled_table,
)

_INDENT = LABEL + GAP
_NARROWEST_NAMES = 34
_WITH_BUFFERS = 80
"""Columns of the terminal from which on buffers have a column of their own, where they are one part in so many of the
peak or more; else they stand among Params."""
_PEAK_SHARE = 100


def table(
    profile: Profile, timeline: Timeline, *, width: int = 100, depth: int | None = None, color: bool = False
) -> str:
    """The report as text whose lines are at most `width` columns wide.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`; its peak may carry the allocator's byte counts as well.
        width: columns of the terminal, at least 60. Wider terminals get more columns of the table, in the order
            forward FLOPs, live, scratch, backward FLOPs, output shape, dtype, calls; from 160 on all of them.
        depth: levels of modules below the model to show, and every call in them; None shows all modules and the
            calls that hold at least a hundredth of the peak.
        color: whether to write ANSI colours.
    """
    width = max(width, 60)
    head = facts([*findings.header_facts(profile), *run_facts(profile), *finding_facts(profile, timeline)])
    parts = [head, *module_tree(profile, timeline, width, depth), *_footer(profile, timeline, width)]
    return render(parts, width, color)


_PARAMS: tuple[Column[Row], ...] = (Column("Params", 9, lambda row: short_bytes(row.figures.params)),)
_PARAMS_AND_BUFFERS: tuple[Column[Row], ...] = (
    Column("Params", 9, lambda row: short_bytes(row.figures.params - row.figures.buffers)),
    Column("Buffers", 9, lambda row: short_bytes(row.figures.buffers)),
)
_COLUMNS: tuple[Column[Row], ...] = (
    Column("Output", 9, lambda row: short_bytes(row.figures.output)),
    Column("Saved", 9, lambda row: short_bytes(row.figures.saved)),
    Column("At peak", 9, lambda row: short_bytes(row.figures.at_peak)),
)
_MORE_COLUMNS: tuple[Column[Row], ...] = (
    Column("Fwd FLOPs", 9, lambda row: flops_sum(row.figures.forward)),
    Column("Live", 9, lambda row: short_bytes(row.figures.live)),
    Column("Scratch", 9, lambda row: short_bytes(row.figures.scratch)),
    Column("Bwd FLOPs", 9, lambda row: flops_sum(row.figures.backward)),
    Column("Output shape", 16, lambda row: _choose_word(row.shapes), "left"),
    Column("Dtype", 8, lambda row: _choose_word(row.dtypes), "left"),
    Column("Calls", 5, lambda row: str(row.calls) if row.calls else ""),
)


def module_tree(
    profile: Profile, timeline: Timeline, width: int, depth: int | None, *, small_rows: bool = True
) -> Iterator[RenderableType]:
    """The modules as rows, and what the columns mean.

    `small_rows`: with a depth, show every call down there, and each module by itself; else those of less than a
    hundredth of the peak are left out, or share a row.
    """
    model = module_rows(profile, timeline)
    rest = step_rows(profile, timeline)
    total = total_row([model[0], *rest])
    has_buffers = width >= _WITH_BUFFERS and _PEAK_SHARE * total.figures.buffers >= timeline.peak.requested_bytes > 0
    always = (*(_PARAMS_AND_BUFFERS if has_buffers else _PARAMS), *_COLUMNS)
    columns, names = choose_columns(always, _MORE_COLUMNS, width=width, narrowest=_NARROWEST_NAMES, gap=GAP)
    worth = 0 if small_rows and depth is not None else max(timeline.peak.requested_bytes // 100, 1)
    rows = [*select_rows(model, depth=depth, worth=worth), *rest]
    rows = rows if small_rows else fold_small(rows, worth)

    tree = ruled_table("Module", names, columns)
    for row in rows:
        tree.add_row(name_cell(row.title, row.type_name, row.depth, names), *_cells(row, columns))
    tree.add_section()
    tree.add_row(name_cell(total.title, total.type_name, 0, names), *_cells(total, columns), style="bold")
    yield tree
    yield note(_legend(rows, columns))


def _cells(row: Row, columns: Sequence[Column[Row]]) -> Iterator[Text]:
    return (Text(fit(printable(column.cell(row)), column.width)) for column in columns)


def _legend(rows: Sequence[Row], columns: Sequence[Column[Row]]) -> str:
    headings = {column.heading for column in columns}
    largest = " and ".join(heading for heading in ("Live", "Scratch") if heading in headings)
    sums = f"A module's figures are the sums of its calls{largest and f'; of {largest}, the largest'}."
    notes = [sums, "At peak: its share of what is alive at the peak."]
    if any(row.alike > 1 for row in rows):
        notes.append("xN: N equal siblings, the figures of each.")
    if any(row.figures.forward.unknown_calls for row in rows) and "Fwd FLOPs" in headings:
        notes.append(">=: some calls have no formula.")
    return " ".join(notes)


def _footer(profile: Profile, timeline: Timeline, width: int) -> Iterator[RenderableType]:
    yield facts(findings.peak_facts(profile, timeline.peak))
    yield _split(timeline, width)
    yield _largest(profile, timeline, width)
    yield facts(findings.outcome_facts(profile, timeline.peak))
    if told := made_up(profile):
        yield item_list("Made up", [("-", text) for text in told])
    if profile.assumptions:
        yield numbered("Assumed", findings.assumptions(profile))
    if profile.unknowns:
        yield item_list("Unknown", [("-", text) for text in findings.unknowns(profile)])


def _split(timeline: Timeline, width: int) -> RenderableType:
    shares = findings.split(timeline.peak)
    longest = min(width - _INDENT - 15 - 9 - 7 - 3 * GAP, 50)
    split = grid(15, -9, -7, longest)
    for share in shares:
        bar = "#" * round(longest * share.nbytes / shares[0].nbytes)
        split.add_row(Text(share.name), Text(format_bytes(share.nbytes)), Text(share.percent), Text(bar, style="cyan"))
    return label_content("Split", split if shares else Text("nothing is alive"))


def _largest(profile: Profile, timeline: Timeline, width: int) -> RenderableType:
    tensors = findings.largest_alive(profile, timeline)
    room = width - _INDENT - 9 - GAP
    if width < 120:
        stacked = grid(-9, room)
        for tensor in tensors:
            owner = f"{fit_left(tensor.owner, room - len(tensor.more) - 1)}{tensor.more}:"
            what = f"{to_words(tensor.kind)}, {tensor.tensor}"
            gap = " " if cell_len(f"{owner} {what}") <= room else "\n"
            place = "\n" + fit_left(tensor.source, room) if tensor.source else ""
            stacked.add_row(format_bytes(tensor.nbytes), Text(owner + gap + what).append(place, style="dim"))
        return label_content("Largest", stacked if tensors else Text("nothing is alive"))
    owners = min(46, room // 3)
    sources = room - 15 - 24 - owners - 3 * GAP
    aligned = grid(-9, 15, 24, owners, sources)
    for tensor in tensors:
        owner = fit_left(tensor.owner, owners - len(tensor.more)) + tensor.more
        what, source = fit(tensor.tensor, 24), fit_left(tensor.source, sources)
        aligned.add_row(*map(Text, (format_bytes(tensor.nbytes), to_words(tensor.kind), what, owner, source)))
    return label_content("Largest", aligned if tensors else Text("nothing is alive"))


def _choose_word(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else "varies" if values else ""
