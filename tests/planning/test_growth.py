"""Work grows with the step, not with its square: bytecodes are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxmem
from benchmarks.speed import growth_cases, long_profiles
from fxmem.planning import tuning
from fxmem.planning.regions.candidates import Span, graph_cuts, limit_spans
from fxmem.planning.regions.cost_tables import most_above, sum_alive
from fxmem.records.profile import Op, Phase
from tests.profiles import make_profile

HOME = str(Path(fxmem.__file__).parent)
EVENTS = 500
FACTOR = 4
COVERED = ("plan", "export: memory-viz", "allocator: replay")
"""Left out: the planners, whose work is cubic in the cuts, of which there is a fixed number at most; and what another
step does as well."""
SLACK = 1.5
"""For N log N, and for the allocator's loop, which may take a step more to repeat itself. What is quadratic takes 4."""


def bytecodes(work: Callable[[], Any]) -> int:
    """How many of fxmem's own were run."""
    count = 0

    def inside(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return inside

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = (
        True  # CPython 3.12 tells of opcodes from the first settrace on that comes after a frame asked for them
    )
    sys.settrace(entered)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.truth
def test_work_on_records_is_linear_in_events(tmp_path: Path) -> None:
    counted: dict[str, list[int]] = {}
    for events in (EVENTS, FACTOR * EVENTS):
        report = long_profiles.long_report(events, "mirror")
        for name, work in growth_cases.record_steps(report, tmp_path / "report.json"):
            if not name.startswith(COVERED):
                work()  # what is done once is done
                counted.setdefault(name, []).append(bytecodes(work))
    assert len(counted) > 20
    assert not {name: (few, many) for name, (few, many) in counted.items() if many > SLACK * FACTOR * few + 5000}


# --- what bounds the planners -----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 99), st.integers(0, 3)), max_size=20),
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 3)), max_size=30, unique=True),
)
def test_the_sweep_is_what_adding_up_gives(
    made: list[tuple[int, int, int, int]], visited: list[tuple[int, int]]
) -> None:
    columns = np.asarray(
        [(birth, birth + length, size, unit) for birth, length, size, unit in made], dtype=np.int64
    ).reshape(-1, 4)
    births, deaths, sizes, units = columns.T
    at, of_unit = np.asarray(sorted(visited), dtype=np.int64).reshape(-1, 2).T
    others = np.arange(40, dtype=np.float64) % 7
    table = most_above(at, of_unit, births, deaths, sizes.astype(float), units, others, 4)
    for unit in range(4):
        for cut in range(5):
            sums = [
                others[tick]
                + sum(size for birth, death, size, maker in columns.tolist() if birth <= tick < death and maker >= cut)
                for tick, of in visited
                if of == unit
            ]
            assert table[unit, cut] == max(sums, default=0)
    live = sum_alive(births, deaths, sizes.astype(float), 43)
    assert live.tolist() == [
        sum(size for birth, death, size, _ in columns.tolist() if birth <= tick < death) for tick in range(43)
    ]


def test_cuts_of_a_deep_graph_lie_all_along_it() -> None:
    count = 10 * tuning.MOST_CUTS
    ops = [
        Op(name="aten.mm.default", node=node, phase=Phase.FORWARD, begin=0, end=0, flops=9 if node == 1 else 5)
        for node in range(count)
    ]
    cuts = graph_cuts(make_profile(ticks=1, ops=ops))
    assert len(cuts) == tuning.MOST_CUTS
    assert cuts[:3] == [1, 2, 12]  # the heavier one, then every tenth, about
    assert cuts[-1] > count - 20


def test_modules_are_left_out_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_MODULE_CUTS", 16)
    outer = {(10 * i, 10 * i + 10): Span(10 * i, 10 * i + 10, (f"{i}",), None) for i in range(6)}
    inner = {(i, i + 1): Span(i, i + 1, (f"{i // 10}.{i % 10}",), None) for i in range(60) if i % 10 in (3, 7)}
    kept = limit_spans({**inner, **outer})
    assert outer.keys() <= kept.keys()  # seven cuts
    assert [nodes for nodes in kept if nodes in inner] == [(3, 4), (17, 18), (33, 34), (47, 48)]
    assert limit_spans(outer) == outer
