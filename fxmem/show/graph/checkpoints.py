"""What is checkpointed in a step, as ranges of nodes to draw a frame around."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxmem.errors import UsageError
from fxmem.hardware.op_classes import is_product
from fxmem.memory.figures import sum_figures
from fxmem.records.plan import Plan, Region
from fxmem.records.profile import Phase, Profile, Timeline
from fxmem.records.units import Application, format_bytes, format_flops
from fxmem.show.plan_facts import check_same_step


@dataclass(frozen=True)
class Checkpoint:
    """Nodes `[first_node, last_node)`, which run again in backward."""

    first_node: int
    last_node: int
    region: Region | None
    """As planned; None where the program itself checkpoints."""
    extra_flops: int | None
    """FLOPs of running it once more: of a plan's as planned, of the program's own all of its forward, which is the most
    it can be. None: unknown."""
    level: int = 0
    """How many others are around it."""

    @property
    def freed_bytes(self) -> int | None:
        """What is no longer kept for backward. None for the program's own: the profile does not have what it would
        keep otherwise."""
        return None if self.region is None else self.region.freed_bytes

    @property
    def results(self) -> tuple[int, int, int]:
        """How many results of its operators are kept, are recomputed one by one, and wait in the host's memory."""
        region = self.region
        return (0, 0, 0) if region is None else (len(region.keeps), len(region.remakes), len(region.offloads))

    @property
    def likeness(self) -> Hashable:
        """Equal for those that free and cost the same."""
        return (self.region is None, self.freed_bytes, self.extra_flops, self.results)


_RESULTS = ("keeps {} result{} of products", "recomputes {} saved result{}", "offloads {} saved result{}")
"""What is said of each number in `Checkpoint.results`."""


def checkpoints(profile: Profile, plan: Plan | None = None) -> tuple[Checkpoint, ...]:
    """What is checkpointed, in the order of the run, outer before inner. It is the plan's regions, and the program's
    own that cross none of these.

    Raises:
        UsageError: the plan is not for this profile, or its regions overlap.
    """
    planned = [] if plan is None else _find_planned(profile, plan)
    found = list(planned)
    for region in profile.recomputed:
        first, last = region.first_node, region.last_node
        forward = sum_figures(profile.nodes[first:last]).forward
        own = Checkpoint(first, last, None, None if forward.unknown_calls else forward.known)
        if first < last and not any(_overlaps_partly(own, other) for other in planned):
            found.append(own)
    return tuple(_nest(found))


def find_recomputed(profile: Profile, plan: Plan | None = None) -> frozenset[int]:
    """Nodes of which backward runs anything again, in the plan or in the program itself.

    Of a region those are all whose results it does not keep; of single operators, those whose results are recomputed.
    """
    numbers: Counter[str] = Counter()
    ran: dict[tuple[str, int], int] = {}
    for op in profile.ops:
        ran[op.name, numbers[op.name]] = op.node
        numbers[op.name] += 1
    found = {node for each in profile.recomputed for node in range(each.first_node, each.last_node)}
    for region in () if plan is None else plan.regions:
        inside = range(region.first_node, region.last_node)
        if region.remakes or region.offloads:
            sent = {(each.operator, each.number) for each in region.offloads}
            names = set(region.nodes) - {profile.nodes[ran[call]].name for call in sent & ran.keys()}
            found |= {node for node in inside if profile.nodes[node].name in names}
            continue
        forward = (op for op in profile.ops if op.phase is Phase.FORWARD and op.node in inside and is_product(op.name))
        found |= set(inside) - {op.node for number, op in enumerate(forward) if number in region.keeps}
    return frozenset(found)


def apply_plan(profile: Profile, timeline: Timeline, plan: Plan) -> tuple[Profile, Timeline]:
    """The nodes and the peak of a step as they are with a plan; as they are without, where it was not analysed."""
    peak, planned = plan.after, plan.planned
    if planned is None or len(planned.saved_bytes) != len(profile.nodes):
        return profile, timeline
    each = zip(profile.nodes, planned.saved_bytes, strict=True)
    nodes = tuple(node.model_copy(update={"saved_bytes": saved}) for node, saved in each)
    ran = (index for index, op in enumerate(profile.ops) if (nodes[op.node].name, op.phase) == (peak.node, peak.phase))
    op = next(ran, None)
    peak = peak.model_copy(update={"op": op, "tick": 0 if op is None else profile.ops[op].begin})
    return profile.model_copy(update={"nodes": nodes}), timeline.model_copy(update={"peak": peak})


def describe_effect(found: Sequence[tuple[Checkpoint, int]], *, each: int = 1) -> str:
    """What checkpoints free and cost, in words.

    Args:
        found: checkpoints, and how often each is there.
        each: how many equal groups of these there are; what they free is then given for one and for all.
    """
    planned = [(checkpoint, times) for checkpoint, times in found if checkpoint.region is not None]
    own = [(checkpoint, times) for checkpoint, times in found if checkpoint.region is None]
    of_each = " each" if each > 1 else ""
    parts = []
    if planned:
        freed = sum_freed(planned)
        together = f", {format_bytes(freed * each)} together" if each > 1 else ""
        parts.append(f"frees {format_bytes(freed)}{of_each}{together}; runs {_flops(planned)} again{of_each}")
        for place, words in enumerate(_RESULTS):
            count = sum(checkpoint.results[place] * times for checkpoint, times in planned)
            parts += [words.format(count, "s" if count > 1 else "") + of_each] if count else []
    if own:
        parts.append(f"in the program itself; runs at most {_flops(own)} again{of_each}")
    return "; ".join(parts)


def sum_freed(found: Sequence[tuple[Checkpoint, int]]) -> int:
    """Bytes that checkpoints, each so often there, free: the outermost, as an inner one frees what it does while the
    outer one runs again."""
    outermost = min((checkpoint.level for checkpoint, _ in found), default=0)
    return sum((each.freed_bytes or 0) * times for each, times in found if each.level == outermost)


def _flops(found: Iterable[tuple[Checkpoint, int]]) -> str:
    total = 0
    for checkpoint, times in found:
        if checkpoint.extra_flops is None:
            return "an unknown number of FLOPs"
        total += checkpoint.extra_flops * times
    return f"{format_flops(total)} FLOPs"


def _find_planned(profile: Profile, plan: Plan) -> list[Checkpoint]:
    check_same_step(plan, profile)
    if plan.application is Application.OPERATORS:
        return []  # its regions are parts of the model in which single results are recomputed
    found = [Checkpoint(each.first_node, each.last_node, each, each.extra_flops) for each in plan.all_regions()]
    if any(each.first_node >= each.last_node for each in found) or len(list(_nest(found))) < len(found):
        raise UsageError(
            "expected a plan whose regions hold nodes and lie apart or within each other; "
            "this one contradicts itself: plan it anew"
        )
    return found


def _overlaps_partly(one: Checkpoint, other: Checkpoint) -> bool:
    first, second = sorted(((one.first_node, one.last_node), (other.first_node, other.last_node)))
    return first[0] < second[0] < first[1] < second[1]


def _nest(found: Sequence[Checkpoint]) -> Iterator[Checkpoint]:
    """In order, with their levels; of two that cross, the one that begins first. Of equal ones the planned is the
    outer."""
    around: list[Checkpoint] = []
    for each in sorted(found, key=lambda each: (each.first_node, -each.last_node, each.region is None)):
        while around and around[-1].last_node <= each.first_node:
            around.pop()
        if around and each.last_node > around[-1].last_node:
            continue
        around.append(replace(each, level=len(around)))
        yield around[-1]
