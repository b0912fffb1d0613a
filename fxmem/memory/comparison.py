"""What grew from one step to another: two models, two settings of one, or two saved reports.

Modules and calls are matched by path and name, as `fxmem.memory.matching` says: a layer inserted between two others is
one addition. Every byte and every FLOP of a node is in one row of `nodes`, in the row of its module, and in those of
the modules around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from fxmem.memory import liveness
from fxmem.memory.facts import describe
from fxmem.memory.matching import Pair, first_shape, matched_modules, matched_nodes, module_of
from fxmem.memory.module_tree import Figures, sum_figures
from fxmem.memory.owners import bytes_at_peak
from fxmem.records.profile import Headed, Kind, Phase, Profile, Record, Report, SourceLine, Timeline, Versioned

__all__ = ["Change", "Comparison", "Grown", "HasReport", "ModuleChange", "NodeChange", "Side", "compare"]


class Change(Record):
    """A quantity before and after; None where it is not known, or where that side has no such thing."""

    before: int | None
    after: int | None

    @property
    def delta(self) -> int | None:
        """What it grew by; None if either is not known."""
        return None if self.before is None or self.after is None else self.after - self.before


class Side(Headed):
    """One of the two steps."""

    peak_phase: Phase
    peak_node: str
    """The node that runs at the peak, in words; empty if it comes before the first."""


class Grown(Record):
    """What a module or a node brings, before and after; 0 on a side that does not have it. Bytes unless it says
    FLOPs."""

    at_peak: Change
    """Of what is alive at the step's peak."""
    saved: Change
    """Kept for backward."""
    params: Change
    """Parameters and buffers, each at its first reader."""
    output: Change
    """New memory of results."""
    scratch: Change
    """Most of what lives only inside it."""
    forward_flops: Change
    """Of the operators that have a formula."""
    backward_flops: Change

    @property
    def largest(self) -> int:
        """The largest change in bytes of what it holds, either way."""
        return max(abs(change.delta or 0) for change in (self.at_peak, self.saved, self.params, self.output))


class ModuleChange(Grown):
    """A module, everything below it included."""

    before_path: str | None
    """Its dotted path; empty for the model itself, None if it was added."""
    after_path: str | None
    """None if it was removed."""
    before_type: str
    """Its class."""
    after_type: str
    depth: int
    """Modules above it."""


class NodeChange(Grown):
    """A node of the graph."""

    before_node: str | None
    """Its name; None if it was added."""
    after_node: str | None
    """None if it was removed."""
    where: str
    """Path of the module, or the function and the module that calls it; as it is after, unless it was removed."""
    source: SourceLine | None
    before_shape: tuple[int, ...] | None
    """Of its first result."""
    after_shape: tuple[int, ...] | None


class Comparison(Versioned):
    """Two steps side by side."""

    before: Side
    after: Side
    requested_bytes: Change
    """The peak: what the program asked for and holds."""
    allocated_bytes: Change
    reserved_bytes: Change
    process_bytes: Change
    by_kind: dict[Kind, Change]
    """Splits `requested_bytes`; a kind that neither has is left out, one that one side lacks is 0 there."""
    phases: dict[Phase, Change]
    """Most requested bytes alive in each phase."""
    saved_bytes: Change
    """Kept for backward when forward ends."""
    params_bytes: Change
    """All parameters."""
    forward_flops: Change
    """Of the operators that have a formula, the optimizer's left out."""
    backward_flops: Change
    flops_unknown: Change
    """Nodes with an operator that has none, forward and backward apart."""
    modules: tuple[ModuleChange, ...]
    """A tree in preorder, what was removed after its siblings. The first row is the whole step, loss and optimizer
    included."""
    nodes: tuple[NodeChange, ...]
    """All nodes in the order they run after, removed ones last."""

    def to_json(self, *, indent: int | None = None) -> str:
        """The comparison as JSON."""
        return self.model_dump_json(indent=indent)


class HasReport(Protocol):
    """An `fxmem.Analysis`, or anything else that makes a report."""

    def report(self) -> Report:
        """The step and its peak."""


def compare(a: Profile | HasReport, b: Profile | HasReport) -> Comparison:
    """What grew from `a` to `b`; each an `Analysis`, a report, or a profile (of which the requested bytes alone are
    known)."""
    before, after = _Step(a), _Step(b)
    merged = matched_modules(before.root, after.root)
    kinds = {*before.timeline.peak.by_kind, *after.timeline.peak.by_kind}
    flops = [sum_figures(node for node in step.profile.nodes if node.op != "optimizer") for step in (before, after)]
    return Comparison(
        before=before.side(),
        after=after.side(),
        requested_bytes=_of(before.peak.requested_bytes, after.peak.requested_bytes),
        allocated_bytes=_of(before.peak.allocated_bytes, after.peak.allocated_bytes),
        reserved_bytes=_of(before.peak.reserved_bytes, after.peak.reserved_bytes),
        process_bytes=_of(before.peak.process_bytes, after.peak.process_bytes),
        by_kind={
            kind: _of(before.peak.by_kind.get(kind, 0), after.peak.by_kind.get(kind, 0))
            for kind in Kind
            if kind in kinds
        },
        phases={
            phase: _of(before.phases.get(phase), after.phases.get(phase))
            for phase in Phase
            if phase in {*before.phases, *after.phases}
        },
        saved_bytes=_of(before.profile.saved_bytes, after.profile.saved_bytes),
        params_bytes=_of(before.params, after.params),
        forward_flops=_of(*(figures.forward.known for figures in flops)),
        backward_flops=_of(*(figures.backward.known for figures in flops)),
        flops_unknown=_of(*(figures.forward.unknown_calls + figures.backward.unknown_calls for figures in flops)),
        modules=tuple(_module_changes(merged, before, after)),
        nodes=tuple(_node_changes(merged, before, after)),
    )


# --- a side -----------------------------------------------------------------------------------------------------------


class _Step:
    """A step, read once."""

    def __init__(self, step: Profile | HasReport) -> None:
        self.profile: Profile = step if isinstance(step, Profile) else step.report()
        self.timeline: Timeline = liveness.timeline(self.profile)
        self.peak = self.profile.peak if isinstance(self.profile, Report) else self.timeline.peak
        live = self.timeline.live_bytes
        self.phases: dict[Phase, int] = {}
        for span in self.profile.phases:
            self.phases[span.phase] = max(self.phases.get(span.phase, 0), max(live[span.begin : span.end], default=0))
        self.params = sum(s.nbytes for s in self.profile.storages if s.kind is Kind.PARAMETER and s.birth == 0)
        self.at_peak = bytes_at_peak(self.profile, self.timeline)
        self.root = module_of(self.profile)

    def side(self) -> Side:
        profile = self.profile
        op = self.peak.op
        return Side(
            **profile.heading(),
            peak_phase=self.peak.phase,
            peak_node="" if op is None else describe(profile.nodes[profile.ops[op].node]),
        )

    def figures(self, nodes: Iterable[int]) -> Figures:
        """The sum over nodes."""
        indices = list(nodes)
        return sum_figures(self.profile.nodes[i] for i in indices) + Figures(
            at_peak=sum(self.at_peak[i] for i in indices)
        )


def _of(before: int | None, after: int | None) -> Change:
    return Change(before=before, after=after)


# --- changes ----------------------------------------------------------------------------------------------------------


def _module_changes(pair: Pair, before: _Step, after: _Step) -> Iterator[ModuleChange]:
    rows = _sums(pair, before, after)
    for each, ours, theirs in rows:
        yield ModuleChange(
            before_path=None if each.before is None else each.before.path,
            after_path=None if each.after is None else each.after.path,
            before_type="" if each.before is None else each.before.type,
            after_type="" if each.after is None else each.after.type,
            depth=each.depth,
            **_grown(ours, theirs),
        )


def _sums(pair: Pair, before: _Step, after: _Step) -> list[tuple[Pair, Figures, Figures]]:
    """The pair and those below it, each with its figures on both sides."""
    below = [_sums(child, before, after) for child in pair.children]
    ours = sum((rows[0][1] for rows in below), before.figures(() if pair.before is None else pair.before.nodes))
    theirs = sum((rows[0][2] for rows in below), after.figures(() if pair.after is None else pair.after.nodes))
    return [(pair, ours, theirs), *(row for rows in below for row in rows)]


def _node_changes(pair: Pair, before: _Step, after: _Step) -> list[NodeChange]:
    found = sorted(
        matched_nodes(pair, before.profile.nodes, after.profile.nodes),
        key=lambda match: (match[1] is None, match[1] or 0, match[0] or 0),
    )
    return [_node_change(one, other, before, after) for one, other in found]


def _node_change(one: int | None, other: int | None, before: _Step, after: _Step) -> NodeChange:
    ours = None if one is None else before.profile.nodes[one]
    theirs = None if other is None else after.profile.nodes[other]
    shown = theirs or ours
    assert shown is not None
    return NodeChange(
        before_node=None if ours is None else ours.name,
        after_node=None if theirs is None else theirs.name,
        where=describe(shown),
        source=shown.source,
        before_shape=first_shape(ours),
        after_shape=first_shape(theirs),
        **_grown(before.figures(() if one is None else [one]), after.figures(() if other is None else [other])),
    )


def _grown(ours: Figures, theirs: Figures) -> dict[str, Change]:
    found = {
        name: _of(getattr(ours, name), getattr(theirs, name))
        for name in ("at_peak", "saved", "params", "output", "scratch")
    }
    return {
        **found,
        "forward_flops": _of(ours.forward.known, theirs.forward.known),
        "backward_flops": _of(ours.backward.known, theirs.backward.known),
    }
