"""Which module and which call of one step is which of another's.

Modules are matched from the top down. Within two matched modules, children match by name; numbered ones (of a
`Sequential` or a `ModuleList`) by number where both sides have the same classes in the same order, else by the longest
runs of children that are equal throughout (classes and shapes of parameters), what lies between two such runs by class,
then by number. So a layer inserted into a `Sequential` is one addition, not a change of all that follow it. Children
that are left and equal throughout are the same under another name.

Calls match within matched modules: calls of a module with its calls, calls of a function with those of the same name,
in the order they occur; where one side has more, those whose results have equal shapes first.

The longest runs are those of `difflib.SequenceMatcher` (Ratcliff and Metzener, "Pattern Matching: The Gestalt
Approach", Dr. Dobb's Journal, July 1988).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from fxmem.memory.module_tree import Branch, ModuleTree, call_name
from fxmem.records.profile import Kind, Node, Profile


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
