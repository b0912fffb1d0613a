"""`answer_all_ways`: a compiled step with other answers to what inductor decides by timing on the card.

All decisions of one question are answered alike; on the card, each is made by itself. So the peaks are those of the
ends, and that a mixture lies between them is taken for granted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fxmem.records.names import TimedQuestion
from fxmem.records.parts import CompileRecord

Answers = dict[TimedQuestion, str]
"""By question, the answer; the first of each where it is not there."""


class Answered(NamedTuple):
    """A step that was compiled with some answers."""

    made: CompileRecord | None
    peak_bytes: int


def answer_all_ways(first: Answered, recompile: Callable[[Answers], Answered | None]) -> list[int]:
    """The peaks of a step with the first answers, and with each other one.

    Each other answer is taken alone; then those together that raise the peak, and those that lower it.

    A question that only another answer brings up is answered all ways with that one: whether to fuse, of templates.

    Args:
        first: the step with the first answers.
        recompile: analyses the step with these; None where that was not possible.
    """
    tried: list[tuple[Answers, int]] = []
    pending: list[tuple[Answers, CompileRecord | None]] = [({}, first.made)]
    asked: set[TimedQuestion] = set()
    while pending:
        answers, made = pending.pop(0)
        found: dict[TimedQuestion, dict[str, None]] = {}
        for each in () if made is None else made.timed:
            if each.question not in asked:
                found.setdefault(each.question, {}).update(dict.fromkeys(each.others))
        asked.update(found)
        for question, others in found.items():
            for other in others:
                chosen: Answers = {**answers, question: other}
                again = recompile(chosen)
                if again is not None:
                    tried.append((chosen, again.peak_bytes))
                    pending.append((chosen, again.made))
    for together in _combine(tried, first.peak_bytes):
        again = recompile(together)
        if again is not None:
            tried.append((together, again.peak_bytes))
    return [first.peak_bytes, *(peak for _, peak in tried)]


def _combine(tried: list[tuple[Answers, int]], first: int) -> list[Answers]:
    """The answers that raise the peak, together, and those that lower it; only of several questions."""
    made = []
    for sign in (1, -1):
        best: dict[TimedQuestion, tuple[int, Answers]] = {}
        for answers, peak in tried:
            question, gain = next(iter(answers)), sign * (peak - first)
            if gain > best.get(question, (0, {}))[0]:
                best[question] = (gain, answers)
        if len(best) > 1:
            made.append({question: answer for _, answers in best.values() for question, answer in answers.items()})
    return made
