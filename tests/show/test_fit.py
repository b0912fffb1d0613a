"""What is said of a step first: no number exceeds the card where it fits, none falls short of it where it does not."""

from __future__ import annotations

import pytest

from fxmem.hardware.context import context_range, explain_room, give_room, room_bytes
from fxmem.memory.allocator import CardRun, complete_timeline
from fxmem.memory.budget import Budget, find_least_budget, peak_in_room
from fxmem.memory.liveness import timeline
from fxmem.records.parts import Growth, Schedule
from fxmem.records.profile import Kind, PartOfRound, Peak, Phase, Profile, ProgramRun, Round
from fxmem.records.units import percent
from fxmem.show.facts import find_fit
from fxmem.show.html import PageOptions, report_html
from fxmem.show.html.sections import verdict as page_verdict
from fxmem.show.run_facts import program_facts
from tests.profiles import TINY_CARD, Log

MIB = 1 << 20


def growing(memory: int) -> Profile:
    """A parameter of 30 MiB, then 40 that are freed, then 60: 130 are reserved where nothing has to go back.

    On a card of which a context leaves so many MiB.
    """
    log = Log(target=give_room(TINY_CARD, memory * MIB))
    node = log.node("fc")
    log.resident(30 * MIB, Kind.PARAMETER, name="w")
    with log.phase(Phase.FORWARD):
        for size in (40, 60):
            with log.op("aten.cat", node, Phase.FORWARD):
                passing = log.allocate(size * MIB, Kind.TEMPORARY)
            log.free(passing)
    return log.profile()


def peak_of(profile: Profile, run: CardRun | None = None) -> Peak:
    return complete_timeline(profile, {}, run).peak


def process_of(peak: Peak) -> tuple[int, int]:
    assert peak.process_bytes is not None
    return peak.process_bytes.low, peak.process_bytes.high


def test_where_it_fits_no_number_is_above_the_card() -> None:
    roomy, tight, small = (growing(memory) for memory in (1 << 20, 100, 89))
    peak = peak_of(roomy)
    assert (peak.fits, peak.reserved_bytes) == (True, 130 * MIB)
    context = context_range(TINY_CARD)
    assert context is not None
    assert context.low == 495 * MIB
    beside = 3 * context.low // 4, 5 * context.high // 4
    assert process_of(peak) == (130 * MIB + beside[0], 130 * MIB + beside[1])
    peak = peak_of(tight)  # the cached 40 go back
    assert (peak.fits, peak.allocated_bytes, peak.reserved_bytes) == (True, 90 * MIB, 90 * MIB)
    assert process_of(peak) == (90 * MIB + beside[0], 90 * MIB + beside[1])
    wider = peak_in_room(tight, peak, 200 * MIB)  # in which they stay
    assert (wider.fits, wider.allocated_bytes, wider.reserved_bytes) == (True, 90 * MIB, 130 * MIB)
    peak = peak_of(small)
    assert (peak.fits, peak.allocated_bytes, peak.reserved_bytes) == (False, 90 * MIB, 130 * MIB)
    within = peak_in_room(roomy, peak_of(roomy), 100 * MIB)
    assert (within.fits, within.reserved_bytes) == (True, 90 * MIB)


def test_whether_a_program_fits_its_own_allocator_says() -> None:
    small = growing(89)
    peak = peak_of(small, CardRun(0, 70 * MIB, "", is_ended=False))
    assert (peak.fits, peak.shortage, peak.at_least) == (True, "", False)
    assert max(peak.allocated_bytes or 0, peak.reserved_bytes or 0) == peak.room_bytes == 89 * MIB
    peak = peak_of(growing(100), CardRun(111 * MIB, 120 * MIB, "It runs out", is_ended=True))
    assert (peak.fits, peak.allocated_bytes, peak.reserved_bytes) == (False, 111 * MIB, 120 * MIB)
    assert find_fit(growing(100), peak).verdict == "does NOT fit: at least 120.0 MiB of 100.0 MiB on tiny, 120.0 %"


def test_a_context_has_its_share_before_the_step() -> None:
    """129 MiB of a card that has 624: without a context it would run with all that it caches."""
    profile = growing(129)
    assert profile.target.memory_bytes == 624 * MIB
    peak = peak_of(profile)
    assert (peak.fits, peak.reserved_bytes, peak.room_bytes) == (True, 90 * MIB, 129 * MIB)
    fit = find_fit(profile, peak)
    assert fit.verdict == "fits: 90.0 MiB of 129.0 MiB on tiny, 69.8 %"
    assert fit.counted == (
        "Counted: what the allocator reserves; room: 129.0 MiB of 624.0 MiB: a CUDA context takes 495.0 MiB or more; "
        "other processes are not counted"
    )


def test_where_no_context_is_known_the_card_is_all_room() -> None:
    unknown = TINY_CARD.model_copy(update={"capability": (13, 0)})
    assert room_bytes(unknown) == unknown.memory_bytes
    assert room_bytes(give_room(unknown, 1 << 30)) == 1 << 30
    assert explain_room(unknown) == "1.48 GiB: what a CUDA context takes of it is not known"
    assert explain_room(TINY_CARD.model_copy(update={"memory_bytes": None})) == ""


def test_the_least_budget_is_the_smallest_that_is_kept() -> None:
    profile = growing(1 << 20)
    peak = peak_of(profile)
    assert find_least_budget(profile, peak) == peak.counted_bytes == 90 * MIB
    # Of 100 MiB reserved in pieces of which each is held: no smaller budget is kept.
    scattered = peak.model_copy(update={"allocated_bytes": 80 * MIB})
    least = find_least_budget(profile, scattered)
    assert 90 * MIB <= least <= 92 * MIB
    assert Budget(least).keeps(profile, scattered)


def test_a_budget_is_answered_first() -> None:
    profile = growing(1 << 20)
    peak = peak_of(profile)
    for nbytes, verdict, code in (
        (45 * MIB, "does NOT keep the budget of 45.0 MiB: 90.0 MiB allocated, 200.0 %; but fits the card: 130.0", 4),
        (180 * MIB, "keeps the budget of 180.0 MiB: 90.0 MiB allocated, 50.0 %; fits: 130.0 MiB of", 0),
    ):
        fit = find_fit(profile, peak, Budget(nbytes))
        assert fit.verdict.startswith(verdict)
        assert fit.exit_code == code
    scattered = peak.model_copy(update={"allocated_bytes": 80 * MIB})
    said = find_fit(profile, scattered, Budget(85 * MIB)).verdict
    assert said.startswith("does NOT keep the budget of 85.0 MiB: 130.0 MiB reserved, 152.9 %; ")


@pytest.mark.parametrize(("failed", "grown", "code"), [(False, 0, 0), (False, 1000, 0), (True, 1000, 1)])
def test_growth_and_an_error_come_before_that_it_fits(failed: bool, grown: int, code: int) -> None:
    profile = growing(1024)
    rounds = [
        Round(requested_bytes=90 * MIB, allocated_bytes=90 * MIB, phase=Phase.FORWARD, operators=2) for _ in range(3)
    ]
    run = ProgramRun(
        ending="raised KeyError",
        failed=failed,
        rounds=rounds,
        shown=3,
        steady=False,
        growth_bytes=grown,
        grown=(Growth(holder="kept", nbytes=grown, tensors=1, since=1, is_endless=True),),
    )
    profile = profile.model_copy(update={"step": profile.step.model_copy(update={"program": run})})
    fit = find_fit(profile, peak_of(profile))
    # Of 1 GiB 934 MiB are left, a block of 1,024 bytes a step: 3 + 956,416 steps; the next fails.
    growth = "grows by 1,000 bytes a step (kept by kept), out of memory at about step 956,420; " if grown else ""
    until = "fits until then" if failed else "fits so far" if grown else "fits"
    start = "not known: the program raised KeyError; " if failed else ""
    assert fit.verdict == f"{start}{growth}{until}: 130.0 MiB of 1.00 GiB on tiny, 12.7 %"
    assert (fit.is_fitting, fit.exit_code) == (None if failed else True, code)
    assert page_verdict(profile, peak_of(profile))["mark"] == ("yes" if not (failed or grown) else "")
    page = report_html(profile, timeline(profile), PageOptions(graph=False))
    assert ("Out of memory at about step" in page) == bool(grown)


def test_phases_of_another_step_say_so_and_the_peak_has_one_place() -> None:
    part = PartOfRound(
        phase=Phase.EVALUATION,
        model="net",
        with_gradients=False,
        requested_bytes=1,
        allocated_bytes=1,
        reserved_bytes=1,
    )
    step = Round(requested_bytes=2, phase=Phase.FORWARD, operators=2, place="train.py:7", phases=(Phase.BACKWARD,))
    rounds = (step.model_copy(update={"parts": (part,), "requested_bytes": 1}), step)
    run = ProgramRun(ending="stopped", rounds=rounds, shown=2)
    profile = growing(1024)
    for shown, of in ((2, "of step 1, which the table is not of, each"), (1, "of step 1, each")):
        now = run.model_copy(update={"shown": shown})
        told = program_facts(profile.model_copy(update={"step": profile.step.model_copy(update={"program": now})}))
        assert [each.text.startswith(of) for each in told if each.label == "Phases"] == [True]
        assert ["train.py:7" in each.text for each in told if each.label.startswith("Step ")] == [
            shown == 2,
            shown == 1,
        ]


@pytest.mark.parametrize("count", [3, 4])
def test_of_many_models_that_a_variable_has_had_the_largest_phase_is_said(count: int) -> None:
    """`net = deepcopy(self.net)` for each task: a line for each was thousands of them."""
    counts = {"phase": Phase.FORWARD, "allocated_bytes": 1, "reserved_bytes": 1}
    names = ["net", *(f"net_{number}" for number in range(2, count + 1))]
    parts = [PartOfRound(model=name, requested_bytes=number, **counts) for number, name in enumerate(names, 1)]
    step = Round(requested_bytes=9, phase=Phase.FORWARD, operators=2, parts=tuple(parts))
    profile = growing(1024)
    run = ProgramRun(ending="stopped", rounds=(step,), shown=1)
    told = program_facts(profile.model_copy(update={"step": profile.step.model_copy(update={"program": run})}))
    said = [each.text.partition(":")[0] for each in told if "forward of net" in each.text]
    assert said == (
        [f"forward of {name}" for name in names] if count == 3 else ["forward of net_4, the largest of 4 alike"]
    )


def test_several_calls_that_did_not_run_are_said_in_one_phrase() -> None:
    calls = tuple(Schedule(place="train.py:9", every=None, calls=f"train.py:{line}") for line in (10, 12))
    step = Round(requested_bytes=2, phase=Phase.FORWARD, operators=2)
    run = ProgramRun(ending="stopped", rounds=[step, step], shown=2, steady=True, schedules=calls)
    profile = growing(1024)
    profile = profile.model_copy(update={"step": profile.step.model_copy(update={"program": run})})
    said = find_fit(profile, peak_of(profile)).verdict
    assert said.startswith("fits so far, without the calls of models at train.py:10 and train.py:12: ")
    assert "yes: a further step would be as the last" in [each.text for each in program_facts(profile)]


def test_a_share_of_more_than_all_says_so() -> None:
    assert [percent(part, 100000) for part in (100000, 100001, 100100)] == ["100.0 %", ">100.0 %", "100.1 %"]
