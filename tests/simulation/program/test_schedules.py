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
count, kept = 0, {kept}
for step in range(100_000):
    if {before}:
        net(torch.randn(kept, 256, device="cuda"))
    out = net(torch.randn(1024, 256, device="cuda"))
    out.sum().backward()
    optimizer.step()
    count += 1
    optimizer.zero_grad()
    preds.append(out.detach())
    if {condition}:
        print(torch.cat(preds).mean().item())
"""


def run(folder: Path, condition: str, before: str = "False", kept: int = 8) -> RecordedProgram:
    program = folder / "train.py"
    program.write_text(PROGRAM.format(condition=condition, before=before, kept=kept))
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
    assert (found.place.rpartition("/")[2], found.every) == ("train.py:20", every)
    assert f"or sooner in what {found.place} does every {every:,}" in describe_growth(recorded.profile)
    (taken,) = (each.text for each in recorded.profile.assumptions if each.topic == "schedules")
    assert taken == f"at most one of the steps did what {found.place} does every {every:,}"


@pytest.mark.parametrize("condition", ["step % 2 == 1", "step % len(preds) == 0", "step == 1000", "step % 1000 != 0"])
def test_what_the_steps_show_or_nobody_can_tell_is_not(tmp_path: Path, condition: str) -> None:
    recorded = run(tmp_path, condition)
    assert not recorded.program.schedules
    assert "sooner" not in describe_growth(recorded.profile)


@pytest.mark.parametrize(
    ("condition", "before"),
    [
        ("step % 1000 == 0", "False"),
        ("net.training and not step % 1000 and count > 0", "False"),
        ("False", "count % 1000 == 0"),
        ("False", "(count + 998) % 1000 == 0"),
    ],
)
def test_what_has_run_in_a_recorded_step_is_not_said(tmp_path: Path, condition: str, before: str) -> None:
    recorded = run(tmp_path, condition, before)
    assert not recorded.program.schedules
    assert "sooner" not in describe_growth(recorded.profile)


@pytest.mark.parametrize(
    ("condition", "before", "kept"),
    [
        ("count % 1000 == 0", "False", 8),  # is one already where it is first asked
        ("len(preds) > 1 and step % 1000 == 0", "False", 8),  # nobody can tell
        ("False", "count % 1000 == 1", 1 << 18),  # with more at once than the next step
    ],
)
def test_what_has_not_run_or_takes_more_is_said(tmp_path: Path, condition: str, before: str, kept: int) -> None:
    recorded = run(tmp_path, condition, before, kept)
    assert "or sooner in what" in describe_growth(recorded.profile)
