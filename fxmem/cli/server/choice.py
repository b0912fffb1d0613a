"""What a reader may change of a step in the live page, checked."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.memory.budget import parse_budget

_SHAPE = re.compile(r"(?P<name>(?:[A-Za-z_][\w.]*:)?)(?P<dims>\d+(?:x\d+)*)(?P<dtype>(?::\w+)?)")
_MOST = 1 << 20
_LONGEST = 100
PRECISIONS = ("fp32", "bf16", "fp16")
FIELDS = ("batch", "sequence", "precision", "target", "budget")


@dataclass(frozen=True)
class StepChoice:
    """The settings of a step that the page changes; None or empty: as on the command line."""

    batch: int | None = None
    sequence: int | None = None
    precision: str = ""
    target: str = ""
    budget: str = ""


def read_choice(query: Mapping[str, str]) -> StepChoice:
    """Read the settings from an address.

    Raises:
        UsageError: one is unknown, too long or cannot be understood.
    """
    for name, value in query.items():
        if name not in FIELDS or len(value) > _LONGEST:
            raise UsageError(f"expected settings of {', '.join(FIELDS)}, got {name[:_LONGEST]!r}")
    precision, target, budget = (query.get(name, "") for name in FIELDS[2:])
    if precision and precision not in PRECISIONS:
        raise UsageError(f"expected a precision of {', '.join(PRECISIONS)}, got {precision!r}")
    if target and target not in catalogue.names():
        raise UsageError(f"expected a card of the catalogue, got {target!r}")
    if budget:
        parse_budget(budget)
    return StepChoice(_number(query, "batch"), _number(query, "sequence"), precision, target, budget)


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,7}", text) or not 1 <= int(text) <= _MOST:
        raise UsageError(f"expected a {name} of 1 to {_MOST:,}, got {text!r}")
    return int(text)


def change_options(options: argparse.Namespace, choice: StepChoice) -> dict[str, Any]:
    """The options of the command line with what the reader chose, as plain JSON."""
    changed = {name: value for name, value in vars(options).items() if name not in ("run", "parser")}
    changed["input"] = [change_shape(spec, choice.batch, choice.sequence) for spec in options.input]
    if choice.batch is not None and not options.input:
        changed["batch"] = choice.batch
    for name in ("precision", "target", "budget"):
        if getattr(choice, name):
            changed[name] = getattr(choice, name)
    if choice.precision == PRECISIONS[0]:
        changed["precision"] = None
    return changed


def change_shape(spec: str, batch: int | None, sequence: int | None) -> str:
    """An input's spec with another first dimension and, where it has two, another second one."""
    found = _SHAPE.fullmatch(spec)
    if found is None:
        return spec
    dims = found["dims"].split("x")
    if batch is not None:
        dims[0] = str(batch)
    if sequence is not None and len(dims) == 2:
        dims[1] = str(sequence)
    return f"{found['name']}{'x'.join(dims)}{found['dtype']}"


def find_sizes(specs: Sequence[str], batch: int | None, default_batch: int) -> tuple[int | None, int | None]:
    """The batch and the sequence that the sliders begin at; None for one that cannot be changed."""
    shapes = [found["dims"].split("x") for found in map(_SHAPE.fullmatch, specs) if found is not None]
    if not specs:
        return batch or default_batch, None
    return (int(shapes[0][0]) if shapes else None), next((int(dims[1]) for dims in shapes if len(dims) == 2), None)
