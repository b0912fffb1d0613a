"""Memory budgets: parsing them, and deciding whether a step keeps one.

A budget bounds the peak of allocated bytes, `torch.cuda.max_memory_allocated()` (requested bytes where no allocator is
modelled). One given in bytes bounds the caching allocator too: a loop over the step has to run where the driver gives
the allocator no more than that. One given as a share of the peak does not.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from fxmem.errors import UsageError
from fxmem.memory import allocator
from fxmem.records.profile import Peak, Profile
from fxmem.records.units import format_bytes

_UNITS = {"": 1, "b": 1, **{f"{prefix}ib": 1 << shift for prefix, shift in zip("kmgt", (10, 20, 30, 40), strict=True)}}
_UNITS |= {f"{prefix}b": 10**power for prefix, power in zip("kmgt", (3, 6, 9, 12), strict=True)}
_DIGITS = 40
_SEGMENT = 2 << 20
_LEAST_SAID = 4096
"""A smaller number without a unit is taken for a slip."""
_EXPECTED = "expected a budget as bytes (8589934592), with a unit (8GiB, 500MB) or as a share of the peak (60%, 0.6)"
_IN_BYTES = "as bytes (8589934592) or with a unit (8GiB, 500MB)"


@dataclass(frozen=True)
class Budget:
    """The most bytes a step may allocate."""

    nbytes: int
    bounds_allocator: bool = True
    """Whether the reserved bytes are bounded as well, not the allocated ones alone."""
    asked_bytes: int | None = None
    """What was asked for, where a card has room for less; None: `nbytes` itself."""

    @property
    def stated_bytes(self) -> int:
        """What was asked for, whatever a card has room for."""
        return self.nbytes if self.asked_bytes is None else self.asked_bytes

    def bound(self, room_bytes: int | None) -> Budget:
        """Bound what bounds the allocator by the room of a card as well; None: its room is not known."""
        if not self.bounds_allocator or room_bytes is None or room_bytes >= self.nbytes:
            return self
        return replace(self, nbytes=room_bytes, asked_bytes=self.nbytes)

    def resolve(self, counted_bytes: int) -> Budget:
        """Return the budget itself: it does not depend on the peak."""
        return self

    def keeps(self, profile: Profile, peak: Peak, environ: Mapping[str, str] | None = None) -> bool:
        """Whether a step with this profile and peak stays within the budget.

        Args:
            profile: of the step.
            peak: of the profile.
            environ: contains the allocator's settings; None: this process's environment.
        """
        if peak.counted_bytes > self.nbytes:
            return False
        return not self.bounds_allocator or bool(peak_in_room(profile, peak, self.nbytes, environ).fits)


class MemoryFit(NamedTuple):
    """How a step fares in so much memory."""

    peak: Peak
    """With `fits` and `shortage` for that memory."""
    alloc_retries: int | None = None
    """How often cached segments went back to the driver for a request to succeed; None: not counted."""


@dataclass(frozen=True)
class BudgetShare:
    """A budget given as a share of the peak of the step as it is."""

    fraction: float

    def resolve(self, counted_bytes: int) -> Budget:
        """Return the budget for a step whose peak has this many counted bytes (`Peak.counted_bytes`)."""
        return Budget(math.floor(self.fraction * counted_bytes), bounds_allocator=False)


BudgetLike = Budget | BudgetShare | str | int | float
"""What `parse_budget` accepts."""


def parse_budget(spec: BudgetLike) -> Budget | BudgetShare:
    """Parse a budget as users write it; return one that is parsed already as it is.

    A whole number is bytes, in text from 4096 on; a number with a decimal point at most 1, or a percentage, is a share
    of the unplanned peak. KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB powers of 1000.

    Raises:
        UsageError: it is none of these, or not above zero.
    """
    if isinstance(spec, (Budget, BudgetShare)):
        return spec
    if isinstance(spec, bool) or not isinstance(spec, (str, int, float)):
        raise UsageError(f"{_EXPECTED}, got {spec!r}")
    if isinstance(spec, int):
        return _budget(spec, spec)
    if isinstance(spec, float):
        return _share(spec, spec)
    found = re.fullmatch(r"\s*([0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]*|%)\s*", spec)
    if found is None or (found[2] != "%" and found[2].lower() not in _UNITS):
        is_begun = found is not None and f"{found[2].lower()}ib" in _UNITS
        raise UsageError(f"{_EXPECTED}, got {spec!r}{f': {spec.strip()}iB?' * is_begun}")
    if len(found[1]) > _DIGITS:
        raise UsageError(f"{_EXPECTED}, of at most {_DIGITS} digits; got {spec[:60]!r}")
    number = Fraction(re.sub("[_,]", "", found[1]))  # exact: a float drops bytes beyond 2**53
    if found[2] == "%":
        return _share(float(number / 100), spec)
    if not found[2] and "." in found[1]:
        return _share(float(number), spec)
    if not found[2] and 0 < number < _LEAST_SAID:
        raise UsageError(f"{_EXPECTED}, got {spec!r}, which is {number} bytes: {number}GiB?")
    return _budget(math.floor(number * _UNITS[found[2].lower()]), spec)


def parse_bytes(spec: BudgetLike, name: str = "a budget") -> Budget:
    """Parse a budget in bytes. A share of the peak is refused: every step would exceed it.

    Args:
        spec: as for `parse_budget`.
        name: how the message names the budget.

    Raises:
        UsageError: it is no budget, or a share.
    """
    budget = _parse(spec, f"expected {name} {_IN_BYTES}")
    if isinstance(budget, BudgetShare):
        raise UsageError(f"expected {name} in bytes or with a unit (16GiB), got {spec!r}, a share of the step's peak")
    return budget


def parse_growth(spec: str, name: str) -> Budget | BudgetShare:
    """Parse by how much a peak may grow: nothing (0), bytes, or a share of the peak before.

    Args:
        spec: as for `parse_budget`.
        name: how the message names it.

    Raises:
        UsageError: it is none of these.
    """
    if re.fullmatch(r"\s*0+(\.0*)?\s*%?\s*", spec):
        return Budget(0)
    return _parse(spec, f"expected {name} as 0, as a share of the peak before (2%), or {_IN_BYTES}")


def _parse(spec: BudgetLike, expected: str) -> Budget | BudgetShare:
    """`parse_budget`, whose errors say what is expected here."""
    try:
        return parse_budget(spec)
    except UsageError as refused:
        raise UsageError(str(refused).replace(_EXPECTED, expected)) from None


def peak_in_room(profile: Profile, peak: Peak, room_bytes: int, environ: Mapping[str, str] | None = None) -> Peak:
    """The profile's peak with `fits` and `shortage` for that room instead of the target's.

    For a card: whether a loop over the step runs when the driver gives the allocator no more than that
    (`allocator.replay`), with the settings of `environ` (None: this process's). Without an allocator: whether the
    requested bytes are no more.
    """
    settings = allocator.read_settings(os.environ if environ is None else environ)
    if peak.reserved_bytes is not None and peak.room_bytes is not None and peak.room_bytes < room_bytes:
        # What was given back in the smaller room stays in this one.
        free = allocator.replay(profile, settings=settings)
        most = {"allocated_bytes": free.allocated_bytes, "reserved_bytes": free.reserved_bytes}
        peak = peak.model_copy(update={name: max(each or 0, getattr(peak, name) or 0) for name, each in most.items()})
    used = peak.requested_bytes if peak.reserved_bytes is None else peak.reserved_bytes
    if used <= room_bytes:
        shortage = ""
    elif peak.reserved_bytes is None:
        shortage = f"Its peak, {profile.step.describe_phase(peak.phase)}, is {format_bytes(used - room_bytes)} more"
    else:
        found = allocator.replay(profile, settings=settings, capacity_bytes=room_bytes)
        shortage = "" if found.shortage is None else found.shortage.sentence
        if not shortage:
            counts = {"allocated_bytes": found.allocated_bytes, "reserved_bytes": found.reserved_bytes}
            peak = peak.model_copy(update=counts)
    return peak.model_copy(update={"room_bytes": room_bytes, "fits": not shortage, "shortage": shortage})


def find_least_budget(profile: Profile, peak: Peak) -> int:
    """The smallest budget in bytes that a step keeps, to a segment of the allocator (2 MiB)."""
    low, high = peak.counted_bytes, max(peak.counted_bytes, peak.reserved_bytes or 0)
    if Budget(low).keeps(profile, peak):
        return low
    while high - low > _SEGMENT:
        middle = (low + high) // 2
        low, high = (low, middle) if Budget(middle).keeps(profile, peak) else (middle, high)
    return high


def _budget(nbytes: int, spec: object) -> Budget:
    if not 0 < nbytes < 1 << 63:
        raise UsageError(f"{_EXPECTED}, above zero and below 2**63; got {str(spec)[:60]!r}")
    return Budget(nbytes)


def _share(fraction: float, spec: object) -> BudgetShare:
    if not 0 < fraction <= 1:
        raise UsageError(f"{_EXPECTED}, a share being above 0 and at most 1; got {spec!r}")
    return BudgetShare(fraction)
