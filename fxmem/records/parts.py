"""Parts of a record: numbers with bounds, what a step may be besides plain, and what is of a whole program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler

from fxmem.records.units import OF_FRAMES, OF_GRAPH, CompileMode, TimedQuestion

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


# --- what follows an epoch of a program -------------------------------------------------------------------------------


class EvaluationPass(Record):
    """A pass over a loader after the epoch, of whose batches the first ones ran; or a loop of a program that trains
    nothing, whose passes are its batches."""

    place: str = ""
    """`file:line` that goes through the loader, or of the loop's first line; empty where that is not known."""
    is_loop: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether it is such a loop."""
    batches: Count | None = None
    """Of all of it; None where its loader, or its head, does not say."""
    ran: Count
    """Batches that ran."""
    requested_bytes: Bytes
    """The most requested at once until then, from the last step before it on."""
    growth_bytes: Bytes | None = None
    """How many bytes more are alive after each batch than after the one before. None: not known."""
    grown: Many[Growth] = ()
    """Who keeps more after each batch, the most first; batches are the steps of these."""
    end_bytes: Bytes | None = None
    """The most requested at once in the whole pass; None where something grows and its end is not known, or whether it
    goes on."""

    reserved_bytes: Bytes | None = None
    """The most reserved until the last batch is over, where further batches were replayed; None where their sizes do
    not grow evenly, and off a card."""
    full_at: Count | None = None
    """The batch that the card had no room for in this replay; None for none."""

    @property
    def is_carried_on(self) -> bool:
        """Whether batches that did not run leave something more: what the program makes of all of it (one tensor, by
        `torch.cat`) is of those that ran."""
        return bool(self.growth_bytes or self.is_loop) and (self.batches is None or self.ran < self.batches)

    @property
    def is_proved(self) -> bool:
        """Whether what grows is proved to go on, or to end at a batch that is known."""
        return all(each.is_endless or each.until is not None for each in self.grown)

    @property
    def of(self) -> Literal["batch", "pass"]:
        """What its batches are, in a word."""
        return "pass" if self.is_loop else "batch"

    @property
    def title(self) -> str:
        """What it is, and where."""
        return f"{'loop' if self.is_loop else 'evaluation'} at {self.place or 'a loader'}"

    @property
    def share(self) -> str:
        """How many of its batches ran, in words."""
        of = "" if self.batches is None else f" of {self.batches:,}"
        return f"{self.ran:,}{of} {self.of}es"

    def find_full(self, room_bytes: int) -> int | None:
        """The batch at which a card is full; None for none of the pass.

        Args:
            room_bytes: what the allocator may have there.
        """
        if self.full_at is not None:
            return self.full_at
        if self.end_bytes is None or self.end_bytes <= room_bytes or not self.growth_bytes:
            return None
        return self.ran + 1 + max(room_bytes - self.requested_bytes, 0) // self.growth_bytes


# --- what a program keeps more of after each step, and what it does later than they show ------------------------------


ONLY_TORCH = "a graph that only torch has"
"""The holder of what autograd keeps, and no object of Python's leads to, in words."""
NOT_FOUND = "something that was not found, as a C extension's cache"
"""The holder of what neither leads to, in words."""
ANEW = "with each new optimizer"
"""When what is kept of a fold or a trial grows, in words."""
OWN_GRAPH = "a cycle of gradients and their graph (backward with create_graph=True)"
"""The holder of what a cycle of parameter, gradient and graph keeps, which no collector frees."""
IN_CYCLES = "reference cycles, which Python does not collect after gc.disable()"


class Growth(Record):
    """What one owner keeps more of after each step than after the one before."""

    holder: str
    """What the program calls the owner (`preds`, `graph of losses`, `frames of errors`); where only torch keeps it,
    empty, or the call that made it. Untrusted text."""
    nbytes: Bytes
    """A step; the mean where steps differ."""
    tensors: int
    """A step that keeps more; 0 where one tensor grows."""
    shape: Many[int] = ()
    """Of the largest."""
    dtype: str = ""
    times: int = Field(default=1, exclude_if=lambda value: value == 1)
    """How many times the bytes of the tensors that the program has of the largest it keeps, as they are views of it."""
    made_at: str = ""
    """`file:line` that made the largest; empty where that is not known."""
    kept_at: str = ""
    """`file:line` of the program that writes to the owner; empty where none is found."""
    since: int
    """The first step that kept more than the one before."""
    every: int = Field(default=1, exclude_if=lambda value: value == 1)
    """Steps at most from one that keeps more to the next."""
    emptied: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The last step that left less than half of what the owner had had before, if that was more than it has now: it
    grows again, and the peak was seen. None: there is none."""
    until: int | None = None
    """The step from which on it keeps no more, for the owner has a bound (`deque(maxlen=10)`); None: none is known."""
    ends: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The last step before the program ends, or makes the owner anew (`preds = []` in the loop of its epochs); None:
    not known."""
    is_endless: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether the program's code puts more into it and nothing there bounds it, or autograd's graph alone keeps it.
    Where no end is known either, whether it goes on is not known."""

    @property
    def keeper(self) -> str:
        """Who keeps it, in words; a chain that is longer each time is cut short. Untrusted text."""
        if not self.holder:
            return ONLY_TORCH if self.is_endless else NOT_FOUND
        return re.sub(r"(\.\w+)\1{2,}", r"\1..", self.holder)

    @property
    def last(self) -> int | None:
        """The step from which on it keeps no more, whatever ends it; None: not known."""
        return min((each for each in (self.until, self.ends) if each is not None), default=None)

    @property
    def is_graph(self) -> bool:
        """Whether it is kept for a backward."""
        return self.holder.startswith(OF_GRAPH)

    @property
    def is_frames(self) -> bool:
        """Whether an exception keeps it, with the functions that it came through."""
        return self.holder.startswith(OF_FRAMES)


class Schedule(Record):
    """What a program does every so many steps, by a condition like `if step % 1000 == 0:`, or after its loop."""

    place: str
    """`file:line` of the condition, or of what follows the loop."""
    every: int | None
    """None: once its steps are over."""
    counter: str = Field(default="", exclude_if=lambda value: not value)
    """What it counts in the place of steps, as epochs: no recorded step changed it; or what comes to `at`. Empty where
    it counts steps."""
    at: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """What it counts when it is done, once; None where it is done again and again, or that is not known."""
    calls: str = Field(default="", exclude_if=lambda value: not value)
    """`file:line` where it calls a model and no step did; empty where it calls none."""
    saves: str = Field(default="", exclude_if=lambda value: not value)
    """`file:line` where it saves what is trained, and no step did; empty where it does not."""
    ran: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether it was brought forward: done once after the recorded steps."""
    requested_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """The most requested at once while it was done, or in the step after it where it changes how the program trains;
    None where it was not, or there is no card."""


def find_large(grown: Sequence[Growth]) -> list[Growth]:
    """Those that keep a hundredth of all at least, in their order."""
    whole = sum(each.nbytes for each in grown)
    return [each for each in grown if 100 * each.nbytes >= whole]


# --- what a program takes of the host's memory ------------------------------------------------------------------------


class HostUse(Record):
    """The most that a program had at once in the host's memory, its loader's workers included.

    Pages of files are not counted, which a system drops where it needs the room: libraries, mapped checkpoints.
    """

    peak_bytes: Bytes | None
    """All that follows, but for the pages of files. None where the system does not say what a process has."""
    after_bytes: Bytes | None = None
    """The same when its last round was over; None where there was none, or that is not known."""
    by_round: Many[Bytes] = Field(default=(), exclude_if=lambda value: not value)
    """The same whenever a round was over, set-up before the first."""
    peak_round: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """The number of the round in which the peak came: 0 for set-up. None where that is not known."""
    place: str = ""
    """`file:line` of the program that ran then; empty where none of its own did."""
    call: str = ""
    """What that line had called (`from_pretrained`); empty for nothing in Python. Untrusted text."""
    process_bytes: Bytes | None
    """Measured: the resident memory of the process at the peak, without what fxmem itself has there."""
    pretended_bytes: Bytes = 0
    """Counted at the peak: tensors on the host that have no memory here, such as a model before it moves to a card."""
    workers: Count = 0
    """Other processes that the program had at the peak, its loaders' workers above all."""
    workers_bytes: Bytes = 0
    """Measured: what they had for themselves, and share with no other process."""
    batches_bytes: Bytes = 0
    """Counted: batches in shared memory, those that the program holds and those that wait for it."""
    worker_adds_bytes: Bytes | None = None
    """What one more worker of the last data loader adds: its own memory and the batches that it loads ahead. None
    where no loader had workers, or the system does not say."""
    copied_bytes: Bytes | None = Field(default=0, exclude_if=lambda value: value == 0)
    """Counted: what forked workers of loaders may have more, once each has read all of its dataset: to read a Python
    object writes its count of references, so that the worker gets a copy of its page.
    By a sample; an upper bound. None: too many to look at."""
    pinned_bytes: Bytes = 0
    """Counted: the most that PyTorch's allocator of pinned memory had, in its powers of two."""
    files_bytes: Bytes | None = None
    """Measured: pages of files in memory at the peak, which the sum leaves out. None where they are not known."""
    limit_bytes: Bytes | None = None
    """What the host has, as the user says; None where nothing is said."""
    growth_bytes: Bytes | None = None
    """How many bytes more of what came from the card are kept on the host after each step: as `growth_bytes` of the
    card."""
    grown: Many[Growth] = ()
    """Who keeps it, the most first."""

    @property
    def fits(self) -> bool | None:
        """Whether it fits the limit; None where either is not known, or `is_open`."""
        if self.limit_bytes is None or self.peak_bytes is None or self.most_bytes is None:
            return None
        return False if self.peak_bytes > self.limit_bytes else self.most_bytes <= self.limit_bytes or None

    @property
    def is_open(self) -> bool:
        """Whether it fits the limit as it was seen, and not where workers copy as much as they may."""
        return self.fits is None and self.limit_bytes is not None and self.peak_bytes is not None

    @property
    def most_bytes(self) -> int | None:
        """The peak where each worker has read all of its dataset, as far as that is known."""
        return None if self.peak_bytes is None else self.peak_bytes + (self.copied_bytes or 0)


# --- the batch of an epoch that decides, and a long run over batches of varied lengths --------------------------------


class LengthChange(Record):
    """What a change of the allocator's settings, or of the batches, makes of a long run."""

    change: str
    """In words."""
    reserved_bytes: Bytes
    """After `LongestBatch.compared_steps` steps."""


class LongestBatch(Record):
    """The batch with the highest peak of an epoch whose batches have different lengths, and a run over many of them."""

    place: str = ""
    """`file:line` that goes through the loader; empty where that is not known."""
    batches: Count
    """Of the epoch, as far as it was read."""
    epochs: Count = 1
    """How many were read, as each has another longest batch."""
    stopped: str = ""
    """Why the epoch was not read to its end; empty where it was."""
    number: int
    """The batch with the highest peak, from 1; the largest one where no peak is known."""
    shape: Many[int]
    """Of its largest tensor."""
    unproved: str = ""
    """Why nothing is known of lengths that were not run; empty where their sizes are proved."""
    requested_bytes: Bytes | None = None
    """Peak of the step with this batch; None where nothing is proved and none was run."""
    allocated_bytes: Bytes | None = None
    """None also without a card."""
    ran: Count = 0
    """Batches that were run, where nothing is proved."""
    most_bytes: Bytes | None = None
    """What another batch may need: where sizes are proved and epochs differ, one as long as the longest in each of its
    lengths; where none is, one of those that were read, if memory grows at most with the square of each length."""
    steps: Count = 0
    """Steps that were replayed."""
    reserved_bytes: Bytes | None = None
    """After these."""
    full_at: int | None = None
    """The step at which the card has no more memory; None where there is none within `steps`."""
    compared_steps: Count = 0
    """Steps over which changes are compared."""
    compared_bytes: Bytes | None = None
    """Reserved after these as it is."""
    changes: Many[LengthChange] = ()
    """What each would reserve, the least first."""
