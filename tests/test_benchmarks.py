"""The benchmark scripts run from end to end; what they measure is not judged here."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
MODEL = "torchvision:alexnet"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a zoo of one model was written to."""
    folder = tmp_path_factory.mktemp("zoo")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(BENCHMARKS / "zoo.py"), "--only", MODEL, "--jobs", "1", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("zoo")


def test_zoo_writes_a_row_for_each_mode(out: Path) -> None:
    rows = {row["mode"]: row for row in json.loads(next(out.glob("zoo-*.json")).read_text())["rows"]}
    assert rows.keys() == {"train", "infer"}
    # Published: 61,100,840 parameters.
    assert {row["parameters_bytes"] for row in rows.values()} == {61_100_840 * 4}
    assert all(row["why"] is None for row in rows.values())
    assert rows["infer"]["saved_bytes"] == 0


def test_zoo_writes_a_table(out: Path) -> None:
    table = next(out.glob("zoo-*.md")).read_text()
    assert "| torchvision | 1 of 1 | 1 of 1 |" in table
    assert f"| {MODEL} | ok | ok |" in table


def test_zoo_goes_on_where_it_stopped(out: Path, zoo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    table = next(out.glob("zoo-*.md")).read_text()
    assert zoo.main(["--only", MODEL, "--out", str(out)]) == 0
    assert capsys.readouterr().err == ""  # nothing was analysed
    assert next(out.glob("zoo-*.md")).read_text() == table


def test_zoo_refuses_unknown_names(tmp_path: Path, zoo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["--only", "torchvision:resnet17", "--out", str(tmp_path)]) == 2
    assert "resnet17" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


WORK = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from workers import Lost, run_jobs

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
    script.write_text(WORK.format(benchmarks=str(BENCHMARKS)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a A", "b B", "c C", "die its process ended with exit code 3", "sleep it took longer than 1 s"]
