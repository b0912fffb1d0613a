"""What is alive at a predicted peak, and whether two places are one line."""

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
from fxmem.whatif.reproduction import _is_same_line, hold_at_peak, leave_room
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
