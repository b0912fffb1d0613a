"""Predict the figures of published cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import fxmem
from fxmem.records.profile import Target

from .steps import Peaks, Program, Typed, build_step
from .tables import STATISTICS, Case


@dataclass(frozen=True)
class Prediction:
    """The peaks of a step in bytes, by statistic; or why there are none."""

    peaks: Mapping[str, int]
    refusal: str = ""

    def error_percent(self, case: Case) -> float | None:
        """Return the predicted figure by the published one, less one, in percent."""
        return None if self.refusal else 100 * (self.peaks[case.statistic] / case.nbytes - 1)


def predict(case: Case) -> Prediction:
    """Predict a case, less its second step where it is a difference."""
    found = predict_step(case.step, case.place, case.settings, case.environment)
    if case.less is None or found.refusal:
        return found
    less = predict_step(case.step, case.place, case.less, case.environment)
    return less if less.refusal else Prediction({name: found.peaks[name] - less.peaks[name] for name in found.peaks})


def predict_step(
    step: str, target: str | Target, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> Prediction:
    """Predict a step with these settings and environment variables; an exception of any kind is a refusal."""
    try:
        return Prediction(_peaks(step, target, tuple(settings.items()), tuple(environment.items())))
    except Exception as error:
        return Prediction({}, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


@lru_cache(maxsize=256)
def _peaks(
    step: str, target: str | Target, settings: tuple[tuple[str, Any], ...], environment: tuple[tuple[str, str], ...]
) -> dict[str, int]:
    with mock.patch.dict(os.environ, environment):
        return _analyse(step, target, settings)


def _analyse(step: str, target: str | Target, settings: tuple[tuple[str, Any], ...]) -> dict[str, int]:
    built = build_step(step, dict(settings))
    if isinstance(built, Program):
        return dict(_run_program(built.run, target, built.compile, built.ranks)[built.case])
    if isinstance(built, Typed):
        found = {statistic: getattr(built.analyze(target), f"{statistic}_bytes") for statistic in STATISTICS}
        return {statistic: nbytes for statistic, nbytes in found.items() if nbytes is not None}  # the CPU has one
    # One step in a function, or one call in a script: what a step returns is gone before the next.
    options = {"keep_outputs": False, **built.options}
    peak = fxmem.analyze(built.model, built.inputs, target=target, **options).peak
    peaks = {}
    for statistic in STATISTICS:
        nbytes = getattr(peak, f"{statistic}_bytes")
        if nbytes is None:
            raise ValueError(f"the prediction has no {statistic} bytes")
        peaks[statistic] = nbytes - built.outside_bytes
    return peaks


@lru_cache(maxsize=4)
def _run_program(
    run: Callable[[], Mapping[str, Peaks]], target: str | Target, compile: str | None, ranks: int | None
) -> Mapping[str, Peaks]:
    with fxmem.record(target, out_of_memory="continue", compile=compile, ranks=ranks):
        return run()
