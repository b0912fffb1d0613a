"""The budgets a planner is asked for, with planners and analyses that are numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.whatif.plan_search import BudgetBracket

BUDGET = 1_000_000


def opened(*, requested: int = 3 * BUDGET, overhead: int = 0, exact: bool = False) -> BudgetBracket:
    return BudgetBracket.open(BUDGET, requested, overhead, exact=exact)


def search(bracket: BudgetBracket, peak: Callable[[int], int | None], attempts: int = 8) -> list[int]:
    """The peaks of plans that keep the budget; `peak` gives that of the plan for a question, None for no plan."""
    kept = []
    for _ in range(attempts):
        found = peak(bracket.ask)
        if found is None:
            bracket = bracket.after_refusal()
        elif found > BUDGET:
            bracket = bracket.after_excess(found - BUDGET)
        else:
            kept.append(found)
            bracket = bracket.after_success(BUDGET - found)
        if bracket.is_closed:
            break
    return kept


def test_the_first_question_leaves_room_for_the_allocator() -> None:
    assert opened(overhead=1234).ask == BUDGET - 1234


def test_the_upper_bound_is_the_unplanned_peak_where_the_budget_is_below_it() -> None:
    assert opened(requested=3 * BUDGET).above == 3 * BUDGET
    assert opened(requested=BUDGET).above == 2 * BUDGET
    assert opened(requested=3 * BUDGET, exact=True).above == BUDGET + BUDGET // 50


def test_an_excess_moves_the_next_question_by_as_much() -> None:
    bracket = opened().after_excess(70_000)
    assert (bracket.ask, bracket.above) == (BUDGET - 70_000, BUDGET)
    assert opened().after_excess(1).ask == BUDGET - bracket.tolerance


def test_where_few_bytes_do_not_fit_a_sixteenth_less_is_asked_for() -> None:
    assert opened().after_excess(-5).ask == BUDGET - BUDGET // 16
    assert opened().after_excess(0).ask == BUDGET - BUDGET // 16


def test_bytes_to_spare_are_asked_for_as_well() -> None:
    bracket = opened().after_success(30_000)
    assert (bracket.below, bracket.ask) == (BUDGET, BUDGET + 30_000)


def test_a_refusal_is_followed_by_the_middle() -> None:
    bracket = opened(requested=3 * BUDGET).after_refusal()
    assert (bracket.below, bracket.ask) == (BUDGET, 2 * BUDGET)


@pytest.mark.parametrize("share", [0.7, 0.9, 1.0, 1.1, 1.3])
def test_a_planner_that_is_always_off_by_a_share_is_brought_to_the_budget(share: float) -> None:
    kept = search(opened(), lambda ask: round(ask * share))
    assert BUDGET - opened().tolerance <= max(kept) <= BUDGET


@given(st.lists(st.integers(0, 2 * BUDGET) | st.none(), min_size=8, max_size=8), st.booleans())
def test_the_bracket_only_narrows_and_the_question_stays_inside(answers: list[int | None], exact: bool) -> None:
    brackets = [opened(exact=exact)]
    for found in answers:
        last = brackets[-1]
        if last.is_closed:
            break
        if found is None:
            brackets.append(last.after_refusal())
        elif found > BUDGET:
            brackets.append(last.after_excess(found - BUDGET))
        else:
            brackets.append(last.after_success(BUDGET - found))
    for before, after in pairwise(brackets):
        assert before.below <= after.below <= after.ask <= after.above <= before.above
        assert after.above - after.below < before.above - before.below
