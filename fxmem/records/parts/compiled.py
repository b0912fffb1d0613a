"""How a compiled step was compiled: what `torch.compile` was given, and what came of it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fxmem.records.names import CompileMode, TimedQuestion
from fxmem.records.parts.base import Many, Record


class CompileSettings(Record):
    """What `torch.compile` is given, with inductor as its backend."""

    mode: CompileMode = "default"
    as_is: bool = False
    """Whether what the model's author has compiled is compiled, and nothing else."""
    parts: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    """With `as_is`, inductor's options by path of each module that is compiled, None for one compiled in place. The
    analysis fills it in."""
    dynamic: bool | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of `torch._inductor.config`."""
    activation_memory_budget: float | None = Field(default=None, ge=0, le=1, exclude_if=lambda value: value is None)
    """What AOTAutograd may keep for backward, as a share of what it could free; None: as the process has it in
    `torch._functorch.config`."""
    answers: dict[TimedQuestion, str] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """How what the compiler decides by timing is decided, where not as in the first analysis."""


class TimedChoice(Record):
    """What the compiler decides on a card by timing, and which answer the profile takes."""

    question: TimedQuestion = "padding"
    what: str
    """The decision, in words."""
    taken: str
    """The answer that was taken."""
    others: Many[str] = ()
    """The answers that there are beside it."""
    count: int = 1


class CompileRecord(Record):
    """What `torch.compile` made of the model."""

    mode: str
    """`default`, `reduce-overhead` and so on, or `as-is`."""
    dynamic: bool | None = None
    options: dict[str, str] = Field(default_factory=dict)
    """Inductor's settings that differ from the mode's, as text."""
    graphs: int
    """Graphs of forward and backward that inductor wrote."""
    breaks: Many[str] = ()
    """Why dynamo ended a graph early."""
    cuda_graphs: int = Field(default=0, exclude_if=lambda value: value == 0)
    """How many of these are recorded as CUDA graphs."""
    cuda_graph_skips: Many[str] = Field(default=(), exclude_if=lambda value: not value)
    """Why others are not, where they should be."""
    kernels: int
    """Launches in a step: inductor's own kernels and those of libraries."""
    timed: Many[TimedChoice] = ()
    lowest_peak_bytes: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The peak with the answers to what is decided by timing that take least, in the allocator's blocks where they are
    modelled; None where nothing is decided so, and where code of the caller's own was recorded, once."""
    highest_peak_bytes: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The same with the answers that take most."""

    def with_peaks(self, *peaks_bytes: int) -> CompileRecord:
        """The record with the peaks of all answers."""
        bounds = {"lowest_peak_bytes": min(peaks_bytes), "highest_peak_bytes": max(peaks_bytes)}
        return self.model_copy(update=bounds)
