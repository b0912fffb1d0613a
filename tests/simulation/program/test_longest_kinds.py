"""Batches that vary by more than one length, or by chance, held against the program run to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

import fxmem
from fxmem.hardware import catalogue
from fxmem.records.parts import LongestBatch
from fxmem.show.run_facts import describe_longest
from fxmem.simulation.program import Launch, RunSettings, launch
from fxmem.simulation.run import longest_batch
from tests.simulation.program.varied_kinds import KINDS, PRELUDE, RANDOM

PEAKS = {
    "nodes and edges": 52_930_048,
    "sources and targets": 37_473_792,
    "batches of so many tokens": 36_312_064,
    "text and patches": 50_962_432,
    "accumulated sources and targets": 27_478_016,
}
"""The true ones of some, for a quick look."""
MEASURED = {"listed pictures", "conversations with pictures"}
"""Those whose sizes follow no form: the peak is the highest of those that were run."""


def run(text: str, folder: Path, settings: RunSettings) -> fxmem.RecordedProgram:
    program = folder / "program.py"
    program.write_text(PRELUDE + text, encoding="utf-8")
    return launch(Launch(str(program), ()), catalogue.target("rtx-4090"), settings).recorded


def say(text: str, folder: Path, patched: pytest.MonkeyPatch) -> LongestBatch:
    patched.setattr(longest_batch, "LONG_RUN", 60)
    longest = run(text, folder, RunSettings(reads_epoch=True)).program.longest
    assert longest is not None
    return longest


def true_peak(text: str, folder: Path) -> int:
    """The highest of all epochs that the program has."""
    return max(each.allocated_bytes or 0 for each in run(text, folder, RunSettings(until="end")).rounds)


def differs(longest: LongestBatch, truth: int) -> float:
    return abs((longest.allocated_bytes or 0) / truth - 1)


@pytest.mark.parametrize("kind", PEAKS)
def test_the_batch_that_decides_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = say(KINDS[kind], tmp_path, monkeypatch)
    assert not longest.ran
    assert differs(longest, PEAKS[kind]) < 0.01


def test_what_chance_makes_is_said_with_its_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = say(RANDOM["dropped words"], tmp_path, monkeypatch)
    assert (longest.epochs, longest.batches) == (3, 150)
    assert "of 150 of 3 epochs" in describe_longest(longest)
    assert "about 1 batch in 151 to come is longer than all of these" in describe_longest(longest)


@pytest.mark.truth
@pytest.mark.parametrize("kind", KINDS)
def test_its_peak_is_the_true_one(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, truth = say(KINDS[kind], tmp_path, monkeypatch), true_peak(KINDS[kind], tmp_path)
    assert PEAKS.get(kind, truth) == truth
    assert bool(longest.ran) == (kind in MEASURED)
    assert differs(longest, truth) < 0.01


@pytest.mark.truth
@pytest.mark.parametrize("kind", RANDOM)
def test_the_true_peak_of_what_chance_makes_is_near(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = say(RANDOM[kind], tmp_path, monkeypatch)
    assert differs(longest, true_peak(RANDOM[kind], tmp_path)) < (0.01 if longest.epochs == 1 else 0.05)
