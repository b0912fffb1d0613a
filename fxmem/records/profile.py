"""Every type that crosses a border between fxmem's stages: frozen, plain data, readable from JSON without torch.

Time is counted in *ticks*. One tick is one event of the allocator's log: a storage comes or a storage goes.
A storage is alive over the half-open range `[birth, death)`; what is there before the step begins has
`birth == 0`, what is still there when the step's function returns has `death == Profile.ticks`. An op covers
the ticks `[begin, end)` at which it allocates; what it no longer needs goes at later ticks, because an op
allocates its outputs, runs, and only then can its inputs be freed.

Bytes are ints and mean *requested* bytes (what the program asked of the allocator) unless the name says
otherwise. `None` means unknown, never zero.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypedDict

from pydantic import Field

from fxmem.records.findings import Finding
from fxmem.records.parts import (
    Bytes,
    CompileRecord,
    Count,
    EngineUse,
    EvaluationPass,
    Flops,
    FlopsChange,
    GenerationRun,
    Growth,
    HostUse,
    LongestBatch,
    Many,
    Mapped,
    RankedStep,
    Record,
    Schedule,
    Tick,
)
from fxmem.records.registry import Viewed, print_record
from fxmem.records.units import NO_LOSS, ZeroGrad, package_path

__all__ = ["Bytes", "Flops", "FlopsChange", "Many", "Mapped", "Record"]
"""What other modules use beside what is defined here."""

SCHEMA_VERSION = "1"


class Kind(StrEnum):
    """What a storage is for. One storage has one kind for its whole life: the first that applies, in this order."""

    PARAMETER = "parameter"
    """Owned by an `nn.Parameter` of the model."""
    BUFFER = "buffer"
    """Owned by a registered buffer, or by another tensor the model object keeps between steps."""
    INPUT = "input"
    """Owned by an argument of the step."""
    OPTIMIZER_STATE = "optimizer_state"
    """Owned by the optimizer between steps (momenta, step counters kept on the device)."""
    GRADIENT = "gradient"
    """A parameter's `.grad` when backward ends."""
    OUTPUT = "output"
    """Reachable from the model's output or the loss when forward ends."""
    SAVED = "saved"
    """Saved by autograd for backward (activations, masks, statistics)."""
    UNSHARDED = "unsharded"
    """Parameters whole, gathered from the shards of all ranks for as long as they are used."""
    COMMUNICATION = "communication"
    """Buffers that a collective reads or writes: all-gather outputs, reduce-scatter inputs, gradient buckets."""
    TEMPORARY = "temporary"
    """Everything else: intermediate results, gradients of activations, optimizer scratch tensors."""
    WORKSPACE = "workspace"
    """Memory no tensor owns: taken by a kernel or a library for its own use."""


class Phase(StrEnum):
    """Part of the step. An inference step is all forward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    """Of a recorded program: a forward without gradients of a model that it trains, in eval mode."""
    ROLLOUT = "rollout"
    """Of a recorded program: a call of a model's `generate`, or of an engine's."""
    SYNC = "sync"
    """Of a recorded program: an engine takes the weights of the model that is trained."""
    SAVE = "save"
    """Of a recorded program: it saves what it trains."""
    PREFILL = "prefill"
    """Of a generation: the forward over the prompt, and what comes before it."""
    DECODE = "decode"
    """Of a generation: the forwards of the tokens after the first."""


class SourceLine(Record):
    """A line of the user's own code."""

    file: str
    """Path as Python reported it."""
    line: int
    """1-based."""
    function: str = ""
    code: str = ""
    """The line's text, stripped; empty when the file cannot be read."""

    @property
    def place(self) -> str:
        """`file:line`; of an installed package, from the package on: a report is for others to read, too."""
        return f"{package_path(self.file)}:{self.line}"


class TensorInfo(Record):
    """One tensor among a node's outputs."""

    shape: Many[int]
    dtype: str
    """torch's name without the module, e.g. `float32`."""
    storage: int | None = None
    """Index into `Profile.storages`; None for a tensor on another device than the target."""


class InputTensor(Record):
    """One tensor handed to the model."""

    name: str
    shape: Many[int]
    dtype: str


class PhaseBytes(Record):
    """A quantity of a node told apart by phase."""

    forward: Bytes
    backward: Bytes | None
    """None when the node has no backward."""

    @property
    def max(self) -> int:
        """The larger of the two."""
        return max(self.forward, self.backward or 0)


class Node(Viewed, Record):
    """One node of the traced graph, annotated.

    `op` is torch.fx's (`placeholder`, `get_attr`, `call_module`, `call_function`, `call_method`, `output`); two further
    rows stand for what a step does outside the model: `loss` and `optimizer`.
    """

    name: str
    op: Literal["placeholder", "get_attr", "call_module", "call_function", "call_method", "output", "loss", "optimizer"]
    target: str
    module: str = ""
    """Path of the innermost module whose code made the call; empty for the model itself. For `call_module`, the module
    called."""
    module_type: str = ""
    """Class name of that module."""
    source: SourceLine | None = None
    called_from: SourceLine | None = Field(default=None, exclude_if=lambda value: value is None)
    """The program's own line that leads to `source`, where that is an installed package's and no call of a module has
    the same."""
    inputs: Many[int] = ()
    """Indices of the nodes whose results it reads, in argument order, each once."""
    outputs: Many[TensorInfo] = ()
    view_of: int | None = None
    """Index of the node that owns the storage of its first output, when this node brought none (a view or an in-place
    result)."""
    leads_to_gradients: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether a backward could begin at what it returns."""
    lacks_backward: bool = Field(default=False, exclude_if=lambda value: not value)
    """As of a `ModuleCall`, where it is the call of a single layer."""
    params_bytes: Bytes = 0
    """Parameters and buffers the node reads, each storage once per model: its first reader owns it."""
    buffers_bytes: Bytes = Field(default=0, exclude_if=lambda value: not value)
    """Of `params_bytes`, those of buffers."""
    output_bytes: Bytes = 0
    """New storage its outputs bring; 0 for a view or an in-place result."""
    saved_bytes: Bytes = 0
    """New-to-the-saved-set storage it keeps for backward until forward ends; parameters, buffers and step inputs
    excluded."""
    saved: Many[int] = ()
    """Storages it keeps for backward, whether or not an earlier node already kept them; the same exclusions."""
    scratch_bytes: PhaseBytes = PhaseBytes(forward=0, backward=None)
    """Peak of what lives only inside the node, workspace included."""
    forward_flops: Flops | None = None
    """Floating-point operations, one multiply-add = 2; None where an op has no formula."""
    backward_flops: Flops | None = None
    """The same for its backward, recomputation of checkpointed regions included."""
    live_bytes: PhaseBytes = PhaseBytes(forward=0, backward=None)
    """Largest number of bytes alive while it runs, everything counted."""


class Op(Record):
    """One call of an ATen or custom operator, in the order they ran."""

    name: str
    """Qualified overload, e.g. `aten.convolution.default`."""
    node: int
    """Index of the node it ran for; backward ops belong to the node whose gradient they compute."""
    phase: Phase
    begin: Tick
    end: Tick
    """`[begin, end)` are the ticks at which it allocated."""
    flops: Flops | None = 0
    """None when it computes and has no formula."""
    moved_bytes: Bytes | None = None
    """What it reads and writes, each argument once; None: not known (a file of an older fxmem)."""
    host_bytes: Bytes = Field(default=0, exclude_if=lambda value: value == 0)
    """What of it crosses the link between the card and the host's memory."""
    stream: int = Field(default=0, exclude_if=lambda value: value == 0)
    """The CUDA stream it runs on; 0 is the default one."""
    repeats: tuple[int, int] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of a module's call that was made of one that ran: the first op of that one, and one past its last."""


class Storage(Record):
    """One block of memory that tensors share, over its life."""

    nbytes: Bytes
    kind: Kind
    birth: Tick
    death: Tick
    """Alive over `[birth, death)`."""
    op: int | None = None
    """Index of the op that allocated it, in the first step of a loop if every step keeps it; None for what was there
    before."""
    node: int | None = None
    """Index of the node that op ran for; for a parameter or buffer, its first reader."""
    name: str = ""
    """Qualified name of the parameter, buffer, input, gradient or optimizer state; empty otherwise."""
    holder: str = Field(default="", exclude_if=lambda value: not value)
    """What a program calls it that keeps it when a round is over: `preds[3]`, `ck['model']['0.weight']`; where only the
    C++ of torch keeps it, the call that made it, with its line. Empty where it has a name, or is not kept."""
    made_at: str = Field(default="", exclude_if=lambda value: not value)
    """`file:line` of a program that made before the step what has no name, or in what backward calls, a hook or the
    backward of a Function, what it makes; empty elsewhere, and where it is not known."""
    is_frozen: bool = Field(default=False, exclude_if=lambda value: not value)
    """Of a parameter: whether no gradient of it is wanted (`requires_grad=False`)."""
    is_read: bool = Field(default=False, exclude_if=lambda value: not value)
    """Of a program's gradient, or of what else is there when its last backward ends, but for parameters and optimizer
    states: whether an operator after a backward, or a function that a backward calls, reads it; of what was there
    before the step, also one of forward; of a gradient, in a step before as well. To fill with zeros is not to read."""
    is_discarded: bool = Field(default=False, exclude_if=lambda value: not value)
    """Of a program's gradient: whether the step frees it, and nothing reads it from its last backward on."""
    copy_of: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of what a program keeps: index of the storage that all of it was copied from last, where that is alive."""
    is_derived: bool = Field(default=False, exclude_if=lambda value: not value)
    """Of a buffer: whether no checkpoint has it (`persistent=False`)."""
    is_bounded: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether its size comes of a shape that depends on data, and is counted at the largest that it can be."""
    other_bytes: Many[Bytes] = Field(default=(), exclude_if=lambda value: not value)
    """Of a workspace of a cuDNN that cannot be asked: its bytes by the further ones of `Profile.cudnns`."""
    smaller_bytes: Many[Bytes] = Field(default=(), exclude_if=lambda value: not value)
    """Of a convolution's workspace: those of the plans that torch goes on to, in this order, where there is no room for
    it. Empty where they were not asked for, as memory is not short."""
    shape: Many[int] = ()
    """Shape of the first tensor seen over it."""
    dtype: str = ""
    stream: int = Field(default=0, exclude_if=lambda value: value == 0)
    """The CUDA stream that was current when it was allocated; 0 is the default one, `GRAPH_POOL` CUDA graphs' pool."""
    used_on: Many[int] = Field(default=(), exclude_if=lambda value: not value)
    """Other streams that `record_stream` named: once freed, its block waits for them."""
    free_by: Tick | None = Field(default=None, exclude_if=lambda value: value is None)
    """The tick by which such a block is free at the latest, as the host has waited for these streams; None: the
    step's end."""

    @property
    def title(self) -> str:
        """Its name, else its holder; empty for none. Untrusted text."""
        return self.name or self.holder


class PhaseSpan(Record):
    """The ticks and ops of one phase, half-open."""

    phase: Phase
    begin: Tick
    end: Tick
    first_op: int
    last_op: int
    """One past the last."""


class ModuleCall(Record):
    """One call of a module with submodules, and the nodes that ran inside it."""

    module: str
    """Its path."""
    first_node: int
    last_node: int
    """One past the last."""
    source: SourceLine | None = None
    """The line that made the call; None where none of the user's did."""
    leads_to_gradients: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether a backward could begin at what it returns."""
    lacks_backward: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether one could, and none came through it or through what reads its results: no `backward()`, no
    `torch.autograd.grad`, none within torch.func, and in a program none to the graph of an earlier step."""
    skips_checkpoint: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether its module is told to checkpoint (`gradient_checkpointing`) and is in eval mode, in which some do not."""


class RecomputedRegion(Record):
    """Nodes that the program itself checkpoints: they ran within `torch.utils.checkpoint` and run again in backward."""

    first_node: int
    last_node: int
    """One past the last."""


class RecomputedOp(Record):
    """An op that ran in backward to recompute what had been freed.

    It ran in a checkpointed region that ran again, or in an unpack hook."""

    op: int
    """Its index."""
    read_bytes: Bytes
    """What it read that no such op had made."""


class RestoredTensor(Record):
    """A tensor that the backward of a node read although it was not saved.

    A checkpointed region recomputed it, or an unpack hook returned it."""

    node: int
    storage: int


class Assumption(Record):
    """Something taken for granted that moves a number, and why."""

    topic: str
    """A short stable key: `step`, `attention`, `optimizer`, `workspace`, …"""
    text: str


class Unknown(Record):
    """Something that could not be counted."""

    topic: str
    """`flops`, `hooks`, …"""
    what: str
    """The operator or place."""
    count: int = 1
    """How often it occurs."""


class Target(Record):
    """The machine the prediction is for."""

    name: str
    """Key of the catalogue, e.g. `h100`."""
    device: Literal["cuda", "cpu"]
    full_name: str = ""
    memory_bytes: Bytes | None = None
    """What the device reports as total memory; None for the CPU."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability (major, minor); None for the CPU."""
    torch: str = Field(default="", exclude_if=lambda value: not value)
    """The release of torch there, e.g. `2.6`, whose kernels and workspaces are predicted; empty for the one that is
    installed here."""
    ranks: int = Field(default=0, exclude_if=lambda value: not value)
    """Ranks that it communicates with over NCCL, itself included; 0 without a process group."""
    in_use_bytes: Bytes = Field(default=0, exclude_if=lambda value: not value)
    """What other programs have of it."""
    system: Literal["", "windows"] = Field(default="", exclude_if=lambda value: not value)
    """The operating system there, which keeps a share of the card for itself; empty for Linux."""

    def release(self, installed: str) -> str:
        """Return the release of torch there, of which `installed` is the one here."""
        return self.torch or installed

    @property
    def spelling(self) -> str:
        """How it is asked for: its name, and what surrounds a program there."""
        used = self.in_use_bytes
        size = f"{used >> 20}MiB" if used % (1 << 20) == 0 else f"{used / 1e6:.3f}MB"
        around = {"torch": self.torch, "in-use": size if used else "", "os": self.system}
        return ",".join([self.name, *(f"{key}={value}" for key, value in around.items() if value)])

    def among(self, ranks: int) -> Target:
        """Return the same for one of so many ranks; a CPU has no NCCL."""
        return self.model_copy(update={"ranks": ranks}) if self.device == "cuda" else self


class PartOfRound(Record):
    """A phase of a round, all its times together: of one model, and with gradients or without."""

    phase: Phase
    model: str = ""
    """What the program calls it; empty in backward and optimizer, and where it has no name."""
    with_gradients: bool = True
    """Whether a forward is one that a gradient leads to."""
    requested_bytes: Bytes
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    """The most of each count while it runs."""

    @property
    def title(self) -> str:
        """Phase and model, in words. Untrusted text."""
        if self.phase is Phase.SAVE:
            return f"saving at {self.model}"
        if self.phase is not Phase.FORWARD:
            return f"{self.phase} of {self.model}" if self.model else self.phase
        if not self.model:
            return "outside of models"
        return f"forward{'' if self.with_gradients else ' without gradients'} of {self.model}"


class Round(Record):
    """One round of a recorded program: what runs until all its optimizers have stepped, or what is done before."""

    requested_bytes: Bytes
    """The largest number of bytes requested at once."""
    allocated_bytes: Bytes | None = None
    """The same in the allocator's blocks: what `torch.cuda.max_memory_allocated()` says of the round. None on a CPU."""
    reserved_bytes: Bytes | None = None
    """Held by the allocator at most. None on a CPU."""
    phase: Phase
    """Of the peak."""
    place: str = ""
    """`file:line` of the program at the peak; empty where none of its lines ran."""
    operators: int
    """How many ran on the target."""
    phases: Many[Phase] = ()
    """In the order they came."""
    retained_bytes: Bytes | None = None
    """Requested bytes alive when it is over. None: not known (a file of an older fxmem)."""
    is_whole: bool = True
    """Whether its optimizers stepped. False: what ran after the last step, or all of a program without one."""
    parts: Many[PartOfRound] = Field(default=(), exclude_if=lambda value: not value)
    """Its phases on a card, in the order in which each came first, where it generates or runs models without gradients
    as well; empty for a plain step."""


MadeUpKind = Literal["read", "decided", "shape", "file", "answered", "sent"]
"""A number read back; a decision by such a number; a shape that depends on data; a file without values; an answer of a
library that was not there; what would have been sent."""


class MadeUp(Record):
    """What a recorded program was told that no card had computed."""

    kind: MadeUpKind
    what: str
    place: str
    """`file:line` of the program; empty where none of its lines ran."""
    count: int


FileChange = Literal["new", "changed", "removed"]
"""What became of a file."""


class WrittenFile(Record):
    """A file that a program wrote or removed, as the program sees it."""

    path: str
    """From the working directory where it lies below it, else absolute."""
    nbytes: int | None = None
    """How long it is; None where it is removed."""
    change: FileChange


class ProgramFiles(Record):
    """What a program did to files; the user's own are as they were."""

    written: Many[WrittenFile] = ()
    kept_in: str | None = None
    """The folder to which they were moved; None where they are dropped."""
    native: Literal["held", "refused", "real"] = "held"
    """What became of what libraries and child processes write by themselves: apart as well, refused, or written."""


class RefusedRequests(Record):
    """Requests that the card had no memory for, whose errors the program caught."""

    count: Count
    last: str
    """The last of them, in words."""
    is_outlived: bool
    """Whether a step ran through after the last; of a program without a backward, a call of a module."""


NetworkReach = Literal["none", "udp", "python"]
"""What the program's processes could reach of the network by themselves: nothing; datagrams alone; all, since only what
Python's libraries send is held."""


class ProgramNetwork(Record):
    """What a program could not send."""

    reach: NetworkReach
    was_refused: bool = False
    """Whether a process has tried to reach something by itself, and found nothing."""


class ProgramRun(Record):
    """A program that was run as it is on a pretended card."""

    ending: str
    """How the run ended, in words."""
    failed: bool = False
    """Whether an error of the program's own ended it; that the card had no more memory is none."""
    is_cut: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether it was ended within a step of too many operators, which may take more than is known of it."""
    setup: Round | None = None
    """What came before the first round; None where nothing ran on the target then."""
    rounds: Many[Round]
    shown: int
    """Number of the round that the profile is of, from 1; 0 for what came before the first."""
    steady: bool | None = None
    """Whether the last whole round allocates no more than the one before and leaves as much alive; None for one."""
    growth_bytes: Bytes | None = None
    """How many bytes more are alive after each step than after the one before: 0 for none. None: not known, as with
    fewer than two steps, or steps that differ."""
    grown: Many[Growth] = ()
    """Who keeps more after each step, the most first; empty where nothing grows, or not enough steps are known."""
    full_at: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """The step within which the card has no more memory, where the steps to come are replayed; None: not known."""
    grown_anew: Many[Growth] = Field(default=(), exclude_if=lambda value: not value)
    """Who keeps more after the first step of each further optimizer that the program makes, as for each fold or each
    trial; these are the steps of it."""
    schedules: Many[Schedule] = Field(default=(), exclude_if=lambda value: not value)
    """What its loop does every so many steps, more than ran, so that at most one did it; what it does later, and did
    once after the recorded steps; and what follows its loop, calls a model or saves, and did not run."""
    longest: LongestBatch | None = Field(default=None, exclude_if=lambda value: value is None)
    """Where the batches of its loader have different lengths; None where they do not, or it has none."""
    evaluations: Many[EvaluationPass] = Field(default=(), exclude_if=lambda value: not value)
    """What its batches leave where the program evaluates after its epoch, by pass."""
    optimizers: Many[str] = ()
    """Class names of the optimizers that stepped, in order."""
    made_up: Many[MadeUp] = ()
    refused: RefusedRequests | None = Field(default=None, exclude_if=lambda value: value is None)
    """None where the card refused nothing, or the error ended the program."""
    files: ProgramFiles | None = Field(default=None, exclude_if=lambda value: value is None)
    """None where the program wrote its own files itself."""
    network: ProgramNetwork | None = Field(default=None, exclude_if=lambda value: value is None)
    """None where it may send, where its code ran in a live process, or in reports of older versions."""
    host: HostUse | None = Field(default=None, exclude_if=lambda value: value is None)
    """What the program took of the host's memory; None in reports of older versions."""
    engines: Many[EngineUse] = Field(default=(), exclude_if=lambda value: not value)
    """The serving engines that it starts in its own process."""

    @property
    def steps(self) -> tuple[Round, ...]:
        """The rounds that are whole."""
        return tuple(each for each in self.rounds if each.is_whole)


class Step(Record):
    """The step that was modelled."""

    mode: Literal["train", "infer"]
    optimizer: str | None
    """Class name; None at inference or when the caller steps elsewhere."""
    loss: str | None
    """How the scalar came about."""
    precision: Literal["bf16", "fp16"] | None
    """Autocast dtype; None means none."""
    accumulate: int = 1
    """Micro-batches to one optimizer step; the step modelled is the last of them."""
    prefetch: int = 0
    """Further batches like the inputs that wait on the target throughout."""
    ranks: RankedStep | None = Field(default=None, exclude_if=lambda value: value is None)
    """Where the step is that of one rank of several; None on one card alone."""
    program: ProgramRun | None = None
    """Where the step is a round of a recorded program; None for a step of a model and its inputs."""
    generation: GenerationRun | None = None
    """Where the step is a generation."""
    zero_grad: ZeroGrad = "after-step"
    """When gradients are cleared; those of the step before live through forward with `before-backward`."""
    set_to_none: bool = True
    """Whether clearing frees gradients; else it fills them with zeros, and they are there throughout."""
    keep_outputs: bool | None = Field(default=None, exclude_if=lambda value: value is None)
    """Whether the loop's variables hold output and loss of the step before until the new ones replace them; None where
    the step is no template of ours, or of an older version, whose outputs were freed."""
    outputs_bytes: Bytes = Field(default=0, exclude_if=lambda value: not value)
    """By how much the peak of requested bytes is higher for what they hold; where they hold nothing, would be."""
    inference_mode: bool = False
    """Whether inference runs under `inference_mode` rather than `no_grad`."""
    compiled: CompileRecord | None = Field(default=None, exclude_if=lambda value: value is None)
    """How the model was compiled; None for eager code."""

    def describe_phase(self, phase: Phase) -> str:
        """The phase in words: of a program's set-up, that it is before the first step."""
        is_setup = self.program is not None and self.program.shown == 0
        return "before its first step" if is_setup else f"in {phase}"


class Heading(TypedDict):
    """The fields of `Headed`, to make another record with."""

    fxmem_version: str
    torch_version: str
    model: str
    inputs: tuple[InputTensor, ...]
    step: Step
    target: Target


class Versioned(Record):
    """A record that is written to a file of its own: the version of its format comes first."""

    schema_version: str = SCHEMA_VERSION

    def __str__(self) -> str:
        """What the command line prints of it, if it does."""
        return print_record(self) or super().__str__()


class Headed(Record):
    """A record about one step: what was analysed, by what and for which machine."""

    fxmem_version: str
    torch_version: str
    model: str
    inputs: Many[InputTensor]
    step: Step
    target: Target

    def heading(self) -> Heading:
        """The same for another record about this step."""
        return Heading(
            fxmem_version=self.fxmem_version, torch_version=self.torch_version, model=self.model, inputs=self.inputs,
            step=self.step, target=self.target,
        )  # fmt: skip


class Profile(Headed, Versioned):
    """One training or inference step as it would run on the target: who allocates what, when, and for how long."""

    ticks: Tick
    """Length of the log; valid ticks are `range(ticks)`."""
    phases: Many[PhaseSpan]
    nodes: Many[Node]
    ops: Many[Op]
    storages: Many[Storage]
    modules: Mapped[str, str] = {}  # noqa: RUF012 - a record's default, which pydantic copies
    """Class name of every module, by its path; the model itself is the empty path."""
    calls: Many[ModuleCall] = ()
    """Calls of the modules inside the model that are not leaves, in the order they began; a leaf's call is a node."""
    recomputed: Many[RecomputedRegion] = ()
    """What the program checkpoints, in the order the regions began; a nested one after the one around it."""
    recomputed_ops: Many[RecomputedOp] = ()
    """In the order they ran."""
    restored: Many[RestoredTensor] = ()
    """In the order they were read."""
    cudnns: Many[str] = Field(default=(), exclude_if=lambda value: not value)
    """The versions of cuDNN that stand for the target's, which cannot be asked: the plans of the first are counted, and
    `Storage.other_bytes` has what the others take. What it may take instead follows, in words. Empty where the target's
    own was asked."""
    saved_bytes: Bytes
    """Bytes saved for backward when forward ends; equals the sum over nodes."""
    assumptions: Many[Assumption] = ()
    unknowns: Many[Unknown] = ()

    def at(self, card: Target) -> Profile:
        """Return the same step on another card, as one of as many ranks."""
        return self.model_copy(update={"target": card.among(self.target.ranks)})

    @property
    def missing_loss(self) -> tuple[Assumption, ...]:
        """What a loss would add to a step without one."""
        return tuple(each for each in self.assumptions if each.topic == "loss" and each.text.startswith(NO_LOSS))


class ProcessBytes(Record):
    """A range of bytes, for what nothing computes: a CUDA context's size is known from measurements alone."""

    low: Bytes
    high: Bytes
    grounds: str
    """What the range is over, in words."""

    def nearest(self, nbytes: int) -> int:
        """The number of the range that is nearest to one: that one itself where it is within."""
        return min(max(nbytes, self.low), self.high)


class MeasuredPhase(Record):
    """The caching allocator's largest values within one phase, each at its own moment."""

    phase: Phase
    requested_bytes: Bytes
    allocated_bytes: Bytes
    active_bytes: Bytes
    """Blocks in use, those included that wait for another stream before they can be used again."""
    reserved_bytes: Bytes


class PlacedPeak(Record):
    """The peak if the driver places segments otherwise."""

    allocated_bytes: Bytes
    reserved_bytes: Bytes
    fits: bool | None = None
    """As `Peak.fits`."""


class PlansPeak(PlacedPeak):
    """The peak with the plans of one cuDNN."""

    cudnn: str
    """Its version; with what it may take instead, in words."""
    least_bytes: Bytes
    """Reserved by the loop's first step; `reserved_bytes` where it does not fit. What later steps add is what finds no
    free block, and depends on all plans together."""
    most_bytes: Bytes
    """The same and the largest workspace, should a later step find no room for that, or `reserved_bytes` if more."""


class Peak(Viewed, Record):
    """The moment of the step with the most bytes alive (the first, if several tie)."""

    requested_bytes: Bytes
    """Bytes the program asked for and has not given back."""
    least_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """The most alive without what has a size that depends on data (`Storage.is_bounded`), which may be nothing; None
    where nothing has. Sizes that the program computes from such a size are taken to depend on data where they equal
    it."""
    allocated_bytes: Bytes | None = None
    """The same in the allocator's blocks; what `torch.cuda.max_memory_allocated()` reports. None: not modelled for this
    target."""
    reserved_bytes: Bytes | None = None
    """Held by the caching allocator; `torch.cuda.max_memory_reserved()`. None: not modelled for this target."""
    reserved_high_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """The same if the blocks that wait for another stream (`record_stream`) wait until the host has waited for it, or
    the step ends; `reserved_bytes` is then if none waits. None: nothing waits."""
    process_bytes: ProcessBytes | None = None
    """Reserved plus the CUDA context and NCCL; what nvidia-smi shows. Its upper end may be more than the card has: it
    fits then beside a small context alone. None: not modelled for this target."""
    room_bytes: Bytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """What the allocator may have there, with which it was compared: what a CUDA context, NCCL and other programs leave
    of the target's memory at most, or another limit that was asked for. None: as for `fits`."""
    fits: bool | None = None
    """Whether a loop over the step runs in that room, the allocator giving its cache back where it must. None: not
    modelled, or the memory is not known."""
    shortage: str = ""
    """Where it runs out, in words; empty when it fits."""
    smaller_plans: int = Field(default=0, exclude_if=lambda value: not value)
    """How many convolutions, alike ones counted once, it fits with because torch takes another plan of cuDNN for them,
    with a smaller workspace, where there is no room for that of the first."""
    by_cudnn: Many[PlansPeak] = Field(default=(), exclude_if=lambda value: not value)
    """Where the target's cuDNN cannot be asked: the peaks with the plans of those that stand for it, the nearest first,
    and with what it may take instead. What they span is no bound: docs/evidence.md has how many runs it held."""
    upward: PlacedPeak | None = Field(default=None, exclude_if=lambda value: value is None)
    """With each segment above the one before, where it was not seen on such a card how its driver places them; None:
    it was, or that moves nothing. `reserved_bytes` is with each below, as on cards on which it was seen."""
    at_least: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether the program ended where it ran out: allocated and reserved bytes are then what it held and asked for."""
    phase: Phase
    tick: Tick
    op: int | None = None
    """Index of the op that is running; None before the first."""
    node: str | None = None
    """Name of the node that op runs for."""
    by_kind: Mapped[Kind, Bytes]
    """Splits `requested_bytes`; kinds with nothing alive are left out."""

    def may_be_within(self, room_bytes: int | None) -> bool:
        """Whether sizes depend on data and without those it is within so many bytes."""
        return (
            room_bytes is not None
            and not self.at_least
            and self.least_bytes is not None
            and self.least_bytes <= room_bytes
        )

    @property
    def plans_range(self) -> tuple[int, int] | None:
        """Least and most that is reserved with the plans of `by_cudnn`; None without any."""
        if not self.by_cudnn:
            return None
        return min(each.least_bytes for each in self.by_cudnn), max(each.most_bytes for each in self.by_cudnn)

    @property
    def counted_bytes(self) -> int:
        """The bytes a budget bounds: allocated ones where an allocator is modelled, else the requested ones."""
        return self.requested_bytes if self.allocated_bytes is None else self.allocated_bytes


class StepTime(Record):
    """The estimated time of a step."""

    seconds: float
    low_seconds: float
    """Nine of ten steps take longer."""
    high_seconds: float
    """Nine of ten steps take less."""


class Report(Profile):
    """What `fxmem analyze --json` writes and every other verb reads: the profile, its peak and its time."""

    peak: Peak
    time: StepTime | None = None
    """None where the target's rates are not known, as on a CPU."""
    findings: Many[Finding] = Field(default=(), exclude_if=lambda value: not value)
    """What is probably not meant, first what grows, then what holds most at the peak."""


class Timeline(Record):
    """Bytes alive at every tick of a profile."""

    live_bytes: Many[int]
    """Total, by tick."""
    by_kind: Mapped[Kind, Many[int]]
    """The same split; the kinds sum to the total at each tick."""
    peak: Peak
    alive: Many[int]
    """Storages alive at the peak, largest first (indices into `Profile.storages`)."""
