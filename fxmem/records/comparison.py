"""Two steps side by side: what grew, in the whole, by module and by node."""

from __future__ import annotations

from pydantic import Field

from fxmem.records.parts import Count
from fxmem.records.profile import Headed, Kind, Mapped, Phase, Record, SourceLine, Versioned


class QuantityChange(Record):
    """A quantity before and after; None where it is not known, or where that side has no such thing."""

    before: int | None
    after: int | None

    @property
    def delta(self) -> int | None:
        """What it grew by; None if either is not known."""
        return None if self.before is None or self.after is None else self.after - self.before


class ComparedStep(Headed):
    """One of the two steps."""

    peak_phase: Phase
    peak_node: str
    """The node that runs at the peak, in words; empty if it comes before the first."""
    fits: bool | None = None
    """As `Peak.fits`."""


class Grown(Record):
    """What a module or a node brings, before and after; 0 on a side that does not have it. Bytes unless it says
    FLOPs."""

    at_peak: QuantityChange
    """Of what is alive at the step's peak."""
    saved: QuantityChange
    """Kept for backward."""
    params: QuantityChange
    """Parameters and buffers, each at its first reader."""
    output: QuantityChange
    """New memory of results."""
    scratch: QuantityChange
    """Most of what lives only inside it."""
    forward_flops: QuantityChange
    """Of the operators that have a formula."""
    backward_flops: QuantityChange

    @property
    def largest(self) -> int:
        """The largest change in bytes of what it holds, either way."""
        return max(abs(change.delta or 0) for change in (self.at_peak, self.saved, self.params, self.output))


class ModuleChange(Grown):
    """A module, everything below it included."""

    before_path: str | None
    """Its dotted path; empty for the model itself, None if it was added."""
    after_path: str | None
    """None if it was removed."""
    before_type: str
    """Its class."""
    after_type: str
    depth: int
    """Modules above it."""


class NodeChange(Grown):
    """A node of the graph."""

    before_node: str | None
    """Its name; None if it was added."""
    after_node: str | None
    """None if it was removed."""
    where: str
    """Path of the module, or the function and the module that calls it; as it is after, unless it was removed."""
    source: SourceLine | None
    before_shape: tuple[int, ...] | None
    """Of its first result."""
    after_shape: tuple[int, ...] | None


class Commit(Record):
    """The commit with which the peak changed, of those that a bisection asked."""

    name: str
    """Its hash."""
    subject: str
    """The first line of its message."""
    asked: Count
    """How many commits were predicted."""
    passed_over: Count = 0
    """How many lie between the two that are compared, at which the command failed: it may be one of these."""


class StepComparison(Versioned):
    """Two steps side by side."""

    commit: Commit | None = Field(default=None, exclude_if=lambda value: value is None)
    """Where they are of two commits, one after the other."""
    before: ComparedStep
    after: ComparedStep
    requested_bytes: QuantityChange
    """The peak: what the program asked for and holds."""
    allocated_bytes: QuantityChange
    reserved_bytes: QuantityChange
    process_bytes: QuantityChange
    """The upper ends of the two ranges."""
    by_kind: Mapped[Kind, QuantityChange]
    """Splits `requested_bytes`; a kind that neither has is left out, one that one side lacks is 0 there."""
    phases: Mapped[Phase, QuantityChange]
    """Most requested bytes alive in each phase."""
    saved_bytes: QuantityChange
    """Kept for backward when forward ends."""
    params_bytes: QuantityChange
    """All parameters."""
    forward_flops: QuantityChange
    """Of the operators that have a formula, the optimizer's left out."""
    backward_flops: QuantityChange
    flops_unknown: QuantityChange
    """Nodes with an operator that has none, forward and backward apart."""
    modules: tuple[ModuleChange, ...]
    """A tree in preorder, what was removed after its siblings. The first row is the whole step, loss and optimizer
    included."""
    nodes: tuple[NodeChange, ...]
    """All nodes in the order they run after, removed ones last."""

    def to_json(self, *, indent: int | None = None) -> str:
        """The comparison as JSON."""
        return self.model_dump_json(indent=indent)
