"""Predicted beside measured peaks in the loops of the Trainer and of Lightning, on a pretended card."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fxmem
from fxmem.errors import ExceededError, UsageError
from fxmem.records.findings import Finding
from fxmem.testing import guard, lightning_callback, trainer_callback

BATCHES = [{"x": row} for row in torch.zeros(16, 8)]


class Net(nn.Module):
    """A network that both loops train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).square().mean()}

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train_with_transformers(folder: Path, callbacks: list[Any]) -> None:
    settings = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )
    transformers.Trainer(Net(), settings, train_dataset=BATCHES, callbacks=callbacks).train()


@pytest.fixture(scope="module", autouse=True)
def _lightning() -> None:
    """Imported before anything is recorded, and by the processes alone that run these tests: it takes seconds."""
    import lightning  # noqa: F401


def train_with_lightning(folder: Path, callbacks: list[Any], net: type[Net] = Net) -> None:
    import lightning

    class LightningNet(net, lightning.LightningModule):  # type: ignore[misc, name-defined, valid-type]
        """The network as Lightning wants it."""

    lightning.Trainer(
        max_epochs=1,
        accelerator="auto",
        devices=1,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=folder,
        callbacks=callbacks,
    ).fit(LightningNet(), torch.utils.data.DataLoader(BATCHES, 2))


LOOPS = pytest.mark.parametrize(
    ("train", "make"),
    [(train_with_transformers, trainer_callback), (train_with_lightning, lightning_callback)],
    ids=["Trainer", "Lightning"],
)
Train = Callable[[Path, list[Any]], None]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 asks torch as older releases had it
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


@LOOPS
def test_first_steps_are_printed_beside_their_prediction(
    train: Train, make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fxmem.record("rtx4090", steps=3) as predicted:
        train(tmp_path, [])
    predicted.to_json(tmp_path / "run.json")
    capsys.readouterr()
    with fxmem.record("rtx4090", steps=4):
        train(tmp_path, [make(tmp_path / "run.json", steps=2)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fxmem: ")]
    for number, (line, each) in enumerate(zip(lines, predicted.rounds, strict=False), 1):
        sizes = re.findall(r"(\w+) ([\d.]+) MiB, predicted \2 MiB \(\+0\.00%\)", line)
        assert line.startswith(f"fxmem: step {number}: ")
        assert each.allocated_bytes is not None
        assert [name for name, _ in sizes] == ["allocated", "reserved"]
        assert float(sizes[0][1]) == pytest.approx(each.allocated_bytes / 2**20, abs=0.05)
    assert len(lines) == 2


@LOOPS
def test_another_step_is_seen_to_take_another_peak(
    train: Train, make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An analysed step is a later one: the first, which makes the optimizer's state, is not compared."""
    analysis = fxmem.analyze(nn.Linear(2048, 2048), torch.zeros(2, 2048), target="rtx4090")
    with fxmem.record("rtx4090", steps=3):
        train(tmp_path, [make(analysis)])
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fxmem: ")]
    assert first == (
        "fxmem: step 1: not predicted; the report is of a later one, which finds the optimizer's state there"
    )
    error = re.search(r"allocated .* \(\+([\d.]+)%\); reserved", second)
    assert error is not None
    assert float(error[1]) > 100


def test_what_is_found_is_said_before_training_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = fxmem.analyze(nn.Linear(8, 8), torch.zeros(2, 8), target="rtx4090").report()
    found = Finding(cause="own", text="all of it is kept", place="train.py:3", nbytes=2048, change="del of it")
    path = tmp_path / "run.json"
    path.write_text(report.model_copy(update={"findings": (found,)}).model_dump_json(), encoding="utf-8")
    with fxmem.record("rtx4090", steps=1):
        train_with_lightning(tmp_path, [lightning_callback(path)])
    first = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fxmem: "))
    told = "train.py:3: all of it is kept, 2.00 KiB at the peak. To do: del of it (not tried)"
    assert first == f"fxmem: found: {told}"


class Wide(Net):
    """At its peak eight results of 16,384 x 256 float32 numbers a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(40)))


@LOOPS
def test_a_run_that_cannot_fit_is_refused_before_its_first_step(
    train: Train,
    make: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a pretended card of which 64 MiB are left; there is room for the same run on a whole one."""
    analysis = fxmem.analyze(Wide(), {"x": torch.zeros(65536, 8)}, target="rtx4090")
    path = tmp_path / "run.json"
    analysis.to_json(path)
    monkeypatch.setattr("fxmem.testing.callbacks.is_recording", lambda: False)  # the card stands for a real one
    with fxmem.record("rtx4090", steps=2):
        train(tmp_path, [make(path, refuse=True)])
    assert "fxmem: step 1: " in capsys.readouterr().out
    ran: list[Any] = []
    monkeypatch.setattr(Wide, "forward", lambda *_, **__: ran.append(0))
    with fxmem.record("rtx4090", steps=1):
        taken = torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device="cuda")
        held = torch.cuda.memory_reserved()
        with pytest.raises(ExceededError) as refused:
            train(tmp_path, [make(path, refuse=True)])
        assert torch.cuda.memory_reserved() - held < 4 << 20  # the weights
        del taken
    assert not ran
    assert re.match(r"expected a step that runs in the 6[34]\.\d MiB that NVIDIA GeForce RTX 4090 ", str(refused.value))


def test_a_guard_says_what_would_make_it_fit() -> None:
    analysis = fxmem.analyze(Wide(), {"x": torch.zeros(65536, 8)}, target="rtx4090")
    guard(analysis)
    report = analysis.report()
    small = report.target.model_copy(update={"memory_bytes": 3 * report.peak.counted_bytes // 4})
    report = report.model_copy(update={"target": small})
    with pytest.raises(ExceededError, match=r"does not: .* What would, by estimate: activation checkpoints down to"):
        guard(report)
    saved = {"nbytes": report.peak.counted_bytes, "saved_bytes": report.peak.counted_bytes}
    found = Finding(cause="own", text="it is kept", place="train.py:3", change="del of it", **saved)
    with pytest.raises(ExceededError, match=r"What would: del of it, train\.py:3$"):
        guard(report.model_copy(update={"findings": (found,)}))
    nothing = small.model_copy(update={"memory_bytes": 1 << 20})
    with pytest.raises(ExceededError, match=r"fxmem advise says what each change would save$"):
        guard(report.model_copy(update={"target": nothing}))


def test_a_recording_that_ran_out_is_known_up_to_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError), fxmem.record("rtx4090", steps=1) as ended:
        torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(ExceededError, match=r"expected a step that runs in the 23\.1 GiB that rtx4090 has for it"):
        guard(ended)
    report = ended.report()
    monkeypatch.setattr("fxmem.testing.callbacks.is_recording", lambda: False)  # the card stands for a real one
    with fxmem.record("h100", steps=1):
        guard(report)


def test_a_report_of_other_arguments_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError), fxmem.record("rtx4090", steps=1, name="train.py --batch 16") as of:
        torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    with fxmem.record("rtx4090"):
        guard(of.report())  # it may be the one that is to be renewed
    monkeypatch.setattr(sys, "argv", ["code/train.py", "--batch", "4"])
    with pytest.raises(ExceededError, match=r"report is of train\.py --batch 16, this run of train\.py --batch 4: "):
        guard(of.report())
    with fxmem.record("rtx4090", steps=1, name="train.py --batch 4") as small:
        torch.empty(1 << 20, device="cuda")
    guard(small.report())
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert not capsys.readouterr().out
    guard(small.report())
    assert "fxmem: The report is of train.py --batch 4, this run of train.py: renew it" in capsys.readouterr().out


@pytest.mark.truth
@LOOPS
def test_without_a_card_nothing_is_measured(
    train: Train, make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = fxmem.analyze(nn.Linear(8, 8), torch.zeros(2, 8), target="rtx4090")
    train(tmp_path, [make(analysis)])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fxmem: ")]
    assert said == ["fxmem: there is no card here, so no step is measured"]


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({"target": "cpu"}, 3, "a prediction for a card"),
        ({"target": "rtx4090", "mode": "infer"}, 3, "a training step"),
        ({"target": "rtx4090"}, 0, "steps of at least 1, got 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], steps: int, message: str) -> None:
    analysis = fxmem.analyze(nn.Linear(8, 8), torch.zeros(2, 8), **options)
    for make in (trainer_callback, lightning_callback):
        with pytest.raises(UsageError, match=message):
            make(analysis, steps=steps)


def test_checks_are_there_without_an_import_of_their_own() -> None:
    code = "import fxmem; print(fxmem.testing.guard.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "guard\n"


def test_a_recording_needs_no_report_that_it_is_to_make(tmp_path: Path) -> None:
    absent = str(tmp_path / "run.json")
    with fxmem.record("h100"):
        fxmem.testing.guard(absent)
        fxmem.testing.trainer_callback(absent, refuse=True)
    with pytest.raises(UsageError, match=r"No such file"):
        fxmem.testing.trainer_callback(absent)
