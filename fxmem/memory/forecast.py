"""How a run goes on that keeps more after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fxmem.hardware.context import room_bytes
from fxmem.memory.allocator import DEFAULT_SETTINGS
from fxmem.records.parts import Growth
from fxmem.records.profile import Profile


class Forecast(NamedTuple):
    """The peaks to come, if every owner goes on as it did, up to its bound."""

    points: tuple[tuple[int, int], ...]
    """Step and allocated bytes: the last that was run, then those where the growth changes; between them it is even."""
    is_full: bool
    """Whether the last point is the step at which the card has no more memory; else nothing grows from it on."""


def forecast(profile: Profile) -> Forecast | None:
    """Go on with a program that grows, until it has all of the card that a context leaves at most.

    None where it does not grow, where what grows is not known to go on or to end, or the card's memory or allocator is
    not known. Where the steps to come were replayed, the last step is what the replay found.
    """
    program, memory = profile.step.program, room_bytes(profile.target)
    if (
        program is None
        or not program.growth_bytes
        or memory is None
        or not is_proved(program.growth_bytes, program.grown)
    ):
        return None
    step, rate, alive = len(program.steps), program.growth_bytes, program.steps[-1].allocated_bytes
    if alive is None:
        return None
    points = [(step, alive)]
    ending = sorted((each.last, each.nbytes) for each in program.grown if each.last is not None)
    for end, nbytes in ending:
        end = max(end, step)
        if alive + rate * (end - step) > memory:
            break
        step, rate, alive = end, rate - nbytes, alive + rate * (end - step)
        points.append((step, alive))
    if ending and len(ending) == len(program.grown) and len(points) > len(ending):
        return Forecast(tuple(points), is_full=False)
    full = program.full_at or step + 1 + (memory - alive) // DEFAULT_SETTINGS.round_size(rate)
    return Forecast((*points, (full, memory)), is_full=True)


def is_proved(growth_bytes: int, grown: Sequence[Growth]) -> bool:
    """Whether of all that grows, but for a hundredth, it is known that it goes on or when it is full.

    That a program ends at some step does not say that it keeps more until then.
    """
    known = sum(each.nbytes for each in grown if each.is_endless or each.until is not None)
    return 100 * known >= 99 * growth_bytes
