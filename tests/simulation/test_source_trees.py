"""What code says of what it keeps: bounds, and that there is none."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator

import pytest

from fxmem.simulation.code.source_trees import find_makings, find_number
from fxmem.simulation.code.source_uses import Named, find_limits, is_unbounded, read_sources

Write = Callable[..., list[str]]


@pytest.fixture(name="write")
def write_files() -> Iterator[Write]:
    """Makes files of these codes, `0.py` and so on, which are read and never there."""
    names: list[str] = []

    def write(*codes: str) -> list[str]:
        for number, code in enumerate(codes):
            names.append(f"{number}.py")
            linecache.cache[names[-1]] = (len(code), None, code.splitlines(keepends=True), names[-1])
        return names

    yield write
    for name in names:
        del linecache.cache[name]


KEPT = {Named("0.py", "", "kept")}


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
        "for x in xs:\n    if kept is None:\n        kept = 0\n    kept += x",
        "kept.append(x)\ndef other():\n    kept = []\n    kept.clear()",
        "kept.append(x)\nclass Other:\n    def __init__(self):\n        self.kept = []\n        self.kept.clear()",
    ],
)
def test_code_that_only_adds_has_no_bound(code: str, write: Write) -> None:
    assert is_unbounded(KEPT, read_sources(write(code)), is_graph="tanh" in code)


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
        "kept = f(kept)\nif at:\n    kept = kept.detach()",
        "for x in xs:\n    kept += x\n    if at:\n        kept = 0",
        "kept = []\nkept.append(x)\ndef flush():\n    global kept\n    kept = []",
        "kept = x",
        "kept.append(x)\nkept = f(kept)",
        "kept.append(x)\nkept = sorted(kept)[:3]",
        "kept.append(x)\nkept = [each for each in kept if each.age < 3]",
        "kept.append(x)\nother = kept\nother.clear()",
        "kept.append(x)\nfor each in kept.values():\n    each.clear()",
        "kept.append(x)\nclass Own(list):\n    def append(self, x):\n        del self[0]",
        "def hook(x):\n    if count > 3:\n        return\n    kept.append(x)",
        "is_on = True\nif is_on:\n    kept.append(x)\nif at:\n    is_on = False",
        "kept.put(x)\nkept.get()",
        "kept -= {x}",
        "",
    ],
)
def test_what_bounds_it_or_may_is_seen(code: str, write: Write) -> None:
    assert not is_unbounded(KEPT, read_sources(write(code)))


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
def test_limits_are_found_by_the_name_of_what_they_bound(
    code: str, expected: tuple[int | None, int], write: Write
) -> None:
    scope = {"count": 3, "most": 7}
    found = [
        (None if each.measure is None else find_number(each.measure, scope), find_number(each.most, scope))
        for each in find_limits(KEPT, ["self"], read_sources(write(code)))
    ]
    assert expected in found


@pytest.mark.parametrize(
    "code", ["if len(kept) > 3: print(kept[-1])", "assert len(kept) == 3", "ready = len(kept) > 3"]
)
def test_a_comparison_that_ends_nothing_is_no_limit(code: str, write: Write) -> None:
    files = write(f"kept.append(x)\n{code}")
    assert not find_limits(KEPT, (), read_sources(files))
    assert is_unbounded(KEPT, read_sources(files)) == ("print" in code)  # nor is it proved to go on


BOUNDED = """
class Pool:
    def __init__(self):
        self.kept = []

    def push(self, x):
        self.kept.append(x)
        if len(self.kept) > 9:
            self.kept.pop(0)

kept = []

def add(x):
    kept.append(x)
    if len(kept) > 7:
        kept.pop(0)
"""


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("kept = []\nkept.append(x)", Named("0.py", "", "kept")),
        ("def train():\n    kept = []\n    kept.append(x)", Named("0.py", "train", "kept")),
        (
            "class Net:\n    def __init__(self):\n        self.kept = []\n"
            "    def add(self, x):\n        self.kept += [x]",
            Named("0.py", "Net", "kept"),
        ),
    ],
)
def test_a_bound_of_another_file_bounds_its_own(code: str, named: Named, write: Write) -> None:
    files = write(code, BOUNDED)
    assert is_unbounded({named}, read_sources(files))
    assert not find_limits({named}, ["net"], read_sources(files))
    for own, most in ((Named("1.py", "Pool", "kept"), 9), (Named("1.py", "", "kept"), 7)):
        assert {find_number(each.most, {}) for each in find_limits({own}, ["pool"], read_sources(files))} == {most}
        assert not is_unbounded({own}, read_sources(files))


@pytest.mark.parametrize(
    ("code", "other"),
    [
        ("kept = []\nkept.append(x)\ntrim(kept)", "def trim(values):\n    values.pop(0)"),
        ("kept = []\nkept.append(x)\ntrim(by=kept)", "def trim(by):\n    cut(by)\ndef cut(values):\n    del values[0]"),
        (
            "kept = []\nkept.append(x)\nPool(kept)",
            "class Pool:\n    def __init__(self, values):\n        self.of = values\n"
            "    def cut(self):\n        self.of.clear()",
        ),
        ("kept = []\nkept.append(x)", "from train import kept\ndef cut():\n    kept.clear()"),
    ],
)
def test_another_file_that_is_given_it_may_empty_it(code: str, other: str, write: Write) -> None:
    files = write(code, other)
    assert not is_unbounded(KEPT, read_sources(files))
    assert is_unbounded(KEPT, read_sources(files[:1]))


def test_a_variable_of_another_file_is_none_of_a_function_here(write: Write) -> None:
    kept = "kept = []\nkept.append(x)"
    anew = "def other(each):\n    if each:\n        kept = frozenset(each)"
    cut = "def other(each):\n    kept = find(each)\n    kept.clear()"
    files = write(
        kept, "def train():\n    " + kept.replace("\n", "\n    "), anew, cut, cut.replace("kept", "train.kept")
    )
    in_module, in_function = {Named("0.py", "", "kept")}, {Named("1.py", "train", "kept")}
    assert is_unbounded(in_module, read_sources([files[0], files[2]]))  # its variable is bound anew, and no more
    assert not is_unbounded(in_module, read_sources([files[0], files[3]]))  # which may have found it there
    assert is_unbounded(in_function, read_sources([files[1], files[3]]))
    assert not is_unbounded(in_function, read_sources([files[1], files[4]]))  # it may have been put there
    own = {Named("2.py", "other", "kept")}
    assert not is_unbounded(own, read_sources([files[2]]))


def test_where_a_value_is_made() -> None:
    code = "kept = []\ndef train(self):\n    self.kept = list()\n    kept = self.kept\n    kept = kept + [1]\n"
    found = [
        (each.line, each.function, each.is_attribute, each.is_new) for each in find_makings("kept", ast.parse(code))
    ]
    assert found == [(1, "", False, True), (3, "train", True, True)]
    code = "for x in xs:\n    kept = []\n    if x:\n        kept = []"
    assert [each.is_always for each in find_makings("kept", ast.parse(code))] == [True, False]
