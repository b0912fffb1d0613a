"""What a step may be besides plain: compiled, a generation, an engine's, a rank's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler

from fxmem.records.units import CompileMode, TimedQuestion

# What every record is made of: the frozen base class, and numbers and sequences with their bounds.


_MOST = 10**30

Bytes = Annotated[int, Field(ge=0, le=_MOST)]
"""A number of bytes. The bound is beyond any sum of sizes that 64 bits address, and within what a float holds and a
table prints."""

Flops = Annotated[int, Field(ge=0, le=_MOST)]
"""A number of floating-point operations, one multiply-add being 2; bounded as `Bytes`."""

FlopsChange = Annotated[int, Field(ge=-_MOST, le=_MOST)]
"""FLOPs of one step beyond those of another: negative where it has fewer. Bounded as `Bytes`."""

Count = Annotated[int, Field(ge=0)]
"""How many there are of something."""

Tick = Annotated[int, Field(ge=0)]
"""A position in the order of allocations and frees."""

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
Many = Annotated[tuple[_Item, ...], FailFast()]
"""A sequence, of which validation reports the first wrong item: a file of a million wrong ones is refused as quickly as
a file of one."""


class _FailFastMapping:
    """What `FailFast` is to a sequence, for a mapping; pydantic's own takes mappings from 2.14 on."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


Mapped = Annotated[dict[_Key, _Item], _FailFastMapping()]
"""A mapping, of which validation reports the first wrong entry, as `Many` does of a sequence."""


class Record(BaseModel):
    """Base of all records: frozen, and refusing fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- how a compiled step was compiled ---------------------------------------------------------------------------------


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


# --- what a generation takes, token by token --------------------------------------------------------------------------


class GenerationPeak(Record):
    """The most bytes of a part of a generation."""

    requested_bytes: Bytes
    allocated_bytes: Bytes | None = None
    """None: no allocator is modelled for this target."""
    reserved_bytes: Bytes | None = None
    token: Count
    """The new token, from 1, while which was computed most was alive."""


class TokenBytes(Record):
    """The most bytes while a token was computed."""

    token: Count
    """From 1: the first comes of the prefill."""
    requested_bytes: Bytes
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None


class GenerationRun(Record):
    """A generation: one forward over the prompt, then one for each further token."""

    new_tokens: Count
    recorded_tokens: Count
    """Tokens whose forward was recorded. All others are made by arithmetic."""
    cache: str
    """What keys and values are kept in."""
    beams: Count = 1
    prefill: GenerationPeak
    decode: GenerationPeak | None = None
    """None with a single token."""
    growth_bytes: Bytes | None = None
    """By what the bytes alive grow from token to token. None: not the same for each."""
    tokens: Many[TokenBytes]
    """Of every token, on a card that is large enough."""
    fits: bool | None = None
    """Whether a first generation of a process runs in the target's room (`Peak.room_bytes`). None: not known."""
    last_token_that_fits: Count | None = None
    """None where all do; 0 where the prompt does not."""
    alloc_retries: Count | None = None
    """How often cached segments went back to the driver for a request to succeed, within that room."""


# --- A serving engine on the card of the program that trains ----------------------------------------------------------


class EngineUse(Record):
    """A serving engine that a program starts in its own process.

    What the driver keeps for it beside torch's allocator is not counted: CUDA graphs, workspaces of its kernels.
    """

    name: str
    """The engine's package."""
    release: str
    """The package and the release whose sources were read."""
    place: str
    """`file:line` of the program that starts it."""
    utilization: float
    """The share of the card that it may use, `gpu_memory_utilization`."""
    max_batched_tokens: Count
    max_seqs: Count
    weights_bytes: Bytes
    """Its own copy of the model, and its tables."""
    profile_peak_bytes: Bytes
    """What its profile run allocates at its peak beside the weights."""
    kv_bytes: Bytes
    """Its blocks of keys and values."""
    can_sleep: bool
    """Whether it was built with `enable_sleep_mode`."""
    sleeps: Count = 0
    """How often it was put to sleep."""
    level: Count = 0
    """Of its last sleep: 1 keeps the weights on the host, 2 drops them. 0: none."""
    start_free_bytes: Bytes
    """What was free on the card when it started: its share must not be more."""
    most_utilization: float | None = None
    """The largest share with which nothing of this run would have asked for more than the card has, in thousandths. A
    lower bound: what torch's allocator reserves is not given back for it. None where a request was refused."""


# --- one rank of a distributed step -----------------------------------------------------------------------------------


CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send", "receive"]


class RankGroup(Record):
    """A process group that the step communicates in."""

    name: str
    """Of the mesh's dimension (`fsdp`, `tp`), else torch's own."""
    size: int
    """How many ranks it has."""
    spread: int = 1
    """The largest distance between the numbers of neighbouring ranks; 1 for ranks side by side."""


class Collective(Record):
    """All collectives of one kind in one group, over the step."""

    kind: CollectiveKind
    group: int
    """Index into `RankedStep.groups`."""
    count: int
    moved_bytes: Bytes
    """What this rank sends: in a ring (n - 1) / n of the whole tensor, twice that for an all-reduce."""


class RankClass(Record):
    """Ranks whose steps are equal, storage by storage."""

    first: int
    """The rank that was analysed; the others have higher numbers."""
    last: int
    size: int
    """How many ranks it has; fewer than from `first` to `last` where ranks of other classes lie between."""
    compared: Many[int] = ()
    """Those that were analysed, too, and found equal to the first."""
    requested_bytes: Bytes
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    fits: bool | None = None


class RankedStep(Record):
    """Which rank of how many the step is of."""

    world: int
    rank: int
    groups: Many[RankGroup] = ()
    collectives: Many[Collective] = ()
    classes: Many[RankClass] = ()
    """All ranks, in classes of equal ones; empty where one rank alone was analysed."""
    host_bytes: Bytes = 0
    """Parameters, gradients and optimizer state that this rank keeps in the host's memory (`CPUOffloadPolicy`); what
    the optimizer's step takes beside them is not counted."""
