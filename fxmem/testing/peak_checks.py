"""For test suites: a step's peak held below a budget, or to what it was when the test was written.

`assert_peak_below` needs nothing but a test runner. The fixture `fxmem_peak` of the pytest plugin keeps peaks in a file
beside the tests; what it compares and says is here. Nothing needs a GPU or weights, so a pull request's CI can run it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fxmem.errors import UsageError
from fxmem.memory.budget import Budget, parse_budget, parse_bytes
from fxmem.memory.facts import describe
from fxmem.records import json_reader
from fxmem.records.profile import InputTensor, Kind, Node, Profile, Timeline
from fxmem.records.sizes import BASELINE_SCHEMA_VERSION, Baseline, PeakBaseline
from fxmem.records.units import exact_bytes, format_bytes, format_shape, percent, printable, to_words
from fxmem.simulation.analysis import Analysis, analyze

__all__ = ["allowed_growth", "assert_peak_below", "baseline_of", "complaint", "growth", "load_baseline"]

_SHOWN = 3
"""Contributors that a failed assertion names."""
_GROWN = 5
"""Nodes that a failed comparison names."""
_SMALL = 1000
"""A node whose share of the peak is less than one in this many is not written down."""


def assert_peak_below(
    model: torch.nn.Module | Callable[[], torch.nn.Module], inputs: Any, budget: int | str, **options: Any
) -> Analysis:
    """Assert that a step's peak is at most `budget`; return the analysis.

    The budget bounds the allocated bytes, `torch.cuda.max_memory_allocated()` (the requested ones for the CPU); on a
    card a loop over the step also has to run where the driver gives the allocator no more than that. `fxmem analyze
    --budget` asks the same.

    Args:
        model: as for `fxmem.analyze`.
        inputs: as for `fxmem.analyze`.
        budget: bytes or "16GiB".
        options: further ones of `fxmem.analyze`; without `target`, the step is that of its default card.

    Raises:
        AssertionError: the peak is above; says by how much, where it falls and what takes most of it.
        UsageError: the budget or an option cannot be understood.
        AnalysisError: the model cannot be analysed.
    """
    __tracebackhide__ = True
    limit = parse_bytes(budget)
    analysis = analyze(model, inputs, **options)
    found = complaint(analysis, limit)
    if found:
        raise AssertionError(found)
    return analysis


def complaint(analysis: Analysis, budget: Budget) -> str:
    """How a step exceeds a budget, in some lines; empty if it keeps it."""
    profile, peak, limit = analysis.profile, analysis.peak, budget.nbytes
    if budget.keeps(profile, peak):
        return ""
    used, measure = peak.counted_bytes, _measure(peak.allocated_bytes)
    if used > limit:
        first = (
            f"the peak is {exact_bytes(used)} {measure}, {format_bytes(used - limit)} above the budget of "
            f"{exact_bytes(limit)}"
        )
    else:
        first = (
            f"the peak of {exact_bytes(used)} {measure} is within the budget of {exact_bytes(limit)}, but in a "
            f"loop the allocator runs out of it"
        )
    lines = [
        first,
        (
            f"  in {peak.phase}{f', while {peak.node} runs' if peak.node else ''}; {profile.model}, "
            f"{profile.step.mode}, {profile.target.name}"
        ),
    ]
    kinds = sorted(peak.by_kind.items(), key=lambda pair: -pair[1])
    lines.append("  " + ", ".join(f"{to_words(kind)} {format_bytes(nbytes)}" for kind, nbytes in kinds))
    lines.append("  most of it by line:")
    lines += [f"    {line}" for line in _contributors(profile, analysis.timeline)]
    return printable_lines(lines)


def _contributors(profile: Profile, timeline: Timeline) -> list[str]:
    """The lines of code whose nodes hold most at the peak, largest first; nodes of one line, as those of a loop, count
    together."""
    held: defaultdict[tuple[str, int] | str, int] = defaultdict(int)
    nodes: defaultdict[tuple[str, int] | str, dict[int, int]] = defaultdict(dict)
    for index, nbytes in _alive_by_node(profile, timeline).items():
        node = profile.nodes[index]
        place = (node.source.file, node.source.line) if node.source is not None else node.name
        held[place] += nbytes
        nodes[place][index] = nbytes
    lines = []
    for place in sorted(held, key=lambda place: -held[place])[:_SHOWN]:
        first = max(nodes[place], key=lambda index: nodes[place][index])
        share = percent(held[place], timeline.peak.requested_bytes)
        lines.append(
            f"{format_bytes(held[place])} ({share}) {_node_words(profile.nodes[first], len(nodes[place]) - 1)}"
        )
    return lines


# --- against a baseline -----------------------------------------------------------------------------------------------


def baseline_of(analysis: Analysis) -> PeakBaseline:
    """What a baseline keeps of an analysis."""
    profile, peak = analysis.profile, analysis.peak
    nodes = {profile.nodes[index].name: nbytes for index, nbytes in _alive_by_node(profile, analysis.timeline).items()}
    return PeakBaseline(
        fxmem_version=profile.fxmem_version,
        torch_version=profile.torch_version,
        target=profile.target.name,
        inputs=profile.inputs,
        step=profile.step,
        requested_bytes=peak.requested_bytes,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        phase=peak.phase,
        by_kind=peak.by_kind,
        by_node={name: nbytes for name, nbytes in sorted(nodes.items()) if nbytes * _SMALL >= peak.requested_bytes},
    )


def allowed_growth(tolerance: str | int | float, before: PeakBaseline) -> int:
    """Bytes a peak may grow by: a share of what it was ("1%", 0.01), bytes or "64MiB"; 0 for none.

    Raises:
        UsageError: it cannot be understood.
    """
    if tolerance in (0, "0", "0%"):
        return 0
    try:
        allowed = parse_budget(tolerance)
    except UsageError as error:
        raise UsageError(
            f"expected a tolerance as a share of the peak (1%, 0.01), as bytes or with a unit (64MiB), got "
            f"{tolerance!r}"
        ) from error
    return allowed.resolve(before.counted_bytes).nbytes


def growth(before: PeakBaseline, analysis: Analysis, allowed: int) -> str:
    """How a peak has grown beyond a baseline and what grew, in some lines; empty if it has not."""
    now = baseline_of(analysis)
    more = now.counted_bytes - before.counted_bytes
    if more <= allowed:
        return ""
    was, measure = before.counted_bytes, _measure(now.allocated_bytes)
    limit = "no growth is allowed" if not allowed else f"{format_bytes(allowed)} is allowed"
    lines = [
        f"the peak grew by {format_bytes(more)} ({percent(more, was)}); {limit}",
        f"  was {exact_bytes(was)} {measure}, in {before.phase}",
        (
            f"  is  {exact_bytes(now.counted_bytes)} {measure}, in "
            f"{now.phase}{f', while {analysis.peak.node} runs' if analysis.peak.node else ''}"
        ),
    ]
    lines += [
        f"  the {what} is not the same: was {old}, is {new}" for what, old, new in _settings(before, now) if old != new
    ]
    kinds = {kind: now.by_kind.get(kind, 0) - before.by_kind.get(kind, 0) for kind in Kind}
    lines += _table(
        "by kind",
        [
            (delta, to_words(kind), before.by_kind.get(kind, 0), now.by_kind.get(kind, 0))
            for kind, delta in kinds.items()
        ],
    )
    known = {node.name: node for node in analysis.profile.nodes}
    nodes = [
        (nbytes - before.by_node.get(name, 0), name, before.by_node.get(name, 0), nbytes)
        for name, nbytes in now.by_node.items()
    ]
    lines += _table("by node", [(delta, _node_words(known[name]), old, new) for delta, name, old, new in nodes])
    return printable_lines(lines)


def load_baseline(path: Path) -> Baseline:
    """The baseline in a file; an empty one if there is no file.

    Raises:
        UsageError: it cannot be read, or is no baseline.
    """
    advice = "delete it and run pytest --fxmem-update"
    expected = "expected a baseline written by fxmem"
    if not path.exists():
        return Baseline(peaks={})
    try:
        baseline = json_reader.record(
            Baseline, json_reader.parsed(json_reader.read(path, expected), path, expected), path, expected
        )
    except UsageError as error:
        raise UsageError(f"{error}; {advice}") from error
    if baseline.schema_version != BASELINE_SCHEMA_VERSION:
        expected = f"expected a baseline of schema version {BASELINE_SCHEMA_VERSION!r}"
        raise UsageError(f"{expected}, got {baseline.schema_version[:20]!r} in {str(path)!r}; {advice}")
    return baseline


def printable_lines(lines: list[str]) -> str:
    """The lines as one text, with names of the model's own made harmless for a terminal."""
    return "\n".join(printable(line) for line in lines)


def _settings(before: PeakBaseline, now: PeakBaseline) -> list[tuple[str, str, str]]:
    """What a comparison presumes to be the same, in words."""
    return [
        ("input", _inputs(before.inputs), _inputs(now.inputs)),
        ("step", str(before.step), str(now.step)),
        ("target", before.target, now.target),
        ("torch version", before.torch_version, now.torch_version),
        ("fxmem version", before.fxmem_version, now.fxmem_version),
    ]


def _inputs(inputs: tuple[InputTensor, ...]) -> str:
    return "; ".join(f"{each.name} {format_shape(each.shape)} {each.dtype}" for each in inputs)


def _table(title: str, rows: list[tuple[int, str, int, int]]) -> list[str]:
    """What grew, most first; each row is the growth, what, before and now."""
    grown = sorted((row for row in rows if row[0] > 0), key=lambda row: -row[0])
    if not grown:
        return []
    more = [f"    and {len(grown) - _GROWN} more"] if len(grown) > _GROWN else []
    lines = [
        f"    +{format_bytes(delta):<9} {format_bytes(old):>9} -> {format_bytes(new):<9}  {what}"
        for delta, what, old, new in grown[:_GROWN]
    ]
    return [f"  what grew {title} (requested bytes at the peak):", *lines, *more]


def _alive_by_node(profile: Profile, timeline: Timeline) -> Mapping[int, int]:
    """Requested bytes alive at the peak by the node they came from; what came from none is left out."""
    held: defaultdict[int, int] = defaultdict(int)
    for index in timeline.alive:
        storage = profile.storages[index]
        if storage.node is not None:
            held[storage.node] += storage.nbytes
    return held


def _node_words(node: Node, others: int = 0) -> str:
    """Where a node stands, what it is, the line of code it comes from, and how many more come from there."""
    details = [node.module_type] if node.op == "call_module" and node.module_type else []
    if node.source is not None:
        details.append(f"{node.source.file}:{node.source.line}" + (f": {node.source.code}" if node.source.code else ""))
    known = f" ({', '.join(details)})" if details else ""
    return f"{describe(node)}{f' and {others} more' if others else ''}{known}"


def _measure(allocated_bytes: int | None) -> str:
    return "requested" if allocated_bytes is None else "allocated"
