"""What `fxmem run` says first, and its exit code: the whole run counts, and two answers never contradict."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fxmem.__main__ import main
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import run as verb
from fxmem.memory import report_reader
from fxmem.records.profile import Report, Round

PROGRAM = str(Path(__file__).with_name("grow.py"))
GIB = 1 << 30


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], words: str, code: int) -> tuple[str, Report]:
    """The first line of a run, unwrapped, and its report, of which `show` says the same."""
    options, _, program = words.partition(" grow ")
    assert main(["run", "--json", "r.json", *options.split(), PROGRAM, *program.split()]) == code
    said = verdict_of(capsys.readouterr().out)
    assert main(["show", "r.json"]) == code
    assert verdict_of(capsys.readouterr().out) == said
    return said, report_reader.load_report(Path("r.json"))


def verdict_of(out: str) -> str:
    return re.sub(r"\s+", " ", out[: out.index("\nPeak")].removeprefix("Memory")).strip()


def rounds_of(report: Report) -> tuple[Round, ...]:
    assert report.step.program is not None
    return report.step.program.rounds


@pytest.mark.truth
@pytest.mark.parametrize(("which", "grown"), [("lists", 1 << 26), ("cat", 64 * 8 * 4)])
def test_a_run_that_grows_says_by_how_much(capsys: pytest.CaptureFixture[str], which: str, grown: int) -> None:
    said, report = run(capsys, f"--target rtx3080 grow {which}", 0)
    assert re.match(
        rf"grows by {grown:,} bytes a step \(.*grow\.py:\d+ keeps \w+\), out of memory at about step ", said
    )
    program = report.step.program
    assert program is not None
    assert (program.growth_bytes, program.steady) == (grown, False)
    *_, one, two, three = (each.retained_bytes or 0 for each in program.rounds)
    assert three - two == two - one == grown
    assert main(["show", "r.json"]) == 0
    assert f"Steady      no: it grows by {grown:,} bytes a step\nGrows " in capsys.readouterr().out


@pytest.mark.truth
def test_the_step_at_which_it_runs_out(capsys: pytest.CaptureFixture[str]) -> None:
    said, report = run(capsys, "--target 2GiB --until steady --steps 8 grow lists", 0)
    assert len(rounds_of(report)) == 8
    expected = re.search(r"at about step (\d+)", said)
    assert expected is not None
    said, report = run(capsys, "--target 2GiB --until end grow lists", 4)
    assert "does NOT fit: at least" in said
    assert abs(len(rounds_of(report)) - int(expected[1])) <= 2


@pytest.mark.truth
def test_what_does_not_grow_is_not_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    said, report = run(capsys, "--target rtx3080 --until steady grow steady", 0)
    program = report.step.program
    assert program is not None
    assert said.startswith("fits: ")
    assert (program.steady, program.growth_bytes) == (True, 0)
    assert len(program.rounds) > 3  # until its list is as long as it gets
    said, report = run(capsys, "--target rtx3080 --steps 6 grow lengths", 0)
    program = report.step.program
    assert program is not None
    assert said.startswith("fits: ")
    assert (program.steady, program.growth_bytes) == (False, None)


@pytest.mark.truth
def test_a_request_that_is_too_large_counts(capsys: pytest.CaptureFixture[str]) -> None:
    said, report = run(capsys, "--target rtx4090 grow pairs", 4)
    assert said.startswith("does NOT fit: at least 47.7 GiB of 23.1 GiB on rtx4090, 206.")
    assert re.search(r"It runs out at .*grow\.py:\d+: Tried to allocate 47\.69 GiB", said)
    peak = report.peak
    assert peak.at_least
    assert min(peak.allocated_bytes or 0, peak.reserved_bytes or 0) > 51_200_000_000


def test_the_traceback_has_the_programs_own_lines_and_the_last(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = ("import torch", "net = torch.nn.Sequential(torch.nn.Linear(8, 1 << 20)).cuda()")
    (tmp_path / "train.py").write_text("\n".join((*lines, 'net(torch.ones(8192, 8, device="cuda"))')))
    assert main(["run", "--target", "rtx3080", "train.py"]) == 4
    said = capfd.readouterr().err
    files = re.findall(r'File "(.+)", line (\d+)', said)
    assert [(Path(file).name, line) for file, line in files[:-1]] == [("train.py", "3")]
    assert len(files) == 2
    assert "torch/nn/modules/linear.py" in files[1][0]
    assert said.count("Traceback") == 1


@pytest.mark.truth
def test_inference_needs_no_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    said, report = run(capsys, "--target rtx3080 grow outputs", 4)
    assert said.startswith("does NOT fit: at least ")
    assert report.peak.process_bytes is not None
    assert report.peak.process_bytes.low > (report.target.memory_bytes or 0)
    assert [each.is_whole for each in rounds_of(report)] == [False]


@pytest.mark.truth
def test_what_comes_after_the_last_step_counts(capsys: pytest.CaptureFixture[str]) -> None:
    said, report = run(capsys, "--target rtx4090 --until end grow evaluate", 0)
    least = 131072 * (256 + 1024 + 10) * 4
    assert (report.peak.allocated_bytes or 0) > least
    program = report.step.program
    assert program is not None
    assert (program.shown, [each.is_whole for each in program.rounds]) == (3, [True, True, False])
    assert said.startswith("fits: 6")  # 676 MiB of 23.5 GiB


@pytest.mark.truth
@pytest.mark.parametrize("which", ["fails 0", "fails 1", "leaves 1"])
def test_an_error_before_the_first_step_is_over_is_all_that_is_said(
    capsys: pytest.CaptureFixture[str], which: str
) -> None:
    assert main(["run", "--json", "r.json", PROGRAM, *which.split()]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert not Path("r.json").exists()
    assert re.match(r"fxmem: the program (raised ValueError: of its own|called sys\.exit\(3\)), before ", last(err))


@pytest.mark.truth
@pytest.mark.parametrize(("which", "ending"), [("fails", "raised ValueError: of"), ("leaves", "called sys.exit(3)")])
def test_an_error_later_leaves_what_was_until_then(capsys: pytest.CaptureFixture[str], which: str, ending: str) -> None:
    said, report = run(capsys, f"--until end grow {which} 3", 1)
    assert said.startswith(f"not known: the program {ending}")
    assert "; fits until then: " in said
    assert [each.is_whole for each in rounds_of(report)] == [True, True, False]


def last(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.truth
def test_an_operator_limit_is_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--max-operators", "12", PROGRAM, "outputs"]) == 1
    said = last(capsys.readouterr().err)
    assert re.search(r"stopped within step 1 of 3 at \S+:\d+, after 12 operators, most of them in ", said)
    assert ": --max-operators N of fxmem run allows more, and fxmem.mark_step() ends" in said
    assert "Until then it requested " in said


def test_pythons_own_option_is_taken() -> None:
    options = Parser().add_arguments(verb.ARGUMENTS).parse_args(["-u", "train.py", "-u"])
    assert (options.program, options.arguments) == ("train.py", ["-u"])


_ENDINGS = """
import sys
import torch

what, steps = sys.argv[1], int(sys.argv[2])
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    for _ in range(steps):
        net(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(100 if what == "generates" else 0):
            net(torch.zeros(1, 64, device="cuda"))
except:
    print("training failed")
    if what == "leaves":
        sys.exit(1)
    if what == "raises":
        raise ValueError("failed")
"""


@pytest.mark.parametrize(
    ("words", "ending", "code"),
    [
        ("plain 5", "stopped after step 3", 0),
        ("plain 1", "ran to its end after step 1 of 3", 0),
        ("plain 3", "stopped after step 3", 0),
        ("leaves 5", "stopped after step 3", 0),
        ("raises 5", "stopped after step 3", 0),
        (
            "generates 5",
            "stopped within step 2 of 3 at {}, after 60 operators: --max-operators N of fxmem run allows more",
            1,
        ),
    ],
)
def test_the_report_says_why_a_run_ended(
    words: str, ending: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ENDINGS)
    assert main(["run", "--max-operators", "60", "--json", "-", str(script), *words.split()]) == code
    program = Report.model_validate_json(capsys.readouterr().out).step.program
    assert program is not None
    assert (program.ending, program.failed, program.is_cut) == (ending.format(f"{script}:14"), False, code == 1)


_EVALUATES_FIRST = """
import torch

net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with torch.no_grad():
    for _ in range(100):
        net(torch.zeros(1, 64, device="cuda"))
net(torch.randn(8, 64, device="cuda")).sum().backward()
optimizer.step()
"""


def test_a_run_that_is_cut_says_which_calls_took_its_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_EVALUATES_FIRST)
    assert main(["run", "--max-operators", "60", str(script)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"after 60 operators, most of them in 20 calls of net at {script}:8 without gradients: --max-" in said


def test_a_compiler_that_is_left_out_is_said_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(_EVALUATES_FIRST.replace("with torch.no_grad", "net = torch.compile(net)\nwith torch.no_grad"))
    assert main(["run", str(script)]) == 0
    compiled = capsys.readouterr().out
    assert "\nCompiler    left out (the program's, or a library's): --compile as-is analyses" in compiled
    script.write_text(_EVALUATES_FIRST)
    assert main(["run", str(script)]) == 0
    assert "Compiler" not in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process has")
def test_a_host_that_is_too_small_is_the_first_answer(capsys: pytest.CaptureFixture[str]) -> None:
    said, report = run(capsys, "--host 10MiB --steps 2 grow steady", 4)
    assert re.match(r"does NOT fit the host: [\d.]+ [MG]iB of 10\.0 MiB at .*; fits: ", said)
    program = report.step.program
    assert program is not None
    assert program.host is not None
    assert program.host.limit_bytes == 10 << 20
    said, _ = run(capsys, "--host 1000GiB --steps 2 grow steady", 0)
    assert re.match(r"fits the host: [\d.]+ [MG]iB of 0\.98 TiB, .* %; fits: ", said)
    assert main(["run", "--host", "60%", PROGRAM]) == 2
    assert "--host" in capsys.readouterr().err
