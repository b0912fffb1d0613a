"""What public scripts do on their way to a card, each in its smallest form."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fxmem
from fxmem.__main__ import _unwind_on_sigterm
from fxmem.errors import AnalysisError
from fxmem.hardware import catalogue
from fxmem.simulation.program import Launch, launch


def test_types_of_tensors_name_the_card() -> None:
    host = torch.ones(4, dtype=torch.uint8)
    before = torch.cuda.FloatTensor
    with fxmem.record("h100"):
        made = [
            host.type(torch.cuda.FloatTensor),
            host.type("torch.cuda.FloatTensor"),
            torch.cuda.FloatTensor(4),
            torch.cuda.FloatTensor(np.zeros(4)),
            torch.cuda.FloatTensor([1, 2, 3, 4]),
        ]
        found = [(each.type(), tuple(each.shape)) for each in made]
        kept = made[0].type(torch.float16).type()
        assert isinstance(made[0], torch.cuda.FloatTensor)
        assert not isinstance(host, torch.cuda.FloatTensor)
        assert torch.cuda.LongTensor([3]).item() == 3
    assert found == [("torch.cuda.FloatTensor", (4,))] * 5
    assert kept == "torch.cuda.HalfTensor"
    assert torch.cuda.FloatTensor is before


def test_inference_mode_moves_tensors_to_the_card() -> None:
    model = nn.Linear(8, 4)
    with fxmem.record("h100") as run:
        model.cuda()
        with torch.inference_mode():
            x = torch.ones(2, 8, dtype=torch.uint8)
            moved = x.to(device=torch.device("cuda"), dtype=torch.float32, memory_format=torch.contiguous_format)
            assert model(moved).cpu().device.type == "cpu"
            assert x.to(torch.float32).sum().item() == 16
    assert run.peak.requested_bytes >= 4 * (8 * 4 + 4 + 16)


def _say_and_sleep(connection: Connection) -> None:
    connection.send("here")
    time.sleep(600)


def test_processes_that_a_program_forks_can_be_terminated() -> None:
    with _unwind_on_sigterm():
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_say_and_sleep, args=(theirs,))
        child.start()
        ours.recv()  # a signal before it runs is lost
        child.terminate()
        child.join()
    assert child.exitcode == -signal.SIGTERM


def test_a_program_that_fails_before_it_uses_the_card_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import a_package_that_is_not_there\n")
    launched = launch(Launch(str(script)), catalogue.target("h100"), enough=lambda rounds: False, max_operators=100)
    assert launched.raised
    with pytest.raises(AnalysisError, match=r"raised ModuleNotFoundError: .*, before anything ran on h100"):
        launched.recorded.report()
