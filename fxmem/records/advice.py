"""What changes to a training step are worth, each analysed as a changed step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fxmem.records.findings import Finding
from fxmem.records.profile import Assumption, Bytes, Headed, Peak, Record, Versioned
from fxmem.records.registry import Viewed

Effect = Literal["none", "rounding", "output", "training"]
"""What a change does to the numbers. `none`: the same results to the bit, or the same sums in another order of
accumulation (which cuDNN does not promise between two runs either). `rounding`: the same mathematics at another
precision. `output`: a generation's other tokens, or another picture, which have to be judged. `training`: another
optimisation, whose result has to be judged by training."""


class Suggestion(Record):
    """One change, or several together, and what it is worth."""

    key: str
    """Short and stable, e.g. `bf16-autocast`; several together are joined by `+`."""
    title: str
    effect: Effect
    code: str
    """What to write."""
    peak: Peak
    """Of the step with the change."""
    saved_bytes: int
    """Of the peak that budgets are held against (allocated; requested for the CPU); negative where the change costs
    memory."""
    extra_flops: int | None = 0
    """FLOPs of the changed step beyond the unchanged one's; None where an operator without a formula is among them."""
    step_seconds: float | None = None
    """Estimated; as `Plan.before_seconds`."""
    host_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of a program: the most that it had at once in the host's memory, as `HostUse.peak_bytes`."""
    link_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of a program: what moves between the card and the host's memory from when its first model begins.
    None where it takes most before one does."""
    growth_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of a program that keeps more after each step: how many bytes a step with the change, where one of its owners
    then keeps no more; None where none does."""
    patch: str = Field(default="", exclude_if=lambda value: not value)
    """Of a program: the same as a change of the user's own files, which ran with it (but for what sets the
    allocator, which is replayed), for `git apply` in the folder in which fxmem ran; empty where it is not known how, or
    is of other files."""
    same_backward: bool | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether backward runs the same operators as before in the same order, for results of the same shapes and dtypes,
    beside those of forward that it recomputes, and without those of gradients that nothing reads. What an optimizer
    runs is not compared: it may step within backward. None where nothing is trained, and of a plan on objects."""
    note: str = ""
    """What to know before doing it."""


class Refused(Record):
    """A change that was considered and is not to be had, and why."""

    key: str
    title: str
    reason: str
    most_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """An upper bound on what it frees of the peak, by the record of the unchanged step, for which it was not tried;
    None: it was, or it cannot be had."""


class Advice(Viewed, Headed, Versioned):
    """What could be changed about a step, what frees most first."""

    before: Peak
    before_flops: int | None
    """Of the unchanged step."""
    before_seconds: float | None = None
    """Estimated; as `Plan.before_seconds`."""
    before_host_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """As `Suggestion.host_bytes`, of the unchanged step."""
    before_link_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """As `Suggestion.link_bytes`."""
    budget_bytes: Bytes | None = None
    suggestions: tuple[Suggestion, ...]
    """Single changes, the largest saving first; of a program that runs a model and does not fit, first those with
    which it fits, what moves least between card and host before others, and where that is not known, last."""
    together: Suggestion | None = None
    """The cheapest set that keeps the budget: as little change to the numbers as possible, then as few extra FLOPs.
    None without a budget, where the step keeps it as it is, and where no set does."""
    patched: Suggestion | None = Field(default=None, exclude_if=lambda value: value is None)
    """What changes with a `patch` do together, the numbers as they are if the budget allows; None where none was asked
    for, or none helps."""
    refused: tuple[Refused, ...] = ()
    interrupted: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether the user interrupted it: there may be more than what was found by then."""
    assumptions: tuple[Assumption, ...] = ()
    findings: tuple[Finding, ...] = Field(default=(), exclude_if=lambda value: not value)
    """What is probably not meant about the unchanged step: as `Report.findings`."""
