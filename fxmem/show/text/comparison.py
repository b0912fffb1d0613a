"""Two steps side by side, as text."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxmem.memory.module_tree import find_runs, fold, mask_numbers, name_alike
from fxmem.records.comparison import ModuleChange, NodeChange, QuantityChange, StepComparison
from fxmem.records.profile import Phase, Timeline
from fxmem.records.units import format_bytes, format_flops, format_shape, group, percent, printable, to_words
from fxmem.show.export.markdown_parts import code_span, fence_text, write_table
from fxmem.show.facts import header_facts
from fxmem.show.sections import Fact, TableColumn, join_parts, make_table, numbers
from fxmem.show.text.tables import (
    GAP,
    Column,
    choose_columns,
    facts,
    fit_left,
    name_cell,
    note,
    render,
    ruled,
    ruled_table,
)

_SHARE = 100
"""A module is shown if it changed by this part of the larger peak."""
_NARROWEST_NAMES = 34
_MOST = 3
"""Modules that are named at the top."""
_WIDE_TOTALS = 64
"""Columns from which the shares have room."""


def table(
    comparison: StepComparison,
    *,
    width: int = 100,
    depth: int | None = None,
    top: int = 8,
    color: bool = False,
    verdicts: Sequence[str] = (),
) -> str:
    """The comparison as text whose lines are at most `width` columns wide.

    Args:
        comparison: from `fxmem.compare`.
        width: columns of the terminal, at least 60.
        depth: levels of modules below the model to show, every change in them. None: all modules that changed by a
            hundredth of the larger peak.
        top: how many nodes to list, the largest change first.
        color: whether to write ANSI colours.
        verdicts: whether each of the two fits, as of `fxmem.show.facts.find_fit`.
    """
    width = max(width, 60)
    parts: list[RenderableType] = [facts(_heads(comparison, verdicts)), _totals(comparison, width)]
    modules = list(select_rows(comparison, depth))
    if modules:
        parts += [_modules(modules, width), note(_legend(comparison, depth, modules))]
    nodes = _group_alike(comparison.nodes)
    if nodes[:top]:
        parts.append(_nodes(nodes[:top], width))
        rest = sum(len(each) for each in nodes[top:])
        more = f"; {rest:,} more changed" if rest else ""
        many = " xN: N alike, the change of each." if any(len(each) > 1 for each in nodes[:top]) else ""
        parts.append(note(f"The nodes whose bytes changed most, by the figure that changed most{more}.{many}"))
    if not modules and not nodes:
        parts.append(note("No module and no node changed by a byte."))
    return render(parts, width, color)


def _heads(comparison: StepComparison, verdicts: Sequence[str]) -> Iterator[Fact]:
    """What changed most, then what was compared; where the two differ, both."""
    yield from _answer(comparison)
    if verdicts:
        yield Fact("Memory", "\n-> ".join(dict.fromkeys(verdicts)))
    if (commit := comparison.commit) is not None:
        yield Fact("Commit", f"{commit.name[:10]} {printable(commit.subject)}", tone="good")
        passed = f", or one of {commit.passed_over} before it, at which the command fails" if commit.passed_over else ""
        yield Fact("", f"{commit.asked} commits asked{passed}; below: the commit before it, and it")
    one, other = comparison.before, comparison.after
    for fact, their in zip(header_facts(one), header_facts(other), strict=True):
        yield Fact(fact.label, _join_sides(fact, their))
    ours, theirs = (
        printable(f"in {side.peak_phase.value}" + (f", {side.peak_node}" if side.peak_node else ""))
        for side in (one, other)
    )
    yield Fact("Peak", _join_sides(Fact("", ours), Fact("", theirs)))


def _answer(comparison: StepComparison) -> Iterator[Fact]:
    """How much the peak changed, and the modules whose share of it did."""
    is_known = comparison.allocated_bytes.delta is not None
    peak, counted = (comparison.allocated_bytes, "allocated") if is_known else (comparison.requested_bytes, "requested")
    if peak.delta is not None and peak.before:
        share = f", {_share(peak.delta, peak.before)}" if peak.delta else ""
        sizes = f"{format_bytes(peak.before)} -> {format_bytes(peak.after)} {counted}"
        yield Fact("Change", f"{format_delta(peak.delta, format_bytes)}{share}: {sizes}")
    levels = group((each.depth, each) for each in comparison.modules if each.at_peak.delta)
    # The first level below the model at which several changed.
    rows = next((rows for depth, rows in sorted(levels.items()) if depth and len(rows) > 1), levels.get(1, []))
    changes = [(each.after_path or each.before_path or "", each.at_peak.delta or 0) for each in rows]
    runs = list(find_runs([(mask_numbers(name), delta) for name, delta in changes]))
    runs = sorted(runs, key=lambda run: -abs(changes[run[0]][1] * run[2]))[:_MOST]
    if runs:
        words = (
            f"{name_alike([name for name, _ in changes[start : start + count]])} "
            f"{format_delta(changes[start][1], format_bytes)}{' each' if count > 1 else ''}"
            for start, _, count in runs
        )
        yield Fact("Most", printable(f"{', '.join(words)} at the peak"))
    lines = Counter[tuple[str, str]]()
    for node in comparison.nodes:
        if node.source is not None:
            lines[node.source.place, node.source.code] += node.at_peak.delta or 0
    worth = max(peak.before or 0, peak.after or 0) // _SHARE
    found = [each for each in sorted(lines.items(), key=lambda each: -abs(each[1])) if abs(each[1]) > worth]
    if found:
        words = (f"{place} {format_delta(by, format_bytes)}: {code}" for (place, code), by in found[:_MOST])
        yield Fact("Lines", "\n".join(map(printable, words)))


def _join_sides(ours: Fact, theirs: Fact) -> str:
    """One text where they agree; where they have as many parts, the parts that differ beside one another."""
    one, other = (fact.parts or [("", fact.text)] for fact in (ours, theirs))
    if len(one) != len(other):
        return f"{ours.text}\n-> {theirs.text}"
    return "; ".join(
        join_parts([a]) if a == b else f"{join_parts([a])} -> {b[1] if a[0] == b[0] else join_parts([b])}"
        for a, b in zip(one, other, strict=True)
    )


# --- the whole step ---------------------------------------------------------------------------------------------------


def _totals(comparison: StepComparison, width: int) -> Table:
    columns = [("Before", 9), ("After", 9), ("Change", 10), *([(" ", 8)] if width >= _WIDE_TOTALS else [])]
    totals = ruled(("", 18), *columns)
    for name, change in peak_changes(comparison):
        _total(totals, name, change, format_bytes)
    totals.add_section()
    for kind, change in comparison.by_kind.items():
        _total(totals, f"  {to_words(kind)}", change, format_bytes)
    totals.add_section()
    for phase in Phase:
        if phase in comparison.phases:
            _total(totals, f"Most in {phase.value}", comparison.phases[phase], format_bytes, missing="none")
    _total(totals, "Saved for backward", comparison.saved_bytes, format_bytes)
    _total(totals, "Parameters", comparison.params_bytes, format_bytes)
    _total(totals, "Forward FLOPs", comparison.forward_flops, format_flops)
    _total(totals, "Backward FLOPs", comparison.backward_flops, format_flops)
    if comparison.flops_unknown.before or comparison.flops_unknown.after:
        _total(totals, "Without a formula", comparison.flops_unknown, str)
    return totals


def peak_changes(comparison: StepComparison) -> tuple[tuple[str, QuantityChange], ...]:
    """The peak before and after, in every count."""
    return (
        ("Peak requested", comparison.requested_bytes),
        ("Peak allocated", comparison.allocated_bytes),
        ("Peak reserved", comparison.reserved_bytes),
        ("Process at most", comparison.process_bytes),
    )


def _total(
    totals: Table, name: str, change: QuantityChange, written: Callable[[int], str], *, missing: str = "unknown"
) -> None:
    if change.before is None and change.after is None:
        return
    before, after = (missing if value is None else written(value) for value in (change.before, change.after))
    delta = change.delta
    share = "" if not delta or not change.before else _share(delta, change.before)
    style = "" if not delta else "red" if delta > 0 else "green"
    grown = Text("" if delta is None else format_delta(delta, written), style=style)
    cells: list[RenderableType] = [name, before, after, grown, Text(share, style=style)]
    totals.add_row(*cells[: len(totals.columns)])


def _share(delta: int, before: int) -> str:
    """`+12.3 %`; of what is ten times as much or more, how many times."""
    if delta >= 9 * before:
        return f"x{(before + delta) / before:.0f}"
    share = percent(abs(delta), before)
    return share if share.startswith("<") else f"{'+' if delta > 0 else '-'}{share}"


def format_delta(delta: int, written: Callable[[int], str]) -> str:
    """A change with its sign, or `same`."""
    return f"+{written(delta)}" if delta > 0 else f"-{written(-delta)}" if delta else "same"


# --- modules ----------------------------------------------------------------------------------------------------------

_COLUMNS: tuple[Column[ModuleChange], ...] = (
    Column("At peak", 10, lambda row: _cell(row.at_peak)),
    Column("Saved", 10, lambda row: _cell(row.saved)),
    Column("Params", 10, lambda row: _cell(row.params)),
)
_MORE_COLUMNS: tuple[Column[ModuleChange], ...] = (
    Column("Fwd FLOPs", 10, lambda row: _cell(row.forward_flops, format_flops)),
    Column("Output", 10, lambda row: _cell(row.output)),
    Column("Scratch", 10, lambda row: _cell(row.scratch)),
    Column("Bwd FLOPs", 10, lambda row: _cell(row.backward_flops, format_flops)),
)


def select_rows(comparison: StepComparison, depth: int | None) -> Iterator[tuple[ModuleChange, str]]:
    """Modules to show, parents before children, and their titles; a run of equal siblings is weighed as a whole."""
    peaks = (comparison.requested_bytes.before or 0, comparison.requested_bytes.after or 0)
    worth = max(max(peaks) // _SHARE, 1) if depth is None else 1
    rows = [row for row in comparison.modules if row.largest and (depth is None or row.depth <= depth)]
    times: list[int] = []
    for folded in fold(rows, label=_label, likeness=_likeness):
        row, alike = folded.rows[0], folded.count
        del times[row.depth :]
        times += [times[-1] * alike if times else alike] * (row.depth + 1 - len(times))
        if row.largest * times[-1] < worth:
            continue
        mark = "+ " if row.before_path is None else "- " if row.after_path is None else ""
        before = (row.before_path or "").rpartition(".")[2]
        is_renamed = not mark and before != _label(row) and alike == 1
        was = f" (was {before})" if is_renamed else ""
        yield row, f"{mark}{folded.label or comparison.after.model}{was}" + (f" x{alike}" if alike > 1 else "")


def _label(row: ModuleChange) -> str:
    path = row.before_path if row.after_path is None else row.after_path
    return (path or "").rpartition(".")[2]


def _likeness(row: ModuleChange) -> Hashable:
    shift = (row.before_path is None, row.after_path is None)
    return (shift, row.before_type, row.after_type, *(getattr(row, name) for name in _FIGURES))


_FIGURES = ("at_peak", "saved", "params", "output", "scratch", "forward_flops", "backward_flops")


def _modules(rows: Sequence[tuple[ModuleChange, str]], width: int) -> Table:
    columns, names = choose_columns(_COLUMNS, _MORE_COLUMNS, width=width, narrowest=_NARROWEST_NAMES, gap=GAP)
    changed = ruled_table("Module", names, columns)
    for row, title in rows:
        types = row.after_type or row.before_type
        if row.before_type and row.after_type and row.before_type != row.after_type:
            types = f"{row.before_type} -> {row.after_type}"
        style = "bold" if row.depth == 0 else "dim" if row.after_path is None else ""
        name = name_cell(title, types or "", row.depth, names)
        changed.add_row(name, *(Text(column.cell(row)) for column in columns), style=style)
    return changed


def _cell(change: QuantityChange, written: Callable[[int], str] = format_bytes) -> str:
    return format_delta(change.delta, written) if change.delta else ""


def _legend(comparison: StepComparison, depth: int | None, rows: Sequence[tuple[ModuleChange, str]]) -> str:
    below = "everything below it included; the first row is the whole step"
    notes = [f"What each module brings more (+) or less (-), {below}."]
    if any(row.before_path is None for row, _ in rows):
        notes.append("+ before a name: added.")
    if any(row.after_path is None for row, _ in rows):
        notes.append("- before a name: removed.")
    if any(" x" in title for _, title in rows):
        notes.append("xN: N equal siblings, the change of each.")
    if depth is None and len(rows) < sum(1 for row in comparison.modules if row.largest):
        notes.append("Changes below 1 % of the peak are not shown (--depth shows them).")
    return " ".join(notes)


# --- nodes ------------------------------------------------------------------------------------------------------------


def _group_alike(nodes: Sequence[NodeChange]) -> list[list[NodeChange]]:
    """Group the nodes that changed, the largest change first.

    Those at the same place of numbered siblings, with the same figures, are one group."""
    groups: dict[Hashable, list[NodeChange]] = {}
    for node in nodes:
        if node.largest:
            place = re.sub(r"(?<![^. ])\d+(?![^.])", "#", node.where)
            key = place, node.before_node is None, node.after_node is None, _largest_change(node)
            groups.setdefault(key, []).append(node)
    return sorted(groups.values(), key=lambda alike: -alike[0].largest)


def _largest_change(node: NodeChange) -> tuple[str, QuantityChange]:
    """The figure that changed most."""
    changes = ((name, getattr(node, name)) for name in ("at_peak", "saved", "params", "output"))
    return max(changes, key=lambda each: abs(each[1].delta or 0))


def _nodes(groups: Sequence[Sequence[NodeChange]], width: int) -> Table:
    names = width - 4 * 12
    columns = [(heading, 10) for heading in ("Figure", "Before", "After", "Change")]
    changed = ruled(("Node", names), *columns, left=("Node", "Figure"))
    for alike in groups:
        row = alike[0]
        name, change = _largest_change(row)
        before = "" if row.before_node is None else format_bytes(change.before)
        after = "" if row.after_node is None else format_bytes(change.after)
        grown = format_delta(change.delta or 0, format_bytes)
        changed.add_row(Text(_title(row, len(alike), names)), to_words(name), before, after, grown)
    return changed


def _title(row: NodeChange, alike: int, width: int) -> str:
    """What a node is, with a path that is too long cut at its left."""
    mark = "+ " if row.before_node is None else "- " if row.after_node is None else ""
    more = f" x{alike}" if alike > 1 else ""
    head, inside, path = printable(row.where).rpartition(" in ")
    path = fit_left(path, max(width - len(mark + head + inside + more), 8))
    title = mark + fit_left(head + inside + path, width - len(mark + more)) + more
    found = dict.fromkeys(shape for shape in (row.before_shape, row.after_shape) if shape is not None)
    shapes = " -> ".join(map(format_shape, found))
    return f"{title} {shapes}" if shapes and len(title + shapes) < width else title


# --- a comparison of two steps as Markdown for a pull request: what grew, by module, and both timelines ---------------


_MODULES = 20
"""Rows of modules at most."""
_CHART_COLUMNS, _CHART_ROWS = 72, 6
"""Of a timeline drawn in text."""
_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Eighths of a character's height."""


def summarize_growth(comparison: StepComparison, before: Timeline, after: Timeline) -> str:
    """Peak, kinds and modules before and after, and the timelines on one scale.

    The first line is a comment of HTML, the same for the same model and target: by it an earlier summary is found.
    """
    about = comparison.after
    name = hashlib.sha256(f"{about.model} {about.target.name}".encode()).hexdigest()[:12]
    allocated = comparison.allocated_bytes
    change = comparison.requested_bytes if allocated.delta is None else allocated
    blocks = [
        f"<!-- fxmem {name} -->\n### Memory of {code_span(about.model)} on {code_span(about.target.name)}: "
        f"{_describe(change)}",
        _table("Peak", "before", "after", "change", rows=_total_changes(comparison)),
        _module_changes(comparison),
        _timelines(before, after),
        "Predicted without a card; two runs of the same code give the same bytes.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _describe(change: QuantityChange) -> str:
    delta, before = change.delta, change.before
    if not delta or not before:
        return "the same peak" if delta == 0 else format_delta(delta or 0, format_bytes)
    return f"{format_delta(delta, format_bytes)} ({percent(abs(delta), before)} {'more' if delta > 0 else 'less'})"


def _total_changes(comparison: StepComparison) -> Iterator[list[str]]:
    kinds = [(f"of it {to_words(kind)}", change) for kind, change in comparison.by_kind.items() if change.delta]
    for name, change in (*peak_changes(comparison), *kinds):
        if change.before is not None or change.after is not None:
            yield [name.removeprefix("Peak ").replace("Process", "process"), *_change_cells(change)]


def _change_cells(change: QuantityChange) -> Iterator[str]:
    for value in (change.before, change.after):
        yield "unknown" if value is None else format_bytes(value)
    yield "unknown" if change.delta is None else format_delta(change.delta, format_bytes)


def _module_changes(comparison: StepComparison) -> str:
    rows = list(select_rows(comparison, None))
    lines = [
        ["&emsp;" * row.depth + code_span(title), *_change_cells(row.at_peak), *list(_change_cells(row.saved))[-1:]]
        for row, title in islice(rows, _MODULES)
    ]
    more = f"\n\n{len(rows) - _MODULES} more changed." if len(rows) > _MODULES else ""
    if not lines:
        return "No module changed by a hundredth of the peak."
    return _table("Module", "at the peak before", "after", "change", "saved", rows=lines) + more


def _table(name: str, *figures: str, rows: Iterable[Sequence[str]]) -> str:
    return write_table(make_table(name, [TableColumn(name), *numbers(*figures)], rows))


def _timelines(before: Timeline, after: Timeline) -> str:
    highest = max(*before.live_bytes, *after.live_bytes, 1)
    parts = []
    for name, timeline in (("before", before), ("after", after)):
        peak = timeline.peak
        parts.append(f"{name}: peak {format_bytes(peak.requested_bytes)} in {peak.phase}")
        parts += draw_rows(timeline.live_bytes, highest)
    return f"<details><summary>Bytes alive over the step</summary>\n\n{fence_text(chr(10).join(parts))}\n\n</details>"


def draw_rows(live: Sequence[int], highest: int) -> list[str]:
    """Draw bytes over time with block characters, the highest of each column; the top row first.

    Args:
        live: bytes at each tick, at least one.
        highest: bytes at the top of the drawing.
    """
    columns = min(_CHART_COLUMNS, len(live))
    tops = [max(live[column * len(live) // columns : (column + 1) * len(live) // columns]) for column in range(columns)]
    eighths = [-(-top * 8 * _CHART_ROWS // highest) for top in tops]
    return [
        "".join(_BLOCKS[min(max(count - 8 * row, 0), 8)] for count in eighths).rstrip()
        for row in reversed(range(_CHART_ROWS))
    ]
