"""Processes that a program starts: that of this rank's card runs in its place, and all that are no card's are real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fxmem.errors import AnalysisError
from fxmem.hardware import catalogue
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch

HEAD = """
import functools
import multiprocessing.connection
import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

HERE, DEVICE = os.getpid(), torch.device("cuda")


class Setup:
    def make(self):
        torch.cuda.set_device(0)
        return torch.nn.Linear(1024, 1024)


def train(rank, *_, done=None):
    assert os.getpid() == HERE
    model = Setup().make().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.randn(64 * (rank + 1), 1024, device=DEVICE)).sum().backward()
    optimizer.step()
    Path(f"trained{rank}").touch()
    sys.exit(rank + 3)


def shard(number):
    Path(f"shard{number}").write_text(str(os.getpid()))


def answer(number, questions, answers):
    answers.put((questions.get(), os.getpid(), torch.cuda.is_available()))


class Work:
    def train(self, rank):
        train(rank)
"""

BY_HAND = """
    processes = [mp.Process(target=train, args=(rank, "all")) for rank in range(2)]
    for each in processes:
        each.start()
    multiprocessing.connection.wait([each.sentinel for each in processes])
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == CODES
    assert not {*mp.active_children()} & {*processes}
    assert not any(each.is_alive() for each in processes)
"""
BY_NAME = """
    process = mp.get_context("spawn").Process(target=functools.partial(Work().train), kwargs={"rank": CODES[1] // 4})
    process.start()
    process.join()
    process.close()
"""
OTHERS = """
    real = mp.get_context("fork")
    shards = [real.Process(target=shard, args=(number,)) for number in range(2)]
    questions, answers = real.Queue(), real.Queue()
    helper = real.Process(target=answer, args=(0, questions, answers))
    for each in (*shards, helper):
        each.start()
    questions.put("?")
    assert answers.get()[1] == helper.pid != HERE
    for each in (*shards, helper):
        each.join()
    assert [int(Path(f"shard{number}").read_text()) for number in range(2)] == [each.pid for each in shards]
    try:
        train(CODES[1] - 3 if CODES[1] else 0)
    except SystemExit:
        pass
"""


def run(folder: Path, body: str, rank: int | None) -> RecordedProgram:
    script, codes = folder / "train.py", [0, 4] if rank else [3, 0]
    script.write_text(f'{HEAD}\nCODES = {codes}\nif __name__ == "__main__":{body}')
    started = Launch(str(script), ranks=None if rank is None else 2, rank=rank or 0)
    return launch(started, catalogue.target("h100"), RunSettings(until="end")).recorded


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("body", [BY_HAND, BY_NAME, OTHERS])
def test_the_process_of_this_card_runs_here_and_others_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, rank: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = run(tmp_path, body, rank)
    assert recorded.ending == "ran to its end"
    assert [each.name for each in tmp_path.glob("trained*")] == [f"trained{rank or 0}"]
    rows = 64 * ((rank or 0) + 1)
    assert any((rows, 1024) == node.outputs[0].shape for node in recorded.profile.nodes if node.outputs)


@pytest.mark.parametrize("code", [0, 3])
def test_spawned_processes_that_are_not_joined_are_over(tmp_path: Path, code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import torch, sys
import torch.multiprocessing as mp

def train(rank, code):
    torch.nn.Linear(8, 8).cuda()(torch.ones(8, 8, device="cuda")).sum().backward()
    sys.exit(code)

context = mp.spawn(train, ({code},), nprocs=2, join=False)
while not context.join():
    pass
assert not context.processes and not context.pids()
raise ValueError("joined")
"""
    )
    launched = launch(Launch(str(script)), catalogue.target("h100"), RunSettings(until="end")).recorded
    assert ("joined" in launched.ending) == (code == 0)


def test_a_program_whose_work_is_in_a_process_that_waits_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import multiprocessing

import torch

def work(number, questions):
    questions.get()
    torch.cuda.set_device(number)

if __name__ == "__main__":
    real = multiprocessing.get_context("fork")
    questions = real.Queue()
    process = real.Process(target=work, args=(0, questions))
    process.start()
    questions.put("?")
    process.join()
"""
    )
    launched = launch(Launch(str(script)), catalogue.target("h100"), RunSettings(until="end")).recorded
    with pytest.raises(
        AnalysisError, match=r"Of processes that it starts \(work\), none is followed: call the function"
    ):
        launched.report()


@pytest.mark.truth
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp_spawn", 1)])
def test_lightning_runs_to_its_end_as_each_rank(tmp_path: Path, strategy: str, rank: int) -> None:
    """Who spawns waits for what rank 0 sends, and at the end the replica is asked what it was given."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import lightning
import torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_steps=2, accelerator="gpu", devices=2, strategy={strategy!r}, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(64, 256), batch_size=16))
    assert trainer.global_step == 2
"""
    )
    options = ["--ranks", "2", "--rank", str(rank), "--target", "h100", "--until", "end"]
    command = [sys.executable, "-m", "fxmem", "run", *options, "train.py"]  # where Lightning was not imported before
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "ran to its end" in ended.stdout
    assert "Step 2 " in ended.stdout
