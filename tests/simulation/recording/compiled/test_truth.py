"""Compiled steps: predicted on FakeTensors, and as a real run of inductor's code allocates."""

import os

import pytest

from tests.simulation.recording.compiled.models import CASES
from tests.simulation.recording.compiled.real import measure_compiled, predict_compiled

pytestmark = [pytest.mark.truth, pytest.mark.usefixtures("compiler")]

SAMPLE = (
    ("attention, tied weights, a graph break", "train"),
    ("convolutions", "train"),
    ("floats, dynamic=True", "train"),
    ("checkpointed", "train"),
    ("mixture of experts", "train"),
    ("vit, bf16 autocast", "infer"),
)
"""Those in `make truth`; `FXMEM_ALL=1` takes all, as `make -C benchmarks compiled` does."""
ALL = [(name, mode) for name in CASES for mode in ("train", "infer")]
WITHIN = 1e-4


@pytest.mark.parametrize(("name", "mode"), ALL if os.environ.get("FXMEM_ALL") else SAMPLE)
def test_predicted_bytes_are_those_of_a_real_compiled_step(name: str, mode: str) -> None:
    analysis = predict_compiled(CASES[name](), mode)
    real, breaks = measure_compiled(CASES[name](), mode)
    off = analysis.peak.requested_bytes - real.peak_without_kernel_scratch_bytes
    assert abs(off) <= (0 if (name, mode) in SAMPLE else WITHIN * real.peak_without_kernel_scratch_bytes)
    made = analysis.profile.step.compiled
    assert made is not None
    assert made.kernels > 0
    assert list(made.breaks) == breaks
