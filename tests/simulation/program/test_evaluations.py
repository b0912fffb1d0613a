"""What follows an epoch: it runs after three steps, and what its batches leave is known to its end."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import pytest

from fxmem.hardware import catalogue
from fxmem.records.parts import EvaluationPass
from fxmem.records.profile import Phase
from fxmem.show.facts import find_fit
from fxmem.show.run_facts import evaluation_facts
from fxmem.simulation.program import Launch, LaunchResult, RecordedProgram, RunSettings, launch
from fxmem.simulation.run import evaluations
from fxmem.simulation.run.listeners import after_epoch

PROGRAM = str(Path(__file__).with_name("evaluating.py"))
KEEPING = ("outputs", "graphs", "joined", "ahead")


@functools.cache
def start(
    kind: str, card: str = "h100", memory_bytes: int = 0, *, to_end: bool = False, cut: bool = False
) -> LaunchResult:
    target = catalogue.target(card)
    if memory_bytes:
        target = target.model_copy(update={"memory_bytes": memory_bytes})
    device = "cpu" if card == "cpu" else "cuda"
    settings = RunSettings(until="end" if to_end else None, reads_epoch=True)
    with pytest.MonkeyPatch.context() as patch:
        if cut:
            patch.setattr(evaluations, "MOST_SECONDS", -1)
        return launch(Launch(PROGRAM, (device, kind)), target, settings)


def run(
    kind: str, card: str = "h100", memory_bytes: int = 0, *, to_end: bool = False, cut: bool = False
) -> RecordedProgram:
    return start(kind, card, memory_bytes, to_end=to_end, cut=cut).recorded


def most(recorded: RecordedProgram) -> tuple[int, int | None, int | None]:
    counts = [(each.requested_bytes, each.allocated_bytes, each.reserved_bytes) for each in recorded.rounds]
    return max(each for each, *_ in counts), max(each[1] or 0 for each in counts), max(each[2] or 0 for each in counts)


def found(recorded: RecordedProgram) -> EvaluationPass:
    (only,) = recorded.program.evaluations
    return only


@pytest.mark.parametrize(
    ("kind", "card"),
    [
        *((kind, "h100") for kind in KEEPING),
        pytest.param("graphs", "cpu", marks=pytest.mark.truth),
    ],
)
def test_what_an_evaluation_keeps_is_known_to_its_end(kind: str, card: str) -> None:
    """Six of sixteen batches show what both epochs of the program take from the first step to its end; so do all."""
    whole = max(each.requested_bytes for each in run(kind, card, to_end=True).rounds)
    part = found(run(kind, card, cut=True))
    assert (part.batches, part.ran) == (16, 6)
    assert part.is_carried_on
    assert part.growth_bytes
    assert part.requested_bytes < whole
    assert part.end_bytes == whole
    assert run(kind, card, cut=True).peak.requested_bytes <= whole
    assert most(run(kind, card)) == most(run(kind, card, to_end=True))
    if card == "cpu":
        assert part.reserved_bytes is None
    else:  # the batches that did not run are replayed on the card
        assert part.reserved_bytes == max(each.reserved_bytes or 0 for each in run(kind, card, to_end=True).rounds)


@pytest.mark.parametrize("kind", ["collected", "named", "halves", "cast"])
def test_what_is_made_of_all_batches_is_of_all_of_them(kind: str) -> None:
    """Logits that are joined, their softmax and what is compared with it: to the byte what a run to the end takes."""
    recorded, whole = run(kind), run(kind, to_end=True)
    part = found(recorded)
    assert part.ran == part.batches == 16
    assert not part.is_carried_on
    assert most(recorded) == most(whole)
    assert recorded.peak.requested_bytes == most(whole)[0] > (part.end_bytes or 0)
    assert recorded._code.watch.parts.repeats.made >= 6  # of ten that are not looked at; 1, 2, 4 and 8 ran
    assert find_fit(recorded.profile, recorded.peak).verdict.startswith("fits: ")


@pytest.mark.truth
@pytest.mark.parametrize(("program", "steps", "batch"), [("glue_like", 64, 16), ("detr_like", 24, 8)])
def test_evaluations_as_libraries_write_them(program: str, steps: int, batch: int) -> None:
    """Accelerate fetches a batch ahead, and has one step more; the last batch has fewer rows."""
    pytest.importorskip("accelerate")
    file = str(Path(__file__).with_name("collecting") / f"{program}.py")
    ended, whole = (
        launch(Launch(file, (str(rows), "500")), catalogue.target("h100"), RunSettings(until=until)).recorded
        for rows, until in ((100 * batch, None), (steps, "end"))
    )
    part = found(ended)
    assert part.ran == part.batches
    assert most(ended) == most(whole)
    assert len(ended.program.steps) == len(whole.program.steps)


def test_a_model_that_does_more_than_return_its_result_runs_each_time() -> None:
    for kind in ("remembers", "hooked"):
        assert found(run(kind)).ran == 16
        assert most(run(kind)) == most(run(kind, to_end=True))
        assert run(kind)._code.watch.parts.repeats.made == 0


@pytest.mark.truth
def test_lightning_validates_after_the_pass_that_is_ended() -> None:
    """It asks by the number of a batch, before it asks for the next one; what is patched of it is as before."""
    loops = pytest.importorskip("lightning.pytorch.loops.training_epoch_loop")
    asks = loops._TrainingEpochLoop._should_check_val_fx
    program = str(Path(__file__).with_name("validating.py"))

    def fit(every: int, until: Literal["end"] | None = None) -> RecordedProgram:
        return launch(Launch(program, (str(every),)), catalogue.target("h100"), RunSettings(until=until)).recorded

    part = found(ended := fit(1))
    assert (part.batches, part.ran, part.growth_bytes) == (16, 16, 128 * 2000 * 4)
    assert "keeps model.preds" in evaluation_facts(ended.program)[0].text
    assert part.end_bytes == max(each.requested_bytes for each in fit(1, "end").rounds)
    assert not fit(2).program.evaluations  # not after its first epoch
    assert loops._TrainingEpochLoop._should_check_val_fx is asks


def test_its_owner_and_its_line_are_named() -> None:
    (fact,) = evaluation_facts(run("outputs", cut=True).program)
    assert fact.label == "Evaluation"
    assert "6 of 16 batches ran; 1,024,000 bytes more a batch" in fact.text
    assert "keeps preds" in fact.text
    assert fact.text.endswith("; --until end runs what is made of them, too")
    recorded = run("outputs", cut=True)
    assert find_fit(recorded.profile, recorded.peak).verdict.startswith(
        f"fits so far, with 6 of 16 batches of the evaluation at {recorded.program.evaluations[0].place}: "
    )
    other = run("nothing")
    assert find_fit(other.profile, other.peak).verdict.startswith("fits: ")


def test_one_that_keeps_nothing_has_its_own_peak_and_no_more() -> None:
    recorded = run("nothing")
    part = found(recorded)
    assert (part.growth_bytes, part.grown, part.end_bytes) == (0, (), part.requested_bytes)
    assert [each.is_whole for each in recorded.rounds] == [True, True, True, False]
    assert Phase.EVALUATION in recorded.rounds[-1].phases
    assert recorded.program.growth_bytes == 0
    assert recorded.program.steady
    assert recorded.ending == "stopped after step 3 and what follows the epoch"


def test_the_longest_of_varied_batches_is_among_those_that_run() -> None:
    recorded = run("varied")
    whole = run("varied", to_end=True)
    assert max(each.requested_bytes for each in recorded.rounds) == max(each.requested_bytes for each in whole.rounds)
    assert found(recorded).ran == 5


def test_workers_that_persist_hand_out_another_epoch() -> None:
    """They have one iterator for all passes: the second epoch is none that is over, and is not evaluated anew."""
    recorded, other = run("persists"), run("nothing")
    assert found(recorded) == found(other)
    assert recorded.ending == other.ending
    assert len(recorded.rounds) == len(other.rounds)


@pytest.mark.parametrize("kind", ["none", "next"])
def test_where_nothing_follows_the_steps_are_all(kind: str) -> None:
    """Not even a program that counts on more batches than it gets fails by it."""
    recorded = run(kind)
    assert recorded.ending == "stopped after step 3"
    assert len(recorded.rounds) == 3
    assert not recorded.program.failed
    assert not start(kind).raised


def test_an_error_after_the_epoch_is_said_and_the_steps_stand(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = run("raises")
    assert 'raise RuntimeError("one class alone")' in capsys.readouterr().err
    assert recorded.ending.startswith("stopped after step 3 and what follows the epoch; what follows raised")
    assert "one class alone" in recorded.ending
    assert not start("raises").raised
    assert not recorded.program.failed
    assert find_fit(recorded.profile, recorded.peak).is_fitting


def test_a_card_that_is_too_small_for_the_whole_evaluation_does_not_fit() -> None:
    part = found(run("long", cut=True))
    ran, end = run("long", cut=True).rounds[-1].reserved_bytes or 0, part.end_bytes or 0
    assert ran < 200 << 20 < end  # what ran fits
    small = run("long", memory_bytes=200 << 20)
    fit = find_fit(small.profile, small.peak)
    assert fit.exit_code == 4
    assert fit.verdict.startswith("does NOT fit: at least ")
    assert fit.shortage.startswith("It runs out in the evaluation at ")
    assert found(small).full_at == found(small).find_full(200 << 20)
    assert found(small).full_at == 101
    assert find_fit(run("long").profile, run("long").peak).exit_code == 0


def test_the_batch_at_which_a_card_is_full() -> None:
    part = found(run("outputs", cut=True))
    assert part.growth_bytes
    assert part.find_full(part.requested_bytes + 4 * part.growth_bytes) == part.ran + 1 + 4
    assert part.find_full(part.end_bytes or 0) is None


def test_what_takes_long_after_the_epoch_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_epoch, "_MOST_OPERATORS", 100)
    recorded = run("endless")
    assert recorded.ending == "stopped after step 3, and within what follows, which takes long"
    assert [each.is_whole for each in recorded.rounds] == [True, True, True, False]


def test_what_is_taken_for_granted_is_listed() -> None:
    topics = [[each.topic for each in run(kind).profile.assumptions] for kind in ("outputs", "none")]
    assert [topic.count("evaluation") for topic in topics] == [1, 0]
