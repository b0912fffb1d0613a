"""Programs as they are, predicted and run for real on the CPU, round by round."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.records.profile import Phase
from fxmem.records.validation import ProgramMeasurement, ProgramVerdict, Quantity
from fxmem.simulation.program import Launch, RunSettings, launch
from fxmem.validation.validate import compare_round, program_verdict, validate_program

pytestmark = pytest.mark.truth

PROGRAMS = Path(__file__).parent.parent / "simulation" / "program" / "programs"
STEPS = 3
TOLERANCE = {"autocast": 0.02}
"""Half-precision products may take scratch in oneDNN, which the measurement lists; 0.01 % where there is none."""

MEASURE_ALL = """
import os, pathlib, sys
import torch._dynamo  # every optimizer imports it; here once for all
from fxmem.simulation.program import Launch
from fxmem.validation import measure_program
folder, steps, *files = sys.argv[1:]
for file in files:
    child = os.fork()
    if not child:
        measured = measure_program._measure_on_cpu(Launch(file), int(steps))
        pathlib.Path(folder, pathlib.Path(file).stem).write_text(measured.model_dump_json())
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ProgramMeasurement]:
    """Every program, run for real in a process that has imported torch for all of them."""
    folder = tmp_path_factory.mktemp("measured")
    files = sorted(map(str, PROGRAMS.glob("*.py")))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_ALL, str(folder), str(STEPS), *files],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found = {file.name: ProgramMeasurement.model_validate_json(file.read_bytes()) for file in folder.iterdir()}
    assert len(found) == len(files) == 11, done.stderr
    return found


@pytest.mark.parametrize("name", sorted(file.stem for file in PROGRAMS.glob("*.py")))
def test_a_program_takes_what_is_predicted(name: str, measured: Mapping[str, ProgramMeasurement]) -> None:
    recorded = launch(
        Launch(str(PROGRAMS / f"{name}.py")),
        catalogue.target("cpu"),
        RunSettings(STEPS),
    ).recorded
    verdict = program_verdict(recorded.report(), measured[name], TOLERANCE.get(name, 1e-4))
    assert recorded.ending == measured[name].ending == "stopped after step 3"
    assert verdict.judged is Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH
    errors = {each.number: {found.quantity.value: found.error for found in each.comparisons} for each in verdict.rounds}
    assert verdict.within_tolerance, errors
    listed = sum(op.scratch_bytes for op in measured[name].scratch)
    gaps = [each.measured.peak_bytes - each.predicted.requested_bytes for each in verdict.rounds]
    assert max(gaps) <= listed + 1e-4 * verdict.rounds[-1].measured.peak_bytes


def test_what_only_a_real_run_shows(measured: Mapping[str, ProgramMeasurement]) -> None:
    digits = measured["mnist"]
    assert {"aten.convolution.default", "fxmem.data_loader"} <= {op.name for op in digits.scratch}
    assert digits.rounds[-1].peak_phase is Phase.BACKWARD
    assert digits.setup is not None
    assert digits.setup.retained_bytes < digits.rounds[0].retained_bytes  # no gradients yet, no state


def test_a_program_is_measured_in_a_process_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os, sys, torch\n"
        "print('arguments', sys.argv[1:], 'environment', os.environ['OWN'])\n"
        "os.mkdir('logs')\n"  # which is there in a second run that sees the files of the first
        "model = torch.nn.Linear(512, 512)\n"
        "while True:\n"
        "    model(torch.randn(64, 512)).square().sum().backward()\n"
        "    for parameter in model.parameters():\n"
        "        parameter.data.sub_(parameter.grad, alpha=0.1)\n"
        "        parameter.grad = None\n"
    )
    monkeypatch.setenv("OWN", "ours")
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    verdict = validate_program([str(script), "--lr", "3"], steps=2, tolerance=1e-4, progress=told.append)
    assert told == ["predicting it", "running the program on the CPU"]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("arguments ['--lr', '3'] environment ours") == 2  # for real, and as predicted
    assert verdict.program == f"{script} --lr 3"
    assert len(verdict.rounds) == 2
    assert verdict.within_tolerance
    assert ProgramVerdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_a_program_that_only_runs_is_one_round(tmp_path: Path) -> None:
    """All that it does after its set-up, whose peak a real run is held to; a loss of bytes is seen."""
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512))\n"
        "x, kept = torch.randn(256, 512), []\n"
        "with torch.no_grad():\n"
        "    for _ in range(6):\n"
        "        kept.append(net(x))\n"
        "    x = torch.stack(kept)\n"
        "sys.exit(0)\n"
    )
    verdict = validate_program([str(script)], tolerance=1e-4)
    (only,) = verdict.rounds
    assert verdict.within_tolerance
    assert verdict.measurement.ending == "ran to its end"
    assert only.predicted.requested_bytes == only.measured.peak_without_kernel_scratch_bytes
    assert only.measured.peak_bytes > 12 * 256 * 512 * 4  # what is kept, and all of it once more
    measured = only.measured.model_copy(update={"peak_without_kernel_scratch_bytes": only.measured.peak_bytes * 2})
    comparisons = {each.quantity: each for each in compare_round(only.predicted, measured)}
    assert comparisons[verdict.judged].error == pytest.approx(-0.5, abs=0.01)


def test_a_program_that_fails_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("raise RuntimeError('mine')")
    with pytest.raises(AnalysisError, match="raised RuntimeError: mine, before anything ran on cpu"):
        validate_program([str(script)])
    with pytest.raises(UsageError, match="which is no file"):
        validate_program([str(tmp_path / "none.py")])
    with pytest.raises(UsageError, match="its script first"):
        validate_program([])
    with pytest.raises(UsageError, match="steps of at least 1"):
        validate_program([str(script)], steps=0)
    with pytest.raises(UsageError, match="tolerance of 0 or more"):
        validate_program([str(script)], tolerance=-1)
