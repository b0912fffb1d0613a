"""Where regions may begin and end: modules, slices of `nn.Sequential`, and cuts of a graph."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxmem.planning import tuning
from fxmem.planning.lookups import Bools, Ints
from fxmem.records.profile import Node, Phase, Profile, SourceLine
from fxmem.records.units import group

_NORMS = ("batch_norm", "group_norm", "instance_norm")


@dataclass(frozen=True)
class Span:
    """Nodes that are exactly one call of a module or of consecutive Sequential children."""

    first: int
    last: int
    modules: tuple[str, ...]
    source: SourceLine | None
    """The line that makes the call."""


def module_spans(profile: Profile) -> tuple[Span, ...]:
    """Every module that is called once, and slices of Sequentials. A module called again and again is left out: it is
    checkpointed in all its calls or none. Calls that evaluate do not count: nothing is checkpointed there."""
    calls = [Span(call.first_node, call.last_node, (call.module,), call.source) for call in profile.calls]
    leaves = ((index, node) for index, node in enumerate(profile.nodes) if node.op == "call_module")
    calls += [Span(index, index + 1, (node.module,), node.source) for index, node in leaves]
    evaluated = sorted({op.node for op in profile.ops if op.phase is Phase.EVALUATION})
    if evaluated:
        calls = [span for span in calls if bisect_left(evaluated, span.first) == bisect_left(evaluated, span.last)]
    times = Counter(span.modules[0] for span in calls)
    single = sorted((span for span in calls if times[span.modules[0]] == 1), key=lambda span: (span.first, -span.last))
    return (*single, *_slices(profile, single))


def _slices(profile: Profile, single: Iterable[Span]) -> Iterable[Span]:
    for parent, spans in group((span.modules[0].rpartition(".")[0], span) for span in single).items():
        if profile.modules.get(parent) != "Sequential":
            continue
        for at in range(len(spans)):
            for end in range(at + 2, min(len(spans), at + tuning.LONGEST_SLICE) + 1):
                slice_ = spans[at:end]
                if any(one.last != other.first for one, other in itertools.pairwise(slice_)):
                    break
                if end - at < len(spans):
                    yield Span(slice_[0].first, slice_[-1].last, tuple(span.modules[0] for span in slice_), None)


def frees(profile: Profile, span: Span, needed: dict[int, int]) -> bool:
    """Whether the span's nodes save something they make that no later node needs."""
    saved = {storage for node in profile.nodes[span.first : span.last] for storage in node.saved}
    made = (profile.storages[storage].node for storage in saved if needed.get(storage, -1) < span.last)
    return any(node is not None and span.first <= node < span.last for node in made)


def graph_cuts(profile: Profile) -> list[int]:
    """After every node that runs something, where there are few; else `worthwhile_cuts`."""
    cuts = sorted({op.node + 1 for op in profile.ops if op.phase is Phase.FORWARD})
    return cuts if len(cuts) <= tuning.MOST_CUTS else worthwhile_cuts(profile)


def worthwhile_cuts(profile: Profile) -> list[int]:
    """Cut after every op with many FLOPs and at the borders of modules. Early stop spares the last op of a region."""
    flops: Counter[int] = Counter()
    for op in profile.ops:
        if op.phase is Phase.FORWARD and op.flops:
            flops[op.node] += op.flops
    most = max(flops.values(), default=0)
    heavy = {node + 1: count for node, count in flops.items() if count * 1000 >= most}
    cuts = heavy.keys() | {cut for call in profile.calls for cut in (call.first_node, call.last_node)}
    return sorted(cuts if len(cuts) <= tuning.MOST_CUTS else _heaviest(heavy, tuning.MOST_CUTS))


def _heaviest(weights: Mapping[int, int], most: int) -> list[int]:
    """Select so many of the heaviest keys; of the lightest weight among them, keys at equal distances: a deep model's
    layers all weigh the same."""
    if len(weights) <= most:
        return list(weights)
    least = sorted(weights.values(), reverse=True)[most - 1]
    above = [key for key, weight in weights.items() if weight > least]
    ties = sorted(key for key, weight in weights.items() if weight == least)
    room = most - len(above)
    return [*above, *(ties[index * len(ties) // room] for index in range(room))]


def limit_spans(spans: Mapping[tuple[int, int], Span]) -> dict[tuple[int, int], Span]:
    """The spans that a planner's tables have room for.

    Whole levels of modules, the outermost first; of the first level that does not fit, spans at equal distances.
    """
    levels = group((span.modules[0].count("."), nodes) for nodes, span in spans.items())
    kept: dict[tuple[int, int], Span] = {}
    cuts: set[int] = set()
    for level in sorted(levels):
        within = sorted(levels[level])
        room = min((tuning.MOST_MODULE_CUTS - len(cuts)) // 2, len(within))
        whole = len(cuts.union(*within)) <= tuning.MOST_MODULE_CUTS
        chosen = within if whole else [within[index * len(within) // room] for index in range(room)]
        kept |= {each: spans[each] for each in chosen}
        cuts.update(*chosen)
        if not whole:
            break
    return kept


def norm_runs(profile: Profile) -> list[tuple[int, int]]:
    """Find the half-open ranges of nodes from a norm up to the next norm's convolution. A concatenation before the norm
    belongs to it."""
    forward = (op for op in profile.ops if op.phase is Phase.FORWARD)
    does = group((op.node, op.name.split(".")[1] if "." in op.name else op.name) for op in forward)
    norm, found = None, []
    for node in range(len(profile.nodes)):
        names = does.get(node, ())
        if any(norm_op in name for name in names for norm_op in _NORMS):
            norm = node - 1 if set(does.get(node - 1, ())) == {"cat"} and norm != node - 1 else node
        elif norm is not None and "convolution" in names:
            found.append((norm, node + 1))
            norm = None
    return found


def siblings(profile: Profile, spans: Iterable[Span]) -> tuple[Span, ...]:
    """Find the chain of sibling modules that saves most for backward: the blocks of the model."""
    chains = group((span.modules[0].rpartition(".")[0], span) for span in spans if len(span.modules) == 1)

    def worth(chain: list[Span]) -> tuple[int, int]:
        kept = sum(profile.nodes[node].saved_bytes for span in chain for node in range(span.first, span.last))
        return (kept if len(chain) > 1 else 0), len(chain)

    return tuple(sorted(chains.values(), key=worth)[-1]) if chains else ()


# --- what of a step may be run twice, and what of it is random --------------------------------------------------------


_NEVER_AGAIN = ("nonzero", "unique", "masked_select", "_local_scalar_dense", "item", "repeat_interleave", "bincount")
"""Operators whose result's shape depends on the data, which may not be the same the second time."""
_RANDOM = tuple(
    """
    dropout bernoulli rand normal uniform multinomial rrelu poisson exponential scaled_dot_product attention
    """.split()
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch norms, which the code that applies a plan sees to it are updated once."""


def earliest(profile: Profile, readers: Mapping[int, Sequence[int]]) -> Ints:
    """By node: the first node that a region around it may begin with at the latest; -1 for a node that no region may
    contain.

    Args:
        profile: of an unplanned step.
        readers: by storage, the nodes that read it.
    """
    low = np.arange(len(profile.nodes))
    names = group((op.node, op.name) for op in profile.ops if op.phase is Phase.FORWARD)
    writers: dict[int, list[int]] = {}
    for index, node in enumerate(profile.nodes):
        own = names.get(index, [])
        if any(name.startswith(("c10d", "_c10d")) or name.split(".")[1] in _NEVER_AGAIN for name in own if "." in name):
            low[index] = -1
        owner = node.view_of
        if owner is not None and any(map(writes_in_place, own)) and not _is_statistic(profile.nodes[owner]):
            low[index] = -1 if profile.nodes[owner].op in ("placeholder", "get_attr") else min(low[index], owner)
            writers.setdefault(owner, []).append(index)
    for owner, written in writers.items():
        storages = {output.storage for output in profile.nodes[owner].outputs}
        for index in (node for storage in storages if storage is not None for node in readers.get(storage, ())):
            if owner < index < max(written) and low[index] >= 0:
                low[index] = min(low[index], owner)
    for region in profile.recomputed:
        low[region.first_node : region.last_node] = -1
    return low


def random_nodes(profile: Profile) -> Bools:
    """By node: whether its forward may draw random numbers."""
    may = np.asarray(["Drop" in node.module_type for node in profile.nodes], dtype=bool)
    for op in profile.ops:
        if op.phase is Phase.FORWARD and any(word in op.name for word in _RANDOM):
            may[op.node] = True
    return may


def writes_in_place(name: str) -> bool:
    """Whether an operator, by its qualified overload, writes to its first argument."""
    return name.count(".") > 0 and name.split(".")[1].endswith("_")


def _is_statistic(node: Node) -> bool:
    return node.op == "get_attr" and node.target.rpartition(".")[2] in _STATISTICS
