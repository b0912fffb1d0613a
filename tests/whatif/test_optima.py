"""`fxmem.plan` beside exhaustive search over small random graphs. `FXMEM_PLANS=0:500` takes those graphs instead; `make
optima` writes the shares down."""

from __future__ import annotations

import os

import pytest

from tests.small_graphs import comparisons

pytestmark = pytest.mark.truth

FIRST, _, LAST = os.environ.get("FXMEM_PLANS", "0:7").partition(":")


def test_plans_keep_their_budget_and_most_are_the_cheapest_there_are() -> None:
    found = [each for seed in range(int(FIRST), int(LAST)) for each in comparisons(seed)]
    wrong = [each for each in found if each.verdict in ("exceeded", "cheaper")]
    assert not wrong
    for nested in (False, True):
        chosen = [each for each in found if each.nested == nested and each.spare]
        assert len(chosen) >= 3
        assert sum(each.verdict == "optimal" for each in chosen) >= 0.8 * len(chosen)
