"""Published figures: a sample keeps its bounds, recorded traces replay, and the runner goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import __main__ as runner
from benchmarks.published import batches, results, xmem
from benchmarks.published.bounds import SMALLEST_BOUND, bound_of, broken, tighten
from benchmarks.published.prediction import Prediction, predict
from benchmarks.published.results import Row
from benchmarks.published.steps.xmem import LANGUAGE_MODELS
from benchmarks.published.tables import STATISTICS, TABLES, Case, format_tables, read_cases
from benchmarks.published.traces import TRACES, Replay, replay
from fxmem.hardware.catalogue import CATALOGUE
from tests import ROOT
from tests.benchmarks import on_measured_release

pytestmark = pytest.mark.truth

CASES = list(read_cases())
SAMPLE = [case for case in CASES if case.sample]
RESERVED_PERCENT = {"kai_memory_files_memory_ctx256_fullstep_": 0.16}
"""Traces that start with cached segments their file does not have, and how far off the reserved bytes may be."""

# --- what was published really ----------------------------------------------------------------------------------------


@on_measured_release
@pytest.mark.filterwarnings("ignore")  # what a model's code says to its own users
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_a_published_figure_is_still_predicted(case: Case) -> None:
    assert case.bound is not None
    assert broken([Row.of(case, predict(case))]) == []


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name.partition(".")[0])
def test_the_requests_of_a_real_card_are_replayed(path: Path) -> None:
    found = replay(path)
    if found.name in RESERVED_PERCENT:
        assert 0 <= found.error_percent <= RESERVED_PERCENT[found.name]
    else:
        assert found.is_exact


def test_the_sample_has_figures_of_every_statistic() -> None:
    assert len(SAMPLE) == 37
    assert {case.statistic for case in SAMPLE} == {"requested", "allocated", "reserved"}


def test_every_figure_has_a_source_and_a_name_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(case.source and case.card and case.torch for case in CASES)


def test_every_row_that_is_run_has_a_bound() -> None:
    assert [case.name for case in CASES if case.bound is None and not case.not_run] == []


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_a_table_stands_as_it_would_be_written(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == format_tables(json.loads(text))


def test_the_page_of_the_docs_has_the_summary_of_the_whole_table() -> None:
    whole = runner.PAGE.read_text(encoding="utf-8").splitlines()
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8").splitlines()
    exact = [line for line in whole if line.startswith(tuple(f"| A | {statistic} | " for statistic in STATISTICS))]
    assert [line for line in page if line.startswith("| A ")] == exact[: len(STATISTICS)]
    assert sum(int(line.split(" | ")[2]) for line in exact[: len(STATISTICS)]) == 304, "the page and README name 304"


# --- tables and bounds ------------------------------------------------------------------------------------------------

TABLE: dict[str, Any] = {
    "name": "made up",
    "source": "nobody",
    "card": "T4",
    "target": "t4",
    "torch": "2.11.0",
    "statistic": "allocated",
    "unit": "MiB",
    "grade": "A",
    "step": "liger_layers.one_row",
    "settings": {"function": "softmax", "dtype": "float32"},
    "rows": [{"at": {"N": 128}, "figure": 2.0}, {"at": {"N": 256}, "figure": 3.0, "less": {"N": 128}, "bound": 5.0}],
}


def _write(folder: Path, **changes: Any) -> Path:
    path = folder / "made-up.json"
    path.write_text(format_tables([{**TABLE, **changes}]), encoding="utf-8")
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[Case]:
    _write(tmp_path)
    return list(read_cases(tmp_path))


def test_a_row_takes_what_its_table_says(two: list[Case]) -> None:
    first, second = two
    assert (first.name, first.nbytes, first.bound) == ("made up: N=128", 2 << 20, None)
    assert first.settings == {"function": "softmax", "dtype": "float32", "N": 128}
    assert second.less == {"function": "softmax", "dtype": "float32", "N": 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "no field"),
        ({"unit": "GO"}, "none of"),
        ({"grade": "D"}, "none of"),
        ({"step": ""}, "either a step or the reason"),
        ({"not_run": "made up"}, "either a step or the reason"),
        ({"rows": [{"att": {}, "figure": 1}]}, "no field"),
    ],
)
def test_a_table_with_a_mistake_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        list(read_cases(tmp_path))


def test_a_bound_only_tightens(tmp_path: Path, two: list[Case]) -> None:
    first, second = two
    assert tighten({first.name: -0.5, second.name: 7.0}, tmp_path) == 1
    assert [case.bound for case in read_cases(tmp_path)] == [bound_of(0.5), 5.0]
    assert tighten({first.name: 0.0, second.name: -1.0}, tmp_path) == 2
    assert [case.bound for case in read_cases(tmp_path)] == [SMALLEST_BOUND, bound_of(1.0)]
    assert tighten({first.name: 0.0, second.name: -1.0}, tmp_path) == 0


def test_a_prediction_beyond_its_bound_or_without_one_is_named(two: list[Case]) -> None:
    case = two[1]
    just, more = (Prediction({"allocated": round(case.nbytes * factor)}) for factor in (0.9501, 0.9499))
    assert broken([Row.of(case, just)]) == []
    assert broken([Row.of(case, more)]) == ["made up: N=256: -5.0100 %, the bound is 5 %"]
    assert broken([Row.of(case, Prediction({}, "refused"))]) == ["made up: N=256: no prediction any more: refused"]


def test_the_difference_of_two_rows_is_predicted_as_one(two: list[Case]) -> None:
    # 0.0029296875 MiB are published for 128 elements, and twice that for 256.
    difference = predict(two[1])
    assert difference.peaks["requested"] == predict(two[0]).peaks["requested"] == 6 * 128 * 4


def test_a_step_that_cannot_be_built_is_a_refusal(two: list[Case]) -> None:
    row = Row.of(two[0], predict(dataclasses.replace(two[0], settings={"N": 1})))
    assert row.error_percent is None
    assert row.refusal.startswith("TypeError: ")


# --- the runner -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up(tmp_path: Path, two: list[Case], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A runner with two made-up cases, whose predictions it counts."""
    predicted: list[str] = []

    def predict_and_count(case: Case) -> Prediction:
        predicted.append(case.name)
        return Prediction(dict.fromkeys(("requested", "allocated", "reserved"), 3 << 20))

    monkeypatch.setattr(runner, "read_cases", lambda: iter(two))
    monkeypatch.setattr(runner, "read_shared", lambda: iter(()))
    monkeypatch.setattr(runner, "predict", predict_and_count)
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "PAGE", tmp_path / "published.md")
    monkeypatch.setattr(runner, "replay_all", lambda: iter([_replay(0), _replay(1)]))
    return predicted


def _replay(off: int) -> Replay:
    return Replay("made", "nobody, x.pickle", 3, (1, 2), (1, 2), 100, 100 + off, 50, 50)


def test_the_runner_writes_every_row_and_its_misses(tmp_path: Path, made_up: list[str]) -> None:
    assert runner.main([]) == 0
    page = (tmp_path / "published.md").read_text(encoding="utf-8")
    assert "| A | allocated | 2 | 25.000 % | 25.0000 % / 50.00 % | 1 / 1 / 1 |" in page
    assert "Not explained:\n\n| grade | statistic | case | error |" in page
    assert "| A | allocated | made up: N=128 | +50.00 % |" in page
    assert "| N=256 | 3.000 MiB | 3.000 MiB | +0.0000 % |" in page
    assert "| x.pickle | 3 | 2 / 2 | all equal |" in page
    assert "| x.pickle | 3 | 2 / 2 | +1.000 % |" in page


def test_the_runner_goes_on_where_it_stopped(
    made_up: list[str], two: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.main([])
    runner.main([])
    assert made_up == ["made up: N=128", "made up: N=256"]
    monkeypatch.setattr(runner, "read_cases", lambda: iter([dataclasses.replace(two[0], figure=1.0), two[1]]))
    runner.main([])
    assert made_up[2:] == ["made up: N=128"]
    monkeypatch.setattr(results, "digest", lambda: "other sources")
    runner.main([])
    assert len(made_up) == 5
    runner.main(["--again"])
    assert len(made_up) == 7


def test_chosen_rows_are_added_to_the_newest_results(
    tmp_path: Path, made_up: list[str], two: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "read_cases", lambda: iter(two[:1]))
    runner.main([])
    monkeypatch.setattr(runner, "read_cases", lambda: iter(two))
    monkeypatch.setattr(results, "digest", lambda: "other sources")
    runner.main(["--only", "made", "N=256", "--add"])
    assert made_up == ["made up: N=128", "made up: N=256"]
    page = (tmp_path / "published.md").read_text(encoding="utf-8")
    assert page.count("| N=128 |") == page.count("| N=256 |") == 1
    assert ", 1 rows added until " in page


def test_the_runner_fails_when_a_bound_is_broken(
    made_up: list[str], two: list[Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "read_cases", lambda: iter([dataclasses.replace(two[0], bound=49.0)]))
    assert runner.main([]) == 4
    assert "made up: N=128: +50.0000 %, the bound is 49 %" in capsys.readouterr().err


def test_a_case_that_is_not_run_is_listed_with_the_reason(
    tmp_path: Path, made_up: list[str], two: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(two[0], step="", not_run="needs a kernel that is not here")
    monkeypatch.setattr(runner, "read_cases", lambda: iter([case]))
    assert runner.main([]) == 0
    assert made_up == []
    page = (tmp_path / "published.md").read_text(encoding="utf-8")
    assert "- made up: 1 rows; needs a kernel that is not here." in page


def test_only_prints_what_is_asked_for(tmp_path: Path, made_up: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--only", "made", "N=256"]) == 0
    assert made_up == ["made up: N=256"]
    assert "grade A allocated: 1 rows, mean 0.000 %" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


# --- the largest batches of timm's models -----------------------------------------------------------------------------


def test_every_published_batch_is_one_that_the_benchmark_tries() -> None:
    _, rows = batches.read_published()
    assert len(rows) == 644
    assert all(row.batch < row.next_batch <= 512 for row in rows)


def test_a_published_batch_is_held_from_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = batches.GIB
    peaks = {64: 20 * gib, 96: 23 * gib, 128: 25 * gib}

    def predict_step(step: str, target: str, settings: dict[str, Any], environment: dict[str, str]) -> Prediction:
        assert (step, target) == ("vision.timm_benchmark", "rtx3090")
        if settings["model"] == "refused":
            return Prediction({}, "made up")
        return Prediction(dict.fromkeys(("allocated", "reserved"), peaks[settings["batch"]]))

    published = [batches.Row("right", 224, 64, 96), batches.Row("wrong", 224, 96, 128), batches.Row("refused", 8, 1, 2)]
    monkeypatch.setattr(batches, "predict_step", predict_step)
    monkeypatch.setattr(batches, "read_published", lambda: ("nobody", published))
    monkeypatch.setattr(batches, "RESULTS", tmp_path)
    assert batches.main([]) == 0
    page = next(tmp_path.glob("published-batches-*.md")).read_text(encoding="utf-8")
    assert "- 2 models predicted, 1 refused." in page
    assert "- The published batch fits: 1 of 2." in page
    assert "- The batch tried before does not: 2 of 2." in page
    assert "| wrong | 224 | 96 | 23.00 | 128 | 25.00 |" in page
    assert "| right |" not in page
    monkeypatch.setattr(batches, "examine", lambda row: pytest.fail("the day has a result"))
    assert batches.main(["--every", "2"]) == 0


# --- the runs of xMem -------------------------------------------------------------------------------------------------


def test_every_run_of_xmem_is_of_a_card_and_a_step_that_are_known() -> None:
    _, runs = xmem.read_published()
    assert Counter(run.part for run in runs) == {"": 65, "later": 39, "held out": 48}
    folder = "plot/data/002-Monte Carlo/CNN/001/"
    assert sum(run.path.startswith(folder) for run in runs) == 80  # all that it has
    assert {run.card for run in runs} <= set(CATALOGUE)
    assert all(run.model in LANGUAGE_MODELS for run in runs if run.kind == "transformer")


def test_a_figure_of_xmem_leaves_open_what_the_first_reading_found_and_which_texts_were_drawn() -> None:
    estimates = dict.fromkeys(xmem.TOOLS)
    run = xmem.Run("a", "rtx3060", "cnn", "a", "SGD", 8, None, False, 100, estimates, placed_bytes=10)
    errors = [dataclasses.replace(run, reserved_bytes=nbytes).error_percent(exact=False) for nbytes in (90, 105, 121)]
    assert errors == [pytest.approx(each) for each in (-10, 0, 10)]
    assert dataclasses.replace(run, reserved_bytes=105).error_percent() == pytest.approx(5)
    assert [dataclasses.replace(run, between=each).is_within for each in ((80, 99), (108, 120), (111, 120))] == [
        False,
        True,
        False,
    ]
    assert dataclasses.replace(run, placed_bytes=0, again=(90, 95)).left_open == (90, 100)


def test_runs_of_xmem_are_counted_by_kind_and_those_that_ran_out_by_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates = {**dict.fromkeys(xmem.TOOLS), "xMem": 90}
    rows = [("a/one", 101, False, True), ("a/two", 104, False, True), ("a/three", 300, True, False)]
    published, found = [], {}
    for path, reserved, ran_out, fits in rows:
        run = xmem.Run(path, "rtx3060", "cnn", path[2:], "SGD", 8, None, ran_out, 100, estimates)
        published.append(run)
        found[path] = dataclasses.replace(run, reserved_bytes=reserved, fits=fits)
    monkeypatch.setattr(xmem, "examine", lambda run: found[run.path])
    monkeypatch.setattr(xmem, "read_published", lambda: ("nobody", published))
    monkeypatch.setattr(xmem, "RESULTS", tmp_path)
    assert xmem.main([]) == 0
    page = next(tmp_path.glob("published-xmem-*.md")).read_text(encoding="utf-8")
    assert "| convolutional, RTX 3060 and 4060 (2) | 2.50 % / 50 % | 10.00 % / 0 % |  |  |" in page
    assert "Of 1 runs that ran out of memory, 1 are predicted to." in page
    assert "Of 2 runs that did not, 2 are predicted to." in page
    assert "| two, SGD, 8, rtx3060 | 0 | 0 to 0 | +4.00 % | +4.00 % | -10.00 % |  |  |" in page
    monkeypatch.setattr(xmem, "examine", lambda run: pytest.fail("the day has a result"))
    assert xmem.main([]) == 0
