"""What code says of what it keeps: bounds, and that there is none."""

from __future__ import annotations

import ast

import pytest

from fxmem.simulation.source_trees import find_limits, find_makings, find_number, is_unbounded


@pytest.mark.parametrize(
    "code",
    [
        "kept.append(x)",
        "self.kept.append(x)",
        "kept += [x]",
        "kept = torch.cat([kept, x])",
        "kept[0] = torch.tanh(kept[0])",
        "kept[len(kept)] = x",
        "kept[name].append(x)",
        "kept.setdefault(name, []).append(x)",
        "if step % 10 == 0:\n    kept.append(x)",
        "if mode == 'train':\n    kept.append(x)",
        "kept.append(x)\nprint(len(kept), torch.stack(kept))",
        "kept.append(x)\nif len(other) > 3:\n    other.pop()",
    ],
)
def test_code_that_only_adds_has_no_bound(code: str) -> None:
    assert is_unbounded("kept", [ast.parse(code)])


@pytest.mark.parametrize(
    "code",
    [
        "kept.append(x)\nif len(kept) > 3:\n    trim()",
        "kept.append(x)\nwhile 3 < len(self.kept):\n    trim()",
        "if count < most:\n    kept.append(x)",
        "if count < most:\n    count += 1\n    kept.append(x)\nelse:\n    kept[0] = x",
        "kept.append(x)\ndel kept[:-3]",
        "kept.append(x)\nkept = kept[-3:]",
        "kept.append(x)\nkept.clear()",
        "kept.append(x)\nheapq.heappop(kept)",
        "kept.append(x)\ndef trim(values):\n    values.pop(0)\ntrim(kept)",
        "state = f(state)\nstate = state.detach()\nkept[at] = x",
        "kept[step] = x",  # steps may come again
        "kept = x",
        "",
    ],
)
def test_what_bounds_it_or_may_is_seen(code: str) -> None:
    assert not is_unbounded("kept", [ast.parse(code)])


def test_a_chain_that_is_cut_now_and_then_is_no_proof() -> None:
    assert not is_unbounded("state", [ast.parse("state = f(state)\nif at:\n    state = state.detach()")])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if len(self.kept) < self.most: self.kept.append(x)", (None, 7)),
        ("while len(self.kept) > self.most: self.kept.pop(0)", (None, 7)),
        ("if len(kept) >= most: return", (None, 7)),
        ("if self.count < self.most:\n    self.kept.append(x)", (3, 7)),
        ("if self.count >= 2 * 8:\n    pass\nelif ready and self.count < 2 * 8:\n    kept.append(x)", (3, 16)),
    ],
)
def test_limits_are_found_by_the_name_of_what_they_bound(code: str, expected: tuple[int | None, int]) -> None:
    scope = {"count": 3, "most": 7}
    found = [
        (None if each.measure is None else find_number(each.measure, scope), find_number(each.most, scope))
        for each in find_limits(ast.parse(code))["kept"]
    ]
    assert expected in found


@pytest.mark.parametrize(
    "code", ["if len(kept) > 3: print(kept[-1])", "assert len(kept) == 3", "ready = len(kept) > 3"]
)
def test_a_comparison_that_ends_nothing_is_no_limit(code: str) -> None:
    assert "kept" not in find_limits(ast.parse(code))
    assert not is_unbounded("kept", [ast.parse(f"kept.append(x)\n{code}")])  # nor is it proved to go on


def test_where_a_value_is_made() -> None:
    code = "kept = []\ndef train(self):\n    self.kept = list()\n    kept = self.kept\n    kept = kept + [1]\n"
    found = [
        (each.line, each.function, each.is_attribute, each.is_new) for each in find_makings("kept", ast.parse(code))
    ]
    assert found == [(1, "", False, True), (3, "train", True, True)]
