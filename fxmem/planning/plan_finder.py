"""What every planner can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from fxmem.errors import ExceededError
from fxmem.records.plan import Plan
from fxmem.records.units import Application, exact_bytes


class PlanFinder(Protocol):
    """A planner for one profile: budgets in requested bytes go in, plans that have not been applied come out.

    Peaks are the planner's own estimates. `strategy` is a name of `fxmem.planning.STRATEGIES`.
    """

    application: Application
    """How its plans are applied."""
    is_exact: bool = False
    """Whether its estimates of a peak are right but for a fiftieth."""
    is_quick: bool = False
    """Whether a first plan is found soon, beside those of other planners."""

    @property
    def operators(self) -> Mapping[str, int]:
        """How often the surveyed forward calls each operator that a plan may name; empty where plans name none."""
        return MappingProxyType({})

    def other_strategies(self, strategy: str) -> tuple[str, ...]:
        """Strategies whose plans are weighed against those of the given one."""
        return ()

    def plan(self, strategy: str, budget_bytes: int | None) -> Plan:
        """The cheapest plan of a strategy within a budget.

        Without a budget strategies without a curve give their one plan; the others store everything.

        Raises:
            UsageError: an unknown strategy, or a step that cannot be planned.
            ExceededError: no plan of this strategy keeps the budget; says the smallest peak it reaches.
        """
        found = self.find(strategy, budget_bytes)
        if found is None:
            raise ExceededError(
                f"expected a plan that keeps the step within {exact_bytes(budget_bytes or 0)}; strategy {strategy} "
                f"with {self.application.value} reaches {exact_bytes(self.lowest_peak(strategy))} at the least"
            )
        return found

    def lowest_peak(self, strategy: str) -> int:
        """The smallest peak that a strategy's own plans reach, in bytes."""

    def find(self, strategy: str, budget_bytes: int | None) -> Plan | None:
        """The same; None if no plan keeps the budget, and no word of the smallest peak, which takes as long again."""

    def least(self, strategy: str) -> int:
        """The fewest bytes for which a strategy has a plan; 0 for a strategy without a curve."""

    def smallest(self) -> Plan:
        """The plan that reaches lowest."""

    def curve(self) -> tuple[Plan, ...]:
        """Plans that no other beats in both peak and cost, largest peak first; the first has no regions."""
