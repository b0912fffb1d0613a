"""Which answers to what is decided by timing are tried."""

from __future__ import annotations

from fxmem.records.parts import CompileRecord, TimedChoice
from fxmem.records.units import TimedQuestion
from fxmem.simulation.recording.compiled.compiled_parts import Answered, Answers, answer_all_ways


def asking(**questions: tuple[str, ...]) -> CompileRecord:
    names: list[TimedQuestion] = ["padding", "kernel", "fusion"]
    timed = tuple(
        TimedChoice(question=name, what="a product", taken="first", others=questions[name])
        for name in names
        if name in questions
    )
    return CompileRecord(mode="default", graphs=1, kernels=1, timed=timed)


def test_each_answer_is_tried_alone_and_a_question_that_it_brings_up_with_it() -> None:
    plain = asking(padding=("padded",), kernel=("template", "split"))
    fusing = asking(padding=("padded",), kernel=("first",), fusion=("apart",))
    tried: list[Answers] = []

    def recompile(answers: Answers) -> Answered | None:
        tried.append(answers)
        if answers.get("kernel") == "split" and "padding" not in answers:
            return Answered(plain, 107)
        if answers.get("kernel") == "template":
            return Answered(fusing, 89 if "fusion" in answers else 83)
        return Answered(plain, 103 if answers == {"padding": "padded"} else 113)

    assert sorted(answer_all_ways(Answered(plain, 97), recompile)) == [83, 89, 97, 103, 107, 113]
    assert tried == [
        {"padding": "padded"},
        {"kernel": "template"},
        {"kernel": "split"},
        {"kernel": "template", "fusion": "apart"},
        {"padding": "padded", "kernel": "split"},  # both raise it; one alone lowers it
    ]


def test_a_step_that_could_not_be_compiled_again_has_no_peak() -> None:
    assert answer_all_ways(Answered(asking(padding=("padded",)), 97), lambda answers: None) == [97]


def test_nothing_is_tried_where_nothing_is_asked() -> None:
    assert answer_all_ways(Answered(asking(), 97), lambda answers: Answered(None, 101)) == [97]
