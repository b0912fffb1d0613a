"""How a plan's regions are chosen: one module for each strategy, which registers itself by its name.

A strategy is a function `propose(tables, budget)`. `tables` say what storing and checkpointing any stretch of the step
costs; `budget` is in requested bytes, infinite where none was given. It returns the stretches to checkpoint, or None
where no stretches keep the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxmem.errors import UsageError
from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.records import registry
from fxmem.records.registry import Registry
from fxmem.records.units import Application

Propose = Callable[[Tables, float], Sequence[Stretch] | None]


@dataclass(frozen=True)
class Strategy:
    """A registered strategy: see `register`."""

    name: str
    propose: Propose | None = None
    tries: tuple[str, ...] = ()
    weighs: tuple[str, ...] = ()
    applications: tuple[Application, ...] = (Application.MODULES, Application.GRAPH)
    has_curve: bool = False
    nests: bool = False
    follows_budget: bool = True

    @property
    def falls_back(self) -> bool:
        """Whether the plan that reaches lowest may stand in where no proposal keeps the budget."""
        return self.has_curve and self.name != "flat"


STRATEGIES: Registry[Strategy] = registry.STRATEGIES


def register(
    name: str,
    propose: Propose | None = None,
    *,
    tries: tuple[str, ...] = (),
    weighs: tuple[str, ...] = (),
    applications: tuple[Application, ...] = (Application.MODULES, Application.GRAPH),
    has_curve: bool = False,
    nests: bool = False,
    follows_budget: bool = True,
) -> None:
    """Add a strategy, for `fxmem.plan(analysis, name)` and `fxmem plan --strategy name`.

    The command line finds one of another package by an entry point of the group `fxmem.planners`, which bears the
    strategy's name and whose loading registers it.

    Args:
        name: lower-case letters, digits and hyphens.
        propose: gives the stretches of units to checkpoint. They may not overlap, and `tables.regions[first, last]` has
            to be true of each.
        tries: names of strategies; the first one that keeps the budget gives the plan. Empty: `propose` does.
        weighs: names of strategies whose plans are applied and analysed beside its own; the cheapest is taken.
        applications: how its plans may be applied, the cheapest way first.
        has_curve: without a budget, a curve of plans is made. Otherwise `propose` is called with an infinite budget for
            the one plan that it has then.
        nests: it proposes regions within regions. It gets tables over fewer cuts, and its plan counts as using up the
            budget.
        follows_budget: what it proposes depends on the budget.

    Raises:
        UsageError: another strategy has this name.
    """
    STRATEGIES.register(name, Strategy(name, propose, tries, weighs, applications, has_curve, nests, follows_budget))


def allowed_applications(
    strategy: str, application: Application | str | None, *, regions_only: bool = False
) -> list[Application]:
    """How plans of a strategy may be applied, the cheapest way first; of them the requested one, if any.

    Args:
        regions_only: leaves single operators out, so that the list may be empty.

    Raises:
        UsageError: no such strategy, or one that does not go with the application.
    """
    found = list(STRATEGIES.get(strategy).applications)
    if application is not None:
        if application not in found:
            raise UsageError(
                f"expected application {' or '.join(map(repr, map(str, found)))} with strategy {strategy!r}, got "
                f"{str(application)!r}"
            )
        found = [Application(application)]
    return [each for each in found if not (regions_only and each is Application.OPERATORS)]
