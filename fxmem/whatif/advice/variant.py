"""What a change to a step works on, and what comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fxmem.errors import FxmemError
from fxmem.memory import allocator
from fxmem.records.advice import Effect
from fxmem.records.profile import Peak, Profile
from fxmem.simulation.analysis import Analysis, analyze_step
from fxmem.simulation.request import StepRequest
from fxmem.whatif.advice.uses import free_after_last_use

_CODE_WIDTH = 58
"""Columns of a line of code, so that it is not broken in an 80-column terminal and can be pasted."""
_LISTED = 3
"""Of what is refused, how many are named."""


class NotApplicableError(FxmemError):
    """The change does not apply here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of running the step."""

    model: nn.Module
    request: StepRequest
    environ: Mapping[str, str]
    """Where the allocator's settings are found."""
    around: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...] = ()
    """What the step runs within."""
    released: frozenset[str] = frozenset()
    """Names of nodes whose results the program frees after their last use."""

    def replace_step(self, model: nn.Module | None = None, **changes: Any) -> Variant:
        """Return the variant with other settings of the step, and another model if given."""
        request = dataclasses.replace(self.request, **changes)
        return dataclasses.replace(self, model=self.model if model is None else model, request=request)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Where the step is to be analysed."""
        with contextlib.ExitStack() as stack:
            for enter in self.around:
                stack.enter_context(enter())
            yield


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A variant, analysed."""

    variant: Variant
    analysis: Analysis
    profile: Profile
    peak: Peak


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing to do differently."""

    key: str
    title: str
    effect: Effect
    code: str
    make: Callable[[Variant, Analysis], Variant]
    """The variant changed; raises NotApplicableError. The analysis is of the unchanged step."""
    note: str = ""
    excludes: str = ""
    """Of changes with the same word here only one can be made."""


def analyse_variant(variant: Variant, known: Iterable[Outcome] = ()) -> Outcome:
    """Analyse the variant. The analysis of a known one with the same model and request is reused."""
    for other in known:
        if (
            variant.model is other.variant.model
            and variant.request is other.variant.request
            and variant.around == other.variant.around
        ):
            return _account(variant, other.analysis)
    with variant.within():
        analysis = analyze_step(variant.model, variant.request)
    return _account(variant, analysis)


def _account(variant: Variant, analysis: Analysis) -> Outcome:
    profile = free_after_last_use(analysis.profile, variant.released)
    return Outcome(variant, analysis, profile, allocator.complete_timeline(profile, variant.environ).peak)


def code_for_modules(paths: Sequence[str], statement: str) -> str:
    """Code that does something to each of several modules, called `module` in the statement."""
    list_refused = textwrap.fill(
        " ".join(paths), _CODE_WIDTH, initial_indent=" " * 15, break_long_words=False, break_on_hyphens=False
    ).strip()
    return f'for path in """{list_refused}""".split():\n    module = model.get_submodule(path)\n    {statement}'


def list_refused(refused: Mapping[str, str]) -> str:
    """What is refused, each with its reason."""
    named = [f"{what} ({reason})" for what, reason in list(refused.items())[:_LISTED]]
    return ", ".join(named) + (f" and {len(refused) - _LISTED} more" if len(refused) > _LISTED else "")
