"""Where records are made by the thousand the garbage collector rests, and nowhere else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxmem import analyze
from fxmem.errors import UsageError
from fxmem.memory import allocator, liveness, report_reader
from fxmem.memory.allocator import peak
from fxmem.records import json_reader
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Profile, Report
from fxmem.simulation.step import model_step
from tests.profiles import small_profile


@pytest.mark.truth
def test_it_rests_within_and_runs_as_before_afterwards() -> None:
    collected: list[str] = []

    def saw(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    assert gc.isenabled()
    gc.collect()
    gc.callbacks.append(saw)
    try:
        with pause_gc():
            lists: list[list[int]] = [[each] for each in range(10_000)]
            with pause_gc():
                assert not gc.isenabled()
            assert not gc.isenabled()
            assert not collected
        assert gc.isenabled()
        lists += [[each] for each in range(10_000)]
        assert collected
    finally:
        gc.callbacks.remove(saw)


def test_it_stays_off_where_it_was_off_and_comes_back_after_an_error() -> None:
    gc.disable()
    try:
        with pause_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(UsageError), pause_gc():
        raise UsageError("no matter what")
    assert gc.isenabled()


def test_what_stays_is_not_looked_at_again_at_once() -> None:
    gc.collect()
    with pause_gc(stays=True):
        made = [[each] for each in range(10_000)]
    young = [*gc.get_objects(generation=0), *gc.get_objects(generation=1)]
    assert not {*map(id, made)} & {*map(id, young)}
    assert gc.get_count()[0] < gc.get_threshold()[0]
    assert not gc.get_freeze_count()
    assert gc.isenabled()


def test_who_leaves_first_does_not_start_it_for_who_is_still_there() -> None:
    first, second = pause_gc(), pause_gc()  # two threads', say
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def read(profile: Profile, folder: Path) -> None:
    path = folder / "report.json"
    path.write_text(Report(**dict(profile), peak=liveness.timeline(profile).peak).model_dump_json(), encoding="utf-8")
    report_reader.load_report(path)


def complete(profile: Profile, _: Path) -> None:
    allocator.complete_timeline(profile, {})


def analysed(_: Profile, __: Path) -> None:
    analyze(torch.nn.Linear(3, 5), torch.zeros(2, 3), target="cpu")


@pytest.mark.parametrize(
    ("work", "home", "part"),
    [
        (read, json_reader, "_find_wide_object"),
        (read, liveness, "check"),
        (complete, peak, "replay"),
        (analysed, model_step, "build_step"),
    ],
)
def test_it_rests_while(
    work: Callable[[Profile, Path], None], home: object, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, collects = getattr(home, part), []

    def spied(*args: object, **kwargs: object) -> object:
        collects.append(gc.isenabled())
        return original(*args, **kwargs)

    monkeypatch.setattr(home, part, spied)
    work(small_profile(), tmp_path)
    assert collects
    assert not any(collects)
    assert gc.isenabled()
