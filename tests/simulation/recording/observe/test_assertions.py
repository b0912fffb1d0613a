"""A program's own checks are taken to hold; what decides about anything else is still asked of data, and refused."""

import importlib.util
import itertools

import pytest
import torch

from fxmem import analyze
from fxmem.errors import AnalysisError

_numbers = itertools.count()

MODEL = """
import torch

class Checked(torch.nn.Module):
    def __init__(self, strict=True):
        super().__init__()
        self.linear, self.strict = torch.nn.Linear(8, 8), strict

    def forward(self, x):
        x = self.linear(x)
{lines}
        return self.linear(x)
"""


def checked(folder, text):
    """A model whose forward contains those lines, in a file of its own: pytest rewrites what a test's file asserts."""
    path = folder / f"checked_{next(_numbers)}.py"
    path.write_text(MODEL.format(lines="\n".join(f"        {line}" for line in text.splitlines())))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Checked()


HOLD = (
    "if (x < 0).any(): raise ValueError('negative')",
    "if not (x >= 0).all():\n    low = x.min()\n    raise ValueError(f'{low} is negative')",
    "if x.min() < 0: raise ValueError",
    "if (x < 0).any().item(): raise ValueError",
    "if bool((x < 0).any()): raise ValueError",
    "if self.strict and (x < 0).any(): raise ValueError",
    "if (x < 0).any() or (x > 1).any(): raise ValueError",
    "if not ((x >= 0).all() and (x <= 1).all()): raise ValueError",
    "if (x >= 0).all():\n    x = x.sqrt()\nelse:\n    raise ValueError",
    "if (\n    (x < 0)\n    .any()\n):\n    raise ValueError",
    "if (x < 0).any():\n    torch._assert(False, f'{x} is negative')",
    "assert (x >= 0).all()",
    "assert not (x < 0).any(), f'{x} is negative'",
    "assert self.strict and (x >= 0).all()",
    "torch._assert((x >= 0).all(), 'negative')",
)


@pytest.mark.parametrize("text", HOLD)
@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_what_a_program_checks_is_taken_to_hold_and_that_is_said(tmp_path, text, target):
    profile = analyze(checked(tmp_path, text), torch.zeros(2, 8), target=target).profile
    assert [node.name for node in profile.nodes if node.op == "call_module"] == ["linear", "linear_1"]
    assert any("assert, if …: raise" in assumption.text for assumption in profile.assumptions)


DECIDE = (
    "if (x < 0).any(): x = x.abs()",
    "if (x < 0).any():\n    x = x.abs()\nelif self.strict:\n    raise ValueError",
    "y = x.abs() if (x < 0).any() else x",
    "while (x < 0).any(): raise ValueError",
    "low = (x < 0).any()\nlow = bool(low)\nif low: raise ValueError",
    "if x.min().item() < 0: raise ValueError",
)


@pytest.mark.parametrize("text", DECIDE)
def test_what_decides_is_refused(tmp_path, text):
    with pytest.raises(AnalysisError, match="do not depend on the data"):
        analyze(checked(tmp_path, text), torch.zeros(2, 8), target="cpu")


def test_a_step_without_checks_assumes_nothing_of_them(tmp_path):
    profile = analyze(checked(tmp_path, "pass"), torch.zeros(2, 8), target="cpu").profile
    assert not [assumption for assumption in profile.assumptions if "checks" in assumption.text]


def test_a_check_whose_source_is_gone_is_refused(tmp_path):
    model = checked(tmp_path, "assert (x >= 0).all()")
    for path in tmp_path.glob("*.py"):
        path.unlink()
    with pytest.raises(AnalysisError, match="do not depend on the data"):
        analyze(model, torch.zeros(2, 8), target="cpu")


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_checks_in_torch_s_own_functions_hold(target):
    class Gaussian(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.spread = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return torch.nn.functional.gaussian_nll_loss(self.mean(x), x, self.spread(x).exp())

    profile = analyze(Gaussian(), torch.zeros(2, 8), target=target).profile
    assert [assumption for assumption in profile.assumptions if "checks" in assumption.text]
