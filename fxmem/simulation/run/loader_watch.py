"""The batches of a program's `DataLoader`: those it has handed out, and the lengths of a whole epoch.

An epoch is read by a second pass over a copy of the loader's sampler, its data set and its `collate_fn`: no model runs,
nothing of the program's own pass is used up, and random states are as they were. The copy and the random states are
those of the moment at which the program began its pass, so that the batches come in its order.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.utils.data

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.records.units import STEPS
from fxmem.simulation.code.source_lines import program_place
from fxmem.simulation.processes.process_guard import process_unchanged
from fxmem.simulation.stand_ins.host import find_tensors

MOST_SECONDS: Final = 10.0
"""Time that reading an epoch may take."""
MOST_BATCHES: Final = 20_000
_MOST_READS: Final = 3
"""Of an epoch, where the next one has longer batches."""
_MOST_LENGTHS: Final = 4
"""Lengths that are compared one by one."""
_MOST_LONGER: Final = 2
"""Batches beside the largest that are run as they are longer in another length."""
NEAR: Final = 1.01
"""By what factor a batch may be longer than one that is run, and is as good as run."""
_VALIDATING_LOOPS: Final = tuple(
    f"{name}.loops.training_epoch_loop" for name in ("lightning.pytorch", "pytorch_lightning")
)
"""Lightning's loops, which validate by the number of a batch before they ask for the next one (Lightning 2.6)."""
MOST_STEPS: Final = 40
"""Recorded steps whose sizes are compared; further ones confirm what these have shown."""
Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of a batch, in order."""


class LoaderPass(NamedTuple):
    """A pass of the program over a loader."""

    loader: Any
    sampler: Any
    """A copy of what gives the indices, and the loader's generator; reading draws from it."""
    random_state: torch.Tensor
    place: str
    """`file:line` that began it."""
    refusal: str
    """Why it cannot be read again; empty where it can."""


class Epoch(NamedTuple):
    """The batches of an epoch, and of those that follow it where they have longer ones."""

    shapes: tuple[Shapes, ...]
    indices: tuple[Any, ...]
    """Of each batch, what the sampler gives."""
    stopped: str
    """Why not all were read; empty where they were."""
    is_ordered: bool
    """Whether the sampler gives the same order again."""
    of: LoaderPass
    reads: int = 1
    """How many epochs these are."""

    @property
    def varies(self) -> bool:
        """Whether batches differ, and not only the last by how many samples are left for it."""
        return len(set(self.shapes[:-1])) > 1


class LoaderWatch:
    """Watches the loaders of one program.

    Args:
        reads: whether an epoch is read.
        gives: whether the program may then be given batches of it.
        on_evaluated: called with a pass that began after the epoch was ended, and the batches it has had, when it asks
            for the next. Says whether it gets it.
        apart: around the reading of an epoch, whose memory is not the program's.
    """

    def __init__(
        self,
        *,
        reads: bool = False,
        gives: bool = False,
        on_evaluated: Callable[[LoaderPass, int], bool] = lambda of, batches: False,
        apart: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._reads, self.gives = reads, gives
        self._on_evaluated, self._apart = on_evaluated, apart
        self._passes: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self._handed: list[tuple[Any, int, Shapes]] = []
        """Of each batch: its loader's number, the round, its shapes."""
        self._last: dict[int, LoaderPass] = {}
        self._waiting: list[Any] = []
        """Batches that the program is given next, in the place of its own."""
        self._given_to = self._until = self._ended_in = 0
        self._over_at = math.inf
        self.ending: LoaderPass | None = None
        """The pass that the program is told is over before it is."""
        self._evaluated: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By pass that began after that, its batches so far."""
        self._shown: weakref.WeakSet[Any] = weakref.WeakSet()
        """Of these, those whose first batches have run."""
        self._stack = contextlib.ExitStack()
        self.round = 1
        self.epoch: Epoch | None = None
        self.is_after = False
        """Whether what follows that pass runs."""
        self.is_ahead = self.was_ahead = False
        """Whether what comes later runs before its time, or did."""
        self.stops = False
        """Whether the pass that trains is over before its next batch, as its loops are left."""
        self._begun: tuple[LoaderPass, ...] = ()
        """The passes that had begun by then."""
        self.has_begun_again = False
        """Whether the program goes through that loader once more."""

    def patches(self) -> torch_common.Patches:
        """Watch each pass over a loader, and each batch."""
        yield torch_common.wrap(torch_programs.LOADER_ITERATOR, "__init__", self._begin)
        yield torch_common.wrap(torch_programs.LOADER_ITERATOR, "_reset", self._begin_again)
        yield torch_common.wrap(torch_programs.LOADER_ITERATOR, "__next__", self._next)
        yield self._stack

    def _begin(self, original: Callable[..., None], iterator: Any, loader: Any, *args: Any) -> None:
        self._note_pass(iterator, loader)
        original(iterator, loader, *args)

    def _begin_again(
        self, original: Callable[..., None], iterator: Any, loader: Any = None, first_iter: bool = False
    ) -> None:
        """Workers that persist have one iterator, which begins each pass but the first anew."""
        if loader is not None and not first_iter:
            self._note_pass(iterator, loader)
            self._evaluated.pop(iterator, None)
            self._shown.discard(iterator)
        original(iterator, *(() if loader is None else (loader, first_iter)))

    def _note_pass(self, iterator: Any, loader: Any) -> None:
        with torch_common.no_modes(), torch_common.pause_observers():
            state = torch.get_rng_state()
            sampler, refusal = _copy_sampler(loader)
        self._passes[iterator] = LoaderPass(loader, sampler, state, program_place(sys._getframe(2)), refusal)

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        found = self._passes.get(iterator)
        if found is not None and not self._goes_on(iterator, found):
            raise StopIteration
        batch = original(iterator)
        if found is None:
            return batch
        number = id(found.loader)
        self._last[number] = found
        if self._waiting and number == self._given_to:
            batch = self._waiting.pop(0)
        with torch_common.no_modes(), torch_common.pause_observers():
            self._handed.append((number, self.round, _find_shapes(batch)))
        return batch

    def _goes_on(self, iterator: Any, found: LoaderPass) -> bool:
        """Whether a pass gets another batch."""
        if self.ending is None and not self.is_ahead:
            return True
        if found is self.ending:
            self._begin_after()
            return False
        if self.stops and any(_are_alike(found, each) for each in self._begun):
            self.stops = False
            return False
        if self.ending is not None and _are_alike(found, self.ending):
            self.has_begun_again = True
            return True
        if self.is_ahead and any(_are_alike(found, each) for each in self._begun):
            return True
        if not self.is_beyond or self.has_begun_again:
            return True
        batches = self._evaluated.get(iterator, 0)
        self._evaluated[iterator] = batches + 1
        goes_on = self._on_evaluated(found, batches)
        if iterator in self._shown:
            return bool(self._waiting)
        if goes_on:
            return True
        self._shown.add(iterator)
        if self._reads and (chosen := choose_batches(epoch := self._read(found))):
            self._give(epoch, [chosen[0], chosen[-1]])
        return bool(self._waiting)

    def _begin_after(self) -> None:
        if not self.is_after:
            self.is_after, self._over_at = True, time.monotonic()

    @property
    def is_beyond(self) -> bool:
        """Whether what runs comes after the recorded steps."""
        return self.is_after or self.is_ahead

    def note_ahead(self, *, stops: bool = False) -> None:
        """What comes later runs from here on; `stops`: without a further batch to train on."""
        self.is_ahead, self.was_ahead, self.stops = True, True, stops
        self._over_at, self._begun = time.monotonic(), (*self._last.values(),)

    def _validate(self, original: Callable[..., bool], loop: Any, *args: Any) -> bool:
        """Whether Lightning validates after a batch: after the last one of the pass that is ended, if ever it does."""
        validates = original(loop, *args) or bool(not self.is_after and loop._should_check_val_epoch())
        if validates:
            self._begin_after()
        return validates

    @property
    def seconds_after(self) -> float:
        """How long it is since that pass was over."""
        return time.monotonic() - self._over_at

    @property
    def has_another_pass(self) -> bool:
        """Whether another pass has begun after the epoch."""
        return bool(self._evaluated)

    def end_epoch(self, rounds: int) -> bool:
        """End the pass of which each round had batches, so that what follows it runs; whether the program goes on.

        A pass that is over by itself within the rounds, or whose loader has no end, is left alone. Where the program
        has fetched a batch ahead, as accelerate does, it has one round more.

        Args:
            rounds: how many are over.
        """
        if self.ending is not None:
            return rounds == self._ended_in + 1 and not self.has_begun_again
        found, per_round = self.find_training()
        if found is None or not self.gives:
            return False
        batches = count_batches(found.loader)
        if batches is None or len(self.handed(found)) + per_round > batches:
            return False
        self.ending, self._ended_in, self.stops = found, rounds, False
        self._waiting.clear()
        for name in _VALIDATING_LOOPS:
            loop = getattr(sys.modules.get(name), "_TrainingEpochLoop", None)
            if all(hasattr(loop, method) for method in ("_should_check_val_fx", "_should_check_val_epoch")):
                self._stack.enter_context(torch_common.wrap(loop, "_should_check_val_fx", self._validate))
        return True

    def end_round(self) -> None:
        """A round is over. After the last that is run anyway the epoch is read, and the program runs on with those of
        its batches that show how sizes follow their lengths."""
        if self._reads and self.round == STEPS and (found := self.find_training()[0]) is not None:
            self.epoch = self._read(found)
            if self.gives and (chosen := choose_batches(self.epoch)):
                self._give(self.epoch, chosen)
                self._until = self.round - (-len(chosen) // self.find_training()[1]) + 1
        self.round += 1

    @property
    def may_go_on(self) -> bool:
        """Whether the next round shows how sizes follow lengths."""
        return self.round <= self._until

    @property
    def keeps_steps(self) -> bool:
        """Whether what the round before this one has allocated is looked at later."""
        return self._reads and self.round <= MOST_STEPS and (self.round <= STEPS or self.epoch is not None)

    # --- what trains --------------------------------------------------------------------------------------------------

    def find_training(self) -> tuple[LoaderPass | None, int]:
        """The pass of which each round so far had batches, and how many a round has; None and 0 for none."""
        for number, found in self._last.items():
            rounds = [at for each, at, _ in self._handed if each == number]
            counts = [rounds.count(at) for at in range(2, STEPS + 1)]
            if 1 in rounds and counts and min(counts) and len(set(counts)) == 1:
                return found, counts[0]
        return None, 0

    def handed(self, loader: LoaderPass) -> list[Shapes]:
        """The shapes of all batches of a loader, in the order in which the program got them."""
        return [shapes for each, _, shapes in self._handed if each == id(loader.loader)]

    def _read(self, of: LoaderPass) -> Epoch:
        with self._apart():
            return read_epoch(of)

    def _give(self, epoch: Epoch, batches: Sequence[int]) -> None:
        """Let the program get these batches of an epoch next."""
        self._given_to = id(epoch.of.loader)
        with _reading(epoch.of):
            self._waiting += [_fetch(epoch.of.loader, epoch.indices[number], number) for number in batches]


def read_epoch(of: LoaderPass, seconds: float = MOST_SECONDS, most: int = MOST_BATCHES) -> Epoch:
    """Read the shapes of a pass's batches, without the program.

    Args:
        of: the pass.
        seconds: after which reading stops.
        most: batches that are read.
    """
    reads: list[list[tuple[Shapes, Any]]] = []
    stopped, is_ordered = of.refusal, False
    begin = time.monotonic()
    with _reading(of):
        try:
            while not stopped and _is_read(reads, of, (time.monotonic() - begin) / seconds):
                for each in (of.sampler[0], getattr(of.sampler[0], "sampler", of)) if reads else ():
                    if hasattr(each, "set_epoch"):  # as the program does, where ranks share an epoch out
                        each.set_epoch(getattr(each, "epoch", 0) + 1)
                reads.append([])
                for chosen in _draw(of.loader, *of.sampler):
                    number = sum(map(len, reads))
                    if number >= most or time.monotonic() > begin + seconds:
                        stopped = f"stopped after {seconds:.0f} s" if number < most else f"stopped at {most:,}"
                        break
                    reads[-1].append((_find_shapes(_fetch(of.loader, chosen, number)), chosen))
            if reads:
                again = [*itertools.islice(of.sampler[0] or (), 2)]
                is_ordered = bool(again) and again == [chosen for _, chosen in reads[0][:2]]
        except Exception as error:
            stopped = f"its data raised {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if len(reads) > 1:
        whole, stopped = reads[: len(reads) - bool(stopped)], ""
        longest = {max(count_elements(shapes) for shapes, _ in each) for each in whole}
        reads = whole if len(longest) > 1 else reads[:1]
    shapes, indices = zip(*itertools.chain(*reads), strict=True) if any(reads) else ((), ())
    return Epoch(shapes, indices, stopped, is_ordered, of, max(len(reads), 1))


def _is_read(reads: Sequence[Sequence[tuple[Shapes, Any]]], of: LoaderPass, taken: float) -> bool:
    """Whether an epoch is read: the first, and others where lengths vary and there is time for all of it."""
    if not reads:
        return True
    has_time = of.sampler[0] is not None and len(reads) < _MOST_READS and taken * (len(reads) + 1) < len(reads)
    return has_time and len({shapes for shapes, _ in reads[0][:-1]}) > 1


def find_lengths(shapes: Sequence[Shapes]) -> list[tuple[int, ...]]:
    """Of each batch, the lengths that its memory grows with. Of long lists of tensors, all of them and the longest."""
    if len({tuple(map(len, each)) for each in shapes}) == 1:
        columns = set(zip(*(itertools.chain.from_iterable(each) for each in shapes), strict=True))
        varied = [each for each in columns if len(set(each)) > 1]
        if len(varied) <= _MOST_LENGTHS:
            return [*zip(*varied, strict=True)]
    sides = sorted({(len(shape), side) for each in shapes for shape in each for side in range(len(shape) + 1)})
    return [tuple(_sum_up(each, *side) for side in sides) for each in shapes]


def _sum_up(shapes: Shapes, rank: int, side: int) -> int:
    """The longest side of the tensors of a rank; of the side after the last, their elements."""
    found = [shape for shape in shapes if len(shape) == rank]
    return max((shape[side] for shape in found), default=0) if side < rank else sum(map(math.prod, found))


def exceed(lengths: Sequence[int], others: Sequence[int]) -> float:
    """By what factor lengths are longer than others, taken together."""
    return math.prod(max(1.0, one / max(other, 1)) for one, other in zip(lengths, others, strict=True))


def choose_batches(epoch: Epoch) -> list[int]:
    """The batches of an epoch that show how sizes follow the lengths: the largest, those that are longer than it in
    another length, the smallest, some between, the last. Empty where the batches are alike."""
    if not epoch.varies:
        return []
    lengths, last = find_lengths(epoch.shapes), len(epoch.shapes) - 1
    by_size = sorted(range(last + 1), key=lambda number: (count_elements(epoch.shapes[number]), number))
    longest = [by_size[last]]
    for _ in range(_MOST_LONGER):
        over = [min(exceed(each, lengths[other]) for other in longest) for each in lengths]
        if max(over) > NEAR:
            longest.append(over.index(max(over)))
    parts = 3 if len(longest) == 1 else 4
    between = [by_size[part * last // parts] for part in range(1, parts)]
    return [*dict.fromkeys([*longest, by_size[0], *between, last])]


def _are_alike(one: LoaderPass, other: LoaderPass) -> bool:
    """Whether two passes are over the same loader, or over one that is made anew for each epoch."""
    alike = [(each.place, each.loader.batch_size, count_batches(each.loader)) for each in (one, other)]
    return one.loader is other.loader or alike[0] == alike[1]


def count_batches(loader: Any) -> int | None:
    """How many batches a loader has; None where it does not say, or has no end."""
    try:
        return len(loader)
    except Exception:  # a sampler's own code, which the program itself has not called
        return None


def count_elements(shapes: Shapes) -> int:
    """Elements of a batch."""
    return sum(map(math.prod, shapes))


def _copy_sampler(loader: Any) -> tuple[Any, str]:
    """A copy of what gives the loader's indices, with its generator, and why there is none."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        if inspect.isgeneratorfunction(type(loader.dataset).__iter__):
            return (None, None), ""
        return None, "an iterable data set that may not be read twice"
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    try:
        return copy.deepcopy((sampler, loader.generator), {id(loader.dataset): loader.dataset}), ""
    except Exception as error:
        return None, f"its sampler cannot be copied ({type(error).__name__})"


def _find_shapes(batch: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in find_tensors(batch))


@contextlib.contextmanager
def _reading(of: LoaderPass) -> Iterator[None]:
    """What is read inside is the host's, and leaves random states as they were."""
    with torch_common.no_modes(), torch_common.pause_observers(), process_unchanged(sys.stdout):
        torch.set_rng_state(of.random_state)
        yield


def _draw(loader: Any, sampler: Any, generator: Any) -> Iterator[Any]:
    """The indices of each batch, as the program's own pass draws them: after a seed for workers."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    if sampler is not None:
        yield from sampler
        return
    size, waiting = loader.batch_size, []
    for each in loader.dataset:
        waiting.append(each)
        if size is None or len(waiting) == size:
            yield waiting if size else each
            waiting = []
    if waiting and not loader.drop_last:
        yield waiting


def _fetch(loader: Any, chosen: Any, number: int) -> Any:
    """The batch of these indices; of an iterable data set, of these samples.

    What is drawn by chance meanwhile, for its samples, is drawn from the number, so that it comes again.
    """
    dataset, state = loader.dataset, torch.get_rng_state()  # samplers draw on
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    try:
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return loader.collate_fn(chosen)
        if loader.batch_sampler is None:
            return loader.collate_fn(dataset[chosen])
        if hasattr(dataset, "__getitems__"):
            return loader.collate_fn(dataset.__getitems__(chosen))
        return loader.collate_fn([dataset[index] for index in chosen])
    finally:
        torch.set_rng_state(state)
