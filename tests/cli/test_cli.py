"""The command line as its user meets it: exit codes, what goes where, and that nothing is left half-done.

Most of it runs `main` in this process; what concerns the process itself (imports, pipes, closed streams) runs afresh.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxmem.simulation.step.analysis
from fxmem.__main__ import main
from fxmem.cli import progress
from fxmem.cli.verbs import VERBS
from fxmem.records.profile import Report
from fxmem.records.schemas import RECORDS
from fxmem.records.validation import Verdict
from fxmem.simulation.kernels.kernel_settings import KernelSettings
from tests.memory.test_report_reader import small_report

Capture = pytest.CaptureFixture[str]

OWN = '''
"""Models and what else a command line can name."""
import signal
import sys

import torch


def build(width=3):
    print("building")
    return torch.nn.Linear(width, 4)


def make_batch():
    return torch.zeros(2, 3)


def mean(out):
    return out.mean()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


class Talks(torch.nn.Linear):
    def forward(self, x):
        print("running")
        return super().forward(x)


class Fails(torch.nn.Linear):
    def forward(self, x):
        raise ValueError("of two lines,\\n\\x1b[31mnot one")


class Reads(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


class Leaves(torch.nn.Linear):
    def forward(self, x):
        sys.exit(0)


class Interrupted(torch.nn.Linear):
    def forward(self, x):
        signal.raise_signal(signal.SIGINT)


LIMIT = 3
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, but for `own.py`; 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FXMEM_CACHE_DIR", "")
    monkeypatch.delenv("NO_COLOR", raising=False)
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return tmp_path


@pytest.fixture
def report(folder: Path) -> Path:
    """A report in a file of that folder."""
    (folder / "report.json").write_text(small_report().model_dump_json(), encoding="utf-8")
    return folder / "report.json"


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def succeeds(capsys: Capture, *arguments: str) -> str:
    """What a command that succeeds writes to stdout."""
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


def fails(capsys: Capture, code: int, *arguments: str) -> str:
    """The one line a command that fails writes to stderr, without its `fxmem: `; it must leave the folder as it was."""
    before = {path: path.read_bytes() for path in Path.cwd().iterdir() if path.is_file()}
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, ""), err
    assert {path: path.read_bytes() for path in Path.cwd().iterdir() if path.is_file()} == before
    assert re.fullmatch(r"fxmem: [^\n]+\n", err), err
    assert err.rstrip("\n").isprintable()
    return err.removeprefix("fxmem: ").rstrip("\n")


def without_next(text: str) -> str:
    """The text without the command that comes next, and what is left of it on the lines after."""
    return re.sub(r"^Next .*\n(?: .*\n)*", "", text, flags=re.MULTILINE)


def analyze(*arguments: str, model: str = "own.py:build") -> tuple[str, ...]:
    """Arguments that analyse the small model of `own.py`, for the CPU and without progress."""
    return ("analyze", model, "--input", "2x3", "--target", "cpu", "--quiet", *arguments)


def afresh(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own."""
    path = str(Path(fxmem.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": path, **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "fxmem", *arguments], env=environment, check=False, **{"capture_output": True, **options}
    )


# --- mistyped ---------------------------------------------------------------------------------------------------------

_VERBS = ", ".join(VERBS)
_SCHEMAS = ", ".join(RECORDS)
TYPOS = {
    "analyse x": f"expected COMMAND to be one of {_VERBS}; got 'analyse', did you mean analyze?; see fxmem --help",
    "frobnicate": f"expected COMMAND to be one of {_VERBS}; got 'frobnicate'; see fxmem --help",
    "--verbose doctor": "no option --verbose; see fxmem doctor --help",
    "analyze": "expected a MODEL, or --run with a program: one of the two",
    "analyze m --prescision bf16": "no option --prescision, did you mean --precision?; see fxmem analyze --help",
    "analyze m --prec bf16": "no option --prec, did you mean --precision?; see fxmem analyze --help",
    "analyze m --gpu rtx4090": "no option --gpu, did you mean --target?; see fxmem analyze --help",
    "analyze m --batch-size 4": "no option --batch-size, did you mean --batch?; see fxmem analyze --help",
    "train.py --lr 3": f"expected COMMAND to be one of {_VERBS}; got 'train.py', did you mean fxmem run train.py?; see",
    "run --target l4 --batch 16 train.py": (
        "no option --batch; the program's own come after it: fxmem run train.py --batch; see fxmem run --help"
    ),
    "run --targt l4 train.py": "no option --targt, did you mean --target?; the program's own come after it: fxmem run ",
    "kv-cache m --share 0.85": "no option --share, did you mean --utilization?; see fxmem kv-cache --help",
    "compare a.json b.json --fail-over -1%": (
        "expected --fail-over as 0, as a share of the peak before (2%), or as bytes (8589934592) or with a unit (8GiB, "
        "500MB), got '-1%'"
    ),
    "plan m --budget 16G": (
        "expected a budget as bytes (8589934592), with a unit (8GiB, 500MB) or as a share of the peak (60%, 0.6), got "
        "'16G': 16GiB?"
    ),
    "analyze m --targets=h100": "no option --targets, did you mean --target?; see fxmem analyze --help",
    "analyze m --precision bf61": (
        "expected --precision to be one of bf16, fp16; got 'bf61', did you mean bf16?; see fxmem analyze --help"
    ),
    "analyze m --weights int4": (
        "expected --weights to be one of bf16, fp16; got 'int4', did you mean --quantize int4?; see fxmem analyze"
    ),
    "analyze m n": "unexpected argument 'n'; see fxmem analyze --help",
    "analyze m --input": "argument --input: expected one argument; see fxmem analyze --help",
    "analyze m --depth two": "expected --depth to be a whole number; got 'two'; see fxmem analyze --help",
    "analyze m --depth -1": "expected --depth of at least 0, got -1",
    "analyze m --width 20": "expected --width of at least 60 columns, got 20",
    "analyze m --target h10": "unknown target 'h10': did you mean h100 or a10?",
    "analyze m --target cuda": "unknown target 'cuda': say which card: t4, ",
    "analyze m --target mine.json": (
        "expected a target file with the fields name, device, full_name, memory_bytes, "
        "capability, torch, ranks, in_use_bytes, system, got 'mine.json': No such"
    ),
    "validate m --tolerance two": "expected --tolerance to be a number; got 'two'; see fxmem validate --help",
    "validate m --tolerance 1": "expected --tolerance as a fraction between 0 and 1, got 1.0",
    "validate m --tolerance nan": "expected --tolerance as a fraction between 0 and 1, got nan",
    "validate m --device tpu": (
        "expected --device to be one of cpu, cuda; got 'tpu', did you mean cpu?; see fxmem validate --help"
    ),
    "validate m --snapshot x.pickle": "expected --snapshot together with --target",
    "validate m --target t4": "expected --snapshot together with --target",
    "validate m --snapshot x.pickle --target t4 --device cuda": "expected --snapshot or --device, not both",
    "show": "expected a MODEL, or --run with a program: one of the two",
    "show nothing.json": (
        "expected a report written by `fxmem analyze --json`, got 'nothing.json': No such file or directory"
    ),
    "show own.py": (
        "expected a model as torchvision:NAME, timm:NAME, hf:ORG/NAME, hf:CLASS, hf:path/to/config.json, "
        "pkg.mod:factory or file.py:factory; got 'own.py'; name the function or class in it that makes the model: "
        "own.py:NAME; as a script: fxmem run own.py"
    ),
    "schema reprot": f"schema: expected one of {_SCHEMAS}; got 'reprot'",
    "doctor --target": "no option --target, did you mean --targets?; see fxmem doctor --help",
    "analyze m --json nowhere/report.json": (
        "expected --json to name a file in a folder that exists, got 'nowhere/report.json'"
    ),
    "analyze m --json .": "expected --json to name a file, or - for stdout, got '.'",
    # A file moved into the place of a device would replace it, for everybody.
    f"analyze m --json {os.devnull}": f"expected --json to name a file, or - for stdout, got '{os.devnull}'",
}


@pytest.mark.parametrize("line", TYPOS)
def test_what_is_mistyped_is_said_in_one_line(capsys: Capture, line: str) -> None:
    message = fails(capsys, 2, *line.split())
    assert message.startswith(TYPOS[line])
    if "--help" in TYPOS[line]:
        assert message == TYPOS[line]


MISTAKES = {
    "analyze own.py:biuld": "own.py has no 'biuld'; closest: build",
    "analyze nowhere.py:build": "no file nowhere.py",
    "analyze ./own.py": (
        "expected a model as torchvision:NAME, timm:NAME, hf:ORG/NAME, hf:CLASS, "
        "hf:path/to/config.json, pkg.mod:factory or file.py:factory; got './own.py'"
    ),
    "analyze own.py:LIMIT": "expected an nn.Module class, a function that returns a module, or a module",
    "analyze own.py:build": "own.py:build: its inputs cannot be known from the model",
    "analyze own.py:build --input 2by3": "expected an input like 32x3x224x224",
    "analyze own.py:build --input 2x3:flot32": "expected a dtype like float32",
    "analyze own.py:build --input own.py:batch": "own.py has no 'batch'; closest: make_batch",
    "analyze own.py:build --input 2x3 --batch 4": (
        "--batch is for the default inputs; with --input, write the batch size there"
    ),
    "analyze torchvision:alexnet --batch 0": "expected --batch of at least 1, got 0",
    "analyze own.py:build --input 2x3 --set width": "expected KEY=VALUE",
    "analyze own.py:build --input 2x3 --set widht=3": "own.py:build has no setting 'widht'; closest: width",
    "analyze own.py:build --input 2x3 --optimizer admaw": (
        "expected an optimizer of torch.optim, got 'admaw'; closest: adamw"
    ),
    "analyze own.py:build --input 2x3 --optimizer own.py:adam": "own.py has no 'adam'",
    "analyze own.py:build --input 2x3 --loss mean": "expected --loss as pkg.mod:name or file.py:name, got 'mean'",
    "analyze own.py:build --input 2x3 --loss own.py:LIMIT": (
        "expected --loss to name a function or a class, but own.py:LIMIT is of type int"
    ),
    "analyze torchvision:resnt18": "torchvision has no model 'resnt18'; closest: resnet18",
    "analyze resnet18": "did you mean torchvision:resnet18?",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_does_not_exist_is_said_in_one_line(capsys: Capture, line: str) -> None:
    arguments = line.split()
    # A model that is found is built, and what it prints then goes to stderr: not what is looked at here.
    (Path.cwd() / "own.py").write_text(OWN.replace('print("building")', "pass"), encoding="utf-8")
    assert MISTAKES[line] in fails(capsys, 2, *arguments, "--target", "cpu", "--quiet")


# --- exit codes 1, 3 and 4 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("Fails", r"the model raised ValueError: of two lines,.* at .*own\.py:\d+ in forward: `raise ValueError"),
        (
            "Reads",
            (
                r"control flow and shapes do not depend on the data; Reads asks for a tensor's value .*own\.py:\d+ in "
                r"forward: `return super"
            ),
        ),
        ("Leaves", r"the model's own code called sys\.exit\(0\) while it ran"),
    ],
)
def test_a_model_that_cannot_be_followed(capsys: Capture, model: str, complaint: str) -> None:
    (Path.cwd() / "report.json").write_text("here before", encoding="utf-8")
    settings = ("--set", "in_features=3", "--set", "out_features=4")
    assert re.search(complaint, fails(capsys, 1, *analyze(*settings, "--json", "report.json", model=f"own.py:{model}")))


def test_what_the_model_needs_may_be_missing(capsys: Capture) -> None:
    (Path.cwd() / "own.py").write_text("import nowhere_to_be_found", encoding="utf-8")
    assert "not installed at" in fails(capsys, 3, *analyze())


@pytest.mark.parametrize("command", ["analyze", "validate"])
def test_torch_may_be_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert (
        fails(capsys, 3, command, "own.py:build")
        == "expected torch, which is not installed: pip install torch (it needs no GPU)"
    )


@pytest.mark.parametrize(("within", "code"), [(True, 0), (False, 4)])
def test_the_verdict_decides_the_exit_code(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, within: bool, code: int
) -> None:
    verdict = SimpleNamespace(within_tolerance=within, model_dump_json=lambda: "{}")
    monkeypatch.setattr("fxmem.validation.validate.validate_step", lambda *_, **__: verdict)
    assert run(capsys, "validate", "own.py:build", "--input", "2x3", "--quiet", "--json", "-")[:2] == (code, "{}\n")


def test_a_step_is_run_and_held_against_its_prediction(capsys: Capture) -> None:
    out = succeeds(
        capsys, "validate", "own.py:build", "--input", "2x3", "--tolerance", "0.5", "--quiet", "--json", "verdict.json"
    )
    assert "own.py:build" in out
    verdict = Verdict.model_validate_json(Path("verdict.json").read_bytes())
    assert verdict.within_tolerance
    # 3 x 4 + 4 parameters of 4 bytes, and as many again twice for AdamW's averages with two 4-byte step counters.
    assert [verdict.predicted.by_kind[kind] for kind in ("parameter", "optimizer_state")] == [64, 136]


def test_what_is_frozen_is_frozen_in_the_real_run_too(capsys: Capture) -> None:
    frozen = ["validate", "own.py:build", "--input", "2x3", "--freeze", "weight", "--quiet", "--json", "-"]
    resident = json.loads(run(capsys, *frozen)[1])["measurement"]["resident_by_kind"]
    # AdamW's two averages of the bias alone, 4 numbers of 4 bytes, and its step counter.
    assert resident["optimizer_state"] == 36


def test_an_interrupt_is_no_traceback(capsys: Capture) -> None:
    settings = ("--set", "in_features=3", "--set", "out_features=4", "--json", "report.json")
    assert fails(capsys, 128 + signal.SIGINT, *analyze(*settings, model="own.py:Interrupted")) == "interrupted"


def test_an_error_of_our_own_is_one_line_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("a bug")

    monkeypatch.setattr("fxmem.cli.environment.report", fail)
    assert (
        fails(capsys, 1, "doctor")
        == "fxmem itself failed, please report it: KeyError: 'a bug'; run it again with --debug to see where"
    )


@pytest.mark.parametrize(
    ("arguments", "code"), [(("show", "nothing.json"), 2), (analyze(model="nowhere.mod:build"), 2)]
)
def test_debug_adds_the_traceback_and_changes_nothing_else(
    capsys: Capture, arguments: tuple[str, ...], code: int
) -> None:
    line = fails(capsys, code, *arguments)
    found, out, err = run(capsys, *arguments, "--debug")
    assert (found, out) == (code, ""), err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith(f"\nfxmem: {line}\n")


# --- the step's options -----------------------------------------------------------------------------------------------


def test_the_options_of_a_step_reach_its_report(capsys: Capture) -> None:
    options = (
        "--accumulate",
        "3",
        "--prefetch",
        "2",
        "--weights",
        "bf16",
        "--loss",
        "own.py:mean",
        "--optimizer",
        "sgd-momentum",
        "--freeze",
        "bias",
    )
    report = Report.model_validate_json(succeeds(capsys, *analyze(*options, "--json", "-")))
    assert (report.step.accumulate, report.step.prefetch, report.step.loss, report.step.optimizer) == (
        3,
        2,
        "mean",
        "SGD",
    )
    dtypes = {storage.name: storage.dtype for storage in report.storages if storage.kind in ("parameter", "gradient")}
    assert dtypes == {"weight": "bfloat16", "bias": "bfloat16", "weight.grad": "bfloat16"}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ((), KernelSettings()),
        (("--sdpa", "math", "--allow-tf32"), KernelSettings(sdpa="math", allow_tf32=True)),
        (
            ("--no-allow-tf32", "--cudnn-benchmark", "--deterministic"),
            KernelSettings(allow_tf32=False, cudnn_benchmark=True, deterministic=True),
        ),
    ],
)
def test_the_options_of_kernels_reach_the_analysis(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], settings: KernelSettings
) -> None:
    asked: list[KernelSettings] = []
    real = fxmem.simulation.step.analysis.analyze_step
    monkeypatch.setattr(
        "fxmem.simulation.step.analysis.analyze_step",
        lambda model, request, progress: asked.append(request.settings) or real(model, request, progress),
    )
    succeeds(capsys, *analyze(*options))
    assert asked == [settings]


def test_channels_last_is_how_weights_and_inputs_lie(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = fxmem.simulation.step.analysis.analyze_step
    monkeypatch.setattr(
        "fxmem.simulation.step.analysis.analyze_step",
        lambda model, request, progress: (
            asked.append((model.weight, request.args[0])) or real(model, request, progress)
        ),
    )
    settings = ("--set", "in_channels=3", "--set", "out_channels=4", "--set", "kernel_size=3")
    for options in ((), ("--channels-last",)):
        succeeds(
            capsys,
            "analyze",
            "torch.nn:Conv2d",
            "--input",
            "2x3x8x8",
            "--target",
            "cpu",
            "--quiet",
            *settings,
            *options,
        )
    assert [[tensor.stride()[1] for tensor in each] for each in asked] == [[9, 64], [1, 1]]


# --- what goes where --------------------------------------------------------------------------------------------------


def test_the_table_goes_to_stdout_and_the_report_to_its_file(capsys: Capture) -> None:
    table = succeeds(capsys, *analyze("--json", "report.json"))
    assert table.startswith("Memory      not compared, because the memory of target cpu is not known\nPeak ")
    assert max(map(len, table.splitlines())) <= 80
    text = Path("report.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert Report.model_validate_json(text).model == "own.py:build"
    assert {*os.listdir()} - {"__pycache__"} == {"own.py", "report.json"}


def test_the_report_alone_goes_to_stdout_if_asked_for(capsys: Capture) -> None:
    (line,) = succeeds(capsys, *analyze("--json", "-")).splitlines()
    report = Report.model_validate_json(line)
    # Linear(3, 4) and its input of 2 x 3, 4 bytes each.
    assert [report.peak.by_kind[kind] for kind in ("parameter", "input")] == [64, 24]


def test_what_was_written_is_shown_as_it_was(capsys: Capture) -> None:
    for options in ((), ("--width", "140"), ("--depth", "0"), ("--full",)):
        table = succeeds(capsys, *analyze("--json", "report.json", *options))
        assert without_next(succeeds(capsys, "show", "report.json", *options)) == without_next(table)
    document = succeeds(capsys, *analyze("--json", "-"))
    assert succeeds(capsys, "show", "report.json", "--json", "-") == document


def test_a_report_comes_through_a_pipe(capsys: Capture, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = succeeds(capsys, "show", "report.json")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(report.read_bytes())))
    assert succeeds(capsys, "show", "-") == without_next(table)  # what is read once cannot be given to another command


def test_what_the_model_prints_does_not_spoil_the_result(capsys: Capture) -> None:
    settings = ("--set", "in_features=3", "--set", "out_features=4")
    code, out, err = run(capsys, *analyze("--json", "-", *settings, model="own.py:Talks"))
    assert code == 0
    assert json.loads(out)["model"] == "own.py:Talks"
    assert "running\n" in err


def test_everything_of_the_users_own(capsys: Capture) -> None:
    arguments = (
        "--input",
        "own.py:make_batch",
        "--loss",
        "own.py:mean",
        "--optimizer",
        "own.py:sgd",
        "--target",
        "cpu",
        "--quiet",
        "--json",
        "-",
    )
    report = Report.model_validate_json(succeeds(capsys, "analyze", "own.py:build", *arguments))
    assert (report.step.loss, report.step.optimizer) == ("mean", "SGD")
    assert [(tensor.name, tensor.shape) for tensor in report.inputs] == [("input", (2, 3))]
    none = Report.model_validate_json(succeeds(capsys, *analyze("--optimizer", "None", "--json", "-")))
    assert none.step.optimizer is None


class Immediately:
    """A timer that does not wait."""

    def __init__(self, seconds: float, say: Any) -> None:
        self.start = say

    def cancel(self) -> None:
        """Too late."""


def test_progress_is_told_on_stderr_unless_quiet(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Timer", Immediately)
    quiet = analyze("--json", "-")
    _, out, err = run(capsys, *quiet)
    assert "fxmem:" not in err
    _, loud, told = run(capsys, *(word for word in quiet if word != "--quiet"))
    assert loud == out
    assert [line for line in told.splitlines() if line.startswith("fxmem: ")][:2] == [
        "fxmem: loading torch ...",
        "fxmem: building own.py:build ...",
    ]


def test_colour_is_for_terminals_and_who_wants_it(
    capsys: Capture, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def colored() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True)
            return "\x1b[" in succeeds(capsys, "show", "report.json")

    assert "\x1b[" not in succeeds(capsys, "show", "report.json")
    monkeypatch.setenv("TERM", "xterm")
    assert colored()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colored()


@pytest.mark.parametrize(("columns", "widest"), [("200", 200), ("80", 80), ("61", 61), ("20", 60)])
def test_the_table_is_as_wide_as_the_terminal(
    capsys: Capture, report: Path, monkeypatch: pytest.MonkeyPatch, columns: str, widest: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert max(map(len, succeeds(capsys, "show", "report.json").splitlines())) == widest


def test_names_that_stdout_cannot_spell(capsys: Capture, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write_text(
        small_report().model_copy(update={"model": "modèle-層-\U0001f600"}).model_dump_json(), encoding="utf-8"
    )

    def shown(*arguments: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
            assert main(["show", "report.json", *arguments]) == 0
            return sys.stdout.buffer.getvalue().decode("ascii")

    assert r"Model       mod\xe8le-\u5c64-\U0001f600" in shown("--full")
    assert json.loads(shown("--json", "-"))["model"] == "modèle-層-\U0001f600"


# --- schema, doctor, help ---------------------------------------------------------------------------------------------


@pytest.mark.truth
def test_schemas(capsys: Capture) -> None:
    assert succeeds(capsys, "schema").split() == list(RECORDS)
    for name in RECORDS:
        assert json.loads(succeeds(capsys, "schema", name))["$id"].startswith(f"urn:fxmem:schema:{name}:")


def test_doctor(capsys: Capture) -> None:
    assert succeeds(capsys, "doctor", "--targets").startswith("Target ")
    assert succeeds(capsys, "doctor").startswith(f"fxmem         {fxmem.__version__}\n")


@pytest.mark.parametrize(
    "command", [[], ["analyze"], ["show"], ["validate"], ["schema"], ["doctor"]], ids=lambda words: " ".join(words)
)
def test_help(capsys: Capture, command: list[str]) -> None:
    text = succeeds(capsys, *command, "--help")
    assert text.startswith(f"usage: {' '.join(['fxmem', *command])} ")
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_command_it_is_the_help(capsys: Capture) -> None:
    text = succeeds(capsys)
    assert text == succeeds(capsys, "--help")
    listed, _, examples = text.partition("examples:")
    assert [name for name in re.findall(r"(?:^  |, )([a-z-]+)", listed, re.MULTILINE) if name in VERBS] == [*VERBS]
    assert examples.count("\n  fxmem ") >= 3


def test_the_help_of_a_verb_has_groups(capsys: Capture) -> None:
    text = succeeds(capsys, "analyze", "--help")
    headings = [line for line in text.splitlines() if re.fullmatch(r"[a-z ,]+:", line)]
    assert headings[2:] == ["what is shown and written:", "the model or program, and the card:", "examples:"]


def test_what_every_step_has_is_named_by_each_verb_and_described_once(capsys: Capture) -> None:
    named, described = succeeds(capsys, "analyze", "--help"), succeeds(capsys, "help", "step")
    listed = named.partition("of every step, described by")[2].partition("examples:")[0]
    for name in ("--zero-grad", "--sdpa", "--compile", "--mesh", "--offload", "--accumulate"):
        assert re.findall(rf"{name}\b(?!-)", listed) == [name]
        assert f"\n  {name} " not in named
        assert described.count(f"\n  {name} ") == 1
    assert "\n  --target " in named
    assert succeeds(capsys, "help", "plan") == succeeds(capsys, "plan", "--help")
    assert succeeds(capsys, "help") == succeeds(capsys, "--help")


def test_the_help_fits_a_screen(capsys: Capture) -> None:
    lines = succeeds(capsys, "--help").splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80


def test_an_option_of_another_form_is_refused(capsys: Capture, report: Path) -> None:
    assert fails(capsys, 2, "show", str(report), "--tensors", "2") == "expected --tensors with --by line"
    assert fails(capsys, 2, "show", str(report), "--by", "lines", "--full") == "expected --full without --by"
    refused = fails(capsys, 2, "show", str(report), "--by", "line", "--depth", "2")
    assert refused == "expected --depth without --by or with --by layer"


def test_version(capsys: Capture) -> None:
    assert succeeds(capsys, "--version") == f"fxmem {fxmem.__version__}\n"


# --- the process itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["--help", "show report.json", "doctor --targets", "schema report", "analyze m --target nothing"]
)
def test_what_needs_no_torch_imports_none(report: Path, command: str) -> None:
    done = afresh(*command.split(), env={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.decode().splitlines()
        if line.startswith("import time:")
    }
    assert "fxmem" in imported
    assert imported.isdisjoint({"torch", "torchvision", "timm", "transformers"})
    if command == "--help":
        assert imported.isdisjoint({"pydantic", "rich"})


def test_whoever_reads_stdout_may_leave(report: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = afresh("show", "report.json", stdout=writing, stderr=subprocess.PIPE, capture_output=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_stdout_may_be_full(report: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = afresh("show", "report.json", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (
        1,
        b"fxmem: expected a stdout that can be written, got No space left on device\n",
    )


def test_stdout_may_be_closed(report: Path) -> None:
    path = {"PYTHONPATH": str(Path(fxmem.__file__).parent.parent)}
    command = ["sh", "-c", 'exec "$0" -m fxmem show report.json >&-', sys.executable]
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"fxmem: expected a stdout to write the result to, but it is closed\n")


@pytest.mark.truth
def test_a_program_runs_on_a_card_that_is_not_there_and_for_real(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(
        "import sys, torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "model = torch.nn.Linear(256, int(sys.argv[1])).to(device)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n"
        "    loss = model(torch.ones(64, 256).to(device)).square().mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    print('loss', loss.item() > 0)\n"
    )
    assert main(["run", "--steps", "2", "--json", "report.json", "small.py", "512"]) == 0
    out, err = capfd.readouterr()
    assert "Run         stopped after step 2" in out
    assert "loss" in err
    report = json.loads(Path("report.json").read_text())
    assert report["step"]["program"]["optimizers"] == ["SGD"]
    assert main(["show", "report.json"]) == 0
    assert main(["run", "--strict", "--steps", "2", "small.py", "512"]) == 1
    assert "decides by made-up numbers: gt 0 at small.py:10" in capfd.readouterr().err
    assert main(["run", "--target", "rtx3080", "small.py", "20000000"]) == 4
    out, err = capfd.readouterr()
    assert "torch.OutOfMemoryError" in err
    assert "does NOT fit" in out
    assert main(["validate", "--steps", "2", "--run", "small.py", "512"]) == 0
    out = capfd.readouterr().out
    assert "Verdict     within tolerance" in out
    assert "Judged      requested, workspaces aside (*): what kernels" in out
    for wrong in (["run", "no.py"], ["run", "--steps", "0", "small.py"], ["validate", "m:f", "--run", "small.py"]):
        assert main(wrong) == 2


class Terminal(io.StringIO):
    """A terminal that keeps what it is sent."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_line_on_the_terminal_says_how_far_a_program_is(stream, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 0.01)
    written, shown = stream(), threading.Event()
    monkeypatch.setattr(sys, "stderr", written)

    def describe():
        text = written.getvalue()
        if text.endswith("step 3"):
            shown.set()
        return "step 3"

    with progress.StatusLine(describe):
        print("epoch 1", file=sys.stderr)
        if written.isatty():
            assert shown.wait(60)
        print("epoch 2", file=sys.stderr)
    text = written.getvalue()
    assert sys.stderr is written
    assert re.sub(r"\r\x1b\[K(fxmem: step 3)?", "", text) == "epoch 1\nepoch 2\n"
    assert ("fxmem: step 3\r\x1b[K" in text) is written.isatty()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_work_that_takes_long_has_one_line_on_a_terminal(stream, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_PATIENCE", 0.02)
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    shown = "3 of 14, trying the third"

    def wait():
        end = time.monotonic() + 60
        while shown not in written.getvalue() and time.monotonic() < end:
            time.sleep(0.01)

    with progress.Progress(quiet=False) as tell:
        tell(shown)
        wait()
        print("of the model")
        tell.found("the third saves 3 GiB")
    text = written.getvalue()
    kept = re.sub(r"\r\x1b\[K(fxmem: \d+ s: [^\r\n]*)?", "", text)
    stages = "" if written.isatty() else f"fxmem: {shown} ...\n"
    assert kept == f"{stages}of the model\nfxmem: the third saves 3 GiB\n"
    assert (f"0 s: {shown}" in text) is written.isatty()


def test_quiet_work_says_nothing(monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    written = Terminal()
    monkeypatch.setattr(sys, "stderr", written)
    with progress.Progress(quiet=True) as tell:
        tell("building")
        tell.found("a result")
    assert written.getvalue() == ""
