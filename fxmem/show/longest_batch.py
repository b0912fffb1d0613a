"""The batch that decides and a long run over batches of varied lengths, in words."""

from __future__ import annotations

from fxmem.records.parts import LongestBatch
from fxmem.records.profile import Profile
from fxmem.records.units import format_bytes, format_shape
from fxmem.show.sections import Fact

_MOST_CHANGES = 4
"""Changes that are listed, of those that save something."""


def longest_facts(profile: Profile) -> list[Fact]:
    """The batch that decides, with its peak, and what a long run reserves; what changes would save."""
    program = profile.step.program
    longest = None if program is None else program.longest
    if longest is None:
        return []
    facts = [Fact("Longest", describe_longest(longest), "longest")]
    if longest.compared_bytes is not None:
        as_it_is = longest.compared_bytes
        better = [each for each in longest.changes if each.reserved_bytes < as_it_is][:_MOST_CHANGES]
        listed = [f"{each.change} {format_bytes(each.reserved_bytes)}" for each in better]
        over = "" if longest.compared_steps == longest.steps else f" after {longest.compared_steps:,} steps"
        facts.append(
            Fact("Options", f"reserved{over} {format_bytes(as_it_is)}; with {', '.join(listed) or 'no change less'}")
        )
    return facts


def describe_longest(longest: LongestBatch) -> str:
    """`batch 7,412 of 10,000 (train.py:30): 16x2031, peak 38.2 GiB; reserved after 10,000 steps 44.1 GiB`."""
    at = f" ({longest.place})" if longest.place else ""
    if not longest.batches:
        return f"not known: the loader{at} is not read, {longest.stopped}; batches have different lengths"
    read = f"{longest.batches:,}{'' if not longest.stopped else ' read'}"
    words = f"batch {longest.number:,} of {read}{at}: {format_shape(longest.shape)}"
    if longest.unproved:
        return f"{words}; no peak is known of lengths that were not run: {longest.unproved}"
    peak = longest.requested_bytes if longest.allocated_bytes is None else longest.allocated_bytes
    words += "" if peak is None else f", peak {format_bytes(peak)}"
    if longest.full_at is not None:
        words += f"; out of memory at step {longest.full_at:,}"
    elif longest.reserved_bytes is not None:
        words += f"; reserved after {longest.steps:,} steps {format_bytes(longest.reserved_bytes)}"
    return words + (f"; {longest.stopped}" if longest.stopped else "")
