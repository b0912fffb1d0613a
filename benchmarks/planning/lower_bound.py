"""A 0-1 program whose least cost bounds every checkpoint plan within a budget. Every such plan is a solution of it, and
costs no less.

For each node of the model: is it in an (outermost) region, and does that region go on to the next node; for each
product, is its result kept from the region's first run. From these follow

- *cost*: the FLOPs of every region's first recomputation, up to the last tensor that its nodes keep for backward (early
  stop), without products whose results are kept. What regions within regions cost beyond that is left out;
- *bytes kept through forward*: a storage that a node outside all regions keeps for backward, and one that a region
  reads and another part of the step has made, from the node that needs it until that node's backward; a product's
  result that is kept, from there on until forward ends (in backward it may be gone: its region hands it out once);
- *bytes at a moment*: at one tick of each node's forward and one of its backward, what is kept, what the unplanned step
  has there that no plan can take away (parameters, gradients, workspaces, outputs, what the node itself is working on),
  and nothing else.

Everything that is not counted (what recomputation itself allocates, what the rest of a region keeps meanwhile, deeper
levels, the allocator's rounding) could only add to bytes or to FLOPs. So a real plan of a given peak is a solution for
any budget not below that peak, whatever regions it nests, and no plan costs less than the program's least cost.

The variables for what is kept are MOCCASIN's retention intervals (Bartan et al. 2023, arXiv:2304.14463) with their ends
at the nodes that need the storage. A second interval of a storage is not a variable, as there, but a region that is run
again: MOCCASIN's bound on how often a tensor is computed would make this no bound for plans that nest more deeply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from fxmem.hardware.op_classes import is_product
from fxmem.planning.lookups import Bools, Ints, group, ops_by_node, results_by_op
from fxmem.planning.regions.candidates import module_spans
from fxmem.planning.regions.cost_tables import CostTables
from fxmem.records.profile import Kind, Phase, Profile
from fxmem.records.units import Application

_SMALL_STORAGES: Final = 1000
"""Storages that together are less than this part of the budget are not counted. Chosen, not measured: a program of
fewer variables, and a bound hardly lower."""
_MOMENTS: Final = 1200
"""Moments that are counted at most: those with most bytes alive without a plan. Chosen, not measured."""
_OF_THE_ENGINE = frozenset({"aten.sum.dim_IntList", "aten._to_copy.default"})
"""Operators with which the autograd engine brings a gradient to the shape and dtype of what it is the gradient of."""


@dataclass(frozen=True)
class Load:
    """Bytes at a moment."""

    held: tuple[tuple[int, int], ...]
    """Bytes, and the variable that says whether they are there."""
    room: int
    """Bytes that the budget leaves for them."""


@dataclass
class Relaxation:
    """A 0-1 program. A literal is a variable's number plus one, negative for its opposite."""

    variables: int = 0
    clauses: list[tuple[int, ...]] = field(default_factory=list)
    """Of each, at least one literal is true."""
    sums: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    """Variables of which as many are 1 as the last one says."""
    loads: list[Load] = field(default_factory=list)
    costs: list[tuple[int, int]] = field(default_factory=list)
    """FLOPs, and the variable that causes them."""
    short: int = 0
    """Bytes by which the budget is too small for any plan."""

    def variable(self) -> int:
        """One more; its literal."""
        self.variables += 1
        return self.variables


def relax(profile: Profile, budget_bytes: int, application: Application) -> Relaxation:
    """Build the program for plans with a peak of at most so many requested bytes.

    Args:
        profile: of the unplanned step.
        application: MODULES: outermost regions are calls of modules, or of consecutive children of an `nn.Sequential`.
            GRAPH: any nodes.
    """
    return _Builder(profile, budget_bytes, application).build()


@dataclass(frozen=True)
class _Moment:
    """A tick of the unplanned step, and what must be there in any planned one."""

    node: int
    backward: bool
    nbytes: int
    unplanned: int
    """Bytes without a plan."""
    there: Bools
    """Of the storages that are counted one by one: whether they are among those bytes."""


class _Builder:
    def __init__(self, profile: Profile, budget_bytes: int, application: Application) -> None:
        self.profile, self.budget, self.application = profile, budget_bytes, application
        self.units = CostTables(profile, [])
        self.nodes = range(self.units.first, self.units.last)
        self.program = Relaxation()

    def build(self) -> Relaxation:
        """The whole program."""
        program = self.program
        self.inside = {node: program.variable() for node in self.nodes}
        self.joined = {node: program.variable() for node in self.nodes}  # to the node before it, in one region
        self.whole = {node: program.variable() for node in self.nodes}  # not up to its last saved tensor only
        self._add_regions()
        self.kept: dict[int, int] = {}  # by storage, whether it is a product's result that is kept
        self._add_costs()
        held = dict(self._find_retained())
        moments = sorted(self._moments(), key=lambda moment: -moment.unplanned)
        program.short = max(0, *(moment.nbytes - self.budget for moment in moments)) if moments else 0
        for moment in moments[:_MOMENTS]:
            load = self._load(moment, held)
            if sum(nbytes for nbytes, _ in load.held) > load.room:
                program.loads.append(load)
        return program

    # --- the unplanned step -------------------------------------------------------------------------------------------

    @cached_property
    def _ops(self) -> dict[Phase, dict[int, list[int]]]:
        return {phase: ops_by_node(self.profile, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}

    @cached_property
    def _counted_storages(self) -> list[int]:
        """Storages that forward makes and a plan may drop, except the smallest."""
        profile = self.profile
        forward = (op for ops in self._ops[Phase.FORWARD].values() for op in ops)
        results = (index for op in forward for index in self._results.get(op, ()))
        made = [
            i for i in results if profile.storages[i].node in self.nodes and profile.storages[i].kind is not Kind.OUTPUT
        ]
        made.sort(key=lambda index: (profile.storages[index].nbytes, index))
        self._droppable = made
        small = np.cumsum([profile.storages[index].nbytes for index in made]) <= self.budget // _SMALL_STORAGES
        return sorted(index for index, tiny in zip(made, small, strict=True) if not tiny)

    @cached_property
    def _results(self) -> dict[int, list[int]]:
        """By op, the storages it makes."""
        return results_by_op(self.profile)

    def _columns(self, storages: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Birth, death and bytes of storages."""
        made = [self.profile.storages[index] for index in storages]
        birth, death, nbytes = np.asarray([(s.birth, s.death, s.nbytes) for s in made], np.int64).reshape(-1, 3).T
        return birth, death, nbytes

    @cached_property
    def _keepers(self) -> dict[int, list[int]]:
        """By storage, the nodes that keep it for a backward that runs, ascending."""
        keepers = [node for node in self.nodes if node in self._ops[Phase.BACKWARD]]
        return group((storage, node) for node in keepers for storage in set(self.profile.nodes[node].saved))

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """By storage, the nodes that read it, ascending."""
        return {storage: [n for n in found if n in self.nodes] for storage, found in self.units.readers.items()}

    def _keeps(self, node: int) -> bool:
        return bool(self.profile.nodes[node].saved) and node in self._ops[Phase.BACKWARD]

    # --- regions and what they cost -----------------------------------------------------------------------------------

    def _add_regions(self) -> None:
        add = self.program.clauses.append
        for node in self.nodes:
            add((-self.joined[node], self.inside[node]))
            add((-self.joined[node], self.inside[node - 1]) if node > self.nodes.start else (-self.joined[node],))
        for node in self.nodes:
            earliest = int(self.units.earliest[node])
            if earliest < 0:
                add((-self.inside[node],))
                continue
            for between in range(max(earliest, self.nodes.start) + 1, node + 1):
                add((-self.inside[node], self.joined[between]))
        if self.application is Application.MODULES:
            self._add_spans()

    def _add_spans(self) -> None:
        over: dict[int, list[int]] = defaultdict(list)
        across: dict[int, list[int]] = defaultdict(list)
        for first, last in sorted({(span.first, span.last) for span in module_spans(self.profile)}):
            chosen = self.program.variable()
            for node in range(first, last):
                over[node].append(chosen)
                if node > first:
                    across[node].append(chosen)
        self.program.sums += [(tuple(over[node]), self.inside[node]) for node in self.nodes]
        self.program.sums += [(tuple(across[node]), self.joined[node]) for node in self.nodes]

    def _add_costs(self) -> None:
        program, ops, storages = self.program, self.profile.ops, self.profile.storages
        for node in self.nodes:
            forward = self._ops[Phase.FORWARD].get(node, [])
            own = [storages[storage].op for storage in self.profile.nodes[node].saved] if self._keeps(node) else []
            last = max((op for op in own if op is not None and op in forward), default=-1)
            for op in forward:
                flops, run_again = ops[op].flops or 0, self.inside[node] if op <= last else self.whole[node]
                if flops:
                    is_kept = is_product(ops[op].name)
                    program.costs.append((flops, self._run_unless_kept(op, run_again) if is_kept else run_again))
        for before, node in pairwise(self.nodes):
            reached = (self.whole[before], -self.joined[node])
            program.clauses.append(reached if self._keeps(node) else (*reached, -self.whole[node]))

    def _run_unless_kept(self, product: int, run_again: int) -> int:
        """Whether a product runs again: if its node does, and its result is not kept."""
        runs, keeps = self.program.variable(), self.program.variable()
        self.program.clauses.append((-run_again, keeps, runs))
        self.kept.update(dict.fromkeys(self._results.get(product, ()), keeps))
        return runs

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _find_retained(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Yield each storage with the nodes that may retain it, ascending. Each node has two variables: whether that
        node or one before it retains the storage through backward; through forward."""
        program = self.program
        for storage in self._counted_storages:
            maker = self.profile.storages[storage].node
            assert maker is not None
            reasons: dict[int, list[tuple[int, ...]]] = defaultdict(list)
            for node in self._keepers.get(storage, ()):
                reasons[node].append((self.inside[node],))
            for node in self._readers.get(storage, ()):
                holder = next((later for later in range(node, self.nodes.stop) if self._keeps(later)), None)
                if node > maker and holder is not None:
                    # Its region keeps what it reads for as long as one of its nodes has a backward to come.
                    same = (-self.inside[node], *(-self.joined[between] for between in range(node + 1, holder + 1)))
                    reasons[holder] += [(*same, self.joined[border]) for border in range(maker + 1, node + 1)]
            held: list[tuple[int, int, int]] = []
            kept = self.kept.get(storage)
            if kept is not None and min(reasons, default=self.nodes.stop) > maker:
                never = program.variable()
                program.clauses.append((-never,))
                held.append((maker, never, kept))
            for node in sorted(reasons):
                variable = program.variable()
                program.clauses += [(*reason, variable) for reason in reasons[node]]
                if held:
                    program.clauses.append((-held[-1][1], variable))
                through = variable
                if kept is not None:
                    through = program.variable()
                    program.clauses += [(-variable, through), (-kept, through)]
                held.append((node, variable, through))
            if held:
                yield storage, held

    def _load(self, moment: _Moment, held: dict[int, list[tuple[int, int, int]]]) -> Load:
        terms = []
        for storage, there in zip(self._counted_storages, moment.there, strict=True):
            if there:
                continue
            for node, variable, through in reversed(held.get(storage, ())):
                if node < moment.node or (moment.backward and node == moment.node):
                    terms.append((self.profile.storages[storage].nbytes, variable if moment.backward else through))
                    break
        return Load(tuple(terms), self.budget - moment.nbytes)

    def _moments(self) -> Iterator[_Moment]:
        """Of each node's forward and backward, the tick with most bytes beyond any plan."""
        counted = self._counted_storages
        live = self.units.live.astype(np.int64)
        births, deaths, sizes = self._columns(counted)
        made, freed, nbytes = self._columns(self._droppable)

        def most(node: int, phase: Phase, ops: Iterable[int], needed: Bools, until: Ints) -> Iterator[_Moment]:
            found = []
            for tick in (tick for op in ops for tick in self._ticks(op)):
                there = needed & (births <= tick) & (tick < np.minimum(deaths, until))
                fixed = int(live[tick]) - int(nbytes[(made <= tick) & (tick < freed)].sum())
                total = fixed + int(sizes[there].sum())
                found.append(_Moment(node, phase is Phase.BACKWARD, total, int(live[tick]), there))
            if found:
                yield max(found, key=lambda moment: moment.nbytes)

        read_until, every = self._read_until(), np.ones(len(counted), dtype=bool)
        makers = np.asarray([self.profile.storages[index].op for index in counted], dtype=np.int64)
        for node in self.nodes:
            for op in self._ops[Phase.FORWARD].get(node, ()):
                yield from most(node, Phase.FORWARD, [op], every, np.where(makers == op, deaths, read_until))
            needed = np.isin(counted, self._find_needed(node))
            yield from most(node, Phase.BACKWARD, self._backward_ops(node), needed, deaths)

    def _ticks(self, op: int) -> range:
        return range(max(self.profile.ops[op].begin - 1, 0), self.profile.ops[op].end)

    def _read_until(self) -> Ints:
        """By counted storage, the tick until which forward is sure to need it: its last reader is to come, or is one
        operator and runs."""
        ops, forward = self.profile.ops, self._ops[Phase.FORWARD]
        until = np.zeros(len(self._counted_storages), dtype=np.int64)
        for at, storage in enumerate(self._counted_storages):
            for node in self._readers.get(storage, ()):
                ran = forward.get(node)
                if ran:
                    until[at] = max(until[at], ops[ran[0]].end if len(ran) == 1 else ops[ran[0]].begin)
        return until

    def _single(self, node: int) -> bool:
        return len(self._ops[Phase.FORWARD].get(node, ())) == 1

    def _find_needed(self, node: int) -> list[int]:
        """What a node keeps and its backward at `_backward_ops` is sure to have: what nothing keeps longer, and all it
        keeps if it is one operator."""
        saved = self.profile.nodes[node].saved
        return [storage for storage in saved if self._keepers.get(storage, [node])[0] == node or self._single(node)]

    def _backward_ops(self, node: int) -> list[int]:
        """Ops of a node's backward that run while all that it kept is certainly alive.

        Up to the first release of something that no other node keeps; where the node is several operators, the last of
        those ops alone: the others may belong to an operator that kept nothing. What the engine does to a gradient
        afterwards is left out: recomputed tensors are gone by then.
        """
        backward, profile = self._ops[Phase.BACKWARD].get(node, []), self.profile
        own = [profile.storages[s].death for s in profile.nodes[node].saved if self._keepers.get(s, [None])[0] == node]
        if not own:
            return backward[:1] if self._keeps(node) and self._single(node) else []
        before = [op for op in backward if profile.ops[op].begin < min(own)]
        while before and profile.ops[before[-1]].name in _OF_THE_ENGINE:
            before.pop()
        return before if self._single(node) else before[-1:]
