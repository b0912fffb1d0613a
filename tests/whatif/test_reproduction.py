"""What is alive at a predicted peak, and whether two places are one line."""

from __future__ import annotations

import pytest

from fxmem.memory import liveness
from fxmem.records.profile import Profile
from fxmem.whatif.reproduction import _is_same_line, hold_at_peak
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
