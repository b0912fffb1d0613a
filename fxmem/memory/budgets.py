"""Budgets as people write them: bytes, `8GiB`, `60%` or a fraction of the peak."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from fxmem.errors import UsageError
from fxmem.records.profile import Peak

__all__ = ["Budget", "counted_bytes", "parse"]

_UNITS = {"": 1, "b": 1, **{f"{prefix}ib": 1 << shift for prefix, shift in zip("kmgt", (10, 20, 30, 40), strict=True)}}
_UNITS |= {f"{prefix}b": 10**power for prefix, power in zip("kmgt", (3, 6, 9, 12), strict=True)}
_DIGITS = 40
_EXPECTED = "expected a budget as bytes (8589934592), with a unit (8GiB, 500MB) or as a share of the peak (60%, 0.6)"


@dataclass(frozen=True)
class Budget:
    """How many bytes a step may take: outright, or as a share of its peak. Exactly one of the two is set."""

    nbytes: int | None = None
    fraction: float | None = None

    def bytes_of(self, peak: Peak) -> int:
        """In bytes, for a step with this peak."""
        return self.nbytes if self.nbytes is not None else math.floor((self.fraction or 0.0) * counted_bytes(peak))


def counted_bytes(peak: Peak) -> int:
    """The number a budget is held against: the allocator's blocks where an allocator is modelled, else what the program
    asked for."""
    return peak.requested_bytes if peak.allocated_bytes is None else peak.allocated_bytes


def parse(spec: str | int | float) -> Budget:
    """What a user wrote.

    A whole number is bytes; a number with a decimal point at most 1, or a percentage, is a share of the unplanned peak.
    KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB powers of 1000.

    Raises:
        UsageError: it is none of these, or not above zero.
    """
    if isinstance(spec, bool) or not isinstance(spec, (str, int, float)):
        raise UsageError(f"{_EXPECTED}, got {spec!r}")
    if isinstance(spec, int):
        return _positive(spec, spec)
    if isinstance(spec, float):
        return _share(spec, spec)
    found = re.fullmatch(r"\s*([0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]*|%)\s*", spec)
    if found is None or (found[2] != "%" and found[2].lower() not in _UNITS):
        raise UsageError(f"{_EXPECTED}, got {spec!r}")
    if len(found[1]) > _DIGITS:
        raise UsageError(f"{_EXPECTED}, of at most {_DIGITS} digits; got {spec[:60]!r}")
    number = Fraction(re.sub("[_,]", "", found[1]))  # exact: a float drops bytes beyond 2**53
    if found[2] == "%":
        return _share(float(number / 100), spec)
    if not found[2] and "." in found[1]:
        return _share(float(number), spec)
    return _positive(math.floor(number * _UNITS[found[2].lower()]), spec)


def _positive(nbytes: int, spec: object) -> Budget:
    if not 0 < nbytes < 1 << 63:
        raise UsageError(f"{_EXPECTED}, above zero and below 2**63; got {str(spec)[:60]!r}")
    return Budget(nbytes=nbytes)


def _share(fraction: float, spec: object) -> Budget:
    if not 0 < fraction <= 1:
        raise UsageError(f"{_EXPECTED}, a share being above 0 and at most 1; got {spec!r}")
    return Budget(fraction=fraction)
