"""What a refused request, or an error of the program's own, comes to in the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fxmem
from fxmem.hardware import catalogue
from fxmem.show.facts import find_fit
from fxmem.simulation.program import Launch, RunSettings
from fxmem.simulation.program.launcher import launch
from fxmem.simulation.program.recorded_program import RecordedProgram

HUGE = 1 << 20
"""Rows of 4 KiB: 4 GiB a tensor."""
PROGRAM = """
import sys
import torch

net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)

def step(rows):
    optimizer.zero_grad()
    net(torch.zeros(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()

class Stop(BaseException):
    pass

step(4)
"""


def run(folder: Path, end: str) -> RecordedProgram:
    (folder / "train.py").write_text(PROGRAM + end)
    return launch(Launch(str(folder / "train.py")), catalogue.target("2GiB"), RunSettings()).recorded


def verdict(recorded: RecordedProgram) -> tuple[str, int]:
    fit = find_fit(recorded.profile, recorded.peak)
    return fit.verdict, fit.exit_code


class Trained:
    """A layer on the card and its optimizer."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(1024, 1024).cuda()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def call(self, rows: int) -> torch.Tensor:
        out: torch.Tensor = self.net(torch.zeros(rows, 1024, device="cuda"))
        return out

    def step(self, rows: int) -> None:
        self.call(rows).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_program_that_swallows_every_refusal_does_not_fit() -> None:
    with fxmem.record("2GiB") as recorded:
        trained = Trained()
        for _ in range(3):
            try:
                trained.step(HUGE)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
    refused = recorded.program.refused
    assert refused is not None
    assert (refused.count, refused.is_outlived) == (3, False)
    said, code = verdict(recorded)
    assert said.startswith("does NOT fit after 3 refused requests: at least 4.0")
    assert code == 4
    told = " ".join(recorded.table().split())
    assert "Refused 3, whose errors the program caught; nothing ran through after the last, at " in told


def test_an_optimizer_that_steps_all_the_same_is_no_step() -> None:
    with fxmem.record("2GiB", steps=2) as recorded:
        trained = Trained()
        while True:
            try:
                trained.call(HUGE).sum().backward()  # type: ignore[no-untyped-call]
            except RuntimeError:
                torch.cuda.empty_cache()
            trained.optimizer.step()
    assert verdict(recorded)[0].startswith("does NOT fit after 2 refused requests: at least 4.0")


@pytest.mark.parametrize("trains", [True, False])
def test_a_search_for_a_batch_that_fits_does(trains: bool) -> None:
    with fxmem.record("2GiB") as recorded:
        trained, rows = Trained(), HUGE
        while True:
            try:
                if trains:
                    trained.step(rows)
                else:
                    with torch.no_grad():
                        trained.call(rows)
                break
            except torch.cuda.OutOfMemoryError:
                rows //= 4
    assert recorded.program.refused is not None
    said, code = verdict(recorded)
    assert said.startswith(f"fits after {recorded.program.refused.count} refused requests: ")
    assert code == 0
    told = " ".join(recorded.table().split())
    assert ("ran to its end, without a backward" in told) is not trains


TRY = "try:\n    step(1 << 20)\nexcept RuntimeError:\n    "
OWN = "not known: the program "


@pytest.mark.parametrize(
    ("end", "said", "code"),
    [
        ("raise torch.cuda.OutOfMemoryError('mine')", f"{OWN}raised OutOfMemoryError: mine; fits until then", 1),
        ("raise Stop('here')", f"{OWN}raised Stop: here; fits until then", 1),
        ("raise KeyboardInterrupt", f"{OWN}raised KeyboardInterrupt; fits until then", 1),
        ("step(1 << 20)", "does NOT fit: at least 4.0", 4),
        (f"{TRY}raise ValueError('no') from None", "does NOT fit: at least 4.0", 4),
        (f"{TRY}pass\nsys.exit(1)", "does NOT fit: at least 4.0", 4),
        (f"{TRY}pass\nstep(4)\nsys.exit(1)", f"{OWN}called sys.exit(1); fits", 1),
        (f"{TRY}step(4)\n    raise ValueError('no')", f"{OWN}raised ValueError: no; fits", 1),
        ("torch.zeros(1, device='cuda:1')", "Error: CUDA error: invalid device ordinal (cuda:1 ", 1),
        ("torch.zeros(1).cuda(1)", "Error: CUDA error: invalid device ordinal (1 ", 1),
        ("torch.cuda.set_device('cuda:1')", "Error: CUDA error: invalid device ordinal (cuda:1 ", 1),
        ("torch.cuda.set_device(0); step(4); step(4)", "fits: ", 0),
    ],
)
def test_an_error_is_the_programs_own_or_a_refusal(tmp_path: Path, end: str, said: str, code: int) -> None:
    found = verdict(run(tmp_path, end))
    assert said in found[0]
    assert found[1] == code


def test_a_users_interrupt_is_no_error_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nstep(4)\nstep(4)")
