"""What a program keeps more of after each step: whose it is, which line made it and which keeps it, and until when.

After each round the storages alive are counted by owner. An owner grows if it has had more after each of the last
rounds, two at least: more tensors, or as many bytes more each time. A list that is full after ten steps grows until
then; so a program that grows runs on for a while (`GROWING`), and an owner with a bound of its own says it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import operator
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fxmem.memory.generation import LEAST_COMPARED, LoopSteps, find_events
from fxmem.records.names import GROWING
from fxmem.records.parts import Growth
from fxmem.records.profile import SourceLine
from fxmem.records.units import package_path
from fxmem.simulation.loaded_modules import program_files
from fxmem.simulation.observe.event_log import LoggedStorage, StepLog
from fxmem.simulation.program.block_trace import BlockTrace
from fxmem.simulation.program.card_memory import CardMemory, RepeatedSteps
from fxmem.simulation.residents import Holders
from fxmem.simulation.source_lines import last_name

_KEEPING: Final = frozenset("add append appendleft extend extendleft insert put setdefault update".split())
"""Methods that put something into what they are called of."""


_MOST_ACTS: Final = 1_000_000
"""Allocations and frees that are replayed at most to find the step at which the card is full."""


class _Held(NamedTuple):
    """What an owner has after a round."""

    nbytes: int
    tensors: int
    largest: int
    """The largest storage of those that were made last."""


class GrowthLog:
    """What each owner has after each round.

    Args:
        log: of the storages.
        holders: who found the owners, and their bounds.
    """

    def __init__(self, log: StepLog, holders: Holders) -> None:
        self._log, self._holders = log, holders
        self._alive: list[int] = []
        """By round, the bytes alive after it."""
        self._held: dict[str, _Held] = {}
        """By owner, what it has after the last round."""
        self._rises: dict[str, list[tuple[int, int]]] = {}
        """By owner that has had more after each of the last rounds, by how many bytes and tensors each time."""
        self._sizes: deque[Counter[int]] = deque(maxlen=2)
        """Of the last rounds, how often each number of bytes was allocated."""
        self._made_at: dict[int, str] = {}
        """By storage that has outlived the round that made it, the line that did."""
        self._files: dict[str, set[int]] = {}
        """The program's own, each with the lines of its functions that have run when a round was over."""

    def note_made(self, sources: Sequence[SourceLine | None]) -> None:
        """A round or set-up is over: note which lines made what is alive now.

        Args:
            sources: of each node of the round.
        """
        alive = [*self._log.alive()]
        for index in alive:
            storage = self._log.storages[index]
            if storage.birth and storage.node is not None and 0 <= storage.node < len(sources):
                source = sources[storage.node]
                self._made_at.setdefault(index, "" if source is None else source.place)
        self._made_at = {index: self._made_at[index] for index in alive if index in self._made_at}

    def note_round(self, sizes: Counter[int]) -> None:
        """A whole round is over: count what is alive, by owner.

        Args:
            sizes: how often each number of bytes was allocated.
        """
        held: dict[str, _Held] = {}
        for index in self._log.alive():
            storage = self._log.storages[index]
            owner = _find_owner(storage)
            nbytes, tensors, largest = held.get(owner, _Held(0, 0, index))
            is_largest = self._rank(index) > self._rank(largest)
            held[owner] = _Held(nbytes + storage.nbytes, tensors + 1, index if is_largest else largest)
        if self._alive:
            nothing, rises = _Held(0, 0, 0), self._rises
            self._rises = {}
            for owner, now in held.items():
                before = self._held.get(owner, nothing)
                if now.nbytes > before.nbytes:
                    self._rises[owner] = rise = rises.get(owner, [])
                    rise.append((now.nbytes - before.nbytes, now.tensors - before.tensors))
        self._held = held
        self._alive.append(sum(each.nbytes for each in held.values()))
        self._sizes.append(sizes)
        if len(self._alive) <= GROWING:
            for file, lines in program_files(sys._getframe(1)).items():
                self._files.setdefault(file, set()).update(lines)

    def _rank(self, index: int) -> tuple[bool, int]:
        storage = self._log.storages[index]
        return storage.birth > 0, storage.nbytes

    @property
    def nbytes(self) -> int | None:
        """How many bytes more are alive after each round than after the one before.

        The last two rounds allocate the same, or the last two differences are equal: batches of different lengths leave
        different bytes alive, which is no growth. None: not known.
        """
        more = [after - before for before, after in itertools.pairwise(self._alive[-3:])]
        is_sure = bool(more) and (self._sizes[-1] == self._sizes[-2] or len(set(more)) < len(more))
        return more[-1] if is_sure and more[-1] >= 0 else None

    def held_bytes(self, owner: str) -> int:
        """What an owner has after the last round."""
        return self._held[owner].nbytes if owner in self._held else 0

    @property
    def may_go_on(self) -> bool:
        """Whether something grows, and the next rounds, as many as are run for that, may show its end."""
        if len(self._alive) >= GROWING:
            return False
        ends = [self._find_end(owner) for owner in self._rises if self._find_rise(owner)]
        if ends and all(end is not None and end > GROWING for end in ends):
            return False
        return bool(ends or self.nbytes)

    def describe(self) -> dict[str, Any]:
        """`growth_bytes` and `grown`, as the records have them."""
        growth, grown = self.nbytes, self.find()
        return {
            "growth_bytes": sum(each.nbytes for each in grown) if growth is None and grown else growth,
            "grown": grown,
        }

    def find(self) -> tuple[Growth, ...]:
        """Who keeps more after each of the last rounds, the most first; nobody where as much is alive in all."""
        if self.nbytes == 0:
            return ()
        found = [self._describe(owner, rise) for owner in self._rises if (rise := self._find_rise(owner))]
        return tuple(sorted(found, key=lambda each: (-each.nbytes, each.holder)))

    def _find_rise(self, owner: str) -> list[tuple[int, int]]:
        """By how many bytes and tensors more an owner had after each of the last rounds, the last first; empty where it
        does not grow."""
        last_first = self._rises[owner][::-1]
        counted = [*itertools.takewhile(lambda each: each[1] > 0, last_first)]
        if len(counted) >= 2:
            return counted
        alike = [*itertools.takewhile(lambda each: each == last_first[0], last_first)]
        return alike if len(alike) >= 2 and self._are_alike() else []

    def _describe(self, owner: str, last: Sequence[tuple[int, int]]) -> Growth:
        rounds, held = len(self._alive), self._held[owner]
        storage = self._log.storages[held.largest]
        return Growth(
            holder=owner,
            nbytes=round(sum(nbytes for nbytes, _ in last) / len(last)),
            tensors=round(sum(tensors for _, tensors in last) / len(last)),
            shape=storage.shape,
            dtype=str(storage.dtype).removeprefix("torch."),
            times=max(storage.nbytes // storage.held_bytes, 1) if storage.held_bytes else 1,
            made_at=self._made_at.get(held.largest, ""),
            kept_at=find_keeping_line(owner, self._files),
            since=rounds - len(last) + 1 if len(last) < rounds - 1 else 1,  # nothing is known of before the first
            until=self._find_end(owner),
        )

    def _are_alike(self) -> bool:
        """Whether the last two rounds allocate mostly the same: with batches of ever new lengths all that is kept until
        the next one differs from round to round."""
        before, after = self._sizes
        return 2 * (before & after).total() >= after.total()

    def _find_end(self, owner: str) -> int | None:
        """The round from which on an owner's bound holds."""
        bounds = next((found for path, found in self._holders.bounds.items() if _is_within(owner, path)), [])
        if len(bounds) < 2:
            return None
        (before, _), (now, most) = bounds[-2:]
        return None if now <= before else len(self._alive) - (now - most) // (now - before)


class FurtherSteps:
    """The steps to come of a program that grows, replayed on its card.

    Args:
        memory: the card's.
        trace: of what the program allocates and frees.
    """

    def __init__(self, memory: CardMemory, trace: BlockTrace) -> None:
        self._memory, self._trace = memory, trace
        self._steps = LoopSteps()
        self._acts = 1

    def note_round(self, number: int) -> None:
        """A round after which more is alive is over."""
        self._memory.ask_cudnn()
        acts, self._acts = self._trace.since(0)
        events = find_events(acts, self._memory.asked)
        if events is None:
            self._steps = LoopSteps()
        else:
            self._steps.add(number, events, (), None, 0)

    def find_full(self, number: int, growth_bytes: int) -> int | None:
        """The round within which the card has no more memory, if all to come are like the last; None: not known."""
        even = self._steps.find_even(LEAST_COMPARED)
        periods = self._memory.usable_bytes // growth_bytes + 1
        if even is None or periods * self._acts > _MOST_ACTS:
            return None
        further = RepeatedSteps(even, periods)
        self._memory.try_steps(further)
        return None if further.done == periods else number + further.done + 1


def _find_owner(storage: LoggedStorage) -> str:
    """Who has a storage: a list, not its element."""
    return (storage.name or storage.holder).partition("[")[0]


def _is_within(owner: str, path: str) -> bool:
    return owner == path or owner.endswith(f" {path}") or owner.startswith(f"{path}.")


# --- the line that keeps it -------------------------------------------------------------------------------------------


def find_keeping_line(owner: str, files: Mapping[str, Collection[int]]) -> str:
    """Find `file:line` that writes to an owner: `preds.append(out)`, `total += loss`, `seen[step] = out`.

    By the owner's last name: the first, in the order of files and lines, of the lines that are given of each file, else
    of all; empty where there is none.
    """
    name = owner.rpartition(" ")[2].rpartition(".")[2]
    lines = ((file, line) for file in files for line in _lines_that_keep(file, name))
    running = ((file, line) for file in files if files[file] for line in _lines_that_keep(file, name))
    found = next(((file, line) for file, line in running if line in files[file]), None) or next(lines, None)
    return "" if found is None else f"{package_path(found[0])}:{found[1]}"


def _lines_that_keep(file: str, name: str) -> Iterator[int]:
    text = "".join(linecache.getlines(file))
    if name in text:  # else it need not be parsed: a program may have hundreds
        yield from (line for kept, line in _keeping_lines(text) if kept == name)


@functools.lru_cache(maxsize=64)
def _keeping_lines(text: str) -> tuple[tuple[str, int], ...]:
    """What a file's lines keep something under, in the order of the lines."""
    try:
        nodes = ast.walk(ast.parse(text))
    except SyntaxError:
        return ()
    return tuple(sorted({each for node in nodes for each in _find_kept(node)}, key=operator.itemgetter(1)))


def _find_kept(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _KEEPING:
            yield last_name(node.func.value), node.lineno
    elif isinstance(node, ast.AugAssign):
        yield last_name(node.target), node.lineno
    elif isinstance(node, ast.Assign):
        read = {last_name(each) for each in ast.walk(node.value)}
        for target in node.targets:
            if isinstance(target, ast.Subscript) or last_name(target) in read:
                yield last_name(target), node.lineno
