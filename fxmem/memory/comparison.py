"""What grew from one step to another: two models, two settings of one, or two saved reports.

Modules and calls are matched by path and name, as `fxmem.memory.comparison` says: a layer inserted between two others
is one addition. Every byte and every FLOP of a node is in one row of `nodes`, in the row of its module, and in those of
the modules around it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import NamedTuple

from fxmem.memory import liveness
from fxmem.memory.figures import Figures, Flops, HasReport, bytes_at_peak, sum_figures
from fxmem.memory.module_tree import Branch, ModuleTree, call_name, describe, preorder
from fxmem.records.comparison import ComparedStep, ModuleChange, NodeChange, QuantityChange, StepComparison
from fxmem.records.profile import Kind, Node, Phase, Profile, Report, Timeline

# --- which module and which call of one step is which of another's ----------------------------------------------------
# Modules are matched from the top down. Within two matched modules, children match by name; numbered ones (of a
# `Sequential` or a `ModuleList`) by number where both sides have the same classes in the same order, else by the
# longest runs of children that are equal throughout (classes and shapes of parameters), what lies between two such
# runs by class, then by number. So a layer inserted into a `Sequential` is one addition, not a change of all that
# follow it. Children that are left and equal throughout are the same under another name.
#
# Calls match within matched modules: calls of a module with its calls, calls of a function with those of the same
# name, in the order they occur; where one side has more, those whose results have equal shapes first.
#
# The longest runs are those of `difflib.SequenceMatcher` (Ratcliff and Metzener, "Pattern Matching: The Gestalt
# Approach", Dr. Dobb's Journal, July 1988).


@dataclass
class Pair:
    """A module on both sides, or on one."""

    before: Branch | None
    after: Branch | None
    depth: int
    children: list[Pair] = field(default_factory=list)
    """In the order of the later side, what was removed last."""


def find_modules(profile: Profile) -> Branch:
    """The tree of a profile's modules, with the calls of each and its own code's."""
    tree = ModuleTree(profile)
    for path in profile.modules:
        tree.find(path)
    for index, node in enumerate(profile.nodes):
        tree.find(node.module).nodes.append(index)
    tree.add_parameters()
    return tree.root


def match_modules(before: Branch, after: Branch) -> Pair:
    """Match two models' modules."""
    likeness: dict[int, int] = {}
    known: dict[Hashable, int] = {}
    for root in (before, after):
        _compute_likeness(root, likeness, known)
    return _pair(before, after, 0, likeness)


def _compute_likeness(module: Branch, likeness: dict[int, int], known: dict[Hashable, int]) -> None:
    """Number the modules, by `id`: equal for modules that are equal throughout (classes; names and shapes of
    parameters)."""
    for child in module.children.values():
        _compute_likeness(child, likeness, known)
    owned = (storage for storage in module.storages if storage.kind is Kind.PARAMETER)
    parameters = tuple((storage.name.rpartition(".")[2], storage.shape) for storage in owned)
    below = tuple((child.label, likeness[id(child)]) for child in module.children.values())
    likeness[id(module)] = known.setdefault((module.type, parameters, below), len(known))


def _pair(before: Branch | None, after: Branch | None, depth: int, likeness: Mapping[int, int]) -> Pair:
    ours, theirs = (
        {} if each is None else {child.label: child for child in each.children.values()} for each in (before, after)
    )
    matched = dict(_match_children(ours, theirs, likeness))
    partners = {theirs_name: ours_name for ours_name, theirs_name in matched.items()}
    children = [
        _pair(ours[partners[name]] if name in partners else None, child, depth + 1, likeness)
        for name, child in theirs.items()
    ]
    children += [_pair(child, None, depth + 1, likeness) for name, child in ours.items() if name not in matched]
    return Pair(before, after, depth, children)


def _match_children(
    ours: Mapping[str, Branch], theirs: Mapping[str, Branch], likeness: Mapping[int, int]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of children's names."""
    found = [(name, name) for name in ours if name in theirs and not name.isdecimal()]
    numbered, their_numbered = ([each for each in side.items() if each[0].isdecimal()] for side in (ours, theirs))
    found += _match_numbers(numbered, their_numbered, likeness)
    yield from found
    taken, taken_theirs = {name for name, _ in found}, {name for _, name in found}
    left = [(name, likeness[id(child)]) for name, child in theirs.items() if name not in taken_theirs]
    for name, child in ours.items():
        same = next((place for place in left if place[1] == likeness[id(child)]), None) if name not in taken else None
        if same is not None:
            left.remove(same)
            yield name, same[0]


def _match_numbers(
    ours: Sequence[tuple[str, Branch]], theirs: Sequence[tuple[str, Branch]], likeness: Mapping[int, int]
) -> list[tuple[str, str]]:
    our_types, their_types = [child.type for _, child in ours], [child.type for _, child in theirs]
    if our_types == their_types:
        return [(one, other) for (one, _), (other, _) in zip(ours, theirs, strict=True)]
    pairs: list[tuple[int, int]] = []
    our_likes, their_likes = [likeness[id(child)] for _, child in ours], [likeness[id(child)] for _, child in theirs]
    for one, other in _align(range(len(ours)), range(len(theirs)), our_likes, their_likes, pairs):
        for one_left, other_left in _align(one, other, our_types, their_types, pairs):
            numbers = {theirs[index][0]: index for index in other_left}
            pairs += [(index, numbers[ours[index][0]]) for index in one_left if ours[index][0] in numbers]
    return [(ours[one][0], theirs[other][0]) for one, other in sorted(pairs)]


def _align(
    ours: range,
    theirs: range,
    our_keys: Sequence[Hashable],
    their_keys: Sequence[Hashable],
    pairs: list[tuple[int, int]],
) -> Iterator[tuple[range, range]]:
    """Add the pairs of equal keys to `pairs`; yield what lies between them."""
    compared = our_keys[ours.start : ours.stop], their_keys[theirs.start : theirs.stop]
    matcher = SequenceMatcher(None, *compared, autojunk=False)
    one, other = ours.start, theirs.start
    for block in matcher.get_matching_blocks():
        begin, their_begin = ours.start + block.a, theirs.start + block.b
        if begin > one or their_begin > other:
            yield range(one, begin), range(other, their_begin)
        pairs += [(begin + by, their_begin + by) for by in range(block.size)]
        one, other = begin + block.size, their_begin + block.size


# --- calls ------------------------------------------------------------------------------------------------------------


def match_nodes(pair: Pair, before: Sequence[Node], after: Sequence[Node]) -> Iterator[tuple[int | None, int | None]]:
    """Yield the indices of nodes that are the same, in no order; None on a side that does not have it."""
    ours = _group_by_name(before, pair.before)
    theirs = _group_by_name(after, pair.after)
    for name in dict.fromkeys([*ours, *theirs]):
        yield from _match_calls(ours.get(name, []), theirs.get(name, []), before, after)
    for child in pair.children:
        yield from match_nodes(child, before, after)


def first_shape(node: Node | None) -> tuple[int, ...] | None:
    """Of a node's first result, if there is one."""
    return node.outputs[0].shape if node is not None and node.outputs else None


def _group_by_name(nodes: Sequence[Node], module: Branch | None) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for index in () if module is None else module.nodes:
        node = nodes[index]
        named = node.op in ("call_function", "call_method", "get_attr", "placeholder")
        found.setdefault(("call", call_name(node)) if named else (node.op, ""), []).append(index)
    return found


def _match_calls(
    ours: Sequence[int], theirs: Sequence[int], before: Sequence[Node], after: Sequence[Node]
) -> Iterator[tuple[int | None, int | None]]:
    if len(ours) == len(theirs):
        yield from zip(ours, theirs, strict=True)
        return
    shapes = [first_shape(before[index]) for index in ours], [first_shape(after[index]) for index in theirs]
    pairs: list[tuple[int, int]] = []
    for one, other in _align(range(len(ours)), range(len(theirs)), *shapes, pairs):
        pairs += zip(one, other, strict=False)
    partners = dict(pairs)
    taken = set(partners.values())
    yield from ((ours[one], theirs[partners[one]] if one in partners else None) for one in range(len(ours)))
    yield from ((None, theirs[other]) for other in range(len(theirs)) if other not in taken)


# --- what grew from one step to another: two models, two settings of one, or two saved reports ------------------------


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
            fits=self.peak.fits,
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
