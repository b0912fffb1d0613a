"""What is said of values that are made up: where they are read, which error may come of them, and real ones instead."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.simulation.program import Launch, RunSettings, find_unread, launch, read_given


def read(body: Callable[[nn.Module, torch.Tensor], object]) -> list[tuple[str, str]]:
    """What a program is told that reads its model's results: kind and what."""
    with fxmem.record("rtx3080") as recorded:
        body(nn.Linear(64, 5).cuda(), torch.randn(32, 64).cuda())
    return [(each.kind, each.what) for each in recorded.made_up]


def test_a_copy_on_the_host_is_listed_where_it_is_read() -> None:
    assert read(lambda net, x: net(x).cpu() + 1) == []
    assert read(lambda net, x: str(net(x).cpu())) == []
    assert read(lambda net, x: (net(x).cpu() + 1).mean().item()) == [("read", "float32")]
    assert read(lambda net, x: net(x).cpu()[0].tolist()) == [("read", "tolist")]
    assert read(lambda net, x: net(x).detach().cpu().numpy()) == [("read", "numpy")]
    assert read(lambda net, x: torch.zeros(32, 5).copy_(net(x).detach()).numpy()) == [("read", "numpy")]
    assert read(lambda net, x: bool((net(x).cpu() > 9).any())) == [("decided", "truth of a tensor")]
    assert read(lambda net, x: net(x).cpu().sum().item() < 2) == [("read", "float32"), ("decided", "lt 2")]
    labels = torch.arange(32)
    assert read(lambda net, x: labels.cuda().cpu().tolist()) == []
    assert read(lambda net, x: labels.float().mean().item()) == []


def check_close(net: nn.Module, x: torch.Tensor) -> None:
    torch.testing.assert_close(net(x), x @ net.weight.t())
    assert torch.allclose(net(x), net(x))
    assert torch.equal(net(x), net(x)), "the same"
    if not torch.allclose(net(x), net(x)):
        raise ValueError("not the same")


def check_numbers(net: nn.Module, x: torch.Tensor) -> None:
    error = (net(x) - net(x)).abs().max().item()
    assert error < 1e-6
    if error > 1e-6:
        raise ValueError(error)
    assert (net(x).argmax(-1) == 3).float().mean().item() > 0.7, "accuracy"


def fail_with(text: str) -> None:
    raise ValueError(text)


def is_positive(x: torch.Tensor) -> bool:
    return x.min().item() > 0


def is_increasing(times: torch.Tensor) -> bool:
    return all(a < b for a, b in itertools.pairwise(times))


def is_valid(x: torch.Tensor) -> bool:
    if (x < 0).any():  # noqa: SIM103
        return False
    return True


def check_elsewhere(net: nn.Module, x: torch.Tensor) -> None:
    """By a function that raises, and by the answer of one that asks."""
    y = net(x)
    if y.min() < 0:
        fail_with("negative")
    if not is_positive(y):
        raise ValueError
    assert is_increasing(y[:, 0])
    assert is_valid(y)
    if not is_valid(y):
        sys.exit(3)
    assert not is_positive(y), "asked for the opposite"


@pytest.mark.parametrize("check", [check_close, check_numbers, check_elsewhere])
def test_a_check_of_made_up_values_holds(check: Callable[[nn.Module, torch.Tensor], None]) -> None:
    read(check)


def test_a_number_is_the_same_each_time_and_equals_itself() -> None:
    def ask(net: nn.Module, x: torch.Tensor) -> None:
        y = net(x)
        loss, other = y.mean(), y.mean()
        numbers = [loss.item(), float(loss), loss.tolist(), loss.item()]
        comparisons = [loss == loss, loss <= loss, (y == y).all(), ~(y != y).any(), loss.item() == loss.item()]
        found.extend([len(set(numbers)) == 1, *map(bool, comparisons), other.item() != numbers[0]])
        other = loss.detach().add_(1)
        found.append(other.item() != loss.item())
        with torch.inference_mode():
            mean = net(x).mean()
            found.append(mean.item() == mean.item())

    found: list[bool] = []
    read(ask)
    assert found == [True] * 9


def test_a_decision_that_is_no_check_is_by_the_number() -> None:
    def decide(net: nn.Module, x: torch.Tensor) -> None:
        number = net(x).mean().item()
        assert number == 1
        assert not torch.allclose(net(x), net(x)) or number < 0.5
        went = "down" if number < 0.5 else "up"
        assert went == "up"
        str(is_positive(net(x)))

    assert {("decided", "lt 0.5"), ("decided", "gt 0")} <= {*read(decide)}


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.item()], ids=["tensor", "number"])
def test_a_loop_that_waits_for_a_small_error_ends(form: Callable[[torch.Tensor], Any]) -> None:
    rounds = []

    def halve(net: nn.Module, x: torch.Tensor) -> None:
        step, count = 1.0, 0
        while True:
            count += 1
            accepted = form((net(x) * step).abs().mean()) <= 1e-6
            if accepted:
                break
            step /= 2
        rounds.append(count)

    def iterate(net: nn.Module, x: torch.Tensor) -> None:
        error, count = net(x).mean(), 0
        while form(error) > 1e-6:
            error, count = net(x).mean(), count + 1
        rounds.append(count)

    def search(net: nn.Module, x: torch.Tensor) -> None:
        tries = iter(range(150))
        for _ in tries:  # ends by itself
            if form(net(x).mean()) <= 1e-6:
                break
        rounds.append(len(list(tries)))

    made = [set(read(body)) - {("read", "float32")} for body in (halve, iterate, search)]
    assert rounds == [101, 100, 0]
    ends = ", so that the loop ends"
    halved, went_on = ("decided", "le 1e-06"), ("decided", "gt 1e-06")
    assert made == [{halved, ("decided", halved[1] + ends)}, {went_on, ("decided", went_on[1] + ends)}, {halved}]


def test_a_truth_is_that_of_the_number_that_is_compared() -> None:
    def solve(net: nn.Module, x: torch.Tensor) -> None:
        t, step = 0.0, 0.25
        while t < 1:
            error_ratio = net(x).square().mean().sqrt()
            if error_ratio <= 1:
                t += step
            else:
                step /= 2

    assert read(solve) == [("decided", "le 1")]

    def compare(net: nn.Module, x: torch.Tensor) -> None:
        for tensor in (net(x).mean(), net(x).sigmoid().mean(), (net(x) > 0).sum(), net(x).softmax(-1)[0, 0]):
            for other in (0, 0.2, 0.9, 1, 160, math.inf):
                number = float(tensor.item())
                assert bool(tensor < other) in ((number - 2e-3) < other, number < other), (number, other)
                assert bool(tensor >= other) in ((number - 2e-3) >= other, number >= other), (number, other)

    read(compare)


_PROGRAM = """
import itertools
import math
import sys
import sys

import torch

net = torch.nn.Linear(64, 5).cuda()
x = torch.randn(32, 64).cuda()
p = net(x)
what = sys.argv[1]
if what == "rows":
    kept = p[p[:, 0] > 0]
    if len(kept) > 16:
        raise ValueError(f"{len(kept)} rows")
if what == "index":
    count = int((p > 0).sum())
    "abc"[count * 10]
if what == "array":
    v = p.detach().cpu().numpy()
    assert v.std() > 3
if what == "root":
    math.sqrt(-p.mean().item())
if what == "key":
    share = (p.argmax(-1) == 3).sum().item() / 32
    best = share if share < 1.5 else 1.5
    {0.5: 1}[best]
if what == "copy":
    q = p.detach().cpu()
    torch.multinomial(q - 9, 1)
if what == "own":
    print(p.mean().item())
    raise KeyError("own")
if what == "name":
    p.mean().item().real_part
if what == "folder":

    def score():
        return p.mean(0).tolist()

    score()
    torch.save(net.state_dict(), "missing/net.pt")
"""


def run(folder: Path, what: str, *values: str) -> tuple[str, list[str]]:
    """How the program ended, and at which lines it was told what the user said."""
    script = folder / "train.py"
    script.write_text(_PROGRAM)
    given = read_given(values)
    settings = RunSettings(until="end", given=given)
    recorded = launch(Launch(str(script), (what,)), catalogue.target("rtx3080"), settings).recorded
    return recorded.ending, list(find_unread(given, recorded.program))


def line_of(text: str) -> int:
    return 1 + next(number for number, line in enumerate(_PROGRAM.splitlines()) if text in line)


@pytest.mark.parametrize(
    ("what", "error", "made", "value"),
    [
        ("rows", "ValueError: 32 rows", "kept = p[", "mask.npy"),
        ("index", "IndexError: string index out of range", "count = int", "0"),
        ("array", "AssertionError", "v = p", "many.pt"),
        ("root", "ValueError: ", "math.sqrt", "-4"),
        ("key", "KeyError: 1.0", "share = ", "16"),
        ("copy", "RuntimeError: ", "q = p", "10"),
    ],
)
def test_an_error_of_a_made_up_value_says_where_it_was_made_up_and_a_given_one_helps(
    what: str, error: str, made: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("mask.npy", np.arange(32) % 3 == 0)
    torch.save(torch.arange(160.0), "many.pt")
    ending, _ = run(tmp_path, what)
    place = f"train.py:{line_of(made)}"
    assert ending.startswith(f"raised {error}")
    assert "; perhaps by a made-up value: " in ending
    assert f"{place}=VALUE gives a real one" in ending
    assert run(tmp_path, what, f"{place}={value}") == ("ran to its end", [])


@pytest.mark.parametrize("what", ["own", "name", "folder"])
def test_an_error_of_the_programs_own_is_not_put_down_to_values(what: str, tmp_path: Path) -> None:
    assert "made-up" not in run(tmp_path, what)[0]


def test_a_value_that_nothing_read_is_named(tmp_path: Path) -> None:
    assert run(tmp_path, "none", "train.py:1=3")[1] == ["train.py:1"]
    place = f"train.py:{line_of('v = p')}"
    ending, unread = run(tmp_path, "array", f"{place}=[1, 2, 3]")  # not as many as there are
    assert ending.startswith("raised AssertionError")
    assert unread == [place]


@pytest.mark.parametrize(
    "word", ["train.py=3", "train.py:3", "train.py:3=", "train.py:3=x", "train.py:3=no.npy", "train.py:3=[]"]
)
def test_a_value_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="expected --value FILE:LINE=VALUE") as refused:
        read_given([word])
    assert "\n" not in str(refused.value)


def test_numbers_lists_and_truths_are_values() -> None:
    found = read_given(["a.py:1=0.5", "./b/a.py:2=[[1, 2], [3, 4]]", "a.py:3=true", "a.py:4=NaN"])
    assert found["a.py:1"].item() == 0.5
    assert found["b/a.py:2"].tolist() == [[1, 2], [3, 4]]
    assert found["a.py:3"].dtype is torch.bool
    assert math.isnan(found["a.py:4"].item())
