"""Which meshes of so many cards a training step fits, the cheapest communication first.

What is shown was analysed whole. What is not tried was ruled out by a lower bound: the peak is the largest of sums that
grow linearly with blocks and with sequences, so that a line through two and three blocks, and through one and two
sequences, is never above it. The same lines give the bytes that each mesh would send, by which it has its turn.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from torch import nn

from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.catalogue import PER_MACHINE, bytes_per_second
from fxmem.hardware.context import room_bytes
from fxmem.memory.figures import find_dtypes
from fxmem.records.fits import FITS_WORDS, NONE, Fits, Point, Settings, Space
from fxmem.records.parts import RankGroup
from fxmem.records.profile import Assumption, Kind, Profile, Target
from fxmem.records.units import format_bytes
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.ranks import Mesh, MeshPlan, check_offload, find_blocks
from fxmem.simulation.step.analysis import build_module, read_request
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif.fits import Measuring
from fxmem.whatif.source import ModelSource

# --- what two and three blocks of a model say of all meshes -----------------------------------------------------------
# Lower bounds of peaks, and the bytes that they send.


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
    short = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    parent, _, name = lists[0][0].rpartition(".")
    kept = short.get_submodule(lists[0][0])[:blocks]  # type: ignore[index]  # a list of modules
    setattr(short.get_submodule(parent), name, kept)
    return short


# --- which meshes of so many cards a training step fits, the cheapest communication first -----------------------------


SHOWN = 3
"""Meshes that fit and are looked for, unless more are asked for."""
_MOST_ANALYSES: Final = 12
"""Whole analyses before the search ends."""
_STATE: Final = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
"""What is there whatever the mesh and the batch."""
_CARDS: Final = re.compile(r"(?:(\d+)x)?(.+)")
_MOST_CARDS: Final = 1024
"""Where the search for a number of cards ends."""


class _NoMesh(AnalysisError):
    """A lower bound rules out every mesh of so many cards."""


def shard(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    cards: str,
    batch: int,
    shown: int = SHOWN,
    reshard_after_forward: bool | None = None,
    offload: str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Fits:
    """Find the meshes of FSDP2, tensor parallel and replicas that fit.

    Args:
        model: as for `fxmem.analyze`.
        inputs: as for `fxmem.analyze`; their batch is resized to what a rank takes at a time.
        cards: how many of which card, e.g. "64xh100", or a target of your own after the x; "h100" alone is the fewest
            of 1, 2, 4, ... that it fits.
        batch: sequences (images, ...) of one optimizer step on all cards. A rank's share is split into micro-batches
            where it does not fit at once.
        shown: how many meshes that fit to look for, the cheapest communication first.
        reshard_after_forward, offload: as for `fxmem.analyze`.
        progress: called with a few words on each analysis.
        options: further ones of `fxmem.analyze`: `loss`, `optimizer`, `precision`, ...

    Raises:
        UsageError: cards or a batch that cannot be understood, or that no mesh divides.
        AnalysisError: the model cannot be analysed.
    """
    check_offload(offload)
    tell = progress or (lambda _: None)
    count, target = read_cards(cards)
    request = read_request(inputs, target=target, **options)
    plan = MeshPlan(Mesh(fsdp=2), reshard_after_forward, offload is not None)
    return find_meshes(build_module(model, tell), request, count, batch, plan, shown=shown, progress=tell)


def read_cards(cards: str) -> tuple[int | None, Target]:
    """How many of which card `64xh100` means; None: as few as fit.

    Raises:
        UsageError: it has another form, or the card's memory is not known.
    """
    match = _CARDS.fullmatch(cards) if isinstance(cards, str) else None
    if match is None or match[1] == "0":
        raise UsageError(f"expected cards as COUNTxCARD, e.g. 64xh100, or CARD for as few as fit, got {cards!r}")
    target = catalogue.target(match[2])
    if target.memory_bytes is None:
        raise UsageError(f"expected cards whose memory is known, got {match[2]!r}")
    return None if match[1] is None else int(match[1]), target


def find_meshes(
    model: nn.Module,
    request: StepRequest,
    count: int | None,
    batch: int,
    plan: MeshPlan,
    *,
    shown: int = SHOWN,
    progress: Callable[[str], None] = lambda _: None,
) -> Fits:
    """`shard` for a step on `count` cards, None for as few as fit; `plan` has the settings of FSDP."""
    if batch < 1 or shown < 1:
        raise UsageError(f"expected a batch and a number of meshes of at least 1, got {batch} and {shown}")
    source = ModelSource(model, request, sharding=plan)

    def find(cards: int) -> Fits:
        return _Search(source, cards, batch, progress).find(shown)

    return find(count) if count is not None else _find_fewest(find)


def _find_fewest(find: Callable[[int], Fits]) -> Fits:
    """The meshes of the fewest cards that the step fits."""
    found: Fits | _NoMesh | None = None
    count = 1
    while count <= _MOST_CARDS and not (isinstance(found, Fits) and found.fitting):
        try:
            found = find(count)
        except _NoMesh as error:
            found = error
        except UsageError:  # more cards than there are sequences for
            if found is None:
                raise
            break
        count *= 2
    if not isinstance(found, Fits):
        assert found is not None
        raise found
    fewer = f"; it does not fit {found.space.ranks // 2}" if found.space.ranks > 1 else ""
    note = Assumption(topic="cards", text=f"as few of 1, 2, 4, ... cards as it fits{fewer}")
    return found.model_copy(update={"assumptions": (note, *found.assumptions)}) if found.fitting else found


def _rank(fit: Point) -> tuple[bool, float, int]:
    return not fit.fits, fit.link_seconds or 0.0, fit.moved_bytes


# --- the search -------------------------------------------------------------------------------------------------------


class _Search:
    """Analyses of one model on so many cards.

    Args:
        source: of the model's step on one card.
        count: how many cards there are.
        batch: of an optimizer step, on all of them.
        progress: called with a few words on each analysis.
    """

    def __init__(self, source: ModelSource, count: int, batch: int, progress: Callable[[str], None]) -> None:
        self._source, self._count, self._batch, self._tell = source, count, batch, progress
        self._card = source.request.resolved_target
        space = Space(question="meshes", ranks=count, samples=batch)
        self._work, self._room = Measuring(source, space, [self._card]), room_bytes(self._card.among(count)) or 0
        model = source.model
        blocks = len(find_blocks(model))
        shorts = (shorten(model, 2), shorten(model, 3)) if blocks > 3 else (None, None)
        self._shorts = tuple(model if each is None else each for each in shorts)
        self._blocks = 2 if shorts[0] is None else blocks
        """A whole model's lines are read where they begin."""
        self._refused: dict[int, str] = {}
        self._misfits: list[Candidate] = []
        self._above: list[str] = []
        self._analysed: list[tuple[Profile, Point]] = []
        self._ruled_out = 0

    def find(self, shown: int) -> Fits:
        """The meshes that fit, the cheapest first, or those that do not."""
        splits = [tp for tp in divisors(self._count) if self._takes(tp)]
        candidates = list(list_candidates(self._count, self._batch, splits))
        if self._source.sharding.offload:
            candidates = [each for each in candidates if "fsdp" in each.mesh.dimensions]
        if not candidates:
            cards = f"{self._batch} on {self._count} cards"
            raise UsageError(f"expected a batch that ranks can share, got {cards}: no mesh divides it")
        self._run(candidates, shown)
        if not self._analysed:
            raise _NoMesh(f"expected a mesh that may fit; {self._explain_bound(candidates)}")
        best = min(self._analysed, key=lambda each: _rank(each[1]))[0]
        return self._work.record(
            self._analysed[0][0],
            sorted((fit for _, fit in self._analysed), key=_rank),
            ruled_out=self._ruled_out,
            dtypes=find_dtypes(best, _STATE),
            assumptions=tuple(self._assume(best)),
        )

    def _takes(self, tp: int) -> bool:
        """Whether tensor parallel of this size is to be had: in one machine, with a plan whose heads it divides."""
        if tp == 1 or tp > PER_MACHINE:
            return tp == 1
        try:
            list(MeshPlan(Mesh(tp=tp)).describe(self._source.model))
        except UsageError as error:
            self._refused[tp] = str(error)
            return False
        return True

    def _run(self, candidates: list[Candidate], shown: int) -> None:
        """Analyse the cheapest, until so many fit."""
        fitting: set[Mesh] = set()
        seconds = {each: self._estimate(each) for each in candidates}
        for one in sorted(candidates, key=lambda each: (seconds[each], -each.mesh.fsdp, each.micro)):
            if len(fitting) == shown or len(self._analysed) == _MOST_ANALYSES:
                return
            if one.mesh in fitting:
                continue  # in smaller micro-batches, which send more
            if self._sketch(one.mesh.tp).bound(one, self._blocks) > self._room or self._is_above_a_misfit(one):
                self._ruled_out += 1
                continue
            if self._analyse_whole(one).fits:
                fitting.add(one.mesh)
            else:
                self._misfits.append(one)

    def _is_above_a_misfit(self, one: Candidate) -> bool:
        return any(
            one.mesh.tp == each.mesh.tp and one.mesh.fsdp <= each.mesh.fsdp and one.micro >= each.micro
            for each in self._misfits
        )

    def _analyse_whole(self, one: Candidate) -> Point:
        analysis = self._analyse(self._source.model, one)
        ranks = analysis.profile.step.ranks
        moved = [(ranks.groups[each.group], each.moved_bytes) for each in ranks.collectives] if ranks else []
        seconds = [self._link_seconds(group, nbytes) for group, nbytes in moved]
        of_mesh = {
            "host_bytes": ranks.host_bytes if ranks else 0,
            "moved_bytes": one.accumulate * sum(nbytes for _, nbytes in moved),
            "link_seconds": None if None in seconds else one.accumulate * sum(each or 0.0 for each in seconds),
        }
        fit = self._work.judge(self._settings(one), analysis).model_copy(update=of_mesh)
        self._analysed.append((analysis.profile, fit))
        if self._sketch(one.mesh.tp).bound(one, self._blocks) > (fit.requested_bytes or 0):
            self._above.append(str(one))
        self._tell(f"{one}: {format_bytes(fit.counted_bytes)}, {FITS_WORDS[fit.fits]}")
        return fit

    def _settings(self, one: Candidate) -> Settings:
        mesh = NONE if one.mesh.size == 1 else str(one.mesh)
        return self._source.at(self._card, size=one.micro, mesh=mesh, accumulate=one.accumulate)

    def _analyse(self, model: nn.Module, one: Candidate) -> ProfiledStep:
        self._work.analyses += 1
        return self._source.run(self._settings(one), self._card, model)

    @functools.cache  # noqa: B019 - a search lives no longer than its sketches
    def _sketch(self, tp: int) -> Sketch:
        mesh = Mesh(fsdp=self._count // tp, tp=tp)
        self._tell(f"what tp={tp} takes, by two and three blocks")
        models = list(dict.fromkeys(self._shorts))
        analyses = [[self._analyse(model, Candidate(mesh, micro, 1)) for model in models] for micro in (1, 2)]

        def line(figure: Callable[[ProfiledStep], int]) -> Line:
            one, two = ([figure(each) for each in row] for row in analyses)
            return Line((one[0], one[-1]), (two[0], two[-1]))

        def moved(name: str, *kinds: str) -> Line:
            whole = mesh.fsdp / max(mesh.fsdp - 1, 1) if name == "fsdp" else 1
            return line(lambda each: int(sum_moved(each.profile, mesh, name, kinds) * whole))

        return Sketch(
            mesh.fsdp,
            line(lambda each: each.peak.requested_bytes),
            line(lambda each: sum_state(each.profile)),
            moved("fsdp", "all-gather"),
            moved("fsdp", "reduce-scatter"),
            moved("tp", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast"),
        )

    def _estimate(self, one: Candidate) -> float:
        """Seconds, or bytes where rates are not known, by which a candidate has its turn."""
        sketch, mesh = self._sketch(one.mesh.tp), one.mesh
        gathered, reduced = (each.extrapolate(self._blocks, 1) for each in (sketch.gathered, sketch.reduced))
        share = (mesh.fsdp - 1) / mesh.fsdp
        copies = 2 * reduced / mesh.fsdp * (mesh.replicate - 1) / mesh.replicate
        parts = (
            (RankGroup(name="fsdp", size=mesh.fsdp, spread=mesh.tp), (gathered + reduced) * share),
            (RankGroup(name="replicate", size=mesh.replicate, spread=mesh.tp * mesh.fsdp), copies),
            (RankGroup(name="tp", size=mesh.tp), sketch.split.extrapolate(self._blocks, one.micro)),
        )
        times = [(self._link_seconds(group, nbytes), nbytes) for group, nbytes in parts]
        return one.accumulate * sum(nbytes if time is None else time for time, nbytes in times)

    def _link_seconds(self, group: RankGroup, nbytes: float) -> float | None:
        rate = bytes_per_second(self._card, group)
        return None if rate is None else nbytes / rate

    def _explain_bound(self, candidates: Iterable[Candidate]) -> str:
        """The least that any mesh needs, where all are ruled out."""
        needs = {each: self._sketch(each.mesh.tp).bound(each, self._blocks) for each in candidates}
        least = min(needs, key=lambda each: needs[each])
        return (
            f"{least} needs at least {format_bytes(needs[least])} of {format_bytes(self._room)}, the others more. "
            f"Use more cards, --offload cpu, a smaller optimizer (--optimizer), shorter sequences, or --precision bf16"
        )

    def _assume(self, best: Profile) -> Iterator[Assumption]:
        """What was taken for granted, of the cheapest."""
        yield from (each for each in best.assumptions if each.topic == "model")
        yield from best.missing_loss
        yield Assumption(topic="ranks", text="each is of rank 0, whose shards are the largest")
        yield Assumption(
            topic="links",
            text="each micro-batch gathers and reduces anew; times are those of the links alone, one after the other, "
            "and how much kernels hide of them is not claimed",
        )
        if self._blocks > 2:
            how = f"of {self._blocks} blocks, two and three were analysed to order and to rule out meshes"
            proof = "for all that was analysed whole, the bound was no more than the peak"
            if self._above:
                proof = f"it was above the peak of {'; '.join(self._above)}: something that was ruled out may fit"
            yield Assumption(topic="blocks", text=f"{how}; {proof}")
        for tp, why in self._refused.items():
            yield Assumption(topic="ranks", text=f"no tp={tp}: {why}")
