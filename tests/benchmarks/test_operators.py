"""A sample of torch's own list of operators, predicted and measured (all: `make -C benchmarks operators`)."""

import importlib
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT

SAMPLE = ("logsumexp", "nn.functional.bilinear", "nn.functional.unfold", "kthvalue", "ldexp", "quantile", "svd")


@pytest.fixture
def operators() -> ModuleType:
    """The script, in this process."""
    return importlib.import_module("benchmarks.programs.operators")


_RUN_SAMPLE = """
import json, sys
from benchmarks.programs import operators
infos = {operators.full_name(info): info for info in operators.operators()}
rows = [operators.run(infos[name], mode) for name in sys.argv[1:] for mode in operators.MODES]
off = [row["operator"] for row in rows if not operators.agrees(row)]
print(json.dumps([off, sorted({row["operator"] for row in rows if row["unknowns"]})]))
"""


@pytest.mark.truth
def test_a_sample_of_operators_agrees_forward_and_backward() -> None:
    # In a process of its own: torch's lists of operators switch torch's global flags off where they are imported.
    done = subprocess.run(
        [sys.executable, "-c", _RUN_SAMPLE, *SAMPLE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], ["svd"]]


def test_the_summary_leaves_out_what_needs_values_and_shows_what_misses(operators: ModuleType) -> None:
    def row(name: str, predicted: int | None, **more: Any) -> dict[str, Any]:
        return {
            "operator": name,
            "mode": "infer",
            "predicted": predicted,
            "measured": 1000,
            "at": "",
            "unknowns": [],
            **more,
        }

    rows = [
        row("exact", 1000),
        row("off", 2000),
        row("said", 2000, unknowns=["temporaries of svd"]),
        row("asks", None, refused="AnalysisError: expected a model whose shapes do not depend on the data"),
        {"operator": "broken", "mode": "infer", "eager": "RuntimeError: no"},
    ]
    text = "\n".join(operators.summary(json.loads(json.dumps(rows))))
    assert "4 operators in 3 runs; 1 need values or are sparse" in text
    assert "**2 of 3 (66.7 %)**" in text
    assert "| off | infer | 2000 | 1000 | between two operators |" in text
    assert text.endswith("Refused: asks.")
