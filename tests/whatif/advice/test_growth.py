"""Lines that keep more after each step, rewritten and tried."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxmem.hardware import catalogue
from fxmem.records.parts import Growth
from fxmem.simulation.program import Launch
from fxmem.whatif.advice.programs import growth_changes
from fxmem.whatif.advice.statements import let_go
from fxmem.whatif.advice.suggestions import _Advisor, make_bench, try_changes
from fxmem.whatif.program_step import ProgramCommand, ProgramStep
from fxmem.whatif.source_edits import edited_lines

PROGRAM = """
import torch
from torch import nn
from meter import Meter
net, meter = nn.Linear(256, 256).cuda(), Meter()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
total = 0
for _ in range(5):
    out = net(torch.ones(1024, 256, device="cuda"))
    loss = out.exp().sum().log()
    meter.update(loss)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    total = total + loss
"""
METER = """
class Meter:
    def __init__(self):
        self.kept_losses = []

    def update(self, loss):
        self.kept_losses.append(
            loss)
"""


@pytest.mark.parametrize(
    ("line", "owner", "written"),
    [
        ("preds.append(out)", "preds", "preds.append(out.detach().cpu())"),
        ("    self.preds[-1].append(out.detach())", "preds", "    self.preds[-1].append(out.detach().cpu())"),
        ("preds.append((x, out + 1, 3))", "preds", "preds.append((x.detach().cpu(), (out + 1).detach().cpu(), 3))"),
        ("preds += [out]", "preds", "preds += [out.detach().cpu()]"),
        ("seen.setdefault('é', []).append([out])", "seen", "seen.setdefault('é', []).append([out.detach().cpu()])"),
        ("seen[step] = out", "seen", "seen[step] = out.detach().cpu()"),
        ("total += loss", "total", "total += loss.detach()"),
        ("self.total = self.total + loss", "total", "self.total = (self.total + loss).detach()"),
        ("total += loss.detach()", "total", ""),
        ("preds.extend(found)", "preds", ""),
        ("preds.append(out", "preds", ""),
        ("others.append(out)", "preds", ""),
    ],
)  # fmt: skip
def test_a_line_keeps_it_on_the_host(tmp_path: Path, line: str, owner: str, written: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"if True:\n{line}\n" if line.startswith(" ") else f"x = 0\n{line}\n", encoding="utf-8")
    edits = let_go(str(path), 2, owner)
    assert (edited_lines(edits, 2, 2) if edits else "") == (f"{written}\n" if written else "")


@pytest.fixture
def _other_train(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of the same name was read in this process before."""
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))
    Path("train.py").write_text("print(1)\n", encoding="utf-8")
    linecache.checkcache("train.py")
    assert linecache.getlines("train.py") == ["print(1)\n"]


@pytest.mark.truth
@pytest.mark.usefixtures("_other_train")
def test_edits_of_a_program_s_files_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("train.py", PROGRAM), ("meter.py", METER)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    bench = make_bench(ProgramStep(ProgramCommand(Launch("train.py"), catalogue.target("rtx3080"), 5)))
    advisor = _Advisor(bench, None, lambda _: None, lambda _: None)
    both, *each = (change for change in bench.changes() if change.key.startswith("let-go"))
    assert both.code == "total = (total + loss).detach()\nself.kept_losses.append(\n    loss.detach().cpu())"
    # Each of both keeps the graph by itself.
    found = [advisor._suggestion([change], advisor._outcome([change])) for change in (both, each[0])]
    assert found[0].growth_bytes == 0
    assert found[0].saved_bytes > found[1].saved_bytes
    assert (found[1].growth_bytes or 0) >= 1 << 20
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in ("train.py", "meter.py")] == [PROGRAM, METER]


GRAPHS = {
    "no-grad": (
        "    loss = net(x).sum()\n    loss.backward()\n    optimizer.step()\nfor _ in range(2):\n    out = net(big)\n",
        2,
        "+    with torch.no_grad():\n+        out = net(big)\n",
    ),
    "free-graph:train.py:11": (
        "    loss = net(x).exp().sum()\n    losses.append(loss)\n    losses[-1].backward(retain_graph=True)\n"
        "    optimizer.step()\n",
        5,
        "+    losses[-1].backward()\n",
    ),
    "detach:train.py:10": (
        "    def join(value):\n        return value + net(x).exp().sum()\n"
        "    loss = net(x).exp().sum()\n    setattr(meter, 'norm', join(getattr(meter, 'norm', 0)))\n"
        "    loss.backward()\n    optimizer.step()\n",
        5,
        "+        return (value + net(x).exp().sum()).detach()\n",
    ),
}  # fmt: skip


@pytest.mark.truth
@pytest.mark.parametrize("key", GRAPHS)
def test_graphs_that_nothing_needs_are_not_kept(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, steps, written = GRAPHS[key]
    begin = PROGRAM.replace("from meter import Meter\n", "class Meter: pass\n").partition("total = 0")[0]
    begin += f"x, losses = torch.ones(1024, 256, device='cuda'), []\nfor _ in range({steps}):\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(begin.replace("\n\n", "\n") + body.replace("big", "x.repeat(16, 1)"))
    bench = make_bench(ProgramStep(ProgramCommand(Launch("train.py"), catalogue.target("rtx3080"), 5)))
    advisor = _Advisor(bench, None, lambda _: None, lambda _: None)
    changes = {each.key: each for each in bench.changes()}
    assert key in changes
    found = advisor._suggestion([changes[key]], advisor._outcome([changes[key]]))
    assert found.saved_bytes >= 1 << 20
    assert found.same_backward is not False
    assert written.replace("big", "x.repeat(16, 1)") in found.patch


TEACHER = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).cuda()
net, teacher = make(), make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x = torch.ones(4096, 256, device="cuda")
    out = net(x)
    target = teacher(x)
    nn.functional.kl_div(out.log_softmax(-1), target.softmax(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.truth
@pytest.mark.parametrize("tied", ["", "teacher[0].weight = net[0].weight\n"])
def test_a_teacher_runs_without_gradients_where_none_of_it_trains(
    tied: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TEACHER.replace("optimizer =", f"{tied}optimizer =", 1))
    bench = make_bench(ProgramStep(ProgramCommand(Launch("train.py"), catalogue.target("rtx3080"), 3)))
    advice = try_changes(bench, None, plans=False, quick=True, progress=lambda _: None)
    if tied:
        (refused,) = (each for each in advice.refused if each.key == "no-grad")
        assert "backward runs other operators" in refused.reason
        return
    (found,) = (each for each in advice.suggestions if each.key == "no-grad")
    assert found.same_backward
    assert found.saved_bytes >= 8 << 20
    assert "+    with torch.no_grad():\n+        target = teacher(x)\n" in found.patch


WRITTEN = {
    "let-go:kept": (
        "kept = []\nwith torch.no_grad():\n    for _ in range(9):\n        kept.append(net(x))\n",
        "none",
        "+        kept.append(net(x).detach().cpu())\n",
    ),
    "fixed-target": (
        "for _ in range(3):\n    value = net(x[:2048])\n    wanted = x[:2048] + 0.9 * value\n"
        "    nn.functional.mse_loss(net(x[2048:]), wanted).backward()\n    optimizer.step()\n",
        "training",
        "+    with torch.no_grad():\n+        value = net(x[:2048])\n",
    ),
}


@pytest.mark.truth
@pytest.mark.parametrize("key", WRITTEN)
def test_what_an_evaluation_keeps_and_a_target_that_trains_are_patched(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, effect, written = WRITTEN[key]
    monkeypatch.chdir(tmp_path)
    begin = TEACHER.partition("net, teacher")[0] + "net, x = make(), torch.ones(4096, 256, device='cuda')\n"
    begin += "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n" if effect == "training" else ""
    (tmp_path / "train.py").write_text(begin + body)
    bench = make_bench(ProgramStep(ProgramCommand(Launch("train.py"), catalogue.target("rtx3080"), 3)))
    (change,) = (each for each in bench.changes() if each.key == key)
    advisor = _Advisor(bench, None, lambda _: None, lambda _: None)
    found = advisor._suggestion([change], advisor._outcome([change]))
    assert change.effect == effect
    assert found.saved_bytes >= 2 << 20
    assert written in found.patch
    assert change.code == textwrap.dedent(written.replace("+", "")).strip()


RESUMED = """
import torch
net = torch.nn.Linear(1024, 1024).cuda()
saved = torch.load("net.pt", map_location="cuda")
net.load_state_dict(saved["model"])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.truth
def test_a_checkpoint_that_stays_on_the_card_is_loaded_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RESUMED)
    torch.save({"model": torch.nn.Linear(1024, 1024).state_dict()}, "net.pt")
    bench = make_bench(ProgramStep(ProgramCommand(Launch("train.py"), catalogue.target("rtx3080"), 3)))
    (change,) = (each for each in bench.changes() if each.key == "load-on-host")
    found = _Advisor(bench, None, lambda _: None, lambda _: None)
    suggestion = found._suggestion([change], found._outcome([change]))
    assert suggestion.saved_bytes >= 4 << 20
    assert suggestion.same_backward is True
    assert '+saved = torch.load("net.pt", map_location="cpu")\n' in suggestion.patch


def test_lines_that_keep_the_same_graph_are_changed_together(tmp_path: Path) -> None:
    path = tmp_path / "meter.py"
    path.write_text("self.a += x\nself.b += x * x\n", encoding="utf-8")
    grown = Growth(
        holder="graph of meters", nbytes=8, tensors=2, shape=(1,), dtype="float32",
        made_at=f"{path}:2", kept_at=f"{path}:1", since=1,
    )  # fmt: skip
    program = SimpleNamespace(grown=[grown], evaluations=())
    step: Any = SimpleNamespace(profile=SimpleNamespace(step=SimpleNamespace(program=program)))
    found = [each.code for each in growth_changes(step) if each.key.startswith("detach")]
    first, second = "self.a += x.detach()", "self.b += (x * x).detach()"
    assert found == [f"{first}\n{second}", first, second]
