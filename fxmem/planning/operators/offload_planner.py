"""Plans in which results of operators wait in the host's memory, and others are recomputed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from fxmem.hardware.step_time import step_seconds
from fxmem.planning import tuning
from fxmem.planning.operators.min_cut import Cutter
from fxmem.planning.operators.offloads import HostLink, OffloadChoices
from fxmem.planning.operators.planner import Choice, OperatorPlanner
from fxmem.planning.regions.planner import Planner


class OffloadPlanner(OperatorPlanner):
    """Plans for one profile, with the host's memory.

    Args:
        planner: of the same step, without it.
        link: to the host's memory.
    """

    def __init__(self, planner: OperatorPlanner, link: HostLink) -> None:
        super().__init__(planner.profile, planner.survey)
        self._without, self._link = planner, link
        self._offloading: dict[tuple[int, ...], Cutter] = {}

    @cached_property
    def _cutter(self) -> Cutter:
        return self._without._cutter

    @cached_property
    def regions(self) -> Planner:
        return self._without.regions

    @cached_property
    def _offloads(self) -> OffloadChoices:
        return OffloadChoices(self._cutter, self._link)

    def _find_choices(self, budget: float) -> list[Choice]:
        step = step_seconds(self.profile, taped=True) or 0.0
        for waits in ([share * step for share in tuning.WAITS], [math.inf]):
            tried = [self._offload(budget, most_waited) for most_waited in waits]
            if found := [each for each in tried if each is not None]:
                return found
        return []

    def _offload(self, budget: float, most_waited: float) -> Choice | None:
        """Offload until the budget is kept, or as much as the step may wait for; recompute what is over it."""
        offloads = self._offloads.choose(budget, most_waited)
        cutter = self._offloading.get(offloads.values)
        if cutter is None:
            cutter = self._cutter.without(offloads.values, offloads.freed) if offloads.values else self._cutter
            self._offloading[offloads.values] = cutter
        found = self._find_choice(cutter, budget)
        return None if found is None else self._settle(Choice(cutter, found, offloads))

    def _settle(self, found: Choice) -> Choice:
        """The choice with results fetched when what is recomputed first needs them."""
        cutter, choice, offloads = found
        if offloads is None or not offloads.values:
            return found
        first, _ = cutter.evaluate(choice.recomputed).spans(len(cutter.live))
        return found._replace(offloads=self._offloads.settle(offloads, first))

    def _choices_of_all(self, budgets: Sequence[float]) -> Iterator[Choice]:
        return itertools.chain.from_iterable(map(self._find_choices, budgets))

    @cached_property
    def _least(self) -> Choice:
        offloads = self._offloads.choose(0.0, math.inf)
        found = self._find_least(self._cutter.without(offloads.values, offloads.freed), self.regions.tables.smallest)
        return self._settle(found._replace(offloads=offloads))
