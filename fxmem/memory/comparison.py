"""What grew from one step to another: two models, two settings of one, or two saved reports.

Modules and calls are matched by path and name, as `fxmem.memory.module_match` says: a layer inserted between two others
is one addition. Every byte and every FLOP of a node is in one row of `nodes`, in the row of its module, and in those of
the modules around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fxmem.memory import liveness
from fxmem.memory.accepted_steps import HasReport
from fxmem.memory.figures import Figures, Flops, bytes_at_peak, sum_figures
from fxmem.memory.module_match import Pair, find_modules, first_shape, match_modules, match_nodes
from fxmem.memory.module_tree import describe, preorder
from fxmem.records.comparison import ComparedStep, ModuleChange, NodeChange, QuantityChange, StepComparison
from fxmem.records.profile import Kind, Phase, Profile, Report, Timeline


def compare(a: Profile | HasReport, b: Profile | HasReport) -> StepComparison:
    """Compare two steps: what grew from `a` to `b`.

    Each is an `Analysis`, a report, or a profile (of which the requested bytes alone are known)."""
    before, after = _Step(a), _Step(b)
    merged = match_modules(before.root, after.root)
    ours, theirs = before.peak, after.peak
    processes = ours.process_bytes, theirs.process_bytes
    kinds = [kind for kind in Kind if kind in {*before.timeline.peak.by_kind, *after.timeline.peak.by_kind}]
    phases = [phase for phase in Phase if phase in {*before.phases, *after.phases}]
    nodes = match_nodes(merged, before.profile.nodes, after.profile.nodes)
    flops = [sum_figures(node for node in step.profile.nodes if node.op != "optimizer") for step in (before, after)]
    return StepComparison(
        before=before.side(),
        after=after.side(),
        requested_bytes=_change(ours.requested_bytes, theirs.requested_bytes),
        allocated_bytes=_change(ours.allocated_bytes, theirs.allocated_bytes),
        reserved_bytes=_change(ours.reserved_bytes, theirs.reserved_bytes),
        process_bytes=_change(*(None if each is None else each.high for each in processes)),
        by_kind={kind: _change(ours.by_kind.get(kind, 0), theirs.by_kind.get(kind, 0)) for kind in kinds},
        phases={phase: _change(before.phases.get(phase), after.phases.get(phase)) for phase in phases},
        saved_bytes=_change(before.profile.saved_bytes, after.profile.saved_bytes),
        params_bytes=_change(before.params, after.params),
        forward_flops=_change(*(_known(figures.forward) for figures in flops)),
        backward_flops=_change(*(_known(figures.backward) for figures in flops)),
        flops_unknown=_change(*(figures.forward.unknown_calls + figures.backward.unknown_calls for figures in flops)),
        modules=tuple(_module_changes(merged, before, after)),
        nodes=tuple(_node_change(one, other, before, after) for one, other in sorted(nodes, key=_order)),
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
        self.root = find_modules(self.profile)

    def side(self) -> ComparedStep:
        profile = self.profile
        op = self.peak.op
        return ComparedStep(
            **profile.heading(),
            peak_phase=self.peak.phase,
            peak_node="" if op is None else describe(profile.nodes[profile.ops[op].node]),
        )

    def figures(self, nodes: Iterable[int]) -> Figures:
        """The sum over nodes."""
        indices = list(nodes)
        return sum_figures((self.profile.nodes[i] for i in indices), (self.at_peak[i] for i in indices))


def _change(before: int | None, after: int | None) -> QuantityChange:
    return QuantityChange(before=before, after=after)


def _known(flops: Flops) -> int | None:
    """The sum; None where nothing of it has a formula, which is not 0."""
    return None if flops.unknown_calls and not flops.known else flops.known


# --- changes ----------------------------------------------------------------------------------------------------------


def _module_changes(pair: Pair, before: _Step, after: _Step) -> Iterator[ModuleChange]:
    def sums(pair: Pair, below: list[_PairSums]) -> _PairSums:
        ours = sum((each.before for each in below), before.figures(() if pair.before is None else pair.before.nodes))
        theirs = sum((each.after for each in below), after.figures(() if pair.after is None else pair.after.nodes))
        return _PairSums(pair, ours, theirs)

    for each in preorder(pair, lambda pair: pair.children, sums):
        ours, theirs = each.pair.before, each.pair.after
        yield ModuleChange(
            before_path=None if ours is None else ours.path,
            after_path=None if theirs is None else theirs.path,
            before_type="" if ours is None else ours.type,
            after_type="" if theirs is None else theirs.type,
            depth=each.pair.depth,
            **_changes(each.before, each.after),
        )


class _PairSums(NamedTuple):
    pair: Pair
    before: Figures
    after: Figures


def _order(match: tuple[int | None, int | None]) -> tuple[bool, int, int]:
    """As nodes run after, removed ones last."""
    return match[1] is None, match[1] or 0, match[0] or 0


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
        **_changes(before.figures(() if one is None else [one]), after.figures(() if other is None else [other])),
    )


def _changes(ours: Figures, theirs: Figures) -> dict[str, QuantityChange]:
    found = {
        name: _change(getattr(ours, name), getattr(theirs, name))
        for name in ("at_peak", "saved", "params", "output", "scratch")
    }
    return {
        **found,
        "forward_flops": _change(_known(ours.forward), _known(theirs.forward)),
        "backward_flops": _change(_known(ours.backward), _known(theirs.backward)),
    }
