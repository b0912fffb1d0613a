"""What a loop does every so many steps is listed where fewer ran, and said beside what grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxmem.hardware import catalogue
from fxmem.show.run_growth import describe_growth
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch

PROGRAM = """
import argparse
import torch
from torch import nn

options, settings = argparse.Namespace(log_every=1000), {{"save": 500}}
net = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(net.parameters())
preds = []
for step in range(100_000):
    out = net(torch.randn(1024, 256, device="cuda"))
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    preds.append(out.detach())
    if {condition}:
        print(torch.cat(preds).mean().item())
"""


def run(folder: Path, condition: str) -> RecordedProgram:
    program = folder / "train.py"
    program.write_text(PROGRAM.format(condition=condition))
    return launch(Launch(str(program)), catalogue.target("t4"), RunSettings()).recorded


@pytest.mark.parametrize(
    ("condition", "every"),
    [
        ("(step + 1) % 1000 == 0", 1000),
        ("step and step % options.log_every == 0", 1000),
        ('not (step + 1) % settings["save"]', 500),
    ],
)
def test_what_is_done_every_so_many_steps_is_said(tmp_path: Path, condition: str, every: int) -> None:
    recorded = run(tmp_path, condition)
    (found,) = recorded.program.schedules
    assert (found.place.rpartition("/")[2], found.every) == ("train.py:16", every)
    assert f"or sooner in what {found.place} does every {every:,}" in describe_growth(recorded.profile)
    (taken,) = (each.text for each in recorded.profile.assumptions if each.topic == "schedules")
    assert taken == f"at most one of the steps did what {found.place} does every {every:,}"


@pytest.mark.parametrize("condition", ["step % 2 == 1", "step % len(preds) == 0", "step == 1000", "step % 1000 != 0"])
def test_what_the_steps_show_or_nobody_can_tell_is_not(tmp_path: Path, condition: str) -> None:
    recorded = run(tmp_path, condition)
    assert not recorded.program.schedules
    assert "sooner" not in describe_growth(recorded.profile)
