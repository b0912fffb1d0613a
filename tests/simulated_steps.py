"""What a step does under a plan, event after event: an account of memory and work that shares nothing with
`fxmem.planning`.

A *pass* is one run of a stretch of the forward: the step's own forward is the first, and each region adds one, its
recomputation. Every pass allocates what its ops allocated in the unplanned step, in the same order. What it makes
lives, in that pass, until

- the last call of the pass that reads it has run, or, where the unplanned step shows it, until the program itself let
  go of it;
- the backward of the first node that keeps it and is in no region of the pass has run;
- the backward of the last region of the pass that takes it as an input has run: a checkpoint holds its inputs.

A region is recomputed just before the first backward op of those of its nodes that keep something, and stops after the
op that makes the last tensor to be kept; a region within it that comes last is not reached, because a checkpoint keeps
its inputs before it runs. A product whose result a region keeps (`Region.keeps`, of outermost regions without others in
them) does not run in its recomputation; its result stays from the first run to where it would have gone in the second.
Everything else (parameters, gradients, workspaces, the optimizer) is where the unplanned profile has it.

Not modelled: how long the program's own variables hold a tensor that autograd kept anyway in the unplanned step, and
random states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from fxmem.records.plan import Region
from fxmem.records.profile import Kind, Phase, Profile


@dataclass(frozen=True)
class _Life:
    """A storage in one pass: from an event of the axis to another."""

    storage: int
    birth: tuple[int, int, int]
    death: tuple[int, int, int]


@dataclass(frozen=True)
class _Pass:
    """A run of nodes `first` to `last - 1` up to and including op `stop`; `at` is the tick it is inserted before, None
    for the forward."""

    first: int
    last: int
    inner: tuple[Region, ...]
    ops: tuple[int, ...]
    at: int | None
    order: int
    """Among passes inserted at one tick, outer ones come first."""
    kept: frozenset[int] = frozenset()
    """Ops whose results are there from the first run."""


class Simulator:
    """Plays plans of one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._known: dict[tuple[object, ...], list[_Life]] = {}

    def simulate(self, regions: Iterable[Region]) -> tuple[int, int]:
        """Peak in bytes and FLOPs run again, of the step with these regions checkpointed. Operators without a formula
        count as 0 FLOPs.

        Args:
            regions: not overlapping; of each only its nodes and the regions within it matter.
        """
        regions = tuple(sorted(regions, key=lambda region: region.first_node))
        passes = [
            _Pass(0, len(self.profile.nodes), regions, tuple(self._forward), None, 0),
            *self._recomputations(regions, 0),
        ]
        found = [(one, life) for one in passes for life in self._lives_once(one)]
        lives = [life for one, life in found if self.profile.storages[life.storage].op not in one.kept]
        again_at = {
            life.storage: life.death for one, life in found if self.profile.storages[life.storage].op in one.kept
        }
        lives = [
            _Life(life.storage, life.birth, max(life.death, again_at.get(life.storage, life.death))) for life in lives
        ]
        lives += [
            _Life(index, (s.birth, 1, 0), (s.death, 1, 0))
            for index, s in enumerate(self.profile.storages)
            if index not in self._made
        ]
        again = [self.profile.ops[op].flops for one in passes[1:] for op in one.ops if op not in one.kept]
        return self._peak(lives), sum(flops or 0 for flops in again)

    # --- the unplanned step -------------------------------------------------------------------------------------------

    @cached_property
    def _forward(self) -> list[int]:
        return [index for index, op in enumerate(self.profile.ops) if op.phase is Phase.FORWARD]

    @cached_property
    def _made(self) -> set[int]:
        """Storages that ops of the forward make."""
        ops = self.profile.ops
        return {
            index
            for index, s in enumerate(self.profile.storages)
            if s.op is not None and ops[s.op].phase is Phase.FORWARD
        }

    @cached_property
    def _by_op(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for index in sorted(self._made):
            op = self.profile.storages[index].op
            assert op is not None
            found[op].append(index)
        return found

    @cached_property
    def _ops_of(self) -> dict[Phase, dict[int, list[int]]]:
        """By phase and node, its ops."""
        found: dict[Phase, dict[int, list[int]]] = {phase: defaultdict(list) for phase in Phase}
        for index, op in enumerate(self.profile.ops):
            found[op.phase][op.node].append(index)
        return found

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """By storage, the nodes that read it, ascending."""
        nodes = self.profile.nodes
        found: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            for storage in {
                output.storage
                for source in node.inputs
                for output in nodes[source].outputs
                if output.storage is not None
            }:
                found[storage].append(index)
        return found

    @cached_property
    def _keepers(self) -> dict[int, list[int]]:
        """By storage, the nodes that keep it for backward, ascending."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(self.profile.nodes):
            for storage in set(node.saved):
                found[storage].append(index)
        return found

    def _after(self, op: int) -> int:
        """Tick by which what an op no longer needs is gone: the beginning of the next."""
        return self.profile.ops[op + 1].begin if op + 1 < len(self.profile.ops) else self.profile.ticks

    def _released(self, first: int, last: int) -> int | None:
        """Tick by which the backward of nodes `first` to `last - 1` has let go of what they keep; None if they have
        none."""
        ran = [ops[-1] for node in range(first, last) if (ops := self._ops_of[Phase.BACKWARD].get(node))]
        return self._after(max(ran)) if ran else None

    # --- passes -------------------------------------------------------------------------------------------------------

    def _recomputations(self, regions: Sequence[Region], depth: int) -> Iterable[_Pass]:
        for region in regions:
            first, last = region.first_node, region.last_node
            ops = [op for node in range(first, last) for op in self._ops_of[Phase.FORWARD].get(node, ())]
            at = self._begins_again(first, last)
            if at is not None:
                stop = self._stop(region)
                products = [op for op in ops if self.profile.ops[op].name.split(".")[1] in ("mm", "addmm", "bmm")]
                kept = frozenset(products[number] for number in region.keeps)
                yield _Pass(first, last, region.regions, tuple(op for op in ops if op < stop), at, depth, kept)
                yield from self._recomputations(region.regions, depth + 1)

    def _begins_again(self, first: int, last: int) -> int | None:
        """Tick of the first backward op of those nodes that keep something."""
        backward = self._ops_of[Phase.BACKWARD]
        begins = [
            backward[node][0] for node in range(first, last) if self.profile.nodes[node].saved and node in backward
        ]
        return self.profile.ops[min(begins)].begin if begins else None

    def _stop(self, region: Region) -> int:
        """The first op that the recomputation of a region does not run."""
        stop, forward = 0, self._ops_of[Phase.FORWARD]
        within = {node for inner in region.regions for node in range(inner.first_node, inner.last_node)}
        for inner in region.regions:
            begins = [forward[node][0] for node in range(inner.first_node, inner.last_node) if node in forward]
            stop = max(stop, min(begins, default=0))
        for node in range(region.first_node, region.last_node):
            if node not in within and self.profile.nodes[node].saved and node in forward:
                stop = max(stop, _first_not_run(self.profile, node, forward[node]))
        return stop

    def _lives_once(self, one: _Pass) -> list[_Life]:
        """The same for passes that make the same: of regions within them only the borders matter."""
        key = (
            one.first,
            one.last,
            tuple((region.first_node, region.last_node) for region in one.inner),
            one.ops,
            one.at,
            one.order,
        )
        if key not in self._known:
            self._known[key] = list(self._lives(one))
        return self._known[key]

    def _lives(self, one: _Pass) -> Iterable[_Life]:
        """What a pass makes, and how long it is there."""
        if not one.ops:
            return
        ops, storages = self.profile.ops, self.profile.storages
        region_of = {
            node: index for index, region in enumerate(one.inner) for node in range(region.first_node, region.last_node)
        }
        freed_with = [self._released(region.first_node, region.last_node) for region in one.inner]
        end = self.profile.ticks if one.at is None else ops[one.ops[-1]].end

        def here(tick: int) -> tuple[int, int, int]:
            """A tick of the forward, on the axis."""
            return (tick, 1, 0) if one.at is None else (one.at, 0, (one.order << 40) + tick)

        for op in one.ops:
            for index in self._by_op.get(op, ()):
                storage, node = storages[index], ops[op].node
                readers = [r for r in self._readers.get(index, ()) if one.first <= r < one.last]
                keepers = self._keepers.get(index, [])
                flow, held = self._flow_end(index, readers, one.at is None)
                until = [(held, 1, 0)] if held is not None else []
                own = [k for k in keepers if one.first <= k < one.last and k not in region_of]
                if own:
                    released = self._released(own[0], own[0] + 1)
                    known = own[0] == keepers[0] or released is None or storage.death <= released
                    until.append((storage.death, 1, 0) if known or released is None else (released, -1, 0))
                for region in {
                    region_of[r] for r in readers if r in region_of and region_of[r] != region_of.get(node, -1)
                }:
                    until.append((freed_with[region] or 0, -1, 0))
                flows = here(flow if one.at is None else min(flow, end))
                yield _Life(index, here(storage.birth), max([flows, *until]))

    def _flow_end(self, index: int, readers: Sequence[int], top: bool) -> tuple[int, int | None]:
        """Tick of the forward until which calls need a storage, and the tick until which something but autograd holds
        it, if that is so."""
        storage = self.profile.storages[index]
        keepers = self._keepers.get(index)
        forward = self._ops_of[Phase.FORWARD]
        assert storage.op is not None
        if not keepers:
            return storage.death, None
        ran = [forward[reader][-1] for reader in readers if reader in forward]
        flow = max([self._after(storage.op), *(self._after(op) for op in ran)])
        released = self._released(keepers[0], keepers[0] + 1)
        held = top and (released is None or storage.death > released or storage.kind is Kind.OUTPUT)
        return flow, storage.death if held else None

    # --- the axis -----------------------------------------------------------------------------------------------------

    # --- the axis -----------------------------------------------------------------------------------------------------

    def _peak(self, lives: Sequence[_Life]) -> int:
        change: dict[tuple[int, int, int], int] = defaultdict(int)
        for life in lives:
            if life.birth < life.death:
                change[life.birth] += self.profile.storages[life.storage].nbytes
                change[life.death] -= self.profile.storages[life.storage].nbytes
        axis = sorted(change)
        live = accumulate(change[at] for at in axis)
        return max((amount for amount, at in zip(live, axis, strict=True) if at[0] < self.profile.ticks), default=0)


def _first_not_run(profile: Profile, node: int, forward: Sequence[int]) -> int:
    """Of a node that keeps something, the first of its forward ops that does not run again if the node is the last to
    do so; one past them if all do.

    Args:
        forward: indices of the node's forward ops, ascending; at least one.
    """
    ops, of = profile.ops, profile.nodes[node]
    if (
        of.view_of is not None
        and _in_place(ops[forward[-1]].name)
        and {output.storage for output in of.outputs} & set(of.saved)
    ):
        return forward[-1] + 1  # it keeps what it has written
    makers = (profile.storages[storage].op for storage in of.saved)
    last = max((op for op in makers if op is not None and forward[0] <= op <= forward[-1]), default=None)
    if last is None:
        return forward[0]
    after = last + 1
    # A mask of dropout is allocated empty, then filled in place.
    while _is_empty(ops[last].name) and after <= forward[-1] and _in_place(ops[after].name):
        after += 1
    return after


def _in_place(name: str) -> bool:
    """Whether an operator, by its qualified overload, writes to its first argument."""
    parts = name.split(".")
    return len(parts) > 1 and parts[1].endswith("_") and not parts[1].endswith("__")


def _is_empty(name: str) -> bool:
    """Whether an operator allocates without writing."""
    parts = name.split(".")
    return len(parts) > 1 and "empty" in parts[1]
