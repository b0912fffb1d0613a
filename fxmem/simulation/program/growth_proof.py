"""Whether what grows goes on, or ends: by what holds it, and by what the program's code does with it.

It goes on where the code makes it longer and nowhere bounds it, or where only autograd's graph, which no object of
Python's leads to, keeps it. It ends where a bound of its own says so, and at the latest with the loops in which it is
not made anew. All else is not known.
"""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from fxmem.simulation.program.loops import Loop
from fxmem.simulation.source_lines import variables
from fxmem.simulation.source_trees import Making, find_functions, find_given, find_makings, is_unbounded, read_tree

_WORD: Final = re.compile(r"[A-Za-z_]\w*")


class HolderCode:
    """What a program's code does with what holds something.

    Args:
        holder: as the program calls it: `meter.values`, `graph of losses`.
        files: the program's own.
        frames: of the functions that run, the outermost first.
        loops: around its steps, the outermost first.
    """

    def __init__(
        self, holder: str, files: Collection[str], frames: Sequence[types.FrameType], loops: Sequence[Loop]
    ) -> None:
        self._names = _WORD.findall(re.sub(r"\[.*?\]", "", re.sub(r"^((graph|frames|hook) of )+", "", holder)))
        self._files, self._frames, self._loops = files, frames, loops
        self._near: set[str] = set()
        """Files of the functions that have it as a variable."""
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
        if not self._is_sure:
            return False
        name = self._names[-1]
        files = [each for each in self._files if name in "".join(linecache.getlines(each))]
        if len(self._names) == 1 and (near := [each for each in files if each in self._near]):  # a plain variable
            given = {called for each in near for called in find_given(name, read_tree(each))}
            files = [each for each in self._files if each in near or given & find_functions(read_tree(each))]
        return is_unbounded(name, map(read_tree, files))

    def _follow_variable(self, name: str) -> None:
        """Find the function that has made what a variable has, from the innermost on: others are given it."""
        value: object = None
        for depth, frame in reversed([*enumerate(self._frames)]):
            own = variables(frame)
            named = [each for each in own if each == name or (each == "self" and type(own[each]).__name__ == name)]
            if value is None and named:
                value = own[named[0]]
            if named or name in frame.f_globals:
                self._near.add(frame.f_code.co_filename)
            names = {*named, *(each for each in own if value is not None and own[each] is value)}
            makings = [each for one in names for each in _find_own_makings(one, frame)]
            if any(each.is_new for each in makings):
                around = sum(each.depth < depth for each in self._loops)
                lines = [each.line for each in makings if each.is_new]
                within = [self._count_around(frame.f_code.co_filename, line) for line in lines]
                self.outer = max(self.outer, around, *within)
                return
            self._is_sure &= not makings

    def _follow_attribute(self, name: str) -> None:
        """Find where an attribute is made: with its owner, in a loop around the steps, or nobody can tell when."""
        for file in self._files:
            for each in (making for making in find_makings(name, read_tree(file)) if making.is_attribute):
                around = self._count_around(file, each.line)
                self.outer = max(self.outer, around)
                self._is_sure &= each.is_new and (bool(around) or each.function == "__init__")

    def _count_around(self, file: str, line: int) -> int:
        """How many of the loops, from the outermost on, are around a line or around what it is within."""
        loops = enumerate(self._loops, 1)
        found = [number for number, each in loops if each.file == file and each.first <= line <= each.last]
        return max(found, default=0)


def _find_own_makings(name: str, frame: types.FrameType) -> Iterator[Making]:
    """The lines of a running function that make what its variable has."""
    function = frame.f_code.co_name.strip("<>").replace("module", "")
    tree = read_tree(frame.f_code.co_filename)
    return (each for each in find_makings(name, tree) if each.function == function and not each.is_attribute)
