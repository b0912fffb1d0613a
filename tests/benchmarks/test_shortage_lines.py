"""Programs of public threads, and the line where they run out."""

from __future__ import annotations

import pytest

from benchmarks.programs.shortage_lines import FOLDER, Outcome, Thread, predict, table, threads
from tests.benchmarks import on_measured_release

THREADS = {each.program: each for each in threads()}
QUICK = ("broadcast_add", "criteo_adamw", "patchcore_pow")


def test_every_program_has_a_thread_whose_line_is_in_it_once() -> None:
    assert {each.stem for each in FOLDER.glob("*.py")} == set(THREADS)
    for each in THREADS.values():
        lines = [line.strip() for line in (FOLDER / f"{each.program}.py").read_text().splitlines()]
        assert lines.count(each.line) == 1, each.program


def test_the_table_counts_hits_and_says_why_the_others_miss() -> None:
    hit = Thread(program="a", url="https://x/o/r/issues/7", target="t4", message="", line="f(x)", said="all")
    miss = hit.model_copy(update={"program": "b", "miss": "another release"})
    said = list(table([(hit, Outcome("f(x)", "2.00 GiB")), (miss, Outcome("", ""))]))
    assert "**1 of 2**" in said[2]
    assert said[-2] == "| a | [r/7](https://x/o/r/issues/7) | `f(x)` |  | 2.00 GiB | yes |"
    assert said[-1].endswith("| none |  |  | **no**: another release |")


@pytest.mark.truth
@on_measured_release
@pytest.mark.parametrize("program", QUICK)
def test_the_line_of_the_thread_is_named(program: str) -> None:
    outcome = predict(THREADS[program])
    assert outcome.line == THREADS[program].line
