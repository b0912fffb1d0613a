"""Tests of the benchmarks."""

import pytest
import torch

MEASURED_RELEASE = "2.11."
on_measured_release = pytest.mark.skipif(
    not torch.__version__.startswith(MEASURED_RELEASE),
    reason=f"bounds are those of torch {MEASURED_RELEASE}x: other releases take other workspaces",
)
