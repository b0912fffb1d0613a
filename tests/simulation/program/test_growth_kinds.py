"""Growth as people write it: what is bounded has no step of an out of memory, and what is not is said so."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

import fxmem
from fxmem.hardware import catalogue
from fxmem.show.run_facts import describe_growth
from fxmem.simulation.code.source_lines import program_modules
from fxmem.simulation.program import Launch, RunSettings, launch
from tests.simulation.program.growth_kinds import BOUNDED, ENDLESS, PRELUDE, TWINS

MOST = 100_000
"""Steps of a program; few enough that the card has room."""
RUN = 72
"""Steps that are run for the truth."""
UNTIL: dict[str, int] = {
    "own LRU": 25,
    "LRU while": 25,
    "queue of maxsize": 25,
    "reservoir": 25,
    "popped before": 25,
    "snapshots": 25,
    "first steps": 25,
    "first key": 25,
    "dataclass with a deque": 25,
    "weak cache beside a deque": 25,
    "stacked when full": 25,
    "function that is cached": 25,
    "taken in threes": 25,
    "until enough": 24,
    "counted down": 24,
    "sliced iterator": 24,
    "left at a length": 24,
    "nested deques": 25,
    "hook that returns early": 24,
    "passed over later": 25,
    "left for good": 24,
    "two conditions of a loop": 24,
    "unequal": 24,
    "ring of a queue": 25,
    "measured by a function": 25,
    "returns when it is full": 25,
}
"""By what is bounded, the step until which it is said to grow; of all others it is not known whether it goes on."""
UNSEEN = {
    "linked objects",
    "by counter",
    "simple queue",
    "own list",
    "UserList",
    "thread's list",
    "buffers of a module",
    "attributes",
    "cycled endless loader",
    "module list",
    "cached by step",
    "padded",
}
"""Endless, and not known to be."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may be that of any module of one's own that is imported: tests and benchmarks are none of the program."""
    for name, _ in program_modules():
        monkeypatch.delitem(sys.modules, name)


def run(text: str, folder: Path, steps: int, settings: RunSettings) -> fxmem.RecordedProgram:
    program = folder / "program.py"
    program.write_text(PRELUDE + text, encoding="utf-8")
    return launch(Launch(str(program), (str(steps),)), catalogue.target("rtx-4090"), settings).recorded


def say(text: str, folder: Path) -> str:
    return describe_growth(run(text, folder, MOST, RunSettings()).profile)


@pytest.mark.parametrize("kind", BOUNDED)
def test_what_is_bounded_ends_or_is_not_known_to_go_on(kind: str, tmp_path: Path) -> None:
    words = say(BOUNDED[kind], tmp_path)
    if kind in UNTIL:
        assert f"until step {UNTIL[kind]}, to " in words
    else:
        assert words.endswith("whether it goes on was not seen: --steps 200")


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_endless_goes_on_as_long_as_the_program(kind: str, tmp_path: Path) -> None:
    words = say(ENDLESS[kind], tmp_path)
    if kind in UNSEEN:
        assert words.endswith("whether it goes on was not seen: --steps 200")
        assert "only torch has" not in words  # which would be proof
    else:
        assert f"until step {MOST:,}, to " in words


@pytest.mark.parametrize("kind", TWINS)
def test_an_innocent_twin_is_not_said_to_grow(kind: str, tmp_path: Path) -> None:
    assert not say(TWINS[kind], tmp_path)


def rises(text: str, folder: Path) -> list[int]:
    """By how many bytes more each step leaves of a program that is run to its end."""
    kept = [each.retained_bytes or 0 for each in run(text, folder, RUN, RunSettings(until="end")).program.steps]
    return [after - before for before, after in itertools.pairwise(kept)]


@pytest.mark.truth
@pytest.mark.parametrize("kind", UNTIL)
def test_the_end_is_the_true_one(kind: str, tmp_path: Path) -> None:
    """Within the step in which it is full."""
    more = rises(BOUNDED[kind], tmp_path)
    number = next((number for number, each in enumerate(more, 1) if each <= 0), len(more) + 1)
    assert abs(number - UNTIL[kind]) <= 1


@pytest.mark.truth
@pytest.mark.parametrize("kind", ENDLESS)
def test_the_endless_grow_in_all_steps_that_run(kind: str, tmp_path: Path) -> None:
    more = rises(ENDLESS[kind], tmp_path)[: RUN - 2]
    assert sum(more[-8:]) >= 4 * max(512, min(each for each in more if each))
    assert min(more) >= 0


def test_equal_code_of_another_file_is_its_own(tmp_path: Path) -> None:
    """To Python, code of two files is equal where the text is."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        assert "until step 100,000, to " in say(ENDLESS["closure of a factory"], tmp_path / name)
