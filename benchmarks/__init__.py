"""Measurements, comparisons and checks that are no tests; README.md says what lies where."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""Where they leave what came out, with the date in its name."""


def make_inputs(specs: Sequence[Any], **settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a batch that `fxmem.cli.specs.inputs` describes."""
    from fxmem.cli.specs.inputs import make_batch

    batch = make_batch(specs, **settings)
    return batch.args, dict(batch.kwargs)
