"""What is wrong with a step, in words: the cause, its line, its bytes and the change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fxmem.memory.findings import Finding, find
from fxmem.records.findings import BytesOf
from fxmem.records.parts import ANEW
from fxmem.records.profile import Profile, Timeline
from fxmem.records.units import format_bytes
from fxmem.show.sections import Fact, Facts, make_printable

MOST: Final = 3
"""Findings that are listed."""
_OF: Final[dict[BytesOf, str]] = {
    "peak": "at the peak",
    "step": "a step",
    "optimizer": ANEW,
    "batch": "a batch",
    "reserved": "reserved and not allocated",
    "host": "on the host",
}


def finding_facts(profile: Profile, timeline: Timeline) -> Facts:
    """The largest findings, a line each."""
    return list_findings(find(profile, timeline))


def list_findings(found: Sequence[Finding]) -> Facts:
    """The first of these, a line each."""
    facts = [Fact("" if index else "Found", describe(each), "found") for index, each in enumerate(found[:MOST])]
    if len(found) > MOST:
        facts.append(Fact("", f"{len(found) - MOST} more in --json", "found"))
    return make_printable(facts)


def describe(about: Finding) -> str:
    """`train.py:14: preds keeps more after each step, 8.00 MiB a step. To do: .cpu() of what is kept (not tried)`."""
    if about.of == "reserved":
        freed = "" if about.saved_bytes is None else f" frees {format_bytes(about.saved_bytes)}"
        return f"{format_bytes(about.nbytes)} of {about.text}; {about.change}{freed}"
    place = f"{about.place}: " if about.place else ""
    size = f"{format_bytes(about.nbytes)} {_OF[about.of]}"
    return f"{place}{about.text}, {size}. To do: {about.change} ({_describe_trial(about)})"


def describe_worth(about: Finding) -> str:
    """`8.00 MiB a step; not tried`."""
    return f"{format_bytes(about.nbytes)} {_OF[about.of]}; {_describe_trial(about)}"


def _describe_trial(about: Finding) -> str:
    if about.saved_bytes is None:
        return "not tried"
    return f"tried: {format_bytes(about.saved_bytes)} less {'reserved' if about.of == 'reserved' else 'at the peak'}"
