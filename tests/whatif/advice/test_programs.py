"""Advice on programs: what each change is worth is what the program takes with the change written into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.__main__ import main
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import advise as advise_command
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.records.advice import Advice, Suggestion
from fxmem.records.plan import Plan
from fxmem.records.profile import Report
from fxmem.simulation.program import Launch
from fxmem.whatif.program_step import ProgramCommand

pytestmark = pytest.mark.truth

SCRIPT = """
import contextlib
import torch
from torch import nn

def train(around=contextlib.nullcontext, change=lambda model: model, made=lambda optimizer: None, **options):
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    made(optimizer)
    change(model)
    for _ in range(3):
        with around():
            loss = model(torch.randn(1 << 15, 256, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
scope: dict[str, Any] = {"__name__": "script"}
exec(SCRIPT, scope)
train: Callable[..., None] = scope["train"]


def peak(**changes: Any) -> int:
    with fxmem.record("rtx4090", steps=2) as recorded:
        train(**changes)
    return recorded.peak.counted_bytes


def in_place(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True


@pytest.fixture(scope="module")
def advice() -> Advice:
    return fxmem.advise(train, target="rtx4090", steps=2)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("bf16-autocast", {"around": lambda: torch.autocast("cuda", dtype=torch.bfloat16)}),
        ("inplace", {"change": in_place}),
        ("fused-optimizer", {"fused": True}),
        ("forloop-optimizer", {"foreach": False}),
        ("within-backward", {"made": fxmem.release_gradients}),
    ],
)
def test_a_change_is_worth_what_it_is_worth_in_the_program(advice: Advice, key: str, changes: dict[str, Any]) -> None:
    found = {each.key: each for each in advice.suggestions}
    saved = advice.before.counted_bytes - peak(**changes)
    if key in found:
        assert found[key].saved_bytes == saved
        assert saved >= 0
    else:
        refused = next(each for each in advice.refused if each.key == key)
        if refused.most_bytes is not None:
            assert saved <= refused.most_bytes < advice.before.counted_bytes // 100
            assert refused.reason.startswith(f"frees at most {refused.most_bytes:,} bytes of the peak")
        else:
            least = "frees nothing here: the peak is elsewhere"
            assert refused.reason == (least if saved == 0 else f"takes {-saved:,} bytes more")


def test_what_is_suggested(advice: Advice) -> None:
    by_key = {each.key: each for each in advice.suggestions}
    assert by_key["bf16-autocast"].saved_bytes > 0
    assert by_key["checkpoint-most"].saved_bytes > 0
    most = by_key["checkpoint-most"]
    called = next(line for line in most.code.splitlines() if line.startswith("plan = "))
    assert called.endswith(", target='rtx4090', steps=2)")
    made: Plan = eval(called.removeprefix("plan = "), {"fxmem": fxmem, "train": train})
    assert made.after.counted_bytes < 1.0001 * most.peak.counted_bytes
    assert advice.before.counted_bytes == peak()


def test_changes_together_keep_a_budget(advice: Advice) -> None:
    least = min(each.peak.counted_bytes for each in advice.suggestions)
    more = fxmem.advise(train, 0.98 * least / advice.before.counted_bytes, target="rtx4090", steps=2)
    together: Suggestion | None = more.together
    assert together is not None
    assert together.key == "bf16-autocast+checkpoint"
    assert together.peak.counted_bytes < least
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    assert before == (False, torch.float16)


def test_programs_that_need_no_advice() -> None:
    def half() -> None:
        model = nn.Linear(64, 64).cuda().bfloat16()
        model(torch.zeros(512, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()

    def look() -> None:
        with torch.no_grad():
            nn.Sequential(nn.Linear(64, 4096), nn.ReLU()).cuda()(torch.zeros(4096, 64, device="cuda"))

    found = {each.key: each for each in fxmem.advise(look, target="rtx4090").suggestions}
    result, workspace = 4096 * 4096 * 4, 2 << 20  # of the product before it, which may be what is left
    assert result - workspace <= found["inplace"].saved_bytes <= result
    assert 'for path in """1"""' in found["inplace"].code
    refused = {each.key: each.reason for each in fxmem.advise(half, target="rtx4090", plans=False).refused}
    assert refused["bf16-autocast"] == "the program computes in half precision already"
    assert refused["inplace"] == "the program has no activation modules that could run in place and do not"

    def fails() -> None:
        raise ValueError("no data")

    with pytest.raises(AnalysisError, match="the program raised ValueError: no data"):
        fxmem.advise(fails, target="rtx4090")
    with pytest.raises(UsageError, match="expected no steps: the analysis has its settings"):
        fxmem.advise(fxmem.analyze(nn.Linear(2, 2), torch.zeros(1, 2), target="cpu"), steps=3)


OWN_LOSS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))

    def forward(self, x):
        return torch.nn.functional.mse_loss(self.layers(x), x)

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    x = torch.randn(4096, 256, device="cuda")
    loss = net(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_that_returns_its_own_loss(tmp_path: Path) -> None:
    script = tmp_path / "own_loss.py"
    script.write_text(OWN_LOSS)
    parser = Parser().add_arguments(advise_command.ARGUMENTS)
    words = ("--target", "100MB", "--no-plans", "--quiet", "--run", str(script))
    assert "1. bfloat16 autocast" in advise_command.run(parser.parse_args(words))[1]


def test_advice_on_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "own.py"
    script.write_text(f"{SCRIPT}\ntrain()\n")
    parser = Parser().add_arguments(advise_command.ARGUMENTS)
    words = ("--target", "rtx4090", "--steps", "2", "--no-plans", "--quiet", "--run", str(script))
    code, text = advise_command.run(parser.parse_args(words))
    assert code == 0
    assert "bfloat16 autocast" in text
    assert f"{peak():,} bytes" in text
    with pytest.raises(UsageError, match="expected --run without --precision"):
        advise_command.run(parser.parse_args(("--precision", "bf16", *words)))


INFERS = """
import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.Linear(1024, 4096))PLACED.eval()
kept = []
with torch.no_grad():
    for _ in range(3):
        x = torch.randn(8, 3, 32, 32, device="cuda")
        kept.append(net(x).argmax(1))
"""


def test_bfloat16_for_a_program_that_only_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is worth what the program takes that has its lines; one in half precision is told so."""

    def run(program: str) -> Report:
        Path("other.py").write_text(program)
        return ProgramCommand(Launch("other.py", ()), catalogue.target("rtx4090"), 1).run()

    def advise(program: str) -> Advice:
        Path("sample.py").write_text(program)
        command = "advise --quiet --target rtx4090 --json advice.json --run sample.py"
        assert main(command.split()) == 0
        return Advice.model_validate_json(Path("advice.json").read_text())

    monkeypatch.chdir(tmp_path)
    program = INFERS.replace("PLACED", ".cuda()")
    call, around = "        kept", '        with torch.autocast("cuda", dtype=torch.bfloat16):\n            kept'
    within = program.replace(call, around)
    advice = advise(program)
    found = {each.key: each for each in advice.suggestions}
    weights = found["bf16-weights"]
    assert weights.effect == "rounding"
    assert weights.code.startswith("net = nn.Sequential(")
    cast = within.replace(".cuda()", ".to(torch.bfloat16).cuda()")
    assert weights.peak.requested_bytes == run(cast).peak.requested_bytes
    assert (
        weights.saved_bytes
        == advice.before.counted_bytes - weights.peak.counted_bytes
        > advice.before.counted_bytes // 3
    )
    (refused,) = [each for each in advice.refused if each.key == "bf16-autocast"]  # which keeps both weights
    more = run(within).peak.counted_bytes - advice.before.counted_bytes
    assert refused.reason == f"takes {more:,} bytes more"
    half = advise(program.replace(".cuda()", ".bfloat16().cuda()").replace('"cuda")', '"cuda", dtype=torch.bfloat16)'))
    reasons = {each.key: each.reason for each in half.refused}
    assert reasons["bf16-autocast"] == reasons["bf16-weights"] == "the program computes in half precision already"
