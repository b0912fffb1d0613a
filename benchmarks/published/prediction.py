"""Predict the figures of published cases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import fxmem

from .steps import build_step
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
    """Predict a case; an exception of any kind is a refusal."""
    try:
        with _environment(case.environment):
            peaks = _peaks(case.step, case.target, _key(case.settings))
            if case.less is not None:
                less = _peaks(case.step, case.target, _key(case.less))
                peaks = {statistic: peaks[statistic] - less[statistic] for statistic in peaks}
    except Exception as error:
        return Prediction({}, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return Prediction(peaks)


def _key(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(settings.items())


@lru_cache(maxsize=256)
def _peaks(step: str, target: str, settings: tuple[tuple[str, Any], ...]) -> dict[str, int]:
    built = build_step(step, dict(settings))
    peak = fxmem.analyze(built.model, built.inputs, target=target, **built.options).peak
    peaks = {}
    for statistic in STATISTICS:
        nbytes = getattr(peak, f"{statistic}_bytes")
        if nbytes is None:
            raise ValueError(f"the prediction has no {statistic} bytes")
        peaks[statistic] = nbytes - built.outside_bytes
    return peaks


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
