"""Random programs, predicted and run: the peaks agree, whatever they do. `FXMEM_FUZZ=0:5000` runs those seeds
instead."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from fxmem import analyze
from fxmem.errors import AnalysisError
from fxmem.memory import liveness
from fxmem.simulation.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu
from tests.random_models import BATCH, BINARY, UNARY, WIDTH, RandomModel

FIRST, _, LAST = os.environ.get("FXMEM_FUZZ", "0:50").partition(":")
CHUNK = 10
SEEDS = range(int(FIRST), int(LAST))
_STATE = torch.get_rng_state().numel()
_TOLERANCE = 1e-4
REGRESSIONS = (16, 58, 94, 117)
"""Seeds that once failed: the inputs of a checkpointed region were let go too early in backward."""


def difference(seed: int) -> str:
    """What is wrong with the prediction for a seed; empty if nothing is, or if the program cannot run at all."""
    torch.manual_seed(seed)
    model, x = RandomModel(seed), torch.randn(BATCH, WIDTH)
    optimizer = ("adamw", "sgd", None)[seed % 3]
    try:
        measured = measure_cpu(copy.deepcopy(model), StepRequest(args=(x,), optimizer=optimizer))
    except AnalysisError:
        return ""
    analysis = analyze(model, x, target="cpu", optimizer=optimizer)
    # Each region's first run keeps a copy of the state of the CPU's random numbers, which is no tensor of the program.
    states = _STATE * sum("checkpoint" in name or name in ("reentrant", "nested") for name, _ in model.statements) * 2
    predicted = liveness.peak_without_scratch_bytes(analysis.profile)
    if abs(measured.peak_without_scratch_bytes - states / 2 - predicted) <= states / 2 + predicted * _TOLERANCE:
        return ""
    numbers = f"predicted {predicted:,}, measured {measured.peak_without_scratch_bytes:,} (of {measured.peak_bytes:,})"
    return f"seed {seed}: {numbers}: {model.statements}"


@pytest.mark.truth
@pytest.mark.parametrize("start", range(SEEDS.start, SEEDS.stop, CHUNK))
def test_random_programs_take_what_is_predicted(start: int) -> None:
    wrong = [said for seed in range(start, min(start + CHUNK, SEEDS.stop)) if (said := difference(seed))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_once_failed(seed: int) -> None:
    assert not difference(seed)


def test_most_programs_run_and_every_statement_is_among_them() -> None:
    seen: set[str] = set()
    runs = 0
    for seed in range(150):
        model = RandomModel(seed)
        try:
            out = model(torch.randn(BATCH, WIDTH))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        except RuntimeError:
            continue  # an in-place write that autograd forbids
        runs += 1
        seen |= {name for name, _ in model.statements}
    assert runs > 100
    assert seen == UNARY.keys() | BINARY.keys()
