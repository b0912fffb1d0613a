"""How a step's peak exceeds a budget or has grown, as a failed test's text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fxmem.memory.budget import Budget
from fxmem.memory.figures import alive_by_node
from fxmem.memory.module_tree import describe
from fxmem.records.profile import Kind, Node, Profile, Timeline
from fxmem.records.sizes import PeakBaseline
from fxmem.records.units import exact_bytes, format_bytes, percent, printable, to_words
from fxmem.show.facts import describe_inputs
from fxmem.show.sections import Fact
from fxmem.show.text.tables import facts, grid, item_list, label_content, render

_LINES_SHOWN = 3
_GROWN_SHOWN = 5
_WIDTH = 1000
"""Test runners show lines as they are; a line of code is not to be broken."""


def describe_excess(profile: Profile, timeline: Timeline, budget: Budget) -> str:
    """How a step exceeds its budget, and which lines of code allocate most."""
    peak, limit = timeline.peak, budget.nbytes
    used, measure = peak.counted_bytes, _measure(peak.allocated_bytes)
    if used > limit:
        over = format_bytes(used - limit)
        first = f"the peak is {exact_bytes(used)} {measure}, {over} above the budget of {exact_bytes(limit)}"
    else:
        within = f"the peak of {exact_bytes(used)} {measure} is within the budget of {exact_bytes(limit)}"
        first = f"{within}, but in a loop the allocator runs out of it"
    where = f"in {peak.phase}{f', while {peak.node} runs' if peak.node else ''}"
    kinds = sorted(peak.by_kind.items(), key=lambda pair: -pair[1])
    found = [
        Fact("Peak", printable(f"{where}; {profile.model}, {profile.step.mode}, {profile.target.name}")),
        Fact("Kinds", ", ".join(f"{to_words(kind)} {format_bytes(nbytes)}" for kind, nbytes in kinds)),
    ]
    return _render(Text(first), facts(found), item_list("Lines", list(_largest_lines(profile, timeline))))


def describe_growth(
    before: PeakBaseline, now: PeakBaseline, allowed_bytes: int, nodes: Sequence[Node], running: str
) -> str:
    """How a peak has grown beyond what is allowed, and what grew.

    Args:
        nodes: those of the step as it is now.
        running: the node that runs at the peak now; empty for none.
    """
    was, grown, measure = before.counted_bytes, now.counted_bytes - before.counted_bytes, _measure(now.allocated_bytes)
    limit = f"{format_bytes(allowed_bytes)} is allowed" if allowed_bytes else "no growth is allowed"
    known = {node.name: node for node in nodes}
    while_running = f", while {printable(running)} runs" if running else ""
    found = [
        Fact("Was", f"{exact_bytes(was)} {measure}, in {before.phase}"),
        Fact("Is", f"{exact_bytes(now.counted_bytes)} {measure}, in {now.phase}{while_running}"),
    ]
    for what, old, new in _settings(before, now):
        found += [Fact("", printable(f"the {what} is not the same: was {old}, is {new}"))] if old != new else []
    by_node = [(_node_words(known[name]), before.by_node.get(name, 0), size) for name, size in now.by_node.items()]
    return _render(
        Text(f"the peak grew by {format_bytes(grown)} ({percent(grown, was)}); {limit}"),
        facts(found),
        *_growth_table("Kinds", [(to_words(k), before.by_kind.get(k, 0), now.by_kind.get(k, 0)) for k in Kind]),
        *_growth_table("Nodes", by_node),
    )


def _render(*parts: RenderableType) -> str:
    return render(parts, _WIDTH, color=False).rstrip("\n")


def _growth_table(label: str, rows: list[tuple[str, int, int]]) -> Iterator[Table]:
    """The rows that grew, in requested bytes at the peak, largest growth first."""
    grown = sorted((row for row in rows if row[2] > row[1]), key=lambda row: row[1] - row[2])
    if not grown:
        return
    table = grid(-10, -9, None, None, None)
    for what, old, new in grown[:_GROWN_SHOWN]:
        table.add_row(f"+{format_bytes(new - old)}", format_bytes(old), "->", format_bytes(new), Text(printable(what)))
    yield label_content(label, table)
    if len(grown) > _GROWN_SHOWN:
        yield facts([Fact("", f"and {len(grown) - _GROWN_SHOWN} more grew")])


def _largest_lines(profile: Profile, timeline: Timeline) -> Iterator[tuple[str, str]]:
    """The lines of code whose nodes keep most at the peak, the largest first; nodes of one line count together."""
    nodes: defaultdict[tuple[str, int] | str, dict[int, int]] = defaultdict(dict)
    for index, nbytes in alive_by_node(profile, timeline).items():
        node = profile.nodes[index]
        nodes[(node.source.file, node.source.line) if node.source is not None else node.name][index] = nbytes
    largest = sorted(nodes.values(), key=lambda sizes: -sum(sizes.values()))
    for sizes in largest[:_LINES_SHOWN]:
        nbytes, first = sum(sizes.values()), max(sizes, key=lambda index: sizes[index])
        share = percent(nbytes, timeline.peak.requested_bytes)
        words = _node_words(profile.nodes[first], len(sizes) - 1)
        yield format_bytes(nbytes), printable(f"({share}) {words}")


def _settings(before: PeakBaseline, now: PeakBaseline) -> list[tuple[str, str, str]]:
    """What a comparison presumes to be the same, in words."""
    return [
        ("input", describe_inputs(before.inputs), describe_inputs(now.inputs)),
        ("step", str(before.step), str(now.step)),
        ("target", before.target, now.target),
        ("torch version", before.torch_version, now.torch_version),
        ("fxmem version", before.fxmem_version, now.fxmem_version),
    ]


def _node_words(node: Node, others: int = 0) -> str:
    """The node, its class, its line of code, and how many more that line has."""
    details = [node.module_type] if node.op == "call_module" and node.module_type else []
    if node.source is not None:
        code = f": {node.source.code}" if node.source.code else ""
        details.append(f"{node.source.file}:{node.source.line}{code}")
    known = f" ({', '.join(details)})" if details else ""
    return f"{describe(node)}{f' and {others} more' if others else ''}{known}"


def _measure(allocated_bytes: int | None) -> str:
    return "requested" if allocated_bytes is None else "allocated"
