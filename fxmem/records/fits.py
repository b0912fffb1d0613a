"""What fits: a step at points of a space of settings, each judged on its card.

*Counted* bytes are those a budget is held against: the allocator's blocks where an allocator is modelled, else what the
program asked for. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from fxmem.records.parts import Count
from fxmem.records.plan import Plan
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
    StepTime,
    Target,
    Versioned,
)
from fxmem.records.registry import Viewed

NEAR_BEST: Final = 0.95
"""Share of the best throughput that a smaller size has to reach to be enough."""

NONE: Final = "none"
"""No checkpoints, one card in the place of a mesh, the model's own dtypes."""
AXES: Final = ("card", "batch", "length", "precision", "checkpoints", "mesh")
"""Names of the settings that a grid varies."""

Size = Annotated[int, Field(ge=1)]
"""Elements along the dimension that varies."""
Price = Annotated[float, Field(ge=0)]

FITS_WORDS: Final = {True: "fits", False: "does not fit", None: "may fit"}
"""By `Point.fits`."""


class Space(Record):
    """The settings that a step is tried with: each value of each with each of the others; empty, as it was given."""

    question: Literal["grid", "largest", "cards", "meshes"] = "grid"
    """Which points were asked for: all; the largest `size` of a dimension that fits, and those on the way; cards; or
    the meshes with the least to send."""
    batch: Many[Size] = ()
    """Samples of a rank's batch; of a program, sizes in the place of its `{}`."""
    length: Many[Size] = ()
    """Lengths of the sequences: dimension 1 of token ids, masks and labels."""
    precision: Many[Literal["none", "bf16", "fp16"]] = ()
    """Of autocast, or of what a mesh gathers; none for the model's own dtypes."""
    checkpoints: Many[str] = ()
    """`none`; `blocks`, each repeated block of the model; or a plan's name."""
    mesh: Many[str] = ()
    """`none` for one card, or as `fsdp=8,tp=2`."""
    card: Many[str] = ()
    """Names, as they were asked for."""
    prices: Mapped[str, Price] = {}  # noqa: RUF012 - a record's default, which pydantic copies
    """Of an hour of one card, by its name."""
    dim: str = "batch"
    """The dimension of sizes, as it was asked for: `batch`, `seq`, the number of a dimension, or `NAME:AXIS` pairs; of
    a generation also `context`, its prompt and its new tokens together; of a program its argument."""
    other: str = Field(default="", exclude_if=lambda value: not value)
    """The second argument of a program that varies, whose sizes are `Settings.length`; empty for one."""
    resized: Many[str] = ()
    """The dimensions that vary together, each as `NAME:AXIS`; of a program none are known."""
    limit: Size | None = None
    """No larger size was tried."""
    is_budget: bool = False
    """Whether the room was given; else it is what a CUDA context leaves of the card's memory at most."""
    planned: bool = False
    """Whether checkpoints were looked for where the step does not fit by itself."""
    ranks: Size = 1
    """How many cards each mesh has."""
    samples: Size | None = None
    """Of an optimizer step, on all cards of a mesh."""


class Settings(Record):
    """A point of the space: how a step is run."""

    card: str
    """Name of its target."""
    size: Size | None = None
    """Of `Space.dim`; None: as it was given. Of a mesh, what a rank takes at a time."""
    length: Size | None = None
    """As `Space.length`, or of `Space.other`."""
    precision: str = NONE
    checkpoints: str = NONE
    mesh: str = NONE
    """All three as in `Space`."""
    accumulate: Size = 1
    """Micro-batches to an optimizer step."""

    @property
    def at(self) -> Settings:
        """These alone."""
        return Settings(**{name: getattr(self, name) for name in Settings.model_fields})

    @property
    def case(self) -> Settings:
        """All but the size."""
        return self.at.model_copy(update={"size": None})


class Point(Settings):
    """A step with these settings."""

    room_bytes: Bytes
    """As `Peak.room_bytes`, or the budget."""
    requested_bytes: Bytes | None = None
    """Peak; None where the step cannot run."""
    allocated_bytes: Bytes | None = None
    """The same in the allocator's blocks; None also where no allocator is modelled."""
    reserved_bytes: Bytes | None = None
    """What the allocator holds when nothing limits it; None as for `allocated_bytes`. A step that fits can have more
    than there is: an allocator that runs short gives its cache back."""
    phase: Phase | None = None
    """Where the peak falls; None where the step cannot run."""
    fits: bool | None
    """None: not known, as sizes depend on data; at their largest it does not."""
    obstacle: str = ""
    """Why it does not fit, or cannot run, in words; empty when it fits."""
    is_analysed: bool = True
    """Whether it was analysed itself; else its sizes follow from those of analysed steps by forms."""
    time: StepTime | None = None
    """Of a rank's own work, without what ranks send; None where the card's rates are not known, or the step cannot run;
    of a program and a generation, too, but when cards were asked for."""
    alloc_retries: Count | None = None
    """Of a generation: how often cached segments went back to the driver for a request to succeed in the memory."""
    samples: Size | None = None
    """Of an optimizer step on all ranks; None where they are not known."""
    cost: float | None = None
    """Of a step on all its cards, in the currency of the prices; None without a price or a time."""
    host_bytes: Bytes = 0
    """As in `RankedStep`."""
    moved_bytes: Bytes = 0
    """Sent by a rank in an optimizer step, where meshes were asked for."""
    link_seconds: float | None = None
    """The time that takes at the links' rates, one after the other; None where they are not known."""
    plan: Plan | None = None
    """Checkpoints with which it fits where it does not by itself, at the least recomputation; None: it fits, or there
    are none, or none were asked for."""

    @property
    def counted_bytes(self) -> int | None:
        """What a budget is held against; None where the step cannot run."""
        return self.requested_bytes if self.allocated_bytes is None else self.allocated_bytes

    @property
    def headroom_bytes(self) -> int:
        """The room less what the allocator holds when nothing limits it. Negative and `fits`: the step runs
        because the allocator gives its cache back when it runs short, which can take time at every step."""
        return self.room_bytes - ((self.requested_bytes if self.reserved_bytes is None else self.reserved_bytes) or 0)

    @property
    def items(self) -> int | None:
        """What a step is of, on all ranks: samples, else its size; tokens, where lengths were given."""
        return self.size if self.samples is None else self.samples * (self.length or 1)

    @property
    def item_seconds(self) -> float | None:
        """The time of a step for each of its `items`; None where either is not known."""
        return None if self.time is None or self.items is None else self.time.seconds / self.items

    @property
    def per_second(self) -> float | None:
        """`items` for each second of the estimated time: a batch's samples per second."""
        return None if self.time is None or self.items is None else self.items / self.time.seconds


class Fits(Viewed, Headed, Versioned):
    """A step at points of a space; its own inputs, step and target are those it was first analysed with."""

    space: Space
    digest: str = ""
    """Of that first analysis and of the plans: points of another digest are not taken over. Of a grid."""
    cards: Many[Target]
    """Those of the points."""
    points: Many[Point]
    """In the order of the grid, the batch last; of sizes the smallest first; of cards the smallest memory first, or the
    fastest with `--time`; of meshes, the ones that were analysed whole, what fits first and sends least."""
    analyses: Count
    """How many steps were analysed, or programs run, for the points that were not kept; of meshes also of small models;
    0 for a report, which is not again."""
    kept: Count = 0
    """How many points came from a file."""
    ruled_out: Count = 0
    """Meshes and micro-batches on the way that a lower bound or one that does not fit rules out."""
    plan_analyses: Count = 0
    """How many plans were carried out on a stand-in and analysed to find those of the points."""
    largest: Size | None = None
    """The largest size found to fit; the next one was analysed, too, and does not (unless it is `Space.limit`). Some
    larger one, up to `last_possible`, may fit all the same: it depends on how the allocator's pieces fall. Of two sizes
    that vary, the first where both grow together (`border` has the others). None: nothing that was tried fits, or no
    size was asked for."""
    positions: Size | None = Field(default=None, exclude_if=lambda value: value is None)
    """Rows of the model's table of positions, which varies with the size: beyond them a real run fails, which no
    analysis sees. None: it has no such table, or none that is known."""
    per_sample_bytes: int | None = None
    """Counted bytes that one more element along the dimension adds: slope of the least-squares line through the points
    from half of `largest` to twice of it (of the smallest that ran, if none fits). None: fewer than two points ran, or
    the line is off by more than a tenth of the most bytes of a point."""
    constant_bytes: int | None = None
    """Intercept of that line: what is there whatever the size. Negative where the curve bends upwards."""
    line_error_bytes: Bytes | None = None
    """Largest distance of those points from it."""
    monotone: bool | None = None
    """Whether no larger size has fewer counted bytes than a smaller one, among the points; None if fewer than two ran.
    Library workspaces can shrink as inputs grow."""
    dtypes: Mapped[Kind, str] = {}  # noqa: RUF012 - a record's default, which pydantic copies
    """Of most bytes of the weights, of their gradients and of the optimizer's state, of a grid and of the cheapest
    mesh."""
    notes: Many[str] = ()
    """Why steps of some settings were each analysed."""
    assumptions: Many[Assumption] = ()

    @property
    def fitting(self) -> tuple[Point, ...]:
        """The points that fit, by themselves or with a plan."""
        return tuple(each for each in self.points if each.fits or each.plan is not None)

    @property
    def best_per_second(self) -> float | None:
        """The highest estimated throughput of the points that fit; None where no time is known."""
        return _best_per_second(self.points)

    @property
    def enough(self) -> int | None:
        """The smallest size that fits and reaches `NEAR_BEST` of `best_per_second`; None where no time is known."""
        return find_enough(self.points)

    @property
    def at_largest(self) -> Point | None:
        """The point of the largest size that fits."""
        return next((point for point in self.points if point.size == self.largest), None)

    @property
    def last_possible(self) -> int | None:
        """Where the line of counted bytes reaches the room: beyond it no size fits, however the allocator's pieces
        fall."""
        if not self.per_sample_bytes or self.per_sample_bytes < 0 or self.constant_bytes is None:
            return None
        return max((self.points[0].room_bytes - self.constant_bytes) // self.per_sample_bytes, self.largest or 0)

    @property
    def border(self) -> tuple[tuple[Point, Point | None], ...]:
        """Where two sizes vary, the points that fit and have no other that fits and is as large in both; each with the
        nearest one that is as large in both and does not fit, None where the limit was reached. The smallest second
        size first."""

        def is_within(one: Point, other: Point) -> bool:
            return (one.size or 0) <= (other.size or 0) and (one.length or 0) <= (other.length or 0)

        fitting = [each for each in self.points if each.fits]
        outer = [each for each in fitting if not any(is_within(each, other) for other in fitting if other != each)]

        def find_above(of: Point) -> Point | None:
            above = (each for each in self.points if not each.fits and is_within(of, each))
            return min(above, key=lambda each: (each.size or 0) * (each.length or 0), default=None)

        return tuple((each, find_above(each)) for each in sorted(outer, key=lambda each: each.length or 0))

    @property
    def next_above(self) -> Point | None:
        """The first size above it, which does not fit; None when the limit was reached."""
        above = (point for point in self.points if (point.size or 0) > (self.largest or 0))
        return next((point for point in above if not point.fits), None)

    @property
    def item(self) -> str:
        """What `Point.items` of a grid are, in a word."""
        return "token" if self.space.length else "sample"

    @property
    def by_case(self) -> tuple[Point, ...]:
        """Of each case, the point with the largest batch that fits; where none does, with the smallest."""
        cases: dict[Settings, list[Point]] = {}
        for each in self.points:
            cases.setdefault(each.case, []).append(each)

        def rank(each: Point) -> tuple[bool, int]:
            return bool(each.fits), (each.size or 0) if each.fits else -(each.size or 0)

        return tuple(max(each, key=rank) for each in cases.values())

    @property
    def front(self) -> tuple[Point, ...]:
        """The fitting points that none beats in both memory and time for an item, the least memory first."""
        found: list[Point] = []
        timed = [(each.counted_bytes or 0, each.item_seconds, each) for each in self.fitting]
        for _, seconds, each in sorted((row for row in timed if row[1] is not None), key=lambda row: row[:2]):
            if not found or (seconds or 0.0) < (found[-1].item_seconds or 0.0):
                found.append(each)
        return tuple(found)


def find_enough(points: Sequence[Point]) -> int | None:
    """`Fits.enough` of points."""
    best = _best_per_second(points)
    if best is None:
        return None
    return min(point.size or 0 for point in points if point.fits and (point.per_second or 0) >= NEAR_BEST * best)


def _best_per_second(points: Sequence[Point]) -> float | None:
    return max((point.per_second for point in points if point.fits and point.per_second), default=None)


# --- an engine's room, and tests' baselines ---------------------------------------------------------------------------


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


class ServeChange(Record):
    """What one option of the engine would leave."""

    option: str
    """As the engine takes it, e.g. `--kv-cache-dtype fp8`."""
    low_tokens: int
    high_tokens: int


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
    tensor_parallel: int = 1
    """Cards that split each layer."""
    pipeline_parallel: int = 1
    """Stages of the model. All that follows is of the card with the least room."""
    kv_dtype: str = "auto"
    """What keys and values are kept in; `auto`: as the weights."""
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
    counts_graphs: bool
    """Whether this release takes what CUDA graphs need off its share; else they lie beside it."""
    graphs_low_bytes: Bytes | None
    graphs_high_bytes: Bytes | None
    """What CUDA graphs take; None where too little was seen of such a model."""
    kv_low_bytes: int
    """For keys and values where every uncounted term is highest; negative: the engine does not start."""
    kv_high_bytes: int
    low_blocks: int
    high_blocks: int
    low_tokens: int
    high_tokens: int
    sequences: Many[ServeSequences]
    changes: Many[ServeChange] = ()
    """Options that leave more, the most first."""
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
