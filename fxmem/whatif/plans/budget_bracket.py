"""Which budget to ask a planner for next, after its last plan was analysed.

A planner bounds requested bytes by its own model of memory; the budget bounds what the analysis counts. The two differ
by little, so the next question moves by as much as the last plan missed the budget by, and by bisection where that
leads out of the bracket.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.planning import tuning


@dataclass(frozen=True)
class BudgetBracket:
    """The requested bytes to ask a planner for, between two bounds."""

    budget: int
    """The bytes that the analysed peak has to keep."""
    ask: int
    """The requested bytes to ask for next."""
    below: int
    """Asked for this much or less, a plan keeps the budget or there is none."""
    above: int
    """Asked for this much or more, no plan keeps it."""

    @classmethod
    def open(cls, budget: int, requested: int, overhead: int, *, exact: bool) -> BudgetBracket:
        """Begin a search.

        Args:
            budget: bytes that the analysed peak has to keep.
            requested: bytes requested at the peak without a plan.
            overhead: bytes the allocator adds to them.
            exact: whether the planner's estimates are exact but for a fiftieth.
        """
        ask = budget - overhead
        above = requested if budget < requested else 2 * budget
        return cls(budget, ask, 0, min(above, ask + ask // tuning.EXACT_ERROR) if exact else above)

    @property
    def is_closed(self) -> bool:
        """Whether the bounds are so close that another question is not worth it."""
        return self.above - self.below <= self.tolerance

    @property
    def tolerance(self) -> int:
        """Bytes of the budget that may stay unused."""
        return self.budget // tuning.USED_UP

    def after_refusal(self, least: int = 0) -> BudgetBracket:
        """The planner had no plan.

        Args:
            least: the fewest bytes for which it has one.
        """
        return self._narrow(max(self.ask, least - 1), self.above, max(self.ask, least))

    def after_success(self, spare: int) -> BudgetBracket:
        """The plan keeps the budget, with so many bytes to spare."""
        return self._narrow(self.ask, self.above, self.ask + spare)

    def after_excess(self, excess: int) -> BudgetBracket:
        """The plan does not keep the budget.

        Args:
            excess: by how many bytes; where there is none, free memory in pieces is the reason.
        """
        less = max(excess, self.tolerance) if excess > 0 else self.budget // tuning.FRAGMENT
        return self._narrow(self.below, self.ask, self.ask - less)

    def _narrow(self, below: int, above: int, ask: int) -> BudgetBracket:
        inside = below < ask < above
        return BudgetBracket(self.budget, ask if inside else (below + above) // 2, below, above)
