"""What two and three blocks of a model say of all meshes: lower bounds of peaks, and the bytes that they send."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator

from torch import nn

from fxmem.records.parts import RankGroup
from fxmem.records.profile import Kind, Profile
from fxmem.simulation.ranks import Mesh, find_blocks

# --- candidates -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, and how a rank splits its share of the batch."""

    mesh: Mesh
    micro: int
    accumulate: int

    def __str__(self) -> str:
        return f"{self.mesh}, {self.accumulate} x {self.micro}"


def list_candidates(count: int, batch: int, splits: Iterable[int]) -> Iterator[Candidate]:
    """The meshes of so many cards, each with the micro-batches that it allows."""
    for tp in splits:
        for fsdp in divisors(count // tp):
            replicate = count // tp // fsdp
            if (replicate > 1 and fsdp == 1 and tp > 1) or batch % (replicate * fsdp):
                continue
            share = batch // (replicate * fsdp)
            for micro in divisors(share):
                yield Candidate(Mesh(replicate=replicate, fsdp=fsdp, tp=tp), micro, share // micro)


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """A figure by blocks and sequences: at two and three blocks of one sequence, and of two."""

    one: tuple[int, int]
    two: tuple[int, int]

    def extrapolate(self, blocks: int, micro: int) -> int:
        """The figure of so many blocks and sequences."""
        one, two = (low + (blocks - 2) * (high - low) for low, high in (self.one, self.two))
        return one + (micro - 1) * max(two - one, 0)


@dataclasses.dataclass(frozen=True)
class Sketch:
    """What small models say of all meshes with one size of tp."""

    fsdp: int
    """Of the mesh that was analysed."""
    peak: Line
    state: Line
    """Parameters and optimizer state."""
    gathered: Line
    """Whole, whatever the number of ranks."""
    reduced: Line
    split: Line
    """What tp sends."""

    def bound(self, one: Candidate, blocks: int) -> int:
        """A lower bound of the peak."""
        state = self.state.extrapolate(blocks, 1)
        return self.peak.extrapolate(blocks, one.micro) + state * self.fsdp // one.mesh.fsdp - state


def sum_state(profile: Profile) -> int:
    """Bytes of parameters and optimizer state."""
    kinds = (Kind.PARAMETER, Kind.OPTIMIZER_STATE)
    return sum(each.nbytes for each in profile.storages if each.kind in kinds and not each.birth)


def sum_moved(profile: Profile, mesh: Mesh, name: str, kinds: Iterable[str]) -> int:
    """Bytes of tensors that collectives of a dimension move, whole."""
    ranks = profile.step.ranks
    total = 0
    for each in ranks.collectives if ranks is not None else ():
        group = ranks.groups[each.group] if ranks is not None else RankGroup(name="", size=1)
        if each.kind in kinds and name == ("tp" if group.spread == 1 and mesh.tp > 1 else "fsdp"):
            total += each.moved_bytes
    return total


def shorten(model: nn.Module, blocks: int) -> nn.Module | None:
    """The model with so many of its repeated blocks, on the same tensors; None where they are in no one list."""
    first = next(iter(find_blocks(model)), None)
    lists = [
        (path, each)
        for path, each in model.named_modules()
        if isinstance(each, (nn.ModuleList, nn.Sequential)) and any(child is first for child in each)
    ]
    if not lists or len({type(child) for child in lists[0][1]}) > 1 or len(find_blocks(model)) != len(lists[0][1]):
        return None
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    short = copy.deepcopy(model, shared)
    parent, _, name = lists[0][0].rpartition(".")
    kept = short.get_submodule(lists[0][0])[:blocks]  # type: ignore[index]  # a list of modules
    setattr(short.get_submodule(parent), name, kept)
    return short
