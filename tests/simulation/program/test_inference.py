"""Programs that train nothing: calls that are alike are made of those that ran, and their loops are followed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import fxmem
from fxmem.hardware import catalogue
from fxmem.hardware.step_time import step_seconds
from fxmem.memory import findings
from fxmem.records.parts import EvaluationPass
from fxmem.show.facts import find_fit
from fxmem.show.run_facts import evaluation_facts
from fxmem.simulation.program import Launch, LaunchResult, RecordedProgram, RunSettings, launch
from fxmem.simulation.run import evaluations

PROGRAM = str(Path(__file__).with_name("inferring.py"))
LINES = Path(PROGRAM).read_text(encoding="utf-8").splitlines()
STEPS, KEPT, CALLS, PICTURES = (
    f"{PROGRAM}:{next(number for number, line in enumerate(LINES, 1) if text in line)}"
    for text in ("for i in range(steps)", "kept = [torch.cat", "for _ in range(4 if", "for _ in range(passes)")
)
PLAIN = ("plain", "kept", "joined", "nested", "left", "varied", "cast", "model-offload")
UNEVEN = ("refilled", "counted", "sequential")
OFFLOADS = ("model-offload", "sequential")


@functools.cache
def start(kind: str, passes: int = 20, *, whole: bool = False, seconds: float | None = None) -> LaunchResult:
    if kind in OFFLOADS:
        pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as patch:
        if seconds is not None:
            patch.setattr(evaluations, "MOST_SECONDS", seconds)
        settings = RunSettings(until="end" if whole else None)
        return launch(Launch(PROGRAM, (kind, str(passes))), catalogue.target("rtx3090"), settings)


def run(kind: str, passes: int = 20, *, whole: bool = False, seconds: float | None = None) -> RecordedProgram:
    return start(kind, passes, whole=whole, seconds=seconds).recorded


def found(recorded: RecordedProgram) -> EvaluationPass:
    (only,) = recorded.program.evaluations
    return only


def made(recorded: RecordedProgram) -> int:
    return recorded._code.watch.parts.repeats.made


@pytest.mark.parametrize("kind", [*PLAIN, *UNEVEN])
def test_calls_that_are_made_take_what_a_whole_run_takes(kind: str) -> None:
    recorded, whole = run(kind), run(kind, whole=True)
    assert made(whole) == 0
    assert (made(recorded) > 0) == (kind in PLAIN)
    for each, other in zip(recorded.rounds, whole.rounds, strict=True):
        assert (each.requested_bytes, each.allocated_bytes) == (other.requested_bytes, other.allocated_bytes)
        assert each.reserved_bytes == other.reserved_bytes
    assert recorded.program.ending == whole.program.ending == "ran to its end"
    for each in (recorded, whole):  # one number, wherever it stands
        highest = each.rounds[-1]
        assert (each.peak.requested_bytes, each.peak.allocated_bytes, each.peak.reserved_bytes) == (
            highest.requested_bytes,
            highest.allocated_bytes,
            highest.reserved_bytes,
        )
    outputs = [sum(node.output_bytes for node in each.profile.nodes) for each in (recorded, whole)]
    assert outputs[0] == outputs[1] > 0
    flops = [sum(op.flops or 0 for op in each.profile.ops) for each in (recorded, whole)]
    assert flops[0] == flops[1] > 0
    moved = [sum(op.host_bytes for op in each.profile.ops) for each in (recorded, whole)]
    assert moved[0] == moved[1]
    assert step_seconds(recorded.profile) == pytest.approx(step_seconds(whole.profile), rel=0.01)


UNLIKE = "attribute of_a_part named collected hooked halved replaced counting lengths attention".split()


@pytest.mark.parametrize("kind", UNLIKE)
def test_calls_that_only_look_alike_run(kind: str) -> None:
    program = Launch(str(Path(PROGRAM).with_name("unlike.py")), (kind,))
    recorded, whole = (
        launch(program, catalogue.target("rtx3090"), RunSettings(until=until)).recorded for until in (None, "end")
    )
    assert [each.requested_bytes for each in recorded.rounds] == [each.requested_bytes for each in whole.rounds]
    assert [each.reserved_bytes for each in recorded.rounds] == [each.reserved_bytes for each in whole.rounds]
    assert not any(each.topic == "calls" and "not like" in each.text for each in recorded.profile.assumptions)
    assert (made(recorded) > 0) == (kind not in ("named", "collected", "counting"))


def test_a_loop_is_followed_to_its_end() -> None:
    each = found(run("kept"))
    assert (each.ran, each.batches, each.is_loop) == (20, 20, True)
    assert each.growth_bytes == 256 * 64 * 2
    assert [grown.holder for grown in each.grown] == ["kept"]
    (fact,) = evaluation_facts(run("kept").program)
    assert fact.label == "Loop"
    assert fact.text.startswith(f"{STEPS}: 20 of 20 passes ran; 32,768 bytes more a pass ({KEPT} keeps kept)")


def test_a_loop_that_is_left_has_as_many_passes_as_ran() -> None:
    assert (found(run("left")).ran, found(run("left")).batches) == (12, 12)


def test_the_outermost_loop_with_passes_is_followed() -> None:
    *inner, outer = run("nested").program.evaluations
    assert (outer.place, outer.ran, outer.batches) == (CALLS, 4, 4)
    assert [(each.place, each.ran) for each in inner] == [(STEPS, 20)]


def test_a_loop_whose_passes_have_calls_beside_an_inner_loop() -> None:
    for passes in (30, 10_000_000):
        each = found(run("pictures", passes))
        assert (each.place, each.batches) == (PICTURES, passes)
        assert each.growth_bytes == 4 * 256 * 64 * 2
        assert [grown.holder for grown in each.grown] == ["masks"]
        assert (each.full_at is None) == (passes == 30)


def test_passes_that_would_take_long_are_made_by_arithmetic() -> None:
    """To the byte what a run of all takes, until what the program makes of all of them."""
    short, whole = run("kept", 300, seconds=-1), run("kept", 300, whole=True)
    each = found(short)
    assert each.ran < 20
    assert each.is_carried_on
    assert short.program.ending.startswith(f"stopped after {each.ran} of 300 passes of the loop at {STEPS}")
    ahead = whole.rounds[-1]
    joined = 300 * 256 * 64 * 2
    assert each.end_bytes is not None
    assert each.end_bytes + joined > ahead.requested_bytes > each.end_bytes  # `torch.cat` of all comes after the loop
    assert f"with 6 of 300 passes of the loop at {STEPS}" in find_fit(short.profile, short.peak).verdict


@pytest.mark.parametrize("kind", ["flushed", "window", "emptied"])
def test_what_a_loop_lets_go_of_again_does_not_fill_the_card(kind: str) -> None:
    """All that it ever keeps is seen where its code says when it lets go; else that it goes on is not claimed."""
    # Of what is never seen to end the passes are cut by time; the others run to the end of what they keep.
    short, whole = run(kind, 10_000_000, seconds=0.5 if kind == "emptied" else 600), run(kind, 300, whole=True)
    each = found(short)
    assert short.peak.fits
    assert short.shortage == ""
    assert (each.full_at, each.is_carried_on) == (None, True)
    assert "fits so far" in find_fit(short.profile, short.peak).verdict
    (fact,) = evaluation_facts(short.program)
    if kind == "emptied":
        assert each.end_bytes is None
        assert "whether it goes on was not seen" in fact.text
    else:
        (grown,) = each.grown
        assert each.ran == (grown.until or 0) + 3
        assert f" a pass ({PROGRAM}" in fact.text
        assert f" until pass {grown.until}, " in fact.text
        assert short.rounds[-1].requested_bytes == whole.rounds[-1].requested_bytes
    if kind == "emptied":
        assert [each.cause for each in findings.find(whole.profile, whole.timeline)] == []


def test_a_loop_that_a_made_up_number_ends_has_no_last_pass() -> None:
    short = run("converge", 3000)
    assert (found(short).batches, found(short).is_carried_on) == (None, True)
    assert "fits so far, with 101 passes" in find_fit(short.profile, short.peak).verdict


@pytest.mark.truth
def test_the_pass_at_which_the_card_is_full() -> None:
    short = run("kept", 10_000_000, seconds=-1)
    assert short.peak.fits is False
    room = catalogue.target("rtx3090").memory_bytes
    full = int(short.shortage.partition("at about pass ")[2].split()[0].replace(",", ""))
    assert 0.9 * room < full * 32_768 < room
    assert [each.cause for each in findings.find(short.profile, short.timeline)] == ["kept-results"]


def test_a_call_that_a_later_one_shows_to_be_of_another_kind_is_said() -> None:
    texts = [each.text for each in run("counted").profile.assumptions if each.topic == "calls"]
    assert texts == []  # it counts its calls
    late = [each.text for each in run("plain").profile.assumptions if each.topic == "calls"]
    assert late == ["14 of 20 calls of models without gradients were made of those that ran and were alike"]


def test_a_loop_in_which_the_card_is_full_keeps_its_number_of_passes() -> None:
    recorded = run("large", 100_000)
    each = found(recorded)
    assert recorded.program.ending.startswith("ran out of memory at ")
    assert (each.batches, each.end_bytes) == (100_000, None)
    assert 9 < each.ran < 50
    assert each.is_carried_on


@pytest.mark.truth
@pytest.mark.parametrize("way", ["plain", "cast", "model", "leaf", "block", "stream", "sequential"])
def test_ways_to_keep_the_weights_of_a_sampler(way: str) -> None:
    """Accelerate's and diffusers' own hooks move the weights, in each step that runs and in those that are made."""
    for package in ("accelerate", "diffusers"):
        pytest.importorskip(package)
    file = str(Path(PROGRAM).with_name("offloading.py"))
    recorded, whole, plain = (
        launch(Launch(file, (kind,)), catalogue.target("rtx3090"), RunSettings(until=until)).recorded
        for kind, until in ((way, None), (way, "end"), ("plain", "end"))
    )
    counts = [
        [(each.requested_bytes, each.allocated_bytes, each.reserved_bytes) for each in run.rounds]
        for run in (recorded, whole)
    ]
    assert counts[0] == counts[1]
    assert (made(recorded) > 0) == (way not in ("cast", "stream", "sequential"))
    most = [max(each.requested_bytes for each in run.rounds) for run in (whole, plain)]
    assert most[0] == most[1] if way in ("plain", "model") else most[0] < most[1]
    assert found(recorded).ran == 12


def test_diffusers_asks_anew_for_the_card_on_both_borders() -> None:
    torch_utils = pytest.importorskip("diffusers.utils.torch_utils")
    before = torch_utils.get_device()
    with fxmem.record("h100"):
        assert torch_utils.get_device() == "cuda"
        torch.ones(8, device="cuda")
    assert torch_utils.get_device() == before == ("cuda" if torch.cuda.is_available() else "cpu")


def test_what_cublas_holds_is_there_from_the_first_product_on() -> None:
    """As a card counts it while the program runs: a peak before the first product has no workspace in it."""
    with fxmem.record("a100") as recorded, torch.no_grad():
        conv, fc = torch.nn.Conv2d(3, 64, 3).cuda(), torch.nn.Linear(64, 64).cuda()
        fc(conv(torch.randn(8, 3, 128, 128, device="cuda")).mean((2, 3)))
    held = [each for each in recorded.profile.storages if each.name.startswith("cuBLAS")]
    assert held
    assert all(each.birth > recorded.peak.tick for each in held)
    (only,) = recorded.rounds
    assert recorded.peak.requested_bytes == only.requested_bytes
    assert recorded.peak.allocated_bytes == only.allocated_bytes
    with fxmem.record("a100", steps=1) as trained:
        fc = torch.nn.Linear(64, 64).cuda()
        fc(torch.randn(8, 64, device="cuda")).sum().backward()
        torch.optim.SGD(fc.parameters(), 0.1).step()
    held = [each for each in trained.profile.storages if each.name.startswith("cuBLAS")]
    assert held
    assert not any(each.birth for each in held)  # of a loop, whose next step finds it there
