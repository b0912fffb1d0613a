"""Whether what grows goes on, or ends: by what holds it, and by what the program's code does with it.

It goes on where the code makes it longer and nowhere bounds it, or where only autograd's graph, which no object of
Python's leads to, keeps it. It ends where a bound of its own says so, and at the latest with the loops in which it is
not made anew. All else is not known.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Collection, Iterator, Mapping, Sequence

from fxmem.records.units import package_path
from fxmem.simulation.code.holder_names import Owner, find_names, split_path
from fxmem.simulation.code.source_lines import variables
from fxmem.simulation.code.source_trees import Making, find_makings, keeping_lines, read_tree
from fxmem.simulation.code.source_uses import is_unbounded, read_sources
from fxmem.simulation.run.loops import Loop


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

    @property
    def is_unbounded(self) -> bool:
        """Whether the code puts more into it, and nothing bounds it."""
        return self._is_sure and is_unbounded(self.meant, read_sources(self._files))

    def _follow_variable(self, name: str) -> None:
        """Find the function that has made what a variable has, from the innermost on: others are given it."""
        value: object = None
        for depth, frame in reversed([*enumerate(self._frames)]):
            own = variables(frame)
            named = [each for each in own if each == name or (each == "self" and type(own[each]).__name__ == name)]
            if value is None and named:
                value = own[named[0]]
            names = {*named, *(each for each in own if value is not None and own[each] is value)}
            makings = [each for one in names for each in _find_own_makings(one, frame)]
            if any(each.is_new for each in makings):
                around = sum(each.depth < depth for each in self._loops)
                lines = [each.line for each in makings if each.is_new and each.is_always]
                within = [self._count_around(frame.f_code.co_filename, line) for line in lines]
                self.outer = max(self.outer, around, *within)
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


def _find_own_makings(name: str, frame: types.FrameType) -> Iterator[Making]:
    """The lines of a running function that make what its variable has."""
    made = find_makings(name, read_tree(frame.f_code.co_filename))
    return (each for each in made if each.function == _name_function(frame) and not each.is_attribute)


def _name_function(frame: types.FrameType) -> str:
    """The name of a running function as its code has it; empty for a module's."""
    return frame.f_code.co_name.strip("<>").replace("module", "")


# --- the line that keeps it -------------------------------------------------------------------------------------------


def find_keeping_line(owner: str, files: Mapping[str, Collection[int]], near: Collection[str] = ()) -> str:
    """Find `file:line` that writes to an owner: `preds.append(out)`, `total += loss`, `seen[step] = out`.

    By the owner's last name: the first, in the order of files and lines, of the lines that are given of each file, else
    of all; empty where there is none.

    Args:
        owner: who keeps it.
        files: the program's, each with the lines of its functions that run.
        near: those of them where the owner is made, which come first.
    """
    files = dict(sorted(files.items(), key=lambda each: each[0] not in near))
    name = owner.rpartition(" ")[2].rpartition(".")[2]
    lines = ((file, line) for file in files for line in _lines_that_keep(file, name))
    running = ((file, line) for file in files if files[file] for line in _lines_that_keep(file, name))
    found = next(((file, line) for file, line in running if line in files[file]), None) or next(lines, None)
    return "" if found is None else f"{package_path(found[0])}:{found[1]}"


def _lines_that_keep(file: str, name: str) -> Iterator[int]:
    if name in "".join(linecache.getlines(file)):  # else it need not be parsed: a program may have hundreds
        yield from (line for kept, line in keeping_lines(read_tree(file)) if kept == name)
