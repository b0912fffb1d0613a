"""Plans of regions as choices of calls: what a region runs again, and in which stretch each of its values lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from fxmem.planning.lookups import group
from fxmem.planning.operators.calls import StretchPath
from fxmem.planning.operators.choices import RecomputeChoices
from fxmem.planning.regions.dynamic_programs import Stretch, Tables


class RegionChoice(NamedTuple):
    """What regions come down to."""

    calls: set[int]
    """Calls that they run again."""
    paths: dict[int, StretchPath]
    """By value of regions that hold others, the region that alone needs it: the number of each that holds it."""


class RegionChoices:
    """Tells of the regions of one step which calls they are.

    Args:
        step: what there is to choose.
    """

    def __init__(self, step: RecomputeChoices) -> None:
        self._step = step

    @cached_property
    def _calls_by_node(self) -> dict[int, list[int]]:
        return group((self._step.profile.ops[op].node, index) for index, op in enumerate(self._step.ops))

    def find(self, tables: Tables, stretches: Iterable[Stretch]) -> RegionChoice:
        """The choice that regions are.

        Args:
            tables: in whose units the regions are.
            stretches: the regions.
        """
        calls, paths = set[int](), dict[int, StretchPath]()
        regions = list(stretches)
        cuts = tables.units.cuts
        for number, region in enumerate(regions):
            rerun = {node for later in regions[number + 1 :] for node in range(cuts[later.first], cuts[later.last])}
            for call, late in self._find_inside(tables, region):
                if not any(self._is_kept(value, cuts[region.last], rerun) for value in late):
                    calls.add(call)
            if region.inner:
                paths |= self._find_paths(tables, region, (number,))
        return RegionChoice(calls, {value: path for value, path in paths.items() if len(path) > 1})

    def _is_kept(self, value: int, last: int, rerun: set[int]) -> bool:
        """Whether a value that is read after its region has to stay: a node from `last` on saves it, or one of `rerun`
        is run again with it."""
        step = self._step
        storage = step.storages[value]
        if storage is not None and self._last_savers.get(storage, -1) >= last:
            return True
        return any(step.profile.ops[step.ops[reader]].node in rerun for reader in step.readers[value])

    @cached_property
    def _last_savers(self) -> dict[int, int]:
        """By storage that is saved, the last node that saves it."""
        return {storage: index for index, node in enumerate(self._step.profile.nodes) for storage in node.saved}

    def _find_paths(self, tables: Tables, region: Stretch, path: StretchPath) -> dict[int, StretchPath]:
        found: dict[int, StretchPath] = {}
        for call, late in self._find_inside(tables, region):
            found |= dict.fromkeys(set(self._step.calls[call].values) - late, path)
        for number, inner in enumerate(region.inner):
            found |= self._find_paths(tables, inner, (*path, number))
        return found

    def _find_inside(self, tables: Tables, region: Stretch) -> Iterator[tuple[int, set[int]]]:
        """The calls that a region runs again, with what is read after it of each."""
        step, units = self._step, tables.units
        first, last = units.cuts[region.first], units.cuts[region.last]
        kept = {product.op for _, product in tables.selection.find_kept(first, last, region.level)}
        for call in (call for node in range(first, last) for call in self._calls_by_node.get(node, ())):
            if step.ops[call] not in kept:
                made = [(value, step.storages[value]) for value in step.calls[call].values]
                readers = ((value, units.last_reader.get(s, -1)) for value, s in made if s is not None)
                yield call, {value for value, last_reader in readers if last_reader >= region.last}
