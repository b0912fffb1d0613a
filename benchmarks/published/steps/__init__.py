"""Functions that build the published steps, named `MODULE.FUNCTION` in the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

from fxmem.records.profile import Peak, Target


@dataclass(frozen=True)
class Step:
    """A model on meta, its inputs and how `fxmem.analyze` is called with them."""

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    outside_bytes: int = 0
    """What the published figure leaves out because it was allocated before the measurement began."""


Peaks = Mapping[str, int]
"""Bytes by statistic."""


@dataclass(frozen=True)
class Program:
    """A program that reads its own peaks, by the names of its cases."""

    run: Callable[[], Mapping[str, Peaks]]
    case: str
    compile: str | None = None
    """How `fxmem.record` runs what the program compiles."""
    ranks: int | None = None
    """Of how many ranks the program is the first."""


@dataclass(frozen=True)
class Typed:
    """A step that words of the command line ask for."""

    analyze: Callable[[str | Target], Peak]


def build_step(name: str, settings: Mapping[str, Any]) -> Step | Program | Typed:
    """Build the step `MODULE.FUNCTION` with these settings."""
    module, _, function = name.partition(".")
    step = getattr(import_module(f"{__name__}.{module}"), function)(**settings)
    assert isinstance(step, Step | Program | Typed)
    return step
