"""Activations called as functions: which lines may run in place, what to write there, and what it is worth in a real
run of the edited file."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxmem import analyze
from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from fxmem.whatif.advice.changes import find_changes
from fxmem.whatif.advice.statements import calls_in_place
from fxmem.whatif.advice.variant import Change, NotApplicableError, Outcome, Variant, analyse_way

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import leaky_relu
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self.act = F.relu

    def forward(self, x):
        x = self.a(x)
"""
TAIL = "        return self.c(x)\n"


def net(folder: Path, body: str, name: str = "net.py") -> nn.Module:
    """A model from a file of its own."""
    path = folder / name
    path.write_text(HEAD + "".join(f"        {line}\n" for line in body.splitlines()) + TAIL, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Net()


def change(analysis: Analysis) -> Change:
    return next(each for each in find_changes(analysis) if each.key == "inplace-calls")


def made(analysis: Analysis) -> Outcome:
    return analyse_way(
        change(analysis).make(Variant(analysis.model, analysis.request, environ=dict(os.environ)), analysis)
    )


def edited(folder: Path, code: str, old: Path) -> nn.Module:
    """The model after the edits that the code of a change asks for."""
    lines = old.read_text(encoding="utf-8").splitlines()
    for place, text in re.findall(r"# \S+?:(\d+)\n(.*(?:\n(?!#).*)*)", code):
        start = int(place) - 1
        indent = re.match(" *", lines[start])[0]  # type: ignore[index]
        new = [indent + line for line in text.splitlines()]
        lines[start : start + len(new)] = new
    path = folder / "edited.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return net_from(path)


def net_from(path: Path) -> nn.Module:
    text = path.read_text(encoding="utf-8")
    body = text[len(HEAD) : -len(TAIL)]
    return net(path.parent, "\n".join(line[8:] for line in body.splitlines()), path.name)


def real_peak(model: nn.Module, x: torch.Tensor, **step: Any) -> int:
    return measure_cpu(
        model,
        StepRequest(args=(x,), **step),
    ).peak_bytes


ALLOWED = """\
x = F.elu(self.b(x))
x = leaky_relu(
    self.b(x), 0.2)
x = F.hardtanh(self.b(x), inplace=False)
x = F.celu(self.b(x),)
x = F.selu(self.b(x)) if x.dim() == 2 else x"""


REPEATED = "for _ in range(4): x = F.leaky_relu(F.relu6(self.b(x)) if self.c else self.b(x)); x = F.hardtanh(self.b(x))"


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    "body", [ALLOWED, "x = torch.relu(self.b(x))", "x = self.b(x).sigmoid()", "x = F.tanh(self.b(x))", REPEATED]
)
def test_edited_lines_are_worth_what_a_real_run_says(tmp_path: Path, body: str, mode: str) -> None:
    model, x = net(tmp_path, body), torch.randn(2048, 64)
    analysis = analyze(model, x, target="cpu", mode=mode)  # type: ignore[arg-type]
    changed = made(analysis)
    rewritten = edited(tmp_path, change(analysis).code, tmp_path / "net.py")
    assert changed.peak.requested_bytes <= analysis.peak.requested_bytes
    assert changed.peak.requested_bytes == pytest.approx(real_peak(rewritten, x, mode=mode), rel=1e-3)
    if body == ALLOWED:
        assert changed.peak.requested_bytes < 0.8 * analysis.peak.requested_bytes
    for each in (model, rewritten):
        each.zero_grad()
        each(x).sum().backward()
    wanted = net_from(tmp_path / "net.py")
    wanted.load_state_dict(rewritten.state_dict())
    wanted(x).sum().backward()
    exact = change(analysis).effect == "none"
    assert exact == (body != ALLOWED)
    for a, b in zip(wanted.parameters(), rewritten.parameters(), strict=True):
        assert (
            torch.equal(a.grad, b.grad)
            if exact
            else torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5 * float(a.grad.abs().max()))
        )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x = F.relu(torch.exp(x))", "exp keeps its input for backward"),
        ("y = F.elu(x); x = x + y", "add reads its input afterwards"),
        ("y, z = x.chunk(2, -1); x = torch.cat([F.elu(y), z], -1)", "one of several views that chunk made"),
        (
            "x = checkpoint(lambda y: F.elu(self.b(y)), x, use_reentrant=False)",
            "it is checkpointed, and runs again in backward",
        ),
        ("y = checkpoint(lambda y: self.b(y).abs(), x.clone(), use_reentrant=False); x = F.elu(y)", ""),
        (
            "w = x.clone(); y = checkpoint(lambda z: z + w.cos(), x, use_reentrant=False); x = F.elu(w)",
            "is checkpointed, and reads its input again in backward",
        ),
        ("x = F.relu(x, inplace=True)", "no line calls an activation"),
        ("x = torch.relu_(x)", "no line calls an activation"),
    ],
)
def test_a_line_that_autograd_forbids_is_refused_with_the_reason(tmp_path: Path, body: str, reason: str) -> None:
    analysis = analyze(net(tmp_path, body), torch.randn(8, 64), target="cpu")
    if not reason:
        made(analysis)
        return
    with pytest.raises(NotApplicableError, match=reason):
        made(analysis)


def test_what_is_refused_is_named_beside_what_is_not_and_a_line_is_taken_whole(tmp_path: Path) -> None:
    body = "for first in (True, False): x = F.elu(self.b(x) if first else torch.exp(self.b(x)))\nx = F.elu(self.b(x))"
    only = change(analyze(net(tmp_path, body), torch.randn(8, 64), target="cpu"))
    first = HEAD.count("\n") + 1
    assert only.note == f"not {tmp_path / 'net.py'}:{first} (exp keeps its input for backward)"
    assert only.code == f"# {tmp_path / 'net.py'}:{first + 1}\nx = F.elu(self.b(x), inplace=True)"


def test_modules_and_what_hides_behind_another_name_are_told_apart(tmp_path: Path) -> None:
    hidden = change(analyze(net(tmp_path, "x = self.act(self.b(x))"), torch.randn(8, 64), target="cpu"))
    assert hidden.code.endswith("# relu(..., inplace=True), by whatever name it is called here")
    analysis = analyze(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.ReLU()), torch.randn(8, 64), target="cpu")
    with pytest.raises(NotApplicableError, match="no line calls an activation"):
        made(analysis)


def test_nothing_of_the_users_is_changed_and_the_changed_model_can_be_changed_again(tmp_path: Path) -> None:
    model, x = net(tmp_path, ALLOWED), torch.randn(512, 64)
    analysis = analyze(model, x, target="cpu")
    changes = {each.key: each for each in find_changes(analysis)}
    changed = made(analysis)
    assert "forward" not in vars(model)
    both = analyse_way(changes["bf16-weights"].make(changed.variant, analysis))
    alone = analyse_way(changes["bf16-weights"].make(Variant(model, analysis.request, environ={}), analysis))
    assert both.peak.counted_bytes < alone.peak.counted_bytes


@pytest.mark.parametrize(
    ("text", "name", "keyword", "result"),
    [
        ("x = F.relu(é + y)", "relu", True, "x = F.relu(é + y, inplace=True)"),
        ("x = F.relu(\n    y,\n)", "relu", True, "x = F.relu(\n    y,\ninplace=True)"),
        ("x = F.relu(F.relu(y))", "relu", True, "x = F.relu(F.relu(y, inplace=True), inplace=True)"),
        ("x = y.relu().relu()", "relu", False, "x = y.relu_().relu_()"),
        ("if y: x = relu(y)", "relu", False, "if y: x = torch.relu_(y)"),
        ("x = F.relu(y) + relu(\n    y)", "relu", True, "x = F.relu(y, inplace=True) + relu(\n    y, inplace=True)"),
        ("x = F.relu(\n    y,  # why\n)", "relu", True, ""),
        ("x = (torch.\nrelu)(y)", "relu", False, ""),
        ("x = act(y)", "relu", True, ""),
        ("x = (", "relu", True, ""),
    ],
)
def test_a_statement_is_written_anew_or_not_at_all(
    tmp_path: Path, text: str, name: str, keyword: bool, result: str
) -> None:
    path = tmp_path / "some.py"
    path.write_text(f"def f(y):\n    {text.replace(chr(10), chr(10) + '    ')}\n", encoding="utf-8")
    assert list(calls_in_place(str(path), {(2, name): keyword})) == [(2, result)]
    assert list(calls_in_place(str(tmp_path / "nowhere.py"), {(2, name): keyword})) == [(2, "")]
