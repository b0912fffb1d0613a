"""Bytes that recomputed values take and free, with a pencil: five ticks forward, five backward."""

from __future__ import annotations

import numpy as np

from fxmem.planning.operators.choices import LiveChanges, ValueLife, ValueUse

SAVED = ValueLife(nbytes=7.0, flow_end=2, death=8, saved=True)
UNSAVED = ValueLife(nbytes=11.0, flow_end=3, death=3, saved=False)


def bytes_after(*uses: tuple[int, ValueUse], most: float = 0.0) -> list[float]:
    changes = LiveChanges.empty([SAVED, UNSAVED], 10)
    for value, use in uses:
        changes.count(value, use, 1.0)
    changes.settle(lambda group: most)
    return changes.apply(np.zeros(10)).tolist()


def test_a_saved_value_that_is_kept_changes_nothing_unless_it_is_needed_for_longer() -> None:
    assert bytes_after((0, ValueUse(False, 6, 8))) == [0] * 10
    assert bytes_after((0, ValueUse(False, 6, 9))) == [0] * 8 + [7, 0]


def test_a_value_that_autograd_does_not_save_is_kept_from_its_last_reader_on() -> None:
    assert bytes_after((1, ValueUse(False, 6, 8))) == [0, 0, 0, 11, 11, 11, 11, 11, 0, 0]


def test_a_recomputed_value_is_gone_until_the_tick_before_backward_needs_it() -> None:
    assert bytes_after((0, ValueUse(True, 6, 8))) == [0, 0, -7, -7, -7, 0, 0, 0, 0, 0]


def test_a_transient_value_counts_at_the_tick_before_others_are_recomputed_from_it() -> None:
    assert bytes_after((1, ValueUse(True, 6, 6)), most=11.0) == [0, 0, 0, 0, 0, 11, 0, 0, 0, 0]


def test_what_is_counted_and_removed_leaves_nothing_and_a_copy_is_its_own() -> None:
    changes = LiveChanges.empty([SAVED, UNSAVED], 10)
    use = ValueUse(True, 6, 6)
    changes.count(1, use, 1.0)
    copy = changes.copy()
    changes.count(1, use, -1.0)
    groups: list[tuple[int, ...]] = []
    changes.settle(lambda group: groups.append(tuple(group)) or 0.0)
    assert groups == [()]
    assert changes.apply(np.zeros(10)).tolist() == [0] * 10
    copy.count(0, use, 1.0)
    copy.settle(lambda group: 11.0 * len(group))
    assert copy.apply(np.zeros(10)).tolist() == [0, 0, -7, -7, -7, 15, -7, -7, 0, 0]
