"""Peaks in test suites: asserted to be below a budget, or compared with a baseline.

`assert_peak_below` needs nothing but a test runner. The fixture `fxmem_peak` of the pytest plugin keeps peaks in a file
beside the tests and compares them here. Nothing needs a GPU or weights, so a pull request's CI can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from fxmem.errors import UsageError
from fxmem.memory.budget import parse_budget, parse_bytes
from fxmem.memory.figures import alive_by_node
from fxmem.records import json_reader
from fxmem.records.fits import BASELINE_SCHEMA_VERSION, Baseline, PeakBaseline
from fxmem.records.units import STEPS
from fxmem.show.run_facts import describe_growth as describe_program_growth
from fxmem.show.run_facts import growth_facts
from fxmem.show.text.answer import describe_excess, describe_growth
from fxmem.simulation.code.profiled_step import ProfiledStep
from fxmem.simulation.program import RecordedProgram
from fxmem.simulation.step.analysis import Analysis, analyze

_SMALL = 1000
"""A node whose share of the peak is less than one in this many is left out of a baseline."""


_StepT = TypeVar("_StepT", bound=ProfiledStep)


@overload
def assert_peak_below(model: _StepT, *, budget: int | str) -> _StepT: ...


@overload
def assert_peak_below(
    model: torch.nn.Module | Callable[[], torch.nn.Module], inputs: Any, budget: int | str, **options: Any
) -> Analysis: ...


def assert_peak_below(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | ProfiledStep,
    inputs: Any = None,
    budget: int | str | None = None,
    **options: Any,
) -> ProfiledStep:
    """Assert that a step's peak is at most `budget`; return the analysis.

    The budget bounds the allocated bytes, `torch.cuda.max_memory_allocated()` (the requested ones for the CPU); on a
    card a loop over the step also has to run where the driver gives the allocator no more than that. `fxmem analyze
    --budget` asks the same. Of a recorded program set-up and every step are bounded.

    Args:
        model: as for `fxmem.analyze`; or what was analysed or recorded already, without inputs and options:
            `assert_peak_below(run, budget="16GiB")` after `with fxmem.record("h100") as run`.
        inputs: as for `fxmem.analyze`.
        budget: bytes or "16GiB".
        options: further ones of `fxmem.analyze`; without `target`, the step is that of its default card.

    Raises:
        AssertionError: the peak is above the budget; by how much, where, and which lines of code take most of it.
        UsageError: the budget or an option cannot be understood.
        AnalysisError: the model cannot be analysed.
    """
    __tracebackhide__ = True
    if budget is None:
        raise UsageError('expected a budget in bytes or with a unit: assert_peak_below(..., budget="16GiB")')
    limit = parse_bytes(budget)
    step = find_step(model, inputs, options)
    if not limit.keeps(step.profile, step.peak):
        raise AssertionError(describe_excess(step.profile, step.timeline, limit))
    return step


def assert_steady(program: RecordedProgram) -> RecordedProgram:
    """Assert that a recorded program keeps no more after each step than after the one before; return it.

    What grows until a bound of its own (a queue, a cache that fills) does not fail it once it is full: record a few
    steps more than that takes.

    Args:
        program: recorded: `assert_steady(run)` after `with fxmem.record("h100", steps=16) as run`.

    Raises:
        AssertionError: it grows; by how much, and who keeps what.
        UsageError: something else than a recorded program, or one of fewer than three steps.
    """
    __tracebackhide__ = True
    steps = program.program.steps if isinstance(program, RecordedProgram) else ()
    if len(steps) < STEPS:
        raise UsageError(f"expected a recording of at least {STEPS} steps, got {len(steps) or repr(program)}")
    if said := describe_program_growth(program.profile):
        who = "".join(f"\n{fact.text}" for fact in growth_facts(program.profile.step))
        raise AssertionError(f"expected as much alive after each step; the program {said}{who}")
    return program


def find_step(model: Any, inputs: Any, options: Mapping[str, Any]) -> ProfiledStep:
    """A step that is given, or the analysis of a model.

    Raises:
        UsageError: a step together with what a model needs.
    """
    if not isinstance(model, ProfiledStep):
        return analyze(model, inputs, **options)
    if inputs is not None or options:
        raise UsageError("expected an analysis or a recording alone: it has its inputs and settings already")
    return model


# --- against a baseline -----------------------------------------------------------------------------------------------


def make_baseline(analysis: ProfiledStep) -> PeakBaseline:
    """The peak of an analysis, as a baseline keeps it."""
    profile, peak = analysis.profile, analysis.peak
    nodes = {profile.nodes[index].name: nbytes for index, nbytes in alive_by_node(profile, analysis.timeline).items()}
    return PeakBaseline(
        fxmem_version=profile.fxmem_version,
        torch_version=profile.torch_version,
        target=profile.target.name,
        inputs=profile.inputs,
        step=profile.step.model_copy(update={"program": None}),
        requested_bytes=peak.requested_bytes,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        phase=peak.phase,
        by_kind=peak.by_kind,
        by_node={name: nbytes for name, nbytes in sorted(nodes.items()) if nbytes * _SMALL >= peak.requested_bytes},
    )


def allowed_growth(tolerance: str | int | float, before: PeakBaseline) -> int:
    """Bytes a peak may grow by: a share of what it was ("1%", 0.01), bytes or "64MiB"; 0 for none.

    Raises:
        UsageError: it cannot be understood.
    """
    if tolerance in (0, "0", "0%"):
        return 0
    try:
        allowed = parse_budget(tolerance)
    except UsageError as error:
        forms = "a share of the peak (1%, 0.01), as bytes or with a unit (64MiB)"
        raise UsageError(f"expected a tolerance as {forms}, got {tolerance!r}") from error
    return allowed.resolve(before.counted_bytes).nbytes


def growth(before: PeakBaseline, analysis: ProfiledStep, allowed_bytes: int) -> str:
    """How a peak has grown beyond a baseline and what grew, in some lines; empty if it has not."""
    now = make_baseline(analysis)
    if now.counted_bytes - before.counted_bytes <= allowed_bytes:
        return ""
    return describe_growth(before, now, allowed_bytes, analysis.profile.nodes, analysis.peak.node or "")


def load_baseline(path: Path) -> Baseline:
    """The baseline in a file; an empty one if there is no file.

    Raises:
        UsageError: it cannot be read, or is no baseline.
    """
    advice = "delete it and run pytest --fxmem-update"
    expected = "expected a baseline written by fxmem"
    if not path.exists():
        return Baseline(peaks={})
    try:
        baseline = json_reader.load(Baseline, path, expected)
    except UsageError as error:
        raise UsageError(f"{error}; {advice}") from error
    if baseline.schema_version != BASELINE_SCHEMA_VERSION:
        expected = f"expected a baseline of schema version {BASELINE_SCHEMA_VERSION!r}"
        raise UsageError(f"{expected}, got {baseline.schema_version[:20]!r} in {str(path)!r}; {advice}")
    return baseline
