"""The benchmark scripts run from end to end; what they measure is not judged here."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT

pytestmark = pytest.mark.truth

MODEL = "torchvision:alexnet"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a zoo of one model was written to."""
    folder = tmp_path_factory.mktemp("zoo")
    command = [sys.executable, "-m", "benchmarks.zoo.zoo", "--only", MODEL, "--jobs", "1", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def zoo() -> ModuleType:
    """The script, in this process."""
    return importlib.import_module("benchmarks.zoo.zoo")


def test_zoo_writes_a_row_for_each_mode(out: Path) -> None:
    rows = {row["mode"]: row for row in json.loads(next(out.glob("zoo-*.json")).read_text())["rows"]}
    assert rows.keys() == {"train", "infer"}
    # Published: 61,100,840 parameters.
    assert {row["parameters_bytes"] for row in rows.values()} == {61_100_840 * 4}
    assert all(row["why"] is None for row in rows.values())
    assert rows["infer"]["saved_bytes"] == 0


def test_zoo_writes_a_page_of_counts(out: Path) -> None:
    table = next(out.glob("zoo-*.md")).read_text()
    assert "| torchvision | 1 of 1 | 1 of 1 |" in table
    assert MODEL not in table


def test_zoo_goes_on_where_it_stopped(out: Path, zoo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    table = next(out.glob("zoo-*.md")).read_text()
    assert zoo.main(["--only", MODEL, "--out", str(out)]) == 0
    assert capsys.readouterr().err == ""  # nothing was analysed
    assert next(out.glob("zoo-*.md")).read_text() == table


def test_zoo_refuses_unknown_names(tmp_path: Path, zoo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["--only", "torchvision:resnet17", "--out", str(tmp_path)]) == 2
    assert "resnet17" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- how they lie -----------------------------------------------------------------------------------------------------


def benchmark_imports() -> dict[str, set[str]]:
    """Each module of the benchmarks with those that it imports, within functions as well."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "benchmarks").rglob("*.py")
    }
    found: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    found[module] |= {source, f"{source}.{alias.name}"} & paths.keys()
    return found


def test_the_benchmarks_import_nothing_in_a_circle() -> None:
    imports = benchmark_imports()
    assert "benchmarks.accuracy.planned" in imports["benchmarks.accuracy.cases"]
    graphlib.TopologicalSorter(imports).prepare()


def test_a_folder_of_benchmarks_imports_no_other_but_lib() -> None:
    folders = {
        (module.split(".")[1], imported.split(".")[1])
        for module, names in benchmark_imports().items()
        for imported in names
        if module.count(".") and imported.count(".")
    }
    assert {(one, other) for one, other in folders if one != other} == {("accuracy", "lib"), ("zoo", "lib")}


# --- workers ----------------------------------------------------------------------------------------------------------

WORK = """
import os, sys, time
sys.path.insert(0, {root!r})
from benchmarks.lib.workers import Lost, run_jobs

def prepare():
    pass

def work(job):
    if job == "sleep":
        time.sleep(60)
    if job == "die":
        os._exit(3)
    return job.upper()

if __name__ == "__main__":
    jobs = ["a", "sleep", "b", "die", "c"]
    for job, result in sorted(run_jobs(jobs, work, prepare=prepare, workers=2, limit_s=1.0, jobs_per_worker=1)):
        print(job, result.reason if isinstance(result, Lost) else result)
"""


def test_workers_are_replaced_when_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORK.format(root=str(ROOT)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "a A",
        "b B",
        "c C",
        "die its process ended with exit code 3",
        "sleep it took longer than 1 s",
    ]


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def table() -> ModuleType:
    """The rows of `plans.py`."""
    return importlib.import_module("benchmarks.planning.plan_table")


def _row(table: ModuleType, contender: str, peak: int | None, extra: int | None, setting: str = "", **more: Any) -> Any:
    return table.Row("m", contender, setting, peak, extra, extra, **more)


def test_settings_beaten_by_their_own_kind_are_not_answered(table: ModuleType) -> None:
    rows = [
        _row(table, "a", 900, 5, "more FLOPs than its next, for more bytes"),
        _row(table, "a", 800, 4, "kept"),
        _row(table, "a", 700, 4, "kept too"),
        _row(table, "b", 900, 5, "another's setting does not count"),
        _row(table, "b", 1000, 0, "frees nothing"),
        _row(table, "c", None, None, "failed", failed="no"),
    ]
    assert [(row.contender, row.peak_bytes) for row in table.challenged(rows, 1000)] == [("b", 900), ("a", 700)]


@pytest.mark.parametrize(
    ("peak", "extra", "failed", "said"),
    [
        (1000, 99, "", "won"),
        (1000, 100, "", "same"),
        (900, 100, "", "won"),
        (1001, 100, "", "same"),
        (1002, 0, "", "LOST: our peak is 0.2% more"),
        (500, 101, "", "LOST: ours computes more"),
        (None, None, "out of reach", "LOST: out of our reach"),
    ],
)
def test_who_wins(table: ModuleType, peak: int | None, extra: int | None, failed: str, said: str) -> None:
    assert table.verdict(_row(table, "a", 1000, 100), _row(table, table.OURS, peak, extra, failed=failed)) == said


@pytest.mark.parametrize(("slowdown", "said"), [(1.25, "won"), (1.75, "LOST: quicker than ours")])
def test_of_fused_kernels_time_decides(table: ModuleType, slowdown: float, said: str) -> None:
    rivals = [_row(table, "a", 900, None, str(taken), slowdown=taken) for taken in (1.0, 2.0)]
    rivals.append(_row(table, "a", 1000 - 300, None, "1.5", slowdown=1.5))
    assert [row.setting for row in table.challenged(rivals, 1000)] == ["1.0", "1.5"]
    assert table.verdict(rivals[2], _row(table, table.OURS, 700, 100, slowdown=slowdown)) == said


def test_the_report_says_where_we_lose(table: ModuleType) -> None:
    rivals = [_row(table, "a", 800, 30, "x"), _row(table, "a", 600, 60, "y"), _row(table, "b", 700, 10, "z")]
    ours = [(rival, extra) for rival, extra in zip(rivals, (20, 70, 10), strict=True)]
    rivals[0] = dataclasses.replace(rivals[0], slowdown=1.5)
    timed = {"slowdown": 1.25, "estimated_slowdown": 1.125}
    rows = [
        _row(table, "none", 1000, 100),
        *rivals,
        *(_row(table, table.OURS, r.peak_bytes, extra, table.answer_to(r), **timed) for r, extra in ours),
    ]
    found = {
        "date": "2026-01-02",
        "versions": {"torch": "2.11"},
        "python": "3.11",
        "machine": "x",
        "cases": {"m": "a model", "n": "another"},
    }
    planned = {"unplanned_bytes": 200, "peak_bytes": 66, "extra_fraction": 0.25, "time_fraction": 0.125}
    text = table.markdown(
        {**found, "rows": [vars(row) for row in rows], "published": {"resnet50, 184, 33.1%": planned}}
    )
    assert "other operators too | 33.0% | +25.0% | +12.5% |" in text
    assert "**Of 3 comparisons at the same peak, over 1 models, fxmem loses 1.**" in text
    assert "Not run yet: another." in text
    assert "| a | 2 | 1 | 0 | 1 | 1.20 | 0 |" in text
    assert "| m | a, y | 0.0 | +60.00% | +70.00% | LOST: ours computes more |" in text
    times = "| +50.0% | 80.0% | +20.00% (+20.00%) | +25.0% | +12.5% | won |"
    assert f"| a | x | 80.0% | +30.00% (+30.00%) {times}" in text


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, in this process, and one model that a pencil can follow: Linear and Tanh eight times, width 64, batch
    256."""
    script, models, torch = map(
        importlib.import_module, ("benchmarks.planning.plans", "benchmarks.planning.plan_models", "torch")
    )

    def build() -> Any:
        return torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())))

    case = models.Case("eight layers", build, lambda: (torch.ones(256, 64),), list)
    monkeypatch.setitem(models.CASES, "eight", case)
    threads = torch.get_num_threads()
    yield script
    torch.set_num_threads(threads)


PRODUCT = 2 * 256 * 64 * 64
"""FLOPs of one layer's product."""


@pytest.mark.filterwarnings("ignore")  # torch.compile's
def test_contenders_recompute_what_a_pencil_says(plans: ModuleType) -> None:
    examination = plans._Examination("eight", plans.CASES["eight"], [])
    assert examination.base.forward_products == 8 * PRODUCT
    makes = {(each.contender, each.setting): each.make for each in plans.candidates(plans.CASES["eight"])}

    def extra(contender: str, setting: str) -> int:
        row = examination.run(plans.Row("eight", contender, setting), makes[contender, setting]())
        assert row.peak_bytes > examination.fixed_bytes
        return int(row.extra_products)

    # The last segment is stored. A segment's last Tanh saves its result, so all of the segment runs again.
    assert extra("checkpoint_sequential", "4 segments of 16 stages, about the root") == 6 * PRODUCT
    # Each stage alone: a Linear saves nothing but its input and stops before its product, and a Tanh has none.
    assert extra("checkpoint_sequential", "16 segments of 16 stages") == 0
    # 30 % of what it would save may be kept: two of eight products need not run again.
    assert extra("torch.compile", "activation_memory_budget 0.3") == 6 * PRODUCT


def test_our_plan_keeps_its_promise(plans: ModuleType) -> None:
    examination = plans._Examination("eight", plans.CASES["eight"], [])
    whole = examination.peak(examination.built())
    row = examination.planned(plans.Row("eight", "fxmem", ""), "auto", None, whole - 1)
    assert row.budget_bytes == whole - 1
    assert row.promised_bytes == row.peak_bytes < whole
    assert row.extra_flops > 0


def test_plans_refuses_unknown_names(tmp_path: Path, plans: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert plans.main(["--only", "resnet17", "--out", str(tmp_path)]) == 2
    assert "resnet17" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_plans_goes_on_where_it_stopped(plans: ModuleType) -> None:
    examination = plans._Examination("eight", plans.CASES["eight"], [plans.Row("eight", "none", "", 7, 11, 13)])
    assert next(examination.rows()) == plans.Row("eight", "none", "", 7, 11, 13)
