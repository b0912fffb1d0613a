"""Thirty programs that keep something of each step, and thirty twins that do not; what is said of them."""

from __future__ import annotations

import functools
import linecache
import os
from pathlib import Path

import pytest
import torch
from torchvision.ops import box_convert

import fxmem
from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.records.profile import ProgramRun
from fxmem.records.units import GROWING, STEPS
from fxmem.show.run_facts import describe_growth, growth_facts
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch
from fxmem.simulation.run.growth import find_keeping_line
from fxmem.testing import assert_steady
from tests.simulation.program import growing


@functools.cache
def run(kind: str, which: str, target: str = "h100", steps: int | None = None) -> RecordedProgram:
    return launch(Launch(growing.__file__, (kind, which)), catalogue.target(target), RunSettings(steps)).recorded


def some(kinds: dict[str, growing.After]) -> list[object]:
    """Every sixth; `FXMEM_LEAKS=all` takes all of them."""
    return [*kinds][:: 1 if "FXMEM_LEAKS" in os.environ else 6]


@pytest.mark.parametrize("kind", some(growing.LEAKS))
def test_a_leak_is_named_with_its_bytes_and_its_line(kind: str) -> None:
    found = run(kind, "leaks").program
    holder, nbytes = growing.EXPECTED[kind]
    most = found.grown[0]
    assert (most.holder.replace("after.", ""), most.nbytes) == (holder, nbytes)
    assert nbytes <= (found.growth_bytes or 0) <= nbytes + 4  # a loss beside its graph
    assert len(found.steps) == GROWING
    assert most.until is None
    source, line = most.kept_at.rsplit(":", 1)
    text = Path(source).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert holder.rpartition(" ")[2].rpartition(".")[2] in text


@pytest.mark.parametrize("kind", some(growing.TWINS))
def test_a_twin_is_not_said_to_grow(kind: str) -> None:
    found = run(kind, "twin").program
    assert not found.grown
    assert not found.growth_bytes
    assert_steady(run(kind, "twin"))


def test_what_grows_is_said_where_it_decides() -> None:
    profile = run("list of outputs", "leaks").profile
    fact = growth_facts(profile.step)[0]
    assert fact.label == "Grows"
    assert fact.text.startswith("1,048,576 bytes a step, ")
    assert "growing.py:58 keeps preds: 1 tensor a step, the largest 1024x256 float32 of " in fact.text
    assert "keeps preds), out of memory at about step " in describe_growth(profile)
    with pytest.raises(AssertionError, match=r"grows by 1,048,576 bytes a step .*\n.*keeps preds"):
        assert_steady(run("list of outputs", "leaks"))


def test_a_queue_says_until_when_it_grows() -> None:
    found = run("queue of five", "twin", steps=4)
    most = found.program.grown[0]
    assert (most.holder, most.nbytes, most.until) == ("after.memory", growing.MIB, 6)
    assert len(found.program.steps) == 4  # as many as were asked for
    last = found.program.steps[-1].allocated_bytes or 0
    expected = last + 2 * growing.MIB
    assert describe_growth(found.profile).endswith(f"until step 6, to {expected / growing.MIB:.1f} MiB")
    real = run("queue of five", "twin", steps=8).program.steps
    assert [each.allocated_bytes for each in real[5:]] == [expected] * 3


def test_a_buffer_that_its_class_fills_up_says_until_when_it_grows() -> None:
    found = run("buffer of twelve", "twin", steps=4)
    most = found.program.grown[0]
    assert (most.holder, most.nbytes, most.until) == ("after.buffer.data", growing.MIB, 13)
    assert "out of memory" not in describe_growth(found.profile)


def test_what_has_a_bound_stops_before_the_card_is_full() -> None:
    profile = run("list of outputs", "leaks").profile
    program, left = profile.step.program, 100 * growing.MIB
    assert program is not None
    endless, last = program.grown[0], program.steps[-1].allocated_bytes or 0
    bounded = endless.model_copy(update={"holder": "queue", "until": len(program.steps) + 10})
    program = program.model_copy(update={"grown": (endless, bounded), "growth_bytes": 2 * growing.MIB})
    step = profile.step.model_copy(update={"program": program})
    target = profile.target.model_copy(update={"memory_bytes": last + left})
    # Ten steps of two, then as many of one as are left, and one that is too many.
    expected = len(program.steps) + 10 + (100 - 20) + 1
    words = describe_growth(profile.model_copy(update={"step": step, "target": target}))
    assert words.endswith(f"out of memory at about step {expected}")


@pytest.mark.truth
def test_the_step_of_the_end_is_the_predicted_one() -> None:
    """But for the last segment of 20 MiB, which the card has no room for: ten steps of a small one."""
    small = catalogue.target("1GiB").model_copy(update={"memory_bytes": 120 << 20})
    told = launch(Launch(growing.__file__, ("replay without end", "leaks")), small, RunSettings()).recorded
    expected = int(describe_growth(told.profile).rpartition("step ")[2].replace(",", ""))
    words = ("replay without end", "leaks", "2000")
    real = launch(Launch(growing.__file__, words), small, RunSettings(until="end")).recorded
    assert real.ending.startswith("ran out of memory")
    assert 0 <= expected - len(real.rounds) <= 20 * growing.MIB // (2 * growing.MIB)


def test_what_goes_from_one_list_to_another_is_no_growth() -> None:
    with fxmem.record("h100", steps=5) as found:
        net = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        waiting, done = [torch.zeros(1024, device="cuda") for _ in range(10)], list[torch.Tensor]()
        while True:
            net(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            waiting.pop()
            done.append(torch.ones(1024, device="cuda"))
    assert (found.program.growth_bytes, found.program.grown) == (0, ())
    assert_steady(found)


def test_fewer_than_three_steps_are_too_few_to_say() -> None:
    found: ProgramRun = run("list of outputs", "leaks", steps=STEPS - 1).program
    assert not found.grown
    with pytest.raises(UsageError, match="expected a recording of at least 3 steps"):
        assert_steady(run("list of outputs", "leaks", steps=STEPS - 1))


SOURCE = """
self.preds.append(out)
total = total + loss
seen[step] = out
best = out
other.preds2.append(out)
kept += [out]
joined = torch.cat([joined, out])
"""


def test_of_two_lines_that_keep_it_the_running_function_has(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def train():\n    kept.append(1)\ndef evaluate():\n    kept.append(2)\n", encoding="utf-8")
    assert find_keeping_line("kept", {str(file): {3, 4}}) == f"{file}:4"
    assert find_keeping_line("kept", {str(file): {7}}) == f"{file}:2"


@pytest.mark.truth
def test_what_a_library_makes_is_of_the_line_that_calls_it() -> None:
    kept: list[torch.Tensor] = []
    with fxmem.record("rtx3080", steps=3) as found:
        net, boxes = torch.nn.Linear(4, 4).cuda(), torch.ones(1 << 16, 4, device="cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            kept.append(box_convert(boxes, "xywh", "xyxy"))
            net(boxes).sum().backward()
            optimizer.step()
    (grown,) = found.program.grown
    line = int(grown.made_at.rpartition(":")[2])
    assert "box_convert(boxes" in linecache.getline(__file__, line)


def test_of_two_lines_that_keep_it_an_object_has_the_attribute(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("preds = preds.float()\nself.preds[-1].append(out)\n", encoding="utf-8")
    assert find_keeping_line("metric.preds", {str(file): ()}) == f"{file}:2"
    assert find_keeping_line("preds", {str(file): ()}) == f"{file}:1"


@pytest.mark.parametrize(
    ("owner", "line"),
    [
        *(("Net.preds", 2), ("graph of total", 3), ("seen", 4), ("best", None), ("preds2", 6), ("kept", 7)),
        *(("joined", 8), ("missing", None), ("", None)),
    ],
)
def test_the_line_that_keeps_it(owner: str, line: int | None, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(SOURCE, encoding="utf-8")
    assert find_keeping_line(owner, {str(tmp_path / "none.py"): (), str(file): ()}) == (
        f"{file}:{line}" if line else ""
    )


@pytest.mark.truth
def test_the_step_that_runs_out_is_found_by_replaying_it() -> None:
    card = catalogue.target("rtx3060").model_copy(update={"memory_bytes": 300 << 20})
    made = Launch(growing.__file__, ("list of outputs", "leaks", "400"))
    ahead = launch(made, card, RunSettings()).recorded.program
    whole = launch(made, card, RunSettings(400)).recorded
    assert ahead.full_at == len(whole.program.rounds)
    assert f", out of memory in step {ahead.full_at}" in describe_growth(whole.profile, has_run_out=True)


RECALLS = """
class Recall:
    def __init__(self):
        self.preds = []

    def update(self, out):
        self.preds.append(out)  # another class's list of this name
"""
KEEPERS = """
class Precision:
    def __init__(self):
        self.preds = []

    def update(self, out):
        self.preds.append(out)  # its own


class Engine:
    def __init__(self):
        self.handlers = {"end": [Saver()]}


class Saver:
    def __init__(self):
        self.saved_outputs = []

    def __call__(self, out):
        self.saved_outputs.append(out)  # the saver's
"""
KEEPING = """
import torch
from a_recall import Recall
from keepers import Engine, Precision

precision, engine, losses = Precision(), Engine(), []
net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).cuda()
optimizer = torch.optim.SGD(net.parameters())


def train(rounds):
    for number in range(rounds):
        loss = net(torch.ones(4096, 256, device="cuda")).sum()
        losses.append(loss)  # all losses
        last_two = losses[-1] - losses[-2] if number else None
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def look(keep):
    data = torch.utils.data.TensorDataset(torch.ones(4096, 256))
    for (batch,) in torch.utils.data.DataLoader(data, 256):
        net(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        for (batch,) in torch.utils.data.DataLoader(data, 256):
            keep(net(batch.cuda()))
"""


@pytest.mark.parametrize(
    ("call", "file", "line"),
    [
        ("train(6)", "train.py", "losses.append(loss)  # all losses"),
        ("look(precision.update)", "keepers.py", "self.preds.append(out)  # its own"),
        ('look(lambda out: [each(out) for each in engine.handlers["end"]])', "keepers.py", "# the saver's"),
    ],
)
def test_the_line_is_that_of_who_has_it(call: str, file: str, line: str, tmp_path: Path) -> None:
    """Of a program that comes to its end by itself, of a class beside another, of an element of a registry."""
    (tmp_path / "keepers.py").write_text(KEEPERS, encoding="utf-8")
    (tmp_path / "a_recall.py").write_text(RECALLS, encoding="utf-8")
    (tmp_path / "train.py").write_text(f"{KEEPING}\n{call}\n", encoding="utf-8")
    settings = RunSettings(reads_epoch=True)
    found = launch(Launch(str(tmp_path / "train.py")), catalogue.target("h100"), settings).recorded.program
    grown = [*found.grown, *(each for one in found.evaluations for each in one.grown)]
    source, _, number = grown[0].kept_at.rpartition(":")
    assert Path(source).name == file
    assert Path(source).read_text(encoding="utf-8").splitlines()[int(number) - 1].endswith(line)
