"""What a real run measured, and what that says about a prediction: frozen records, as in `records`.

Bytes mean *requested* bytes unless the name says otherwise; unknown is None.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from fxmem.records.profile import Bytes, Kind, MadeUp, Mapped, MeasuredPhase, Peak, Phase, Record, Round, Step

VALIDATION_SCHEMA_VERSION = "1"

PositiveBytes = Annotated[int, Field(gt=0)]


class Machine(Record):
    """Where a step was measured, with everything that is known to move its memory."""

    device: Literal["cpu", "cuda"]
    name: str
    """The card, or for the CPU its architecture and the instruction set torch's kernels use."""
    torch_version: str | None = None
    """None where a measurement does not say."""
    cuda_version: str | None = None
    cudnn_version: str | None = None
    onednn: bool | None = None
    """Whether the CPU's convolutions and half-precision products may run in oneDNN; None on a card."""
    threads: int | None = None
    """Threads inside one operator; some CPU kernels take scratch memory per thread. None on a card."""
    driver_version: str | None = None
    """The card's driver. None on the CPU, or where it does not say."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability (major, minor); None for the CPU."""
    memory_bytes: Bytes | None = None
    """What the card reports as its total memory; None for the CPU."""
    allocator_settings: str = ""
    """`PYTORCH_ALLOC_CONF`, else `PYTORCH_CUDA_ALLOC_CONF`; empty where neither is set, and on the CPU."""


class MeasuredOp(Record):
    """The scratch memory of one operator at one set of input shapes in one phase. It covers all its calls.

    Scratch is what an operator's kernel allocates and frees inside one call, so that no tensor outside the call ever
    owns it, and what it keeps for its own backward in a size that only its library knows (oneDNN's workspace of a
    recurrent layer).
    """

    name: str
    """Qualified overload as in `Op.name`, e.g. `aten.convolution.default`."""
    kernel: str
    """The innermost operator that encloses the scratch, e.g. `aten.mkldnn_convolution.default`; `name` itself if there
    is none."""
    phase: Phase
    input_shapes: tuple[tuple[int, ...] | None, ...]
    """Of the arguments in order; None for what is no tensor."""
    calls: int
    """Calls that took scratch."""
    allocations: int
    """Scratch blocks taken, over all calls."""
    scratch_bytes: Bytes
    """The most scratch alive at once, of all calls."""
    at_peak_bytes: Bytes = 0
    """Scratch of it alive at the measured peak."""


class Measurement(Record):
    """One real step in its steady state: the bytes its program asked of the allocator and gave back."""

    schema_version: str = VALIDATION_SCHEMA_VERSION
    model: str
    """Class name of the model."""
    step: Step
    machine: Machine
    resident_bytes: Bytes
    """Alive when the step begins: parameters, buffers, inputs, optimizer state, each storage once; on a card also what
    no tensor of the step owns, as the libraries' workspaces."""
    resident_by_kind: Mapped[Kind, Bytes]
    """Splits `resident_bytes`; kinds with nothing are left out. On a card, `workspace` is what no tensor found in the
    model, the inputs or the optimizer owns. Empty for a snapshot, which does not say what a block is for."""
    resident_sizes: tuple[Bytes, ...] = ()
    """The blocks of `resident_bytes`, the largest first; only for a snapshot."""
    retained_bytes: int
    """Alive when the step's function has returned, less `resident_bytes`. 0 in a steady state; the gradients if there
    is no optimizer."""
    peak_bytes: PositiveBytes
    """The most bytes alive at once."""
    peak_phase: Phase
    """Phase of the first moment with `peak_bytes` alive."""
    peak_op: str
    """Operator running at that moment; empty between two operators, and on a card, which does not say."""
    peak_by_phase: Mapped[Phase, Bytes]
    """The same for each phase on its own."""
    set_aside: tuple[str, ...] = ()
    """Operators whose scratch `peak_without_kernel_scratch_bytes` leaves out."""
    peak_without_kernel_scratch_bytes: PositiveBytes
    """The peak of the same log less the scratch of the operators in `set_aside`. It may fall at another moment than
    `peak_bytes`."""
    peak_without_scratch_bytes: PositiveBytes
    """The peak of the same log less the scratch of every operator."""
    scratch: tuple[MeasuredOp, ...] = ()
    """Every operator that took scratch, the largest first. Empty where it cannot be observed."""
    allocated_bytes: Bytes | None = None
    """Peak of the allocator's blocks; `torch.cuda.max_memory_allocated()`. None: this device has none."""
    reserved_bytes: Bytes | None = None
    """Peak of the caching allocator; `torch.cuda.max_memory_reserved()`. None: this device has none."""
    process_bytes: Bytes | None = None
    """`reserved_bytes` plus everything else in use on the card when the step is over: the CUDA context, loaded kernels,
    and other processes if there are any. None: this device has none, or it was not measured."""
    phases: tuple[MeasuredPhase, ...] = ()
    """What the card's allocator reports phase by phase, in their order; empty on the CPU."""
    events: tuple[int, ...] = ()
    """The log: signed bytes of every allocation (+) and free (-) in order of time. `resident_bytes` plus its largest
    running sum is `peak_bytes`."""
    events_by_phase: Mapped[Phase, int] = Field(default_factory=dict)
    """How many events fall into each phase, in the order of the phases; empty if there is no log. For a snapshot, those
    of the predicted blocks that both sides have."""
    segments: tuple[Bytes, ...] = ()
    """The allocator's segments when the step is over, the largest first; only for a snapshot."""
    notes: tuple[str, ...] = ()
    """What this measurement does not show."""


class Quantity(StrEnum):
    """What is compared."""

    REQUESTED = "requested"
    """`Peak.requested_bytes` with `Measurement.peak_bytes`."""
    REQUESTED_WITHOUT_KERNEL_SCRATCH = "requested_without_kernel_scratch"
    """`Peak.requested_bytes` with `Measurement.peak_without_kernel_scratch_bytes`."""
    REQUESTED_WITHOUT_SCRATCH = "requested_without_scratch"
    """The predicted peak without workspaces that come and go with an op, with
    `Measurement.peak_without_scratch_bytes`."""
    ALLOCATED = "allocated"
    RESERVED = "reserved"
    PROCESS = "process"
    """Of `Peak.process_bytes`, the number that is nearest to what was measured."""


class ComparedQuantity(Record):
    """One predicted number beside the measured one."""

    quantity: Quantity
    predicted_bytes: Bytes
    measured_bytes: PositiveBytes
    error: float
    """`predicted / measured - 1`; negative where the prediction is too small."""


class ComparedShare(Record):
    """Some of the kinds, predicted and measured, that make up the peak.

    A measurement sees blocks, not what they are for: it knows what was there before the step, kind by kind, and the
    rest only together. That rest is negative where the step frees more of what was there than it allocates. A snapshot
    knows what was there only together: its first share has all the kinds that may be there before a step, workspaces
    among them, and its second none.
    """

    kinds: tuple[Kind, ...]
    predicted_bytes: int
    measured_bytes: int
    """Of the figure that is judged; the rest is what the figure leaves after the resident kinds."""


class LogSide(StrEnum):
    """Which of the two logs."""

    PREDICTED = "predicted"
    MEASURED = "measured"


class Difference(Record):
    """A block on which the logs disagree."""

    side: LogSide
    """The log that has it, or where it lives longer."""
    lives_longer: bool = False
    """Both have it, and on this side it goes later."""
    nbytes: Bytes
    count: int = 1
    """Blocks of this size; more than one only of those that are there before the step."""
    phase: Phase
    position: int | None
    """Index into that side's log of its allocation, or of the free that comes late; None for a block that is there
    before the step."""
    op: str = ""
    """Operator that takes it, e.g. `aten.convolution.default`; of a block that only the measurement has, that of the
    last common allocation before it. Empty before the first."""
    node: str = ""
    """Name of the node that operator runs for; of a predicted block that is there before the step, what it is."""
    line: str = ""
    """The user's line that made the node, as `file:line`."""
    frames: tuple[str, ...] = ()
    """The card's own stack at that event, innermost first; empty where none was recorded."""


class ComparedSegments(Record):
    """The segments of one size that the caching allocator has when the step is over."""

    nbytes: Bytes
    predicted: int
    measured: int


class ComparedPhase(Record):
    """One phase as it was predicted and as it was measured."""

    predicted: MeasuredPhase
    measured: MeasuredPhase


class Verdict(Record):
    """A prediction held against a measurement."""

    schema_version: str = VALIDATION_SCHEMA_VERSION
    model: str
    """What the prediction calls the model."""
    target: str
    """Name of the target the prediction is for."""
    predicted: Peak
    measurement: Measurement
    comparisons: tuple[ComparedQuantity, ...]
    """Every quantity that both sides know."""
    judged: Quantity
    """The one that is held to the tolerance."""
    reason: str
    """Why that one."""
    tolerance: float = Field(ge=0)
    """Largest absolute error allowed, as a fraction."""
    within_tolerance: bool
    """Whether the judged error is within the tolerance."""
    shares: tuple[ComparedShare, ...]
    """The judged figure split by kinds."""
    phases: tuple[ComparedPhase, ...] = ()
    """What the card's allocator reports phase by phase, beside the prediction, in their order; empty on the CPU."""
    differences: tuple[Difference, ...] = ()
    """The first blocks on which the predicted and the measured log disagree, in the order of the step. Empty on the
    CPU, where most of what would stand here is the kernels' own scratch, which `Measurement.scratch` names."""
    segments: tuple[ComparedSegments, ...] = ()
    """By size, the largest first; empty unless the measurement names its segments."""


class MeasuredRound(Record):
    """One round of a program that ran for real, or what came before the first."""

    peak_bytes: Bytes
    """The most bytes requested and alive at once, from the program's start on."""
    peak_phase: Phase | None = None
    """Phase of the first moment with `peak_bytes` alive. None on a card, which does not say."""
    peak_op: str = ""
    """Operator running at that moment; empty between two operators, and on a card."""
    peak_without_kernel_scratch_bytes: Bytes | None = None
    """The peak of the same log less the scratch of the operators in `ProgramMeasurement.set_aside`. None on a card."""
    retained_bytes: Bytes
    """Alive when the round is over."""
    allocated_bytes: Bytes | None = None
    """Peak of the allocator's blocks. None on the CPU."""
    reserved_bytes: Bytes | None = None
    """Peak of the caching allocator. None on the CPU."""


class ProgramMeasurement(Record):
    """The user's own program, run for real, round by round as `ProgramRun` has them."""

    schema_version: str = VALIDATION_SCHEMA_VERSION
    program: str
    """As it was typed."""
    machine: Machine
    ending: str
    """How the run ended, in words."""
    setup: MeasuredRound | None = None
    """What came before the first round."""
    rounds: tuple[MeasuredRound, ...]
    set_aside: tuple[str, ...] = ()
    """Operators whose scratch is set aside; and data loaders, as far as they free what they allocate."""
    scratch: tuple[MeasuredOp, ...] = ()
    """Every operator that took scratch, the largest first, and what of it was alive at the largest round's peak. Empty
    on a card."""
    notes: tuple[str, ...] = ()
    """What differs from running the program by itself."""


class ComparedRound(Record):
    """One round of a program as it was predicted and as it was measured."""

    number: int
    """From 1."""
    predicted: Round
    measured: MeasuredRound
    comparisons: tuple[ComparedQuantity, ...]
    """Every quantity that both sides know."""


class ProgramVerdict(Record):
    """The prediction of a program held against a real run of it, round by round."""

    schema_version: str = VALIDATION_SCHEMA_VERSION
    program: str
    """As it was typed."""
    target: str
    """Name of the target the prediction is for."""
    ending: str
    """How the predicted run ended, in words."""
    measurement: ProgramMeasurement
    rounds: tuple[ComparedRound, ...]
    """Those that both runs have."""
    judged: Quantity
    """The quantity that is held to the tolerance, in every round."""
    tolerance: float = Field(ge=0)
    """Largest absolute error allowed, as a fraction."""
    within_tolerance: bool
    """Whether every round's judged error is within the tolerance, and both runs have as many rounds."""
    made_up: tuple[MadeUp, ...] = ()
    """What the predicted program was told that nothing had computed."""
