"""A plan as text and as code, from records alone."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fxmem.records import schemas
from fxmem.records.plan import CurvePoint, Edit, Plan, Region
from fxmem.records.profile import InputTensor, Kind, Peak, Phase, SourceLine
from fxmem.records.units import Application
from fxmem.show.text.plan import table
from tests import ROOT
from tests.profiles import TINY_CARD, TRAINING

GIB = 1 << 30
GOLDEN = ROOT / "tests" / "golden"


def peak(gib: float, **fields: Any) -> Peak:
    nbytes = int(gib * GIB)
    return Peak(
        **{
            "requested_bytes": nbytes,
            "allocated_bytes": nbytes + 512,
            "reserved_bytes": nbytes + (64 << 20),
            "phase": Phase.BACKWARD,
            "tick": 7,
            "by_kind": {Kind.SAVED: nbytes},
            **fields,
        }
    )


def line(number: int, code: str) -> SourceLine:
    return SourceLine(file="net.py", line=number, function="forward", code=code)


BLOCKS = tuple(
    Region(
        first_node=4 * i,
        last_node=4 * i + 4,
        nodes=(f"layers_{i}_a", f"layers_{i}_b"),
        modules=(f"layers.{i}",),
        source=line(12, "x = layer(x)"),
        freed_bytes=100 << 20,
        extra_flops=3_000_000_000,
    )
    for i in range(32)
)
STEM = Region(
    first_node=200,
    last_node=210,
    nodes=("conv1", "relu"),
    modules=("stem",),
    freed_bytes=GIB,
    extra_flops=5_000_000,
    edit=Edit(source=line(8, "x = self.stem(x)"), after="x = checkpoint(self.stem, x, use_reentrant=False)"),
    regions=(Region(first_node=202, last_node=204, nodes=("mul",), freed_bytes=1, extra_flops=None),),
)


def plan(**fields: Any) -> Plan:
    return Plan(
        **{
            "fxmem_version": "0",
            "torch_version": "2.11.0",
            "model": "Net",
            "inputs": (InputTensor(name="x", shape=(8, 3), dtype="float32"),),
            "step": TRAINING,
            "target": TINY_CARD,
            "strategy": "auto",
            "chosen": "flat",
            "application": Application.MODULES,
            "budget_bytes": 3 * GIB,
            "regions": (*BLOCKS, STEM),
            "before": peak(6),
            "after": peak(2.5),
            "analysed": True,
            "forward_flops": 1_000_000_000_000,
            "extra_flops": 96_005_000_000,
            "before_seconds": 0.1,
            "after_seconds": 0.11,
            **fields,
        }
    )


KEEPING = STEM.model_copy(update={"keeps": (0, 2)})
RECOMPUTING = STEM.model_copy(update={"remakes": (1, 2, 3), "offloads": (1,)})
CURVE = (
    CurvePoint(
        strategy="flat", application=Application.MODULES, regions=(), peak=peak(6), extra_flops=0, step_seconds=0.1
    ),
    CurvePoint(strategy="flat", application=Application.GRAPH, regions=(STEM,), peak=peak(4), extra_flops=None),
    CurvePoint(
        strategy="flat",
        application=Application.MODULES,
        regions=(*BLOCKS, STEM),
        peak=peak(2.5),
        extra_flops=96_005_000_000,
    ),
)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("budget", {"regions": (*BLOCKS, KEEPING)}),
        ("curve", {"curve": CURVE, "budget_bytes": None, "analysed": False}),
        ("operators", {"regions": (RECOMPUTING,), "application": Application.OPERATORS, "host_bytes": 1 << 30}),
    ],
)
def test_golden(name: str, fields: dict[str, Any], width: int) -> None:
    text = table(plan(**fields), width=width)
    path = GOLDEN / f"plan_{name}_{width}.txt"
    if os.environ.get("FXMEM_UPDATE"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_the_table_says_what_it_frees_and_costs() -> None:
    text = table(plan(), width=100)
    assert "6.00 GiB" in text
    assert "2.50 GiB" in text
    assert "-58.3 %" in text
    assert "+9.6 %" in text
    assert "+10.0 %" in text
    assert "auto: flat, 34 regions of whole modules" in text
    assert "kept, 512.0 MiB to spare" in text


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_too_wide_and_equal_regions_are_one_line(width: int) -> None:
    text = table(plan(), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert sum("layers." in row for row in text.splitlines()) == 1
    assert "layers.0-31  x32" in text
    assert "    mul" in text or "  mul" in text


def test_a_plan_that_breaks_its_budget_and_one_that_is_an_estimate_say_so() -> None:
    assert "exceeded" in table(plan(after=peak(4)))
    assert "has not been applied and analysed again" in table(plan(analysed=False))
    assert "none needed" in table(plan(regions=(), after=peak(6), budget_bytes=7 * GIB, extra_flops=0))


def test_unknown_flops_are_unknown_and_not_zero() -> None:
    assert "has no formula" in table(plan(extra_flops=None))
    assert plan(extra_flops=None).extra_fraction is None


def test_the_curve_marks_the_plan_that_was_chosen() -> None:
    text = table(plan(curve=CURVE, budget_bytes=None), width=100)
    assert [row for row in text.splitlines() if "->  " in row or "-> " in row.lstrip()[:3]] == [
        row for row in text.splitlines() if "+9.6 %" in row and "flat" in row
    ]
    assert "no checkpoints" in text
    assert "unknown" in text


def test_the_code_shows_each_line_once_and_names_what_no_line_stands_for() -> None:
    code = plan().to_code()
    ast.parse(code)  # all of it can be pasted
    assert code.count("#     x = self.stem(x)\nx = checkpoint(self.stem, x, use_reentrant=False)\n") == 1
    assert "net.py:8, in forward: stem" in code
    assert "layers.31" in code
    assert ", mul" in code
    assert plan(regions=()).to_code() == "# nothing to change\n"


def test_names_of_regions() -> None:
    assert STEM.title == "stem"
    assert STEM.model_copy(update={"modules": ("features.3", "features.7")}).title == "features.3 to 7"
    assert STEM.model_copy(update={"modules": ()}).title == "conv1 to relu"


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    evil = STEM.model_copy(update={"modules": ("\x1b[31mred",)})
    assert "\x1b" not in table(plan(regions=(evil,)))


def test_it_is_written_as_its_schema_says_and_read_again(tmp_path: Path) -> None:
    whole = plan()
    whole.to_json(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    Draft202012Validator(json.loads(schemas.text("plan"))).validate(document)
    assert Plan.model_validate(document) == whole
    assert [region.first_node for region in whole.all_regions()][-2:] == [200, 202]
