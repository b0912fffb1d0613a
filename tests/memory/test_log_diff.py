"""Predicted and measured logs, made up by hand, and where they part ways; no torch."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.memory import log_diff
from fxmem.memory.log_diff import LogEvent, first_differences, predicted_events
from fxmem.records.profile import Kind, Phase
from fxmem.records.validation import Difference, LogSide
from tests.profiles import TINY_CARD, Log, profiles, small_profile

CONVOLUTION, RELU, BACKWARD = "aten.convolution.default", "aten.relu.default", "aten.convolution_backward.default"


def predicted() -> tuple[LogEvent, ...]:
    """conv takes 700 and a workspace of 90; relu takes 700; backward takes 700 and 300, and conv's result goes."""
    return (
        LogEvent(700, Phase.FORWARD, CONVOLUTION, "conv"),
        LogEvent(90, Phase.FORWARD, CONVOLUTION, "conv"),
        LogEvent(-90, Phase.FORWARD, CONVOLUTION, "conv"),
        LogEvent(700, Phase.FORWARD, RELU, "relu"),
        LogEvent(700, Phase.BACKWARD, BACKWARD, "conv"),
        LogEvent(300, Phase.BACKWARD, BACKWARD, "conv"),
        LogEvent(-700, Phase.BACKWARD, CONVOLUTION, "conv"),
        LogEvent(11, Phase.BACKWARD, RELU, "relu"),
    )


SIZES = tuple(event.nbytes for event in predicted())
BY_PHASE = {Phase.FORWARD: 4, Phase.BACKWARD: 4}


def brief(found: tuple[Difference, ...]) -> list[tuple[Any, ...]]:
    return [(d.side.value, d.lives_longer, d.nbytes, d.phase.value, d.node) for d in found]


def test_equal_logs_have_no_differences() -> None:
    assert first_differences(predicted(), SIZES, BY_PHASE) == ()
    assert first_differences(predicted(), SIZES) == ()
    assert first_differences((), ()) == ()


def test_a_block_only_the_prediction_has_is_named() -> None:
    measured = [700, 700, 700, 300, -700, 11]
    (found,) = first_differences(predicted(), measured, {Phase.FORWARD: 2, Phase.BACKWARD: 4})
    expected = {
        "side": LogSide.PREDICTED,
        "nbytes": 90,
        "phase": Phase.FORWARD,
        "position": 1,
        "op": CONVOLUTION,
        "node": "conv",
    }
    assert found.model_dump(exclude_defaults=True) == expected


def test_a_block_only_the_measurement_has_is_placed_by_what_came_before() -> None:
    measured = [700, 90, -90, 700, 57, -57, 700, 300, -700, 11]
    (found,) = first_differences(predicted(), measured, {Phase.FORWARD: 6, Phase.BACKWARD: 4})
    assert found.model_dump(exclude_defaults=True) == {
        "side": LogSide.MEASURED,
        "nbytes": 57,
        "phase": Phase.FORWARD,
        "position": 4,
        "op": RELU,
        "node": "relu",
    }


def test_a_block_before_all_others_has_no_neighbour() -> None:
    (found,) = first_differences(predicted(), (57, -57, *SIZES), {Phase.FORWARD: 6, Phase.BACKWARD: 4})
    assert (found.nbytes, found.op, found.node) == (57, "", "")


def test_another_size_is_one_block_on_each_side() -> None:
    measured = [700, 80, -80, 700, 700, 300, -700, 11]
    assert brief(first_differences(predicted(), measured, BY_PHASE)) == [
        ("predicted", False, 90, "forward", "conv"),
        ("measured", False, 80, "forward", "conv"),
    ]


def test_a_block_that_goes_later_is_the_same_block() -> None:
    # Measured, conv's result goes before the gradient of 300 comes: it lives longer in the prediction.
    sooner = [700, 90, -90, 700, 700, -700, 300, 11]
    assert brief(first_differences(predicted(), sooner, BY_PHASE)) == [("predicted", True, 700, "backward", "conv")]
    later = [700, 90, -90, 700, 700, 300, 11, -700, 13]
    assert brief(
        first_differences((*predicted(), LogEvent(13, Phase.BACKWARD)), later, {Phase.FORWARD: 4, Phase.BACKWARD: 5})
    ) == [("measured", True, 700, "backward", "conv")]


def test_frees_at_the_very_end_are_left_out() -> None:
    assert first_differences(predicted(), (*SIZES, -11, -300, -700), {Phase.FORWARD: 4, Phase.BACKWARD: 7}) == ()
    assert first_differences((*predicted(), LogEvent(-11, Phase.BACKWARD)), SIZES, BY_PHASE) == ()


def test_a_block_that_goes_at_the_very_end_of_one_side_only_lives_longer_there() -> None:
    sooner = (*SIZES[:4], -700, *SIZES[4:])
    late = (*predicted(), LogEvent(-700, Phase.BACKWARD))
    counts = {**BY_PHASE, Phase.FORWARD: BY_PHASE[Phase.FORWARD] + 1}
    assert brief(first_differences(late, sooner, counts)) == [("predicted", True, 700, "backward", "")]


def test_phases_are_aligned_each_on_its_own() -> None:
    # As wholes these logs differ in nothing; but the block of 11 comes in forward on one side and in backward on the
    # other.
    mine = (
        LogEvent(700, Phase.FORWARD, RELU, "relu"),
        LogEvent(11, Phase.FORWARD, RELU, "relu"),
        LogEvent(5, Phase.BACKWARD, BACKWARD, "conv"),
    )
    assert first_differences(mine, (700, 11, 5)) == ()
    assert brief(first_differences(mine, (700, 11, 5), {Phase.FORWARD: 1, Phase.BACKWARD: 2})) == [
        ("predicted", False, 11, "forward", "relu"),
        ("measured", False, 11, "backward", "relu"),
    ]


def test_differences_come_in_the_order_of_the_step_and_no_more_than_asked_for() -> None:
    measured = [57, 700, 700, 700, 300, -700]
    counts = {Phase.FORWARD: 3, Phase.BACKWARD: 3}
    all_of_them = first_differences(predicted(), measured, counts)
    assert brief(all_of_them) == [
        ("measured", False, 57, "forward", ""),
        ("predicted", False, 90, "forward", "conv"),
        ("predicted", False, 11, "backward", "relu"),
    ]
    assert first_differences(predicted(), measured, counts, limit=2) == all_of_them[:2]


def test_a_step_without_optimizer_or_backward_is_no_special_case() -> None:
    forward = predicted()[:4]
    assert brief(first_differences(forward, [700, 700], {Phase.FORWARD: 2})) == [
        ("predicted", False, 90, "forward", "conv")
    ]


def test_counts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to the 8 events, got 7"):
        first_differences(predicted(), SIZES, {Phase.FORWARD: 3, Phase.BACKWARD: 4})


# --- the log of a profile ---------------------------------------------------------------------------------------------


def test_the_log_of_a_profile_says_who_takes_each_block() -> None:
    log = Log(target=TINY_CARD)
    log.resident(1000, Kind.PARAMETER)
    conv, relu = log.node("conv"), log.node("relu")
    with log.phase(Phase.FORWARD):
        with log.op(CONVOLUTION, conv, Phase.FORWARD):
            held = log.allocate(700, Kind.SAVED)
            log.free(log.allocate(90, Kind.WORKSPACE))
            log.allocate(0, Kind.TEMPORARY)
        with log.op(RELU, relu, Phase.FORWARD):
            log.allocate(701, Kind.OUTPUT)
    with log.phase(Phase.BACKWARD), log.op(BACKWARD, conv, Phase.BACKWARD):
        log.allocate(702, Kind.GRADIENT)
        log.free(held)
    assert predicted_events(log.profile()) == (
        LogEvent(700, Phase.FORWARD, CONVOLUTION, "conv"),
        LogEvent(90, Phase.FORWARD, CONVOLUTION, "conv"),
        LogEvent(-90, Phase.FORWARD, CONVOLUTION, "conv"),
        LogEvent(701, Phase.FORWARD, RELU, "relu"),
        LogEvent(702, Phase.BACKWARD, BACKWARD, "conv"),
        LogEvent(-700, Phase.BACKWARD, CONVOLUTION, "conv"),
    )


@given(profiles())
def test_any_log_ends_where_its_profile_does(profile: Any) -> None:
    resident = sum(s.nbytes for s in profile.storages if s.birth == 0)
    left = sum(s.nbytes for s in profile.storages if s.death == profile.ticks)
    events = predicted_events(profile)
    assert resident + sum(event.nbytes for event in events) == left
    assert first_differences(events, [event.nbytes for event in events]) == ()


def test_a_training_step_of_a_hand_made_profile_agrees_with_itself() -> None:
    events = predicted_events(small_profile())
    counts = {phase: sum(event.phase is phase for event in events) for phase in Phase}
    assert first_differences(events, [event.nbytes for event in events], counts) == ()


# --- the alignment ----------------------------------------------------------------------------------------------------

SEQUENCES = st.lists(st.integers(1, 4), max_size=9)


def longest_common(a: list[int], b: list[int]) -> int:
    """By the textbook's table."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(SEQUENCES, SEQUENCES)
def test_the_edit_script_is_a_shortest_one(a: list[int], b: list[int]) -> None:
    only_a, only_b, ends = log_diff._edit_script(a, b)
    assert ends == (len(a), len(b))
    assert [x for at, x in enumerate(a) if at not in only_a] == [y for at, y in enumerate(b) if at not in only_b]
    assert len(only_a) + len(only_b) == len(a) + len(b) - 2 * longest_common(a, b)


@given(SEQUENCES, SEQUENCES)
def test_what_is_given_up_is_right_as_far_as_it_went(a: list[int], b: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_diff, "_MAX_EDITS", 3)
        only_a, only_b, (end_a, end_b) = log_diff._edit_script(a, b)
    assert len(only_a) + len(only_b) <= 3
    assert [x for at, x in enumerate(a[:end_a]) if at not in only_a] == [
        y for at, y in enumerate(b[:end_b]) if at not in only_b
    ]


def test_a_hopeless_phase_is_given_up_and_the_first_difference_is_still_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_diff, "_MAX_EDITS", 60)
    mine = tuple(LogEvent(1000 + at, Phase.FORWARD, RELU, f"n{at}") for at in range(600))
    found = first_differences(mine, [1000, 1001, *range(20_000, 20_600)])
    assert len(found) == 20
    assert found[0].position == 2


def test_a_phase_after_one_that_was_given_up_is_aligned_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_diff, "_MAX_EDITS", 4)
    forward = tuple(LogEvent(1000 + at, Phase.FORWARD, RELU, f"n{at}") for at in range(9))
    mine = (
        *forward,
        LogEvent(700, Phase.BACKWARD, BACKWARD, "conv"),
        LogEvent(-700, Phase.BACKWARD, BACKWARD, "conv"),
        LogEvent(11, Phase.BACKWARD, RELU, "relu"),
    )
    theirs = [*range(2000, 2009), 700, -700, 57, 11]
    found = first_differences(mine, theirs, {Phase.FORWARD: 9, Phase.BACKWARD: 4})
    assert [d.nbytes for d in found if d.phase is Phase.BACKWARD] == [57]
    assert len(found) == 5


def test_blocks_of_one_size_are_told_apart_by_where_they_go() -> None:
    # Three blocks of 64 on either side; the measurement has a fourth, gone again at once, and keeps the second until
    # the end.
    sizes = [64, 64, 64, -64, 5, -64, 6]
    mine = tuple(LogEvent(size, Phase.FORWARD, RELU, f"n{at}") for at, size in enumerate(sizes))
    theirs = [64, 64, 64, -64, 64, -64, 5, 6, -64, 7]
    found = first_differences((*mine, LogEvent(7, Phase.FORWARD)), theirs)
    assert brief(found) == [("measured", False, 64, "forward", "n2"), ("measured", True, 64, "forward", "n5")]
