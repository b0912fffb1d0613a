"""Random programs, predicted and run: the peaks agree, whatever they do. `FXMEM_FUZZ=0:5000` runs those seeds
instead."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import random
from typing import Any

import pytest
import torch

from fxmem import analyze, record
from fxmem._torch import kernels as torch_kernels
from fxmem.errors import AnalysisError
from fxmem.memory import liveness
from fxmem.records.pause_gc import freeze_gc
from fxmem.simulation.code.round_rule import Enough
from fxmem.simulation.step.request import StepRequest
from fxmem.validation import measure_program
from fxmem.validation.measure_cpu import mark, measure_cpu, quiet_profiler
from fxmem.validation.profiler_log import live_bytes, read_rounds, scratch_events
from tests.random_models import BATCH, BINARY, UNARY, WIDTH, RandomModel
from tests.random_programs import WIDER_BINARY, WIDER_UNARY, Loop, WiderModel

pytestmark = pytest.mark.usefixtures("others_frozen")

FIRST, _, LAST = os.environ.get("FXMEM_FUZZ", "0:12").partition(":")
CHUNK = 10
SEEDS = range(int(FIRST), int(LAST))
_STATE = torch.get_rng_state().numel()
_TOLERANCE = 1e-4
_STEPS = 3
REGRESSIONS = (16, 58, 94, 117)
"""Seeds of `RandomModel` that once failed: the inputs of a checkpointed region were let go too early in backward."""


def difference(model: RandomModel, x: torch.Tensor, **settings: Any) -> str:
    """What is wrong with the prediction for a step; empty if nothing is, or if the program cannot run at all."""
    try:
        measured = measure_cpu(copy.deepcopy(model), StepRequest(args=(x,), **settings))
    except AnalysisError:
        return ""
    try:
        profile = analyze(model, x, target="cpu", **settings).profile
    except Exception as error:
        return f"refused {settings}: {error}: {model.statements}"
    return compare(model, measured.peak_without_scratch_bytes, liveness.peak_without_scratch_bytes(profile), settings)


def compare(model: RandomModel, measured: int, predicted: int, about: object, *, graphs: int = 1) -> str:
    """What is wrong with a number; empty if nothing is. So many graphs of the model are alive at most."""
    # Each region's first run keeps a copy of the state of the CPU's random numbers, which is no tensor of the program.
    regions = sum("checkpoint" in name or name in ("reentrant", "nested") for name, _ in model.statements)
    states = _STATE * regions * 2 * graphs
    if abs(measured - states / 2 - predicted) <= states / 2 + predicted * _TOLERANCE:
        return ""
    return f"predicted {predicted:,}, measured {measured:,}: {about}: {model.statements}"


def random_step(seed: int) -> str:
    """As `difference`, of a random step of a random model."""
    torch.manual_seed(seed)
    chance = random.Random(f"step {seed}")
    model, x = WiderModel(seed), torch.randn(BATCH, WIDTH)
    if chance.random() < 0.15:
        return difference(model.eval(), x, mode="infer", values=model.values)
    settings = {
        "optimizer": chance.choice(("adamw", "sgd", None)),
        "accumulate": chance.choice((1, 1, 1, 2)),
        "set_to_none": chance.random() < 0.8,
        "precision": chance.choice((None, None, None, "bf16")),
        "values": model.values,
    }
    if settings["accumulate"] == 1 and chance.random() < 0.3:
        settings["zero_grad"] = "before-backward"
    return difference(model, x, **settings)


def random_loop(seed: int) -> str:
    """As `difference`, of a random loop, of which the largest step is compared."""
    loop = Loop(seed)
    try:
        measured = measured_rounds(loop)
    except (RuntimeError, ValueError):
        return ""
    try:
        with record("cpu", steps=_STEPS) as run:
            loop(_STEPS + 1)
        profile = run.profile
    except Exception as error:
        return f"refused {loop}: {error}"
    shown = profile.step.program.shown
    if len(run.rounds) != len(measured) or not shown:
        return f"{len(run.rounds)} steps, {len(measured)} measured, step {shown} shown: {loop}"
    graphs = loop.micro_batches * _STEPS if loop.keeps == "losses" else 1
    predicted = liveness.peak_without_scratch_bytes(profile)
    said = compare(loop.model, measured[shown - 1], predicted, loop, graphs=graphs)
    return said and f"step {shown}: {said}"


def measured_rounds(loop: Loop) -> list[int]:
    """The most bytes alive in each step of a loop that runs for real, scratch aside."""
    rounds = measure_program._RealRounds("cpu", _STEPS, mark, functools.partial(mark, "round"))
    gc.collect()  # a free of what was there before would count
    with (
        freeze_gc(),
        quiet_profiler(),
        torch_kernels.profiler() as profiled,
        rounds.observe(),
        contextlib.suppress(Enough),
    ):
        loop(_STEPS + 1)
    events, ends = read_rounds(profiled)
    alive = live_bytes(0, events, scratch_events(events))
    return [max(alive[begin : end + 1]) for begin, end in itertools.pairwise([0, *ends])][rounds.has_setup :]


@pytest.mark.truth
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(SEEDS.start, SEEDS.stop, CHUNK))
def test_random_programs_take_what_is_predicted(start: int) -> None:
    seeds = range(start, min(start + CHUNK, SEEDS.stop))
    wrong = [f"seed {seed}: {said}" for seed in seeds if (said := (random_loop if seed % 2 else random_step)(seed))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_once_failed(seed: int) -> None:
    torch.manual_seed(seed)
    assert not difference(RandomModel(seed), torch.randn(BATCH, WIDTH), optimizer=("adamw", "sgd", None)[seed % 3])


@pytest.mark.parametrize("seed", [20313, 20831])
def test_a_backward_within_a_call_of_the_model_ends_no_step(seed: int) -> None:
    assert "inner_backward" in {name for name, _ in Loop(seed).model.statements}
    assert not random_loop(seed)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("assign_elements", "train"),  # the places of a mask are what the kernel makes on its way
        ("assign_elements", "infer"),
        ("select_masked", "train"),  # its gradient is written into zeros, not beside them
        ("scatter_into_views", "train"),  # an expanded gradient is copied as large as it looks
    ],
)
def test_kinds_that_once_missed(name: str, mode: str) -> None:
    model = WiderModel(0)
    model.statements, model.several = [(name, (0,))], False
    assert not difference(model.train(mode == "train"), torch.randn(BATCH, WIDTH), mode=mode)


def test_every_statement_runs() -> None:
    model = WiderModel(0)
    x = torch.randn(BATCH, WIDTH) + model.bias
    for name in (*WIDER_UNARY, *WIDER_BINARY):
        found = model.unary[name](model, x) if name in WIDER_UNARY else model.binary[name](model, x, x * 2)
        assert (found.shape, found.dtype) == (x.shape, x.dtype), name
        found.sum().backward()


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


def test_most_wider_programs_run() -> None:
    runs = 0
    for seed in range(0, 100, 2):
        with contextlib.suppress(RuntimeError, ValueError):
            Loop(seed)(1)
            runs += 1
    assert runs > 40
