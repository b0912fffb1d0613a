"""Guards for test suites: budgets asserted, and peaks kept in a file beside the tests by the pytest plugin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxmem.errors import UsageError
from fxmem.records.fits import PeakBaseline
from fxmem.simulation.program import RecordedProgram, record
from fxmem.simulation.step.analysis import Analysis, analyze
from fxmem.testing import peak_checks
from tests import ROOT

pytest_plugins = ("pytester",)

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def net(width: int = 128, blocks: int = 2) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def batch(samples: int = 64, width: int = 128) -> torch.Tensor:
    return torch.empty(samples, width, device="meta")


# --- a budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "rtx4090"])
def test_a_budget_that_is_kept_gives_the_analysis(target: str) -> None:
    peak = analyze(net, batch(), target=target).peak
    counted = peak.requested_bytes if target == "cpu" else peak.reserved_bytes
    assert counted is not None
    assert peak_checks.assert_peak_below(net, batch(), counted, target=target).peak == peak


def test_a_budget_that_is_exceeded_is_told_with_the_peak_the_phase_and_the_lines() -> None:
    peak = analyze(net, batch(), target="cpu").peak
    with pytest.raises(AssertionError) as failed:
        peak_checks.assert_peak_below(net, batch(), peak.requested_bytes - 1, target="cpu")
    first, where, kinds, *contributors = filter(None, str(failed.value).splitlines())
    assert first.startswith("the peak is ")
    assert f"({peak.requested_bytes:,} bytes) requested, 1 B above the budget of" in first
    assert f"in {peak.phase}, while {peak.node} runs; Sequential, train, cpu" in where
    assert "optimizer state" in kinds
    assert contributors[0].startswith("Lines")
    assert len(contributors) == 3
    # All the blocks' layers stand in one line of code.
    assert re.search(
        r"0\.up and 4 more \(Linear, .*test_testing\.py:\d+: return x \+ self\.down\(self\.up\(x\)\.relu\(\)\)\)$",
        contributors[0],
    )
    assert "optimizer (AdamW)" in contributors[1]


def test_what_fits_in_blocks_but_not_in_a_loop_is_beyond_the_budget() -> None:
    # Allocated bytes are blocks; what holds them comes in segments of 2 MiB and 20 MiB, and cannot be had in less.
    peak = analyze(net, batch(), target="rtx4090").peak
    assert peak.allocated_bytes is not None
    with pytest.raises(AssertionError, match=r"is within the budget .* but in a loop the allocator runs out of it"):
        peak_checks.assert_peak_below(net, batch(), peak.allocated_bytes, target="rtx4090")


def test_a_recorded_program_is_held_to_a_budget_and_to_a_baseline() -> None:
    def train() -> RecordedProgram:
        with record("cpu", steps=2) as run:
            torch.empty(64, 128, 1024).sum()  # 32 MiB, before its first step
            model = net()
            optimizer = torch.optim.AdamW(model.parameters())
            while True:
                model(torch.empty(64, 128)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return run

    run = train()
    assert peak_checks.assert_peak_below(run, budget="33MiB") is run
    with pytest.raises(AssertionError, match=r"1\.00 MiB above the budget of 31\.0 MiB(.|\n)*test_testing\.py:\d+"):
        peak_checks.assert_peak_below(run, budget="31MiB")
    with pytest.raises(AssertionError, match="1 B above the budget"):
        peak_checks.assert_peak_below(run, budget=run.peak.requested_bytes - 1)
    baseline = peak_checks.make_baseline(run)
    assert baseline.step.program is None
    assert peak_checks.growth(baseline, run, 0) == ""
    with pytest.raises(UsageError, match="expected an analysis or a recording alone"):
        peak_checks.find_step(run, batch(), {})
    with pytest.raises(UsageError, match="expected a budget"):
        peak_checks.assert_peak_below(net, batch(), None)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("budget", "message"), [("50%", "in bytes or with a unit"), ("much", "expected a budget as bytes")]
)
def test_what_is_no_budget_is_refused(budget: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        peak_checks.assert_peak_below(net, batch(), budget, target="cpu")


# --- a baseline -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Analysis:
    return analyze(net, batch(), target="cpu")


def test_a_baseline_splits_the_peak(small: Analysis) -> None:
    baseline = peak_checks.make_baseline(small)
    assert sum(baseline.by_kind.values()) == baseline.requested_bytes == small.peak.requested_bytes
    assert sum(baseline.by_node.values()) <= baseline.requested_bytes
    assert min(baseline.by_node.values()) * 1000 >= baseline.requested_bytes
    assert PeakBaseline.model_validate_json(baseline.model_dump_json()) == baseline


def test_what_has_not_grown_says_nothing(small: Analysis) -> None:
    baseline = peak_checks.make_baseline(small)
    assert peak_checks.growth(baseline, small, 0) == ""
    one_less = baseline.model_copy(update={"requested_bytes": baseline.requested_bytes - 1})
    assert peak_checks.growth(one_less, small, 1) == ""
    assert peak_checks.growth(one_less, small, 0).startswith("the peak grew by 1 B (<0.1 %); no growth is allowed")


def test_what_grew_is_named_by_kind_and_by_node(small: Analysis) -> None:
    grown = analyze(lambda: net(blocks=3), batch(), target="cpu")
    text = peak_checks.growth(peak_checks.make_baseline(small), grown, 0)
    # One more block: two weights of 128 x 512 x 4 bytes, and twice as much of Adam's averages.
    weights = 2 * 128 * 512 * 4
    assert "+512.0 KiB" in text
    assert f"+{2 * weights / MIB:.2f} MiB" in text
    by_kind, by_node = text.split("\nNodes")
    assert "optimizer state" in by_kind
    assert "2.up (" in by_node
    assert "2.down (" in by_node
    assert "test_testing.py:" in by_node
    assert "is not the same" not in text


def test_a_baseline_of_another_step_says_what_is_not_the_same(small: Analysis) -> None:
    text = peak_checks.growth(
        peak_checks.make_baseline(small), analyze(net, batch(640), target="cpu", optimizer="sgd"), 0
    )
    assert "the input is not the same: was input 64x128 float32, is input 640x128 float32" in text
    assert "the step is not the same" in text
    assert "the target" not in text


@pytest.mark.parametrize(
    ("tolerance", "allowed"),
    [
        ("1%", 10),
        (0.01, 10),
        ("0", 0),
        (0, 0),
        ("0%", 0),
        (0.0, 0),
        ("64MiB", 64 * MIB),
        (7, 7),
        ("0.1%", 1),
        ("100%", 1000),
    ],
)
def test_a_tolerance_is_a_share_or_bytes(small: Analysis, tolerance: Any, allowed: int) -> None:
    before = peak_checks.make_baseline(small).model_copy(update={"allocated_bytes": 1000})
    assert peak_checks.allowed_growth(tolerance, before) == allowed


def test_what_is_no_tolerance_is_refused(small: Analysis) -> None:
    with pytest.raises(UsageError, match="expected a tolerance as a share of the peak"):
        peak_checks.allowed_growth("some", peak_checks.make_baseline(small))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON, or only a part of one"),
        ('{"peaks": {"a": {}}}', "peaks.a.fxmem_version is wrong"),
        ('{"schema_version": "0", "peaks": {}}', "schema version '1', got '0'"),
    ],
)
def test_what_is_no_baseline_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fxmem-baseline.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as refused:
        peak_checks.load_baseline(path)
    assert "\n" not in str(refused.value)
    assert "delete it and run pytest --fxmem-update" in str(refused.value)


# --- the plugin -------------------------------------------------------------------------------------------------------

TESTS = """
import torch

WIDTH = {width}

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 64))

def test_peak(fxmem_peak):
    analysis = fxmem_peak(build, torch.empty(32, 64, device="meta"), target="cpu")
    assert analysis.peak.requested_bytes > 0

class TestMore:
    def test_two(self, fxmem_peak):
        for mode in ("train", "infer"):
            fxmem_peak(build, torch.empty(32, 64, device="meta"), target="cpu", mode=mode, name=mode)
"""
PLUGIN = ("-p", "fxmem.testing.pytest_plugin")
KEYS = ["test_net.py::TestMore::test_two#infer", "test_net.py::TestMore::test_two#train", "test_net.py::test_peak"]


@pytest.fixture(scope="module")
def imported() -> None:
    """pytester forgets what a suite imports, and parts of torch cannot be imported twice: what an analysis imports is
    here before."""
    analyze(torch.nn.Linear(2, 2), torch.empty(1, 2, device="meta"), target="cpu")


@pytest.fixture
def suite(imported: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite of a user's own, in a folder `tests`; the plugin is loaded by name, whether or not it is installed as an
    entry point."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (pytester.path / "tests").mkdir()
    write(pytester, width=256)
    return pytester


def write(suite: pytest.Pytester, *, width: int, text: str = TESTS) -> None:
    # Of a file that is written anew within a second and has the same length, Python would take the old bytecode.
    (suite.path / "tests" / "test_net.py").write_text(text.replace("{width}", str(width)) + f"# {'-' * width}\n")


def outcome(suite: pytest.Pytester, *arguments: str) -> tuple[dict[str, int], str]:
    done = suite.runpytest_inprocess(*PLUGIN, *arguments)
    return done.parseoutcomes(), done.stdout.str()


def stored(suite: pytest.Pytester) -> dict[str, Any]:
    peaks = json.loads((suite.path / "tests" / "fxmem-baseline.json").read_text())["peaks"]
    assert isinstance(peaks, dict)
    return peaks


def test_without_a_baseline_a_test_fails_and_says_what_to_do(suite: pytest.Pytester) -> None:
    outcomes, text = outcome(suite)
    assert outcomes == {"failed": 2}
    assert "test_net.py::test_peak has no peak in tests/fxmem-baseline.json: run pytest --fxmem-update once" in text


def test_a_baseline_is_written_and_held(suite: pytest.Pytester) -> None:
    outcomes, text = outcome(suite, "--fxmem-update")
    assert outcomes == {"passed": 2}
    assert "wrote 3 of 3 peaks to tests/fxmem-baseline.json" in text
    assert list(stored(suite)) == KEYS
    outcomes, text = outcome(suite)
    assert outcomes == {"passed": 2}
    assert "= fxmem =" not in text
    # From another folder it is the same test.
    assert outcome(suite, "--rootdir", str(suite.path), "tests/test_net.py::test_peak")[0] == {"passed": 1}


def test_a_step_that_takes_more_fails_its_test_and_says_what_grew(suite: pytest.Pytester) -> None:
    outcome(suite, "--fxmem-update")
    write(suite, width=512)
    outcomes, text = outcome(suite)
    assert outcomes == {"failed": 2}
    assert "test_net.py::test_peak: the peak grew by" in text
    assert "Kinds" in text
    assert "optimizer state" in text
    assert "If that is meant: pytest --fxmem-update, and commit tests/fxmem-baseline.json" in text
    assert "Traceback" not in text
    assert outcome(suite, "--fxmem-tolerance", "100GiB")[0] == {"passed": 2}
    # Updating one test leaves the others' peaks.
    before = stored(suite)
    outcome(suite, "--fxmem-update", "-k", "test_peak")
    after = stored(suite)
    assert {key for key in KEYS if before[key] != after[key]} == {"test_net.py::test_peak"}
    assert outcome(suite)[0] == {"passed": 1, "failed": 1}


def test_the_tolerance_can_be_set_once_and_by_call(suite: pytest.Pytester) -> None:
    outcome(suite, "--fxmem-update")
    (suite.path / "pytest.ini").write_text("[pytest]\nfxmem_tolerance = 100GiB\n")
    write(suite, width=512)
    assert outcome(suite)[0] == {"passed": 2}
    write(suite, width=512, text=TESTS.replace('target="cpu")', 'target="cpu", tolerance=0)'))
    assert outcome(suite)[0] == {"passed": 1, "failed": 1}


def test_a_step_that_takes_less_passes_and_is_pointed_out(suite: pytest.Pytester) -> None:
    outcome(suite, "--fxmem-update")
    write(suite, width=128)
    outcomes, text = outcome(suite)
    assert outcomes == {"passed": 2}
    assert "test_net.py::test_peak: the peak fell from" in text


def test_a_failed_test_does_not_move_its_baseline(suite: pytest.Pytester) -> None:
    write(suite, width=256, text=TESTS.replace("> 0", "< 0"))
    assert outcome(suite, "--fxmem-update")[0] == {"passed": 1, "failed": 1}
    assert list(stored(suite)) == KEYS[:2]


def test_a_budget_holds_even_when_the_baseline_is_written(suite: pytest.Pytester) -> None:
    write(suite, width=256, text=TESTS.replace('target="cpu")', 'target="cpu", budget="1KiB")'))
    outcomes, text = outcome(suite, "--fxmem-update")
    assert outcomes == {"passed": 1, "failed": 1}
    assert "above the budget of 1.00 KiB (1,024 bytes)" in text


def test_two_peaks_of_one_name_are_refused(suite: pytest.Pytester) -> None:
    write(suite, width=256, text=TESTS.replace(", name=mode", ""))
    outcomes, text = outcome(suite, "--fxmem-update")
    assert outcomes == {"passed": 1, "failed": 1}
    assert "expected each peak of a test to have a name of its own, got a second one without a name" in text


def test_the_baseline_can_lie_elsewhere(suite: pytest.Pytester) -> None:
    (suite.path / "pytest.ini").write_text("[pytest]\nfxmem_baseline = ../memory.json\n")
    assert outcome(suite, "--fxmem-update")[0] == {"passed": 2}
    assert list(json.loads((suite.path / "memory.json").read_text())["peaks"]) == [f"tests/{key}" for key in KEYS]
    assert outcome(suite)[0] == {"passed": 2}


def test_a_baseline_nobody_can_read_is_named(suite: pytest.Pytester) -> None:
    (suite.path / "tests" / "fxmem-baseline.json").write_text("{")
    outcomes, text = outcome(suite)
    assert outcomes == {"failed": 2}
    assert "expected a baseline written by fxmem" in text
    done = suite.runpytest_inprocess(*PLUGIN, "--fxmem-update")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "delete it and run pytest --fxmem-update" in done.stdout.str()


@pytest.mark.truth
def test_what_a_worker_of_xdist_measures_is_written_by_the_process_that_started_it(suite: pytest.Pytester) -> None:
    # One worker is enough: what it measures has to come from another process.
    outcomes, text = outcome(suite, "-p", "xdist.plugin", "-n", "1", "--fxmem-update")
    assert outcomes == {"passed": 2}
    assert list(stored(suite)) == KEYS
    assert "wrote 3 of 3 peaks to tests/fxmem-baseline.json" in text


@pytest.mark.truth
def test_the_example_holds_a_model_to_its_peaks(suite: pytest.Pytester) -> None:
    (suite.path / "tests" / "test_net.py").unlink()
    text = (ROOT / "examples" / "test_memory_budget.py").read_text()
    (suite.path / "tests" / "test_memory_budget.py").write_text(text)
    assert outcome(suite, "--fxmem-update")[0] == {"passed": 5}
    assert outcome(suite)[0] == {"passed": 5}
    (suite.path / "tests" / "test_memory_budget.py").write_text(text.replace("width=512", "width=1024"))
    assert outcome(suite)[0] == {"passed": 3, "failed": 2}


def test_the_plugin_imports_nothing_until_a_test_asks_for_it(tmp_path: Path) -> None:
    code = (
        "import pytest, sys; before = set(sys.modules); import fxmem.testing.pytest_plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["fxmem", "fxmem.testing", "fxmem.testing.pytest_plugin"]
