"""What a program keeps more of after each step: whose it is, which line made it and which keeps it, and until when.

After each round the storages alive are counted by owner. An owner grows if it has had more after each of the last
rounds, two at least: more tensors, some of the round before among them, or as many bytes more each time. A batch that
is longer each time is another's in the next round. A list that is full after ten steps grows until then; so a program
that grows runs on for a while (`GROWING`), and what ends the growth, or shows that it goes on, is looked for in the
program's code.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import operator
import queue
import re
import sys
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fxmem.memory.generation import LEAST_COMPARED, EvenSteps, LoopSteps, find_events
from fxmem.records.parts import IN_CYCLES, OWN_GRAPH, Growth
from fxmem.records.profile import SourceLine
from fxmem.records.units import GROWING, OF_GRAPH, STEPS, group, package_path
from fxmem.simulation.card.block_trace import BlockTrace
from fxmem.simulation.card.card_memory import CardMemory, RepeatedSteps
from fxmem.simulation.code.round_rule import Owner, find_names, split_path
from fxmem.simulation.code.source_lines import last_name, program_files, variables
from fxmem.simulation.code.source_trees import find_makings, keeping_lines, read_tree
from fxmem.simulation.code.source_uses import is_unbounded, read_sources
from fxmem.simulation.recording.observe.event_log import LoggedStorage, StepLog
from fxmem.simulation.recording.residents import Holders, Places
from fxmem.simulation.run.loops import Loop, LoopWatch, list_frames
from fxmem.simulation.run.owner_names import Cycles

# --- whether what grows goes on, or ends: by what holds it, and by what the program's code does with it ---------------
# It goes on where the code makes it longer and nowhere bounds it, or where only autograd's graph, which no object of
# Python's leads to, keeps it. It ends where a bound of its own says so, and at the latest with the loops in which it
# is not made anew. All else is not known.


class HolderCode:
    """What a program's code does with what holds something.

    Args:
        holder: as the program calls it: `meter.values`, `graph of losses`.
        owner: who has it.
        files: the program's own.
        frames: of the functions that run, the outermost first.
        loops: around its steps, the outermost first.
    """

    def __init__(
        self,
        holder: str,
        owner: Owner,
        files: Collection[str],
        frames: Sequence[types.FrameType],
        loops: Sequence[Loop],
    ) -> None:
        self._names = split_path(holder)
        self._files, self._frames, self._loops = files, frames, loops
        self.meant = find_names(holder, owner, frames[::-1])
        """What the code calls it."""
        self._is_sure = bool(self._names)
        """Whether it is known where it is made."""
        self.outer = 0
        """How many of the outermost loops make it anew."""
        if self._names:
            self._follow_variable(self._names[0])
            for name in self._names[1:]:
                self._follow_attribute(name)

    def is_unbounded(self, *, is_graph: bool) -> bool:
        """Whether the code puts more into it, and nothing bounds it; or makes its graph longer."""
        lines = (line for file in self._files for line in linecache.getlines(file))
        if len(self._names) > 1 and any(re.search(r"[\w\]]\.__init__\((?!self)", line) for line in lines):
            return False  # `meter.__init__()` makes anew all that it has
        loops = [each for each in self._loops[self.outer :] if each.turns != 1]
        counters = [_find_counters(each, self._frames[each.depth].f_code) for each in loops]
        sources = read_sources(self._files)
        return self._is_sure and is_unbounded(self.meant, sources, is_graph=is_graph, counters=counters)

    def _follow_variable(self, name: str) -> None:
        """Find the function that has made what a variable has, from the innermost on: others are given it."""
        value: object = None
        for depth, frame in reversed([*enumerate(self._frames)]):
            own = variables(frame)
            named = [each for each in own if each == name or (each == "self" and type(own[each]).__name__ == name)]
            if value is None and named:
                value = own[named[0]]
            names = {*named, *(each for each in own if value is not None and own[each] is value)}
            made = (each for one in names for each in find_makings(one, read_tree(frame.f_code.co_filename)))
            makings = [each for each in made if each.function == _name_function(frame) and not each.is_attribute]
            if any(each.is_new for each in makings):
                around = sum(each.depth < depth for each in self._loops)
                lines = [each.line for each in makings if each.is_new and each.is_always]
                within = [self._count_around(frame.f_code.co_filename, line) for line in lines]
                self.outer = max(self.outer, around, *within)
                self._is_sure &= len(self._names) == 1 or all(each.is_always for each in makings)
                return
            self._is_sure &= not makings

    def _follow_attribute(self, name: str) -> None:
        """Find where an attribute is made: with its owner, in a loop around the steps, or nobody can tell when."""
        depths = {(each.f_code.co_filename, _name_function(each)): depth for depth, each in enumerate(self._frames)}
        for file in self._files:
            for each in (making for making in find_makings(name, read_tree(file)) if making.is_attribute):
                depth = depths.get((file, each.function), 0)
                called = sum(loop.depth < depth for loop in self._loops)  # in the function that has the loop
                around = max(self._count_around(file, each.line), called) if each.is_always else 0
                self.outer = max(self.outer, around)
                is_once = each.is_always and (file, each.function) in depths
                self._is_sure &= each.is_new and (bool(around) or is_once or each.function == "__init__")

    def _count_around(self, file: str, line: int) -> int:
        """How many of the loops, from the outermost on, are around a line or around what it is within."""
        loops = enumerate(self._loops, 1)
        found = [number for number, each in loops if each.file == file and each.first <= line <= each.last]
        return max(found, default=0)


def _find_counters(loop: Loop, code: types.CodeType) -> Collection[tuple[str, str]]:
    """The variables of a loop that count its passes: of `range`, and the first of `enumerate`."""
    scope = "" if code.co_name == "<module>" else code.co_qualname
    for node in ast.walk(read_tree(loop.file)):
        if isinstance(node, ast.For) and node.lineno == loop.head and isinstance(node.iter, ast.Call):
            name = last_name(node.iter.func)
            target = node.target.elts[0] if isinstance(node.target, ast.Tuple) and name == "enumerate" else node.target
            return [(scope, last_name(target))] if name in ("count", "enumerate", "range", "trange") else []
    return []


def _name_function(frame: types.FrameType) -> str:
    """The name of a running function as its code has it; empty for a module's."""
    return frame.f_code.co_name.strip("<>").replace("module", "")


# --- the line that keeps it -------------------------------------------------------------------------------------------


def find_keeping_line(owner: str, files: Mapping[str, Collection[int]], near: Collection[str] = ()) -> str:
    """Find `file:line` that writes to an owner: `preds.append(out)`, `total += loss`, `seen[step] = out`.

    By the owner's last name: the first, in the order of files and lines, of the lines that are given of each file, else
    of all, an attribute's for what an object has; empty where there is none.

    Args:
        owner: who keeps it.
        files: the program's, each with the lines of its functions that run.
        near: those of them where the owner is made, which come first.
    """
    files = dict(sorted(files.items(), key=lambda each: each[0] not in near))
    path = owner.rpartition(" ")[2]
    name, of_object = path.rpartition(".")[2], "." in path
    found = [
        (line not in files[file], file not in near, is_attribute != of_object, number, f"{package_path(file)}:{line}")
        for number, file in enumerate(files)
        if name in "".join(linecache.getlines(file))  # else it need not be parsed: a program may have hundreds
        for kept, line, is_attribute in keeping_lines(read_tree(file))
        if kept == name
    ]
    return min(found, key=operator.itemgetter(0, 1, 2, 3), default=("",))[-1]


_REGISTERS: Final = (
    (r"^hook of (.*)", r"\.register_\w*hook\(", r"\bremove\b|\w_hooks\b"),
    (r"^(.*)\.param_groups$", r"\.add_param_group\(", r"\bparam_groups\b"),
)
"""Owners that methods of torch's alone write to, these, and what takes something away."""


def find_registration(owner: str, files: Iterable[str]) -> str:
    """Find `file:line` that gives an owner more by a method of torch's: a hook whose handle nobody removes.

    Empty where there is none, where the program may take something away, or gives one of its names another value.
    """
    for pattern, adding, removing in _REGISTERS:
        if (found := re.search(pattern, owner)) is not None:
            lines = [(file, *each) for file in sorted(files) for each in enumerate(linecache.getlines(file), 1)]
            anew = Counter(name for *_, line in lines for name in re.findall(r"(\w+)\s*=[^=]", line))
            is_kept = all(anew[name] < 2 for name in re.findall(r"[a-zA-Z_]\w*", found[1]))
            if is_kept and not any(re.search(removing, line) for *_, line in lines):
                called = (f"{package_path(file)}:{n}" for file, n, line in lines if re.search(adding, line))
                return next(called, "")
    return ""


# --- what a program keeps more of after each step ---------------------------------------------------------------------


_OFTEN: Final = 3
"""Times that something has to keep more, where it does not in each round."""
_Rise = tuple[int, int]
"""By how many bytes and tensors more something is."""


class _Held(NamedTuple):
    """What an owner has after a round."""

    nbytes: int
    largest: int
    """The largest storage of those that were made last."""
    storages: frozenset[int] = frozenset()
    made: frozenset[int] = frozenset()
    """Of these, those that it has not had after the round before."""

    @property
    def oldest(self) -> list[int]:
        """Half of those that it had before: a variable may still have the last one."""
        kept = sorted(self.storages - self.made or self.storages)
        return kept[: (len(kept) + 1) // 2]


class GrowthLog:
    """What each owner has after each round.

    Args:
        log: of the storages.
        holders: who found the owners, and their bounds.
        cycles: what frees what is in cycles of references.
    """

    def __init__(self, log: StepLog, holders: Holders, cycles: Cycles) -> None:
        self._log, self._holders, self._cycles = log, holders, cycles
        self._alive: list[int] = []
        """By round, the bytes alive after it."""
        self._held: dict[str, _Held] = {}
        """By owner, what it has after the last round."""
        self._rises: dict[str, list[_Rise]] = {}
        """By owner that has had more after each of the last rounds, by how many bytes and tensors each time."""
        self._emptied: dict[str, tuple[int, int]] = {}
        """By owner that has had more after each round and then less than half of it, the last round that left so much
        less, and the bytes before."""
        self._storages: frozenset[int] = frozenset()
        """Alive after the last round."""
        self._series: dict[str, list[_Rise]] = {}
        """By owner, how many more it has had after each round for as long as it never had fewer."""
        self._sizes: deque[Counter[int]] = deque(maxlen=2)
        """Of the last rounds, how often each number of bytes was allocated."""
        self._forward_sizes: deque[Counter[int]] = deque(maxlen=2)
        """The same before the first backward."""
        self._made_at: dict[int, str] = {}
        """By storage that has outlived the round that made it, the line that did."""
        self._proved: tuple[Growth, ...] = ()
        self.known: dict[str, dict[str, str]] = {}
        """By owner whose growth was looked into while the program ran, `Growth.holder` and `kept_at` as found then."""
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

    def note_round(self, sizes: Counter[int], forward_sizes: Counter[int] | None = None) -> None:
        """A whole round is over: count what is alive, by owner.

        Args:
            sizes: how often each number of bytes was allocated.
            forward_sizes: the same before the first backward: gradients are as large whatever the batch. None: of all.
        """
        owned = group((_find_owner(self._log.storages[index]), index) for index in self._log.alive())
        rises, series, nothing, held = self._rises, self._series, _Held(0, 0), dict[str, _Held]()
        self._rises, self._series = {}, {}
        for owner, storages in owned.items():
            before = self._held.get(owner, nothing)
            nbytes = sum(self._log.storages[index].nbytes for index in storages)
            largest, made = max(storages, key=self._rank), frozenset(storages) - before.storages
            held[owner] = now = _Held(nbytes, largest, frozenset(storages), made)
            rise = nbytes - before.nbytes, len(now.storages) - len(before.storages)
            is_kept = not before.made or bool(before.made & now.storages)
            if self._alive and rise[0] > 0 and (is_kept or not rise[1]):
                self._rises[owner] = [*rises.get(owner, []), rise]
            if self._never_falls(before, now, series.get(owner, [])):
                self._series[owner] = [*series.get(owner, []), rise]
        for owner in (each for each, found in rises.items() if len(found) >= _OFTEN):
            most = self._held[owner].nbytes
            if 2 * held.get(owner, nothing).nbytes < most:
                self._emptied[owner] = len(self._alive) + 1, most
        self._held, self._storages = held, frozenset(index for each in held.values() for index in each.storages)
        self._alive.append(sum(each.nbytes for each in held.values()))
        self._sizes.append(sizes)
        self._forward_sizes.append(sizes if forward_sizes is None else forward_sizes)
        if len(self._alive) <= GROWING:
            for file, lines in program_files(sys._getframe(1)).items():
                self._files.setdefault(file, set()).update(lines)

    def _never_falls(self, before: _Held, now: _Held, series: Sequence[_Rise]) -> bool:
        """Whether an owner may be one that keeps all that it gets, now and then: it has what it had, or in the place of
        some of that, once it has kept more a few times, as much."""
        if before.storages == now.storages or now.storages > before.storages:
            was_alive = before.storages or self._storages  # what it has first is no new one's, as of a variable
            return bool(now.storages & was_alive)
        return now.nbytes == before.nbytes and sum(nbytes > 0 for nbytes, _ in series) >= _OFTEN

    def _rank(self, index: int) -> tuple[bool, int]:
        storage = self._log.storages[index]
        return storage.birth > 0, storage.nbytes

    @property
    def nbytes(self) -> int | None:
        """How many bytes more are alive after each round than after the one before.

        All of them where the last two rounds allocate the same, or leave as much alive; else what owners keep: batches
        of different lengths leave different bytes alive, which is no growth. None: not known.
        """
        more = [after - before for before, after in itertools.pairwise(self._alive[-3:])]
        if any(_find_gap(each) for each in self._series.values()):
            return sum(each.nbytes for each in self._find_all())
        if more and (self._sizes[-1] == self._sizes[-2] or more == [0, 0]):
            return more[-1] if more[-1] >= 0 else None
        return sum(rise[-1][0] for owner in self._rises if (rise := self._find_rise(owner))) or None

    def held_bytes(self, owner: str) -> int:
        """What an owner has after the last round."""
        known = {name for name, each in self.known.items() if each["holder"] == owner}
        return sum(held.nbytes for name, held in self._held.items() if name in (known or {owner}))

    @property
    def may_go_on(self) -> bool:
        """Whether something grows, and the next rounds, as many as are run for that, may show its end."""
        if len(self._alive) >= GROWING:
            return False
        ends = [each.until for each in self._find_all()]
        if ends and all(end is not None and end > GROWING for end in ends):
            return False
        is_joined = len(self._alive) == STEPS and bool(self._rises) and self._are_alike()  # a tensor, since step 2
        is_on_and_off = any(_find_gap(each, least=1) for each in self._series.values())
        return bool(ends or self.nbytes or is_joined or is_on_and_off)

    def describe(self, *, is_over: bool = False) -> dict[str, Any]:
        """`growth_bytes` and `grown`, as the records have them.

        Args:
            is_over: whether the program has come to its end: there are no further rounds.
        """
        grown = self._proved or _join_all(each.model_copy(update=self.known.get(each.holder)) for each in self.find())
        if is_over:
            grown = tuple(each.model_copy(update={"ends": len(self._alive)}) for each in grown)
        return {"growth_bytes": self.nbytes, "grown": grown}

    def prove(
        self, loops: LoopWatch | None, places: Places, saved: Mapping[int, int], cycle_at: str = "", *, is_last: bool
    ) -> None:
        """Find out what of the growth goes on after the last round, which ends here, and what ends when.

        Args:
            loops: around it; None where rounds are not their steps.
            places: as of `Holders.search`.
            saved: by storage that autograd keeps, the number of its node.
            cycle_at: the line of the last round's backward that leaves gradients with their graph; empty for none.
            is_last: whether no further rounds are looked at; else when it ends is not found, but what nobody can tell
                when the program is over.
        """
        grown = self.find()
        kept = [self._held[each.holder].oldest for each in grown]
        located = self._holders.locate(kept, places, saved) if kept else {}
        found = []
        for each, own in zip(grown, kept, strict=True):
            held_at = [place for index, place in located.items() if index in own]
            if held_at:
                found.append(self._prove(each, loops, held_at))
            else:
                found.append(self._prove_unheld(each, loops, cycle_at, is_saved=not saved.keys().isdisjoint(own)))
        named = zip(grown, found, strict=True)
        names = "holder", "kept_at", "is_endless"
        self.known = {was.holder: {name: getattr(each, name) for name in names} for was, each in named}
        self._proved = _join_all(found) if is_last else ()

    def _prove_unheld(self, grown: Growth, loops: LoopWatch | None, cycle_at: str, *, is_saved: bool) -> Growth:
        """Of what no object of Python's leads to: what autograd's graph alone keeps is not freed by itself, nor are its
        leaves' gradients."""
        ends, stays = loops and loops.find_last(len(self._alive)), not self._cycles.are_freed
        holder, line = (IN_CYCLES, "") if stays else (OWN_GRAPH, cycle_at) if cycle_at else ("", "")
        is_endless = stays or is_saved or grown.holder.endswith(".grad")
        return grown.model_copy(update={"ends": ends, "holder": holder, "kept_at": line, "is_endless": is_endless})

    def _prove(self, grown: Growth, loops: LoopWatch | None, held_at: Sequence[tuple[str, Owner]]) -> Growth:
        ((path, owner), _) = Counter((path.partition("[")[0], owner) for path, owner in held_at).most_common(1)[0]
        if isinstance(owner, type) and issubclass(owner, queue.Queue):  # its own deque is the queue
            path, owner = path.rpartition(".")[0], None
        frames, around = list_frames(sys._getframe(1)), () if loops is None else loops.loops
        code = HolderCode(path, owner, self._files, frames, around)
        # What an element of it has as an attribute, as a handler's list among an engine's handlers.
        inner = {own.rpartition(".")[2].partition("[")[0] for own, _ in held_at if "." in own.partition("[")[2]}
        (attribute,) = inner if len(inner) == 1 else ("grad",)
        line = "" if attribute == "grad" else find_keeping_line(f"{path}.{attribute}", self._files)
        registered = find_registration(path, self._files)
        kept_at = line or registered or find_keeping_line(path, self._files, {each.file for each in code.meant})
        ends = loops and loops.find_last(len(self._alive), code.outer)
        is_known = not code.outer or ends is not None  # else a pass of unknown length makes it anew
        goes_on = bool(registered) or code.is_unbounded(is_graph=grown.is_graph)
        is_endless = grown.until is None and bool(kept_at) and is_known and goes_on
        found = {"ends": ends, "holder": path, "kept_at": kept_at or grown.kept_at, "is_endless": is_endless}
        return grown.model_copy(update=found)

    def find(self) -> tuple[Growth, ...]:
        """Who keeps more after each of the last rounds, the most first; nobody where as much is alive in all."""
        return () if self.nbytes == 0 else self._find_all()

    def _find_all(self) -> tuple[Growth, ...]:
        rounds, found = len(self._alive), list[Growth]()
        for owner in self._series.keys() | self._rises.keys():
            series = self._series.get(owner, [])
            if gap := _find_gap(series):
                first, *_, last = (number for number, (nbytes, _) in enumerate(series) if nbytes)
                found.append(self._describe(owner, series[first + 1 : last + 1], rounds - len(series) + first + 1, gap))
            elif last_first := self._find_rise(owner):
                is_since_first = len(last_first) >= rounds - 1  # before it, nothing is known
                since = 1 if is_since_first else rounds - len(last_first) + 1
                found.append(self._describe(owner, last_first, since))
        return tuple(sorted(found, key=lambda each: (-each.nbytes, each.holder)))

    def _find_rise(self, owner: str) -> list[_Rise]:
        """By how many bytes and tensors more an owner had after each of the last rounds, the last first; empty where it
        does not grow."""
        last_first = self._rises.get(owner, [])[::-1]
        counted = [*itertools.takewhile(lambda each: each[1] > 0, last_first)]
        if len(counted) >= 2:
            return counted
        alike = [*itertools.takewhile(lambda each: each == last_first[0], last_first)]
        return alike if len(alike) >= 2 and self._are_alike() else []

    def _describe(self, owner: str, rises: Sequence[_Rise], since: int, every: int = 1) -> Growth:
        held = self._held[owner]
        storage = self._log.storages[held.largest]
        emptied, most = self._emptied.get(owner, (None, 0))
        of_graph = owner.removeprefix(OF_GRAPH) if owner.startswith(OF_GRAPH) else ""
        times = sum(nbytes > 0 for nbytes, _ in rises)
        return Growth(
            holder=owner,
            nbytes=round(sum(nbytes for nbytes, _ in rises) / len(rises)),
            tensors=round(sum(tensors for _, tensors in rises) / times),
            shape=storage.shape,
            dtype=str(storage.dtype).removeprefix("torch."),
            times=max(storage.nbytes // storage.held_bytes, 1) if storage.held_bytes else 1,
            made_at=self._find_made_at(held),
            kept_at=find_keeping_line(owner, self._files) or self._find_made_at(self._held.get(of_graph)),
            since=since,
            every=every,
            until=self._find_end(owner, every),
            emptied=emptied if held.nbytes <= most else None,
        )

    def _find_made_at(self, held: _Held | None) -> str:
        """The line that made the largest of what an owner has, or another as large: not of each round are lines known.
        Empty where there is none."""
        if held is None:
            return ""
        nbytes = self._log.storages[held.largest].nbytes
        alike = (each for each in sorted(held.storages) if self._log.storages[each].nbytes == nbytes)
        return next((self._made_at[each] for each in (held.largest, *alike) if each in self._made_at), "")

    def _are_alike(self) -> bool:
        """Whether the last two rounds allocate mostly the same: with batches of ever new lengths all that is kept until
        the next one differs from round to round."""
        before, after = self._forward_sizes
        return 2 * (before & after).total() >= after.total()

    def _find_end(self, owner: str, every: int) -> int | None:
        """The round from which on an owner's bound holds; of several things that it has, the last."""
        ends = []
        for path, series in self._holders.bounds.items():
            found = []
            for each in series.values():
                (now, most), before = each[-1], each[-1 - every][0] if len(each) > every else each[-1][0]
                if before < now <= most:
                    found.append(len(self._alive) - (now - most) * every // (now - before))
            own = path.partition("[")[0]
            if found and (owner == own or owner.endswith(f" {own}") or owner.startswith(f"{own}.")):
                ends.append(min(found))
        return max(ends, default=None)


def _join_all(grown: Iterable[Growth]) -> tuple[Growth, ...]:
    """One for each holder, the largest first."""
    by_holder = group((each.holder, each) for each in grown)
    return tuple(sorted(map(_join, by_holder.values()), key=lambda each: (-each.nbytes, each.holder)))


def _join(grown: Sequence[Growth]) -> Growth:
    """What one holder keeps more of, though it was known by several names."""
    first, lasts = grown[0], [each.ends for each in grown if each.ends is not None]
    together = {
        "nbytes": sum(each.nbytes for each in grown),
        "tensors": sum(each.tensors for each in grown),
        "since": max(each.since for each in grown),
        "until": first.until if all(each.until == first.until for each in grown) else None,
        "ends": max(lasts, default=None),
        "is_endless": all(each.is_endless for each in grown),
    }
    return first if len(grown) == 1 else first.model_copy(update=together)


def _find_owner(storage: LoggedStorage) -> str:
    """Who has a storage: a list, not its element; of the models that a variable has had one after the other, all."""
    return (re.sub(r"^(\w+?)_\d+\b", r"\1", storage.name) or storage.holder).partition("[")[0]


def _find_gap(series: Sequence[_Rise], least: int = _OFTEN) -> int:
    """How many rounds at most come from one that keeps more to the next, where some keep no more; 0: it is not so, or
    may be over.

    Args:
        series: of the rounds.
        least: how many have to keep more.
    """
    at = [number for number, (nbytes, _) in enumerate(series) if nbytes]
    gap = max((after - before for before, after in itertools.pairwise(at)), default=2)
    is_over = len(at) < least or len(series) - 1 - at[-1] >= gap
    return 0 if is_over or (gap < 2 and least > 1) else max(gap, 1)


# --- the steps to come of a program that grows, replayed on its card --------------------------------------------------


_MOST_ACTS: Final = 1_000_000
"""Allocations and frees that are replayed at most to find the step at which the card is full."""


class FurtherSteps:
    """The steps to come of a program that grows, replayed on its card.

    Args:
        memory: the card's.
        trace: of what the program allocates and frees.
    """

    def __init__(self, memory: CardMemory, trace: BlockTrace) -> None:
        self.memory, self._trace = memory, trace
        self._steps = LoopSteps()
        self._acts = 1

    def note_round(self, number: int, since: int = 0) -> int:
        """A round after which more is alive is over, or a part of one after its first so many acts; how many it has."""
        self.memory.ask_cudnn()
        acts, now = self._trace.since(since)
        self._acts, events = len(acts), find_events(acts, self.memory.asked)
        if events is None:
            self._steps = LoopSteps()
        else:
            self._steps.add(number, events, (), None, 0)
        return now

    def find_even(self) -> EvenSteps | None:
        """How further ones are like the last; None: not known."""
        return self._steps.find_even(LEAST_COMPARED)

    def find_full(self, number: int, growth_bytes: int) -> int | None:
        """The round within which the card has no more memory, if all to come are like the last; None: not known."""
        even = self.find_even()
        periods = self.memory.usable_bytes // growth_bytes + 1
        if even is None or periods * self._acts > _MOST_ACTS:
            return None
        further = RepeatedSteps(even, periods)
        self.memory.try_steps(further)
        return None if further.done == periods else number + further.done + 1
