"""What is wrong with a step, found in its record: each cause has a line of the user's code, its bytes and a change.

Each cause is one module of `causes/`, whose name it has, with a function `find(profile, timeline) -> findings`. These
functions are pure, and need no torch. `register` adds a cause of your own. A cause says what is there and
what it takes; its change is tried where the record is enough for that (`trials`), and `fxmem advise` tries others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Final

from fxmem.records import registry
from fxmem.records.findings import BytesOf, Finding
from fxmem.records.profile import Profile, Report, Timeline
from fxmem.records.registry import Registry

__all__ = ["ACTIVATIONS", "CAUSES", "WORTH_SAYING", "Finding", "find", "is_cut_short", "register"]

Find = Callable[[Profile, Timeline], Iterable[Finding]]

WORTH_SAYING: Final = 50
"""What is at the peak is said where it is this share of it, one in so many."""
_ORDER: Final[dict[BytesOf, int]] = {
    "step": 0,
    "optimizer": 1,
    "batch": 1,
    "pass": 1,
    "peak": 2,
    "reserved": 2,
    "host": 2,
}
"""What grows comes first: it has no end."""

_HALF: Final = r"(?=.*(?:(?<!\d)0?\.5(?!\d)|/ ?2\b)).*"
ACTIVATIONS: Final[dict[str, tuple[set[str], str]]] = {
    "torch.nn.functional.silu(x)": ({"sigmoid"}, ""),
    "torch.nn.functional.gelu(x)": ({"erf"}, rf"{_HALF}(?:sqrt\(2|SQRT|1\.41|\.707)"),
    'torch.nn.functional.gelu(x, approximate="tanh")': ({"pow", "tanh"}, rf"{_HALF}\.0447"),
    "torch.nn.functional.mish(x)": ({"softplus", "tanh"}, ""),
}
"""By call, the functions that do the same beside sums and products, and the constants that their code has; without
any, the functions are of the input itself: `x * sigmoid(1.702 * x)` is no SiLU."""

CAUSES: Registry[Find] = registry.CAUSES
_known: dict[tuple[int, tuple[str, ...]], tuple[Finding, ...]] = {}
"""What was found, by timeline and causes: it is asked for by the answer, the page and the file."""


def register(name: str, find: Find) -> None:
    """Add a cause.

    The command line finds one of another package by an entry point of the group "fxmem.findings", which bears the
    cause's name and whose loading registers it.

    Args:
        name: of the cause, `Finding.cause`.
        find: finds it in a profile and its timeline.

    Raises:
        UsageError: another cause has this name.
    """
    CAUSES.register(name, find)


def find(profile: Profile, timeline: Timeline) -> tuple[Finding, ...]:
    """All that is found in a step: first what grows, then what saves most at the peak.

    A report has what was found where it was written. What is small is left out, and what was tried and lowers the peak
    by little.

    Args:
        profile: what was predicted.
        timeline: its `fxmem.memory.liveness.timeline`.
    """
    if isinstance(profile, Report):
        return profile.findings
    key = id(timeline), tuple(CAUSES)
    if key not in _known:
        _known[key] = _find(profile, timeline)
        weakref.finalize(timeline, _known.pop, key)
    return _known[key]


def is_cut_short(profile: Profile, timeline: Timeline) -> bool:
    """Whether the program ended within this step, for want of memory or otherwise: what is missing may have followed.

    Args:
        profile, timeline: as for `find`.
    """
    program = profile.step.program
    if timeline.peak.at_least or program is None:
        return timeline.peak.at_least
    is_whole = program.shown > 0 and program.rounds[program.shown - 1].is_whole
    return (program.failed or program.is_cut) and not is_whole


def _find(profile: Profile, timeline: Timeline) -> tuple[Finding, ...]:
    found = [each for name in CAUSES for each in CAUSES.get(name)(profile, timeline)]
    least = max(timeline.peak.requested_bytes // WORTH_SAYING, 1)
    worth = [each for each in found if each.of != "peak" or each.nbytes >= least]
    return tuple(sorted([each for each in worth if each.saved_bytes is None or each.saved_bytes >= least], key=_rank))


def _rank(each: Finding) -> tuple[int, int, str]:
    """What grows first, then what saves most; what was not tried saves its bytes at most."""
    return _ORDER[each.of], -(each.nbytes if each.saved_bytes is None else each.saved_bytes), each.place
