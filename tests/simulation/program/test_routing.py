"""How many tokens experts get: a rule, from which all follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.simulation.asked.routing import Rule, read_rule, share_out
from fxmem.simulation.program import Launch, RunSettings, launch


@pytest.mark.parametrize(
    ("weights", "whole", "most", "parts"),
    [
        ([1, 1, 1], 9, 9, [3, 3, 3]),
        ([1, 1, 1, 1], 6, 6, [1, 2, 1, 2]),  # of any first few the sum is right to one
        ([7, 1, 0, 0], 16, 8, [8, 8, 0, 0]),
        ([1, 0, 0, 0], 16, 8, [8, 2, 3, 3]),  # those without weight take what is left
        ([3, 1, 1, 1], 12, 4, [4, 2, 3, 3]),
    ],
)
def test_tokens_are_shared_out_by_weights_and_room(weights: list[int], whole: int, most: int, parts: list[int]) -> None:
    assert share_out(weights, whole, most) == parts


def test_rules_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"layers.0": [3, 1], "": [1, 1]}))
    assert read_rule(str(file)).tokens == (("layers.0", (3, 1)), ("", (1, 1)))
    assert read_rule("worst") == Rule("worst")
    for wrong, said in (
        ("[1, -1]", "no list of whole"),
        ("[0, 0]", "no list"),
        ("{", "JSON"),
        ('{"a": 3}', "of a are"),
    ):
        file.write_text(wrong)
        with pytest.raises(UsageError, match=said):
            read_rule(str(file))
    with pytest.raises(UsageError, match="expected --routing balanced, worst, or a JSON file"):
        read_rule(str(tmp_path / "none.json"))


_PROGRAM = """
import sys
import torch

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(16, 4, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        places = self.gate(x).softmax(-1).topk(2, dim=-1).indices
        mask = torch.nn.functional.one_hot(places, num_classes=4)
        out = torch.zeros_like(x)
        self.got = [0] * 4
        for number in mask.sum((0, 1)).nonzero().flatten():
            rows = (places == number).any(-1).nonzero().flatten()
            self.got[number] = len(rows)
            out = out.index_add(0, rows, self.experts[number](x[rows]))
        return out

model = torch.nn.Sequential(Experts(), Experts()).cuda()
optimizer = torch.optim.SGD(model.parameters())
x = torch.randn(64, 16, device="cuda")
model(x).sum().backward()
optimizer.step()
assert str([each.got for each in model]) == sys.argv[1], [each.got for each in model]
assert len((x[0] > 0).topk(3).indices) == 3  # of no router
"""


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        (Rule(), [[32] * 4] * 2),
        (Rule("worst"), [[64, 64, 0, 0]] * 2),
        (Rule("f.json", (("", (2, 1, 1, 0)),)), [[64, 32, 32, 0]] * 2),
        (Rule("f.json", (("1", (9, 1, 1, 1)),)), [[32] * 4, [64, 20, 22, 22]]),
    ],
)
def test_experts_get_tokens_by_the_rule(rule: Rule, got: list[list[int]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    words = Launch(str(tmp_path / "train.py"), (str(got),))
    recorded = launch(words, catalogue.target("h100"), RunSettings(until="end", rule=rule)).recorded
    assert recorded.ending == "ran to its end"
    said = [each.text for each in recorded.profile.assumptions if "--routing" in each.text]
    assert len(said) == 1
    assert said[0].endswith("of 4 with 2 for each token, on all ranks alike (fxmem run --routing)")
    assert not recorded.made_up


def test_a_file_is_of_as_many_experts_as_there_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    rule = Rule("f.json", (("", (1, 2)),))
    with pytest.raises(UsageError, match=r"expected the tokens of 4 experts in f\.json, got 2"):
        launch(Launch(str(tmp_path / "train.py"), ("",)), catalogue.target("h100"), RunSettings(rule=rule))
