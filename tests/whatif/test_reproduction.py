"""What is alive at a predicted peak, beside what a snapshot has, and whether two places are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxmem.hardware import catalogue
from fxmem.hardware.context import room_bytes
from fxmem.memory import liveness
from fxmem.memory.shortage import read_messages
from fxmem.records.profile import Profile
from fxmem.simulation.program import Launch
from fxmem.whatif.program_step import ProgramCommand, ProgramStep
from fxmem.whatif.reproduction import _find_line, _is_same_line, hold_at_peak, join_lines, leave_room
from tests.memory.test_snapshots import event, frame, report_of, segment
from tests.profiles import deep_profile, small_profile


@pytest.mark.parametrize("profile", [small_profile(), deep_profile(3)], ids=["small", "deep"])
def test_the_holders_are_the_peak(profile: Profile) -> None:
    timeline = liveness.timeline(profile)
    holders = hold_at_peak(profile, timeline)
    assert sum(each.nbytes for each in holders) == timeline.peak.requested_bytes
    assert sum(each.count for each in holders) == len(timeline.alive)
    assert len({(each.kind, each.place) for each in holders}) == len(holders)
    assert [each.nbytes for each in holders] == sorted((each.nbytes for each in holders), reverse=True)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("/data/train.py:9", True), ("train.py:9", True), ("train.py:8", False), ("/data/model.py:9", False)],
)
def test_a_line_is_the_same_in_another_folder(said: str, expected: bool) -> None:
    assert _is_same_line("src/train.py:9", said) is expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("/data/nets/model.py:9", "src/nets/model.py:9"),  # most folders in common
        ("/data/model.py:9", "src/model.py:9"),
        ("/data/model.py:8", "/data/model.py:8"),  # the prediction has no such line
        ("AddmmBackward0", ""),
        ("", ""),
    ],
)
def test_a_snapshots_line_is_the_predictions_most_like_it(said: str, expected: str) -> None:
    assert _find_line(said, ["src/model.py:9", "src/nets/model.py:9", ""]) == expected


def test_a_snapshot_and_a_prediction_are_told_apart_by_line(tmp_path: Path) -> None:
    profile = small_profile()
    timeline = liveness.timeline(profile)
    predicted = {each.place: 0 for each in hold_at_peak(profile, timeline)}
    for each in hold_at_peak(profile, timeline):
        predicted[each.place] += each.nbytes
    known = next(place for place in predicted if place)
    file, _, line = known.rpartition(":")
    blocks = (
        (1, 13, [frame(int(line), f"/elsewhere/{file}")]),
        (14, 17, [frame(3, "/elsewhere/other.py")]),
        (31, 19, []),
    )
    trace = [{**event("alloc", at, size), "frames": frames} for at, size, frames in blocks]
    held = segment(1, 49, (13, "active_allocated", 0), (17, "active_allocated", 0), (19, "active_allocated", 0))
    joined = {each.place: each for each in join_lines(report_of(tmp_path / "a", trace, held), profile, timeline)}
    assert {place: each.predicted_bytes for place, each in joined.items() if each.predicted_bytes} == predicted
    measured = {place: each.measured_bytes for place, each in joined.items() if each.measured_bytes}
    assert measured == {known: 13, "/elsewhere/other.py:3": 17, "": 19}


def test_what_backward_made_has_a_line_only_beside_a_snapshot_that_gives_it_one(tmp_path: Path) -> None:
    profile = deep_profile(3)
    timeline = liveness.timeline(profile)
    backward = sum(
        each.nbytes
        for each in map(profile.storages.__getitem__, timeline.alive)
        if each.op is not None and profile.ops[each.op].phase == "backward" and each.node is not None
    )
    assert backward
    unnamed = []
    for index, name in enumerate(("step", "at::_ops::mm::call")):
        trace = [{**event("alloc", 1, 13), "frames": [frame(3, "??" if index else "/data/a.py", name)]}]
        report = report_of(tmp_path / name[:2], trace, segment(1, 13, (13, "active_allocated", 0)))
        unnamed.append(sum(each.predicted_bytes for each in join_lines(report, profile, timeline) if not each.place))
    assert unnamed[1] - unnamed[0] == backward


def test_a_program_runs_on_the_part_of_the_card_that_the_message_leaves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    card = catalogue.target("v100")
    step = ProgramStep(ProgramCommand(Launch(str(tmp_path / "train.py")), card, steps=3))
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 16.00 GiB total capacity; 3.00 GiB already allocated; "
        "1.00 GiB free; 4.00 GiB reserved in total by PyTorch)"
    )
    left, room = leave_room(step, read_messages(text)[0])
    assert isinstance(left, ProgramStep)
    assert room == room_bytes(left.program.target) == 5 << 30
    assert left.program.target.capability == card.capability
    assert leave_room(step, None) == (step, room_bytes(card))
