"""Sums over nodes, and the node that each byte of the peak belongs to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from fxmem.records.profile import Kind, ModuleCall, Node, Peak, Profile, Report, SourceLine, Storage, Timeline
from fxmem.records.units import package_path, to_words

_RUN_NOTHING: Final = frozenset({"placeholder", "get_attr", "output"})


@dataclass(frozen=True)
class Flops:
    """A sum of FLOPs, and how many calls in it have no formula."""

    known: int = 0
    unknown_calls: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.known + other.known, self.unknown_calls + other.unknown_calls)


@dataclass(frozen=True)
class Figures:
    """What some nodes amount to; in bytes, but for the FLOPs.

    `scratch` and `live` are the largest of the nodes', because nodes run one after another; all others are sums.
    """

    params: int = 0
    """Of parameters and buffers."""
    buffers: int = 0
    output: int = 0
    saved: int = 0
    at_peak: int = 0
    """Of the bytes alive at the peak, those the nodes brought."""
    scratch: int = 0
    live: int = 0
    forward: Flops = Flops()
    backward: Flops = Flops()

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            params=self.params + other.params,
            buffers=self.buffers + other.buffers,
            output=self.output + other.output,
            saved=self.saved + other.saved,
            at_peak=self.at_peak + other.at_peak,
            scratch=max(self.scratch, other.scratch),
            live=max(self.live, other.live),
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
        )

    @property
    def largest(self) -> int:
        """The largest byte count of the nodes' own; `live` counts other nodes' bytes, too."""
        return max(self.params, self.output, self.saved, self.at_peak, self.scratch)


NO_FIGURES = Figures()


def sum_figures(nodes: Iterable[Node], at_peak: Iterable[int] = ()) -> Figures:
    """Sum over nodes; `at_peak` are their bytes at the peak, as from `bytes_at_peak`."""
    nodes = tuple(nodes)
    return Figures(
        params=sum(node.params_bytes for node in nodes),
        buffers=sum(node.buffers_bytes for node in nodes),
        output=sum(node.output_bytes for node in nodes),
        saved=sum(node.saved_bytes for node in nodes),
        at_peak=sum(at_peak),
        scratch=max((node.scratch_bytes.max for node in nodes), default=0),
        live=max((node.live_bytes.max for node in nodes), default=0),
        forward=sum_flops(node.forward_flops for node in nodes if node.op not in _RUN_NOTHING),
        backward=sum_flops(node.backward_flops for node in nodes if node.live_bytes.backward is not None),
    )


def sum_flops(counts: Iterable[int | None]) -> Flops:
    """Sum the counts of calls that ran; None is an unknown one."""
    counts = tuple(counts)
    return Flops(sum(filter(None, counts)), counts.count(None))


def owners_at_peak(profile: Profile, timeline: Timeline) -> Iterator[tuple[Storage, int | None]]:
    """Each storage alive at the peak, and the node it counts for.

    Optimizer state, which is there before any op, counts for the optimizer.
    """
    optimizer = next((index for index, node in enumerate(profile.nodes) if node.op == "optimizer"), None)
    for storage in (profile.storages[index] for index in timeline.alive):
        yield storage, optimizer if storage.node is None and storage.kind is Kind.OPTIMIZER_STATE else storage.node


def bytes_at_peak(profile: Profile, timeline: Timeline) -> list[int]:
    """For each node, of the bytes alive at the peak, those it brought."""
    nbytes = [0] * len(profile.nodes)
    for storage, owner in owners_at_peak(profile, timeline):
        if owner is not None:
            nbytes[owner] += storage.nbytes
    return nbytes


def find_module(profile: Profile, storage: Storage) -> str | None:
    """The module that a parameter, a buffer or a gradient belongs to by its name; None for what has another owner."""
    if storage.kind not in (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT) or not storage.name:
        return None
    path = storage.name.removesuffix(".grad").rpartition(".")[0]
    # What lies in no module of a program is a variable of its own.
    return path if path in profile.modules and (path or profile.step.program is None) else None


@dataclass(frozen=True)
class Holding:
    """What lies at the peak with one owner that is neither a node nor a module: a variable, a library."""

    owner: str
    """What the program calls it; empty where that is not known. Untrusted text."""
    kind: Kind
    nbytes: int
    tensors: int

    @property
    def label(self) -> str:
        """The owner and how many tensors it has; of no owner, their kind. Untrusted text."""
        name = self.owner or to_words(self.kind)
        is_told = self.kind is Kind.WORKSPACE or name == f"{self.tensors} others"
        return f"{name}, {self.tensors} tensors" if self.tensors > 1 and not is_told else name

    @property
    def note(self) -> str:
        """The kind, where the owner does not say it; that the owner is not known."""
        if not self.owner:
            return "of no node"
        return "" if self.owner.endswith(to_words(self.kind)) else to_words(self.kind)


def holdings_at_peak(profile: Profile, timeline: Timeline) -> list[Holding]:
    """What the peak has beside its nodes and modules, by owner and kind, the largest first.

    Elements of a list and entries of a dictionary belong to it. Owners of less than a hundredth of the peak are one,
    kind by kind, where there are several.
    """
    found: dict[tuple[str, Kind], list[int]] = {}
    for storage, node in owners_at_peak(profile, timeline):
        if node is None and find_module(profile, storage) is None:
            cut = "," if storage.kind is Kind.WORKSPACE else "["
            found.setdefault((storage.title.partition(cut)[0], storage.kind), []).append(storage.nbytes)
    worth = timeline.peak.requested_bytes // 100
    small = Counter(kind for (_, kind), sizes in found.items() if sum(sizes) < worth)
    holdings: dict[tuple[str, Kind], Holding] = {}
    for (owner, kind), sizes in found.items():
        if sum(sizes) < worth and small[kind] > 1:
            owner = f"{small[kind]} others" if owner else owner
        before = holdings.get((owner, kind), Holding(owner, kind, 0, 0))
        holdings[owner, kind] = Holding(owner, kind, before.nbytes + sum(sizes), before.tensors + len(sizes))
    return sorted(holdings.values(), key=lambda each: -each.nbytes)


def alive_by_node(profile: Profile, timeline: Timeline) -> dict[int, int]:
    """Requested bytes alive at the peak, by the node that allocated them; those of no node are left out."""
    nbytes: dict[int, int] = {}
    for storage in (profile.storages[index] for index in timeline.alive):
        if storage.node is not None:
            nbytes[storage.node] = nbytes.get(storage.node, 0) + storage.nbytes
    return nbytes


def find_dtypes(profile: Profile, kinds: Iterable[Kind]) -> dict[Kind, str]:
    """The dtype that most bytes of each kind have; without the kinds of which there is nothing."""
    sizes: dict[Kind, Counter[str]] = {kind: Counter() for kind in kinds}
    for each in profile.storages:
        if each.kind in sizes and each.dtype:
            sizes[each.kind][each.dtype] += each.nbytes
    return {kind: found.most_common(1)[0][0] for kind, found in sizes.items() if found}


# --- what a function that reads a step accepts: a profile, or anything that carries one -------------------------------


class HasProfile(Protocol):
    """An `fxmem.Analysis`, or anything else that has a profile."""

    @property
    def profile(self) -> Profile:
        """The step."""


class HasReport(Protocol):
    """An `fxmem.Analysis`, or anything else that makes a report."""

    def report(self) -> Report:
        """The step and its peak."""


def read_profile(step: Profile | HasProfile) -> Profile:
    """Return the profile of an `Analysis`, or the given report or profile itself."""
    return step if isinstance(step, Profile) else step.profile


# --- where a program's own code calls what is found: its models, and the lines that a node stands for -----------------


def find_outermost(profile: Profile) -> Iterator[ModuleCall]:
    """Calls of modules within no other, those of a single layer among them."""
    leaves = (
        ModuleCall(
            module=node.target, first_node=index, last_node=index + 1, source=node.source,
            leads_to_gradients=node.leads_to_gradients, lacks_backward=node.lacks_backward,
        )
        for index, node in enumerate(profile.nodes)
        if node.op == "call_module"
    )  # fmt: skip
    end = 0
    for call in sorted((*profile.calls, *leaves), key=lambda each: (each.first_node, -each.last_node)):
        if call.first_node >= end:
            yield call
            end = call.last_node


def list_readers(profile: Profile) -> defaultdict[int, list[int]]:
    """By node, those that read what it makes."""
    readers = defaultdict[int, list[int]](list)
    for index, node in enumerate(profile.nodes):
        for each in node.inputs:
            readers[each].append(index)
    return readers


def name_call(node: Node) -> str:
    """`matmul` of a call of `torch.matmul`, of a tensor's method, or of `@`; of a layer, what kind it is: `dropout`."""
    name = node.module_type.lower() if node.op == "call_module" else node.target.rpartition(".")[2]
    return name.strip("_")


def leads(profile: Profile, index: int) -> bool:
    """Whether a backward goes on through what a node returns: none does through a detached tensor. What a checkpoint is
    around may have run without gradients."""
    within = (each.first_node <= index < each.last_node for each in profile.recomputed)
    return profile.nodes[index].leads_to_gradients or any(within)


def find_place(profile: Profile, node: int | None) -> str:
    """`file:line` of the user's own code that a node runs for, as `find_line`. Empty where none is known."""
    line = None if node is None else find_line(profile, node)
    return "" if line is None else line.place


def find_place_of_peak(profile: Profile, peak: Peak) -> str:
    """`find_place` of the operator at the peak, or the line of what backward calls that runs it."""
    if peak.op is None:
        return ""
    made = (each.made_at for each in profile.storages if each.op == peak.op and each.birth)
    return next(filter(None, made), "") or find_place(profile, profile.ops[peak.op].node)


def find_line(profile: Profile, node: int) -> SourceLine | None:
    """The line of the user's own code that a node runs for: its own line, or that which leads to it where its own is an
    installed package's; that one where no line is the user's. None where none is known."""
    of = profile.nodes[node]
    return choose_line(node, (of.source, of.called_from), profile.calls)


def choose_line(node: int, own: Iterable[SourceLine | None], calls: Iterable[ModuleCall]) -> SourceLine | None:
    """`find_line` of a node with its own line and that which leads to it, among these calls."""
    around = [call for call in calls if call.first_node <= node < call.last_node]
    around.sort(key=lambda each: each.last_node - each.first_node)
    lines = [line for line in (*own, *(each.source for each in around)) if line is not None]
    return next((each for each in lines if package_path(each.file) == each.file), lines[0] if lines else None)
