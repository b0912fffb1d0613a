"""An engine's room, and tests' baselines."""

from __future__ import annotations

from fxmem.records.profile import (
    Assumption,
    Bytes,
    Headed,
    InputTensor,
    Kind,
    Many,
    Mapped,
    Phase,
    Record,
    Step,
    Versioned,
)

BASELINE_SCHEMA_VERSION = "1"


class UncountedTerm(Record):
    """What the engine takes that an analysis cannot know, and its published range."""

    name: str
    low_bytes: Bytes
    high_bytes: Bytes
    source: str
    """Where the range was published."""


class ServeSequences(Record):
    """How many sequences of a length the card holds at once."""

    context: int
    """Tokens of each."""
    blocks: int
    """Blocks that each takes."""
    low: float
    high: float


class ServeSize(Headed, Versioned):
    """A serving engine's start on a card: its terms, and the blocks of keys and values that are left."""

    engine: str
    release: str
    """Of the engine, whose arithmetic it is."""
    memory_bytes: Bytes
    utilization: float
    """The share of the card's memory that the engine may use."""
    max_batched_tokens: int
    max_seqs: int
    block_size: int
    """Tokens of a block."""
    weights_bytes: Bytes
    """Parameters, buffers and the engine's tables of rotary positions."""
    profile_peak_bytes: Bytes
    """What the engine's profile run allocates at its peak beside the weights, in the allocator's blocks."""
    profile_peak_at: str
    """The operator at that peak."""
    token_bytes: Bytes
    """Keys and values of one token in all layers."""
    block_bytes: Bytes
    """One block: that of a group's layers."""
    groups: int
    """Groups of layers that share blocks; 1 where all layers are alike."""
    uncounted: Many[UncountedTerm]
    """All of them lie between `kv_low_bytes` and `kv_high_bytes`."""
    kv_low_bytes: int
    """For keys and values where every uncounted term is highest; negative: the engine does not start."""
    kv_high_bytes: int
    low_blocks: int
    high_blocks: int
    low_tokens: int
    high_tokens: int
    sequences: Many[ServeSequences]
    assumptions: Many[Assumption] = ()


class PeakBaseline(Record):
    """The peak that a test recorded, with its parts, to report later what grew."""

    fxmem_version: str
    torch_version: str
    target: str
    inputs: Many[InputTensor]
    step: Step
    requested_bytes: Bytes
    allocated_bytes: Bytes | None
    reserved_bytes: Bytes | None
    phase: Phase
    by_kind: Mapped[Kind, Bytes]
    """Splits `requested_bytes`."""
    by_node: Mapped[str, Bytes]
    """Requested bytes alive at the peak by the node they came from; only nodes with at least a thousandth of the
    peak."""

    @property
    def counted_bytes(self) -> int:
        """What is compared: the allocator's blocks where an allocator is modelled, else what the program asked for."""
        return self.requested_bytes if self.allocated_bytes is None else self.allocated_bytes


class Baseline(Record):
    """The file in which tests keep their peaks."""

    schema_version: str = BASELINE_SCHEMA_VERSION
    peaks: Mapped[str, PeakBaseline]
    """By test: its file and name, and the name of the peak where a test has several."""
