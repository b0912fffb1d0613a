"""What a loop does every so many steps, or what follows it, is listed where it did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxmem.hardware import catalogue
from fxmem.show.facts import find_fit
from fxmem.show.run_facts import describe_growth, program_facts
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
    out = net(torch.randn(8192, 256, device="cuda"))  # a T4 is full after two thousand
    loss = out.sum(); loss.backward()
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


EVALUATING = """
import torch
from torch import nn

class Task:
    def __init__(self):
        self.net = nn.Linear(256, 256).cuda()
        self.optimizer = torch.optim.SGD(self.net.parameters())

    def step(self):
        self.net(torch.randn(8, 256, device="cuda")).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, net, batches=2):
        return [net(torch.randn(8, 256, device="cuda")) for _ in range(batches)]

    def fit(self):
        for step in range(20):
            {before}
            self.step()
            {every}
        print("trained")

def main():
    task = Task()
    for epoch in range(3):
        task.fit(); {after}

main()
"""
CALLS = "train.py:17"


def evaluate(folder: Path, *, before: str = "", every: str = "", after: str = "") -> RecordedProgram:
    (folder / "train.py").write_text(
        EVALUATING.format(before=before or "pass", every=every or "pass", after=after or "pass")
    )
    return launch(Launch(str(folder / "train.py")), catalogue.target("t4"), RunSettings()).recorded


@pytest.mark.parametrize(
    ("parts", "place", "every"),
    [
        ({"after": "task.evaluate(task.net)"}, "train.py:29", None),
        ({"after": "print(task.evaluate(net=task.net)[0].mean().item())"}, "train.py:29", None),
        ({"every": "if step % 10 == 9: self.evaluate(self.net)"}, "train.py:23", 10),
    ],
)
def test_a_call_of_a_model_that_did_not_run_is_said(
    tmp_path: Path, parts: dict[str, str], place: str, every: int | None
) -> None:
    """Where so many steps were asked for; else it runs before its time."""
    (ran,) = evaluate(tmp_path, **parts).program.schedules
    assert (ran.ran, ran.every, ran.place.rpartition("/")[2]) == (True, every, place)
    launched = launch(Launch(str(tmp_path / "train.py")), catalogue.target("t4"), RunSettings(steps=3))
    recorded = launched.recorded
    (found,) = recorded.program.schedules
    names = [each.rpartition("/")[2] for each in (found.place, found.calls)]
    assert (names, found.every) == ([place, CALLS], every)
    profile = recorded.profile
    assert find_fit(profile, recorded.timeline.peak).verdict.startswith(
        f"fits so far, without the call of a model at {found.calls}: "
    )
    (fact,) = (each.text for each in program_facts(profile) if each.label == "Not run")
    assert CALLS in fact
    assert ("--until end" if every is None else "--steps 12 ") in fact


@pytest.mark.parametrize(
    "parts",
    [
        {"after": "print(task.net)"},
        {"after": "nn.MSELoss()(torch.ones(1), torch.ones(1))"},
        {"before": "self.evaluate(self.net)", "after": "task.evaluate(task.net)"},
        {"every": "if step % 2 == 1: self.evaluate(self.net)", "after": "task.evaluate(task.net)"},
    ],
)
def test_what_ran_or_calls_no_model_is_not(tmp_path: Path, parts: dict[str, str]) -> None:
    recorded = evaluate(tmp_path, **parts)
    assert not recorded.program.schedules
    assert find_fit(recorded.profile, recorded.timeline.peak).verdict.startswith("fits: ")


@pytest.mark.parametrize("condition", ["step and step % 6 == 0", "(step + 1) % 6 == 0"])
def test_the_steps_that_are_named_run_it(tmp_path: Path, condition: str) -> None:
    """And fewer do not: what comes after the last recorded step has not run."""
    (tmp_path / "train.py").write_text(
        EVALUATING.format(before="pass", every=f"if {condition}: self.evaluate(self.net)", after="pass")
    )

    def run_steps(steps: int) -> tuple[bool, str]:
        """Whether a step had the operators of the branch, and what is said of it."""
        settings = RunSettings(steps=steps)
        recorded = launch(Launch(str(tmp_path / "train.py")), catalogue.target("t4"), settings).recorded
        operators = {each.operators for each in recorded.program.rounds[1:]}
        said = [each.text for each in program_facts(recorded.profile) if each.label == "Not run"]
        return len(operators) > 1, " ".join(said)

    has_run, said = run_steps(6)
    assert not has_run
    assert said.endswith("every 6 steps; --steps 8 runs it")
    assert run_steps(8) == (True, "")


def test_what_follows_the_loop_has_run_where_the_program_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        EVALUATING.format(before="pass", every="pass", after="task.evaluate(task.net)").replace("range(20)", "range(2)")
    )
    recorded = launch(Launch(str(tmp_path / "train.py")), catalogue.target("t4"), RunSettings(steps=5)).recorded
    assert not recorded.program.schedules


def test_what_a_program_that_has_ended_did_not_call_is_not_said(tmp_path: Path) -> None:
    parts = {"before": "pass", "every": "if step % 50 == 49: self.evaluate(self.net)"}
    text = EVALUATING.format(**parts, after="False and task.evaluate(task.net)").replace("range(20)", "range(2)")
    (tmp_path / "train.py").write_text(text)
    recorded = launch(Launch(str(tmp_path / "train.py")), catalogue.target("t4"), RunSettings(until="end")).recorded
    assert [each.calls for each in recorded.program.schedules] == [""]
    assert find_fit(recorded.profile, recorded.timeline.peak).verdict.startswith("fits: ")


@pytest.mark.parametrize(
    ("condition", "before"),
    [
        ("step % 1000 == 0", "False"),
        ("step % 1000 == 0: print(loss.item())\n    if False", "False"),  # only reads
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
        ("sum([1] * step) > 1 and step % 1000 == 0", "False", 8),  # nobody can tell
        ("False", "count % 1000 == 1", 1 << 18),  # with more at once than the next step
    ],
)
def test_what_has_not_run_or_takes_more_is_said(tmp_path: Path, condition: str, before: str, kept: int) -> None:
    recorded = run(tmp_path, condition, before, kept)
    assert "or sooner in what" in describe_growth(recorded.profile)


OPTIONS = """
import torch
from torch import nn

KIND, flags = "pair", {"single": False}
net = nn.Bilinear(64, 64, 32).cuda()
optimizer = torch.optim.SGD(net.parameters())

def call(net, x):
    if KIND == "single" or not KIND or flags["single"]:
        return net(x)
    return net(x, x)

def epoch(learn=True):
    for _ in range(2):
        loss = call(net, torch.randn(8, 64, device="cuda")).sum()
        if learn:
            loss.backward(); optimizer.step()

for number in range(100):
    epoch()
    if number % 5 == 4:
        BODY
"""


def run_options(folder: Path, body: str) -> RecordedProgram:
    (folder / "train.py").write_text(OPTIONS.replace("BODY", body))
    return launch(Launch(str(folder / "train.py")), catalogue.target("t4"), RunSettings()).recorded


def test_a_branch_that_the_options_never_take_is_not_named(tmp_path: Path) -> None:
    assert not run_options(tmp_path, "epoch(learn=False)").program.schedules  # what it calls has run
    calls = "net(torch.ones(9, 64, device='cuda'), torch.ones(9, 64, device='cuda'))"
    (tmp_path / "other").mkdir()  # the lines of a file are read once
    recorded = run_options(tmp_path / "other", calls)
    (found,) = recorded.program.schedules
    assert (found.every, found.counter, found.calls) == (5, "number", found.place.replace(":22", ":23"))
    assert "every 5 of `number`, which does not count steps; --until end runs it" in str(
        program_facts(recorded.profile)
    )
    assert not [each for each in recorded.profile.assumptions if each.topic == "schedules"]


@pytest.mark.parametrize(
    ("again", "count"), [("", 0), ("        options = argparse.Namespace(data=options.data.upper())\n", 1)]
)
def test_options_that_are_assigned_anew_before_the_loop_are_known(tmp_path: Path, again: str, count: int) -> None:
    """`parser = parser.parse_args()`; what the loop itself writes may be another by then."""
    (tmp_path / "train.py").write_text(
        "import argparse, torch\n"
        "def main():\n"
        "    options = argparse.ArgumentParser()\n"
        '    options.add_argument("--data", default="csv")\n'
        '    options.add_argument("--val")\n'
        "    options = options.parse_args([])\n"
        "    net = torch.nn.Linear(64, 64).cuda()\n"
        "    optimizer = torch.optim.SGD(net.parameters())\n"
        "    for _ in range(100):\n"
        '        net(torch.randn(8, 64, device="cuda")).sum().backward()\n'
        "        optimizer.step()\n"
        f"{again}"
        '    if options.data == "coco" or options.val is not None:\n'
        '        net(torch.randn(9, 64, device="cuda"))\n'
        "main()\n"
    )
    recorded = launch(Launch(str(tmp_path / "train.py")), catalogue.target("t4"), RunSettings()).recorded
    assert len(recorded.program.schedules) == count
