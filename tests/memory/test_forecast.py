"""A step of an out of memory has a form that is proved; what is not known to go on has none."""

from __future__ import annotations

import pytest

from fxmem.memory import liveness
from fxmem.memory.forecast import forecast
from fxmem.records.parts import Growth
from fxmem.records.profile import Phase, Profile, ProgramRun, Round
from fxmem.show.facts import find_fit
from fxmem.show.run_facts import describe_growth
from tests.profiles import small_profile

MIB = 1 << 20


def run_of(*grown: Growth, growth_bytes: int = MIB) -> Profile:
    rounds = [Round(requested_bytes=MIB, allocated_bytes=MIB, phase=Phase.FORWARD, operators=2) for _ in range(5)]
    program = ProgramRun(ending="", rounds=rounds, shown=5, steady=False, growth_bytes=growth_bytes, grown=grown)
    profile = small_profile()
    target = profile.target.model_copy(update={"memory_bytes": 2048 * MIB})
    step = profile.step.model_copy(update={"program": program})
    return profile.model_copy(update={"step": step, "target": target})


def growth(**known: int | bool) -> Growth:
    return Growth(holder="kept", nbytes=MIB, tensors=1, since=1, **known)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "grew by 1,048,576 bytes in each of 4 steps (kept by kept); whether it goes on was not seen: --steps 200"),
        ({"until": 10}, "grows by 1,048,576 bytes a step (kept by kept) until step 10, to 6.00 MiB"),
        (
            {"ends": 20},  # it may be emptied before
            "grew by 1,048,576 bytes in each of 4 steps (kept by kept); whether it goes on was not seen: --steps 200",
        ),
        (
            {"emptied": 2},
            "grew by 1,048,576 bytes in each of 4 steps (kept by kept), and has had more: it was emptied in step 2",
        ),
        (
            {"every": 2},
            "grew by 1,048,576 bytes in the mean of 4 steps (kept by kept); whether it goes on was not seen: "
            "--steps 200",
        ),
        ({"is_endless": True, "ends": 20}, "grows by 1,048,576 bytes a step (kept by kept) until step 20, to 16.0 MiB"),
    ],
)
def test_no_step_of_an_out_of_memory_without_a_proof(known: dict[str, int | bool], words: str) -> None:
    assert describe_growth(run_of(growth(**known))) == words


@pytest.mark.parametrize("known", [{"is_endless": True}, {"is_endless": True, "ends": 100_000}])
def test_what_goes_on_until_the_card_is_full_has_its_step(known: dict[str, int | bool]) -> None:
    profile = run_of(growth(**known))
    ahead = forecast(profile)
    assert ahead is not None
    assert ahead.is_full
    assert describe_growth(profile).endswith(f"out of memory at about step {ahead.points[-1][0]:,}")


@pytest.mark.parametrize("nbytes", [4, MIB])
def test_a_growth_that_ends_as_a_trifle_comes_after_the_verdict(nbytes: int) -> None:
    profile = run_of(growth(until=10).model_copy(update={"nbytes": nbytes}), growth_bytes=nbytes)
    said = find_fit(profile, liveness.timeline(profile).peak).verdict
    grows = f"grows by {nbytes:,} bytes a step (kept by kept) until step 10, to {1 + 5 * (nbytes // MIB)}.00 MiB"
    fits = "200.0 MiB of 1.52 GiB on tiny, 12.9 %"
    assert said == (f"fits: {fits}; {grows}" if nbytes < MIB else f"{grows}; fits so far: {fits}")


def test_a_part_that_is_not_known_leaves_the_whole_unknown() -> None:
    other = growth().model_copy(update={"holder": "other"})
    assert forecast(run_of(growth(is_endless=True), other, growth_bytes=2 * MIB)) is None
    small = other.model_copy(update={"nbytes": MIB // 200})  # a loss beside its graph
    assert forecast(run_of(growth(is_endless=True), small, growth_bytes=MIB + MIB // 200)) is not None
