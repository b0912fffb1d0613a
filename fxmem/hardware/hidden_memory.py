"""What an op allocates that is no output of it: the order of events inside one op.

A fake run sees an op's outputs and nothing else. The rest (a cuDNN workspace, a contiguous copy of an argument, the
float accumulator of an attention backward) comes and goes between them, and whether it coexists with an output decides
the peak. So the answer is not a sum but the sequence torch goes through: allocations, frees, and the places where the
op's own outputs are allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from fxmem.records.profile import Bytes, Record


class ConvSignature(Record):
    """One convolution as cuDNN is asked about it: `x` the wide side, `y` the narrow one, whatever is being computed.

    A transposed convolution is a `dgrad` whose result is `x`; a 1-d convolution is a 2-d one with height 1.
    """

    op: Literal["fwd", "dgrad", "wgrad"]
    x: tuple[int, ...]
    x_stride: tuple[int, ...]
    w: tuple[int, ...]
    """`(out channels, in channels / groups, *kernel)`."""
    w_stride: tuple[int, ...]
    y: tuple[int, ...]
    y_stride: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    """Implied by `x` and `w`; kept for the reader."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    allow_tf32: bool = True
    """`torch.backends.cudnn.allow_tf32`."""
    deterministic: bool = False

    @property
    def key(self) -> str:
        """A short text that is equal exactly for equal signatures."""
        sides = (self.x, self.x_stride), (self.w, self.w_stride), (self.y, self.y_stride)
        tensors = (f"{_dots(shape)}@{_dots(stride)}" for shape, stride in sides)
        window = f"p{_dots(self.padding)} s{_dots(self.stride)} d{_dots(self.dilation)} g{self.groups}"
        return f"{self.op} {' '.join(tensors)} {window} {self.dtype} tf{self.allow_tf32:d} det{self.deterministic:d}"


class RnnSignature(Record):
    """One recurrent layer as cuDNN is asked about it. Numbers of `algorithm` and `mode` are cuDNN's."""

    op: Literal["rnn"] = "rnn"
    algorithm: int
    mode: int
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    input_size: int
    hidden_size: int
    proj_size: int
    """0 for none."""
    num_layers: int
    bidirectional: bool
    steps: int
    batch: int
    dropout: float = 0.0
    training: bool = True
    allow_tf32: bool = True
    """`torch.backends.cudnn.rnn.fp32_precision == "tf32"`."""
    batch_sizes: tuple[int, ...] | None = None
    """Sequences that are there at each step, of a packed input; None for a padded one."""

    @property
    def key(self) -> str:
        """A short text that is equal exactly for equal signatures."""
        return " ".join(str(value) for value in self.model_dump(exclude_none=True).values())


Signature = ConvSignature | RnnSignature
"""What cuDNN is asked about."""


class HeldBuffer(NamedTuple):
    """A buffer that is allocated once, in the first step of a loop, and kept; a CUDA graph's, to the graph's end."""

    nbytes: int
    op: int | None
    """Index of the op that needs it first; None where a step before did."""
    stream: int = 0
    needed_by: tuple[int, ...] = ()
    """In the pool of CUDA graphs, all ops that need it."""


class HiddenEvent(Record):
    """One step inside an op."""

    action: Literal["alloc", "free", "output"]
    """`output`: the op's next output is allocated here, in the order of its results."""
    name: str
    """What the buffer is for; a `free` names the `alloc` it ends."""
    nbytes: Bytes | None = None
    """Of an `alloc`: bytes requested, None while or where unknown."""
    signature: Signature | None = None
    """Of a cuDNN workspace: whose."""
    other_bytes: tuple[Bytes, ...] = ()
    """Of a cuDNN workspace whose cuDNN cannot be asked: the bytes of further ones that stand for it."""
    smaller_bytes: tuple[Bytes, ...] = ()
    """Of a cuDNN workspace: those of the plans that torch goes on to where there is no room for it."""


Events: TypeAlias = tuple[HiddenEvent, ...]
"""Steps in their order."""


class HiddenMemory(Record):
    """The events of one op, in order. Whatever is not freed explicitly is freed when the op returns, the last that came
    first, as C++ ends what a function holds (held to an H200's log: benchmarks/programs/card_runs.py)."""

    events: Events = ()

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """The calls of cuDNN whose workspace is still to be asked for."""
        return tuple(event.signature for event in self.events if event.signature is not None and event.nbytes is None)

    @property
    def unknown_buffers(self) -> tuple[str, ...]:
        """Names of the buffers whose size is not known."""
        return tuple(event.name for event in self.events if event.action == "alloc" and event.nbytes is None)

    def fill_workspaces(
        self,
        nbytes: Mapping[Signature, int | None],
        others: Sequence[Mapping[Signature, int | None]] = (),
        smaller: Mapping[Signature, tuple[int, ...]] | None = None,
    ) -> HiddenMemory:
        """The same with the workspaces' sizes filled in, those that further cuDNNs name, and those of the plans that
        follow."""

        def fill(event: HiddenEvent) -> HiddenEvent:
            if (of := event.signature) is None:
                return event
            found = nbytes.get(of)
            further = () if found is None else tuple(each.get(of) or 0 for each in others)
            follow = tuple(each for each in (smaller or {}).get(of, ()) if found is not None and each < found)
            return event.model_copy(update={"nbytes": found, "other_bytes": further, "smaller_bytes": follow})

        return self.model_copy(update={"events": tuple(map(fill, self.events))})


def expand(count: int, hidden: HiddenMemory | None) -> Iterator[tuple[int, int | None]]:
    """What an operator allocates and frees, in order: a number, and the bytes of an allocation, None of a free.

    Outputs have their places as numbers, and 0 bytes: the caller knows them. The n-th buffer that the kernel has for
    itself is -n; what it does not free is freed when it is over, the last first. Buffers of unknown size are left out.

    Args:
        count: how many outputs there are.
        hidden: what the kernel has for itself.
    """
    own: dict[str, int] = {}
    outputs = iter(range(count))
    number = 0
    for event in () if hidden is None else hidden.events:
        if event.action == "output":
            if (output := next(outputs, None)) is not None:
                yield output, 0
        elif event.action == "free":
            if event.name in own:
                yield own.pop(event.name), None
        elif event.nbytes:
            number -= 1
            own[event.name] = number
            yield number, event.nbytes
    for output in outputs:
        yield output, 0
    for left in reversed(own.values()):
        yield left, None


def alloc(name: str, nbytes: int | None, signature: Signature | None = None) -> HiddenEvent:
    """A buffer comes."""
    return HiddenEvent(action="alloc", name=name, nbytes=nbytes, signature=signature)


def free(*names: str) -> Events:
    """Buffers go."""
    return tuple(HiddenEvent(action="free", name=name) for name in names)


def output(name: str) -> HiddenEvent:
    """The op's next output comes."""
    return HiddenEvent(action="output", name=name)


def _dots(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))
