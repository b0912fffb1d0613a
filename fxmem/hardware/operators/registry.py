"""The rows: all that is known of one ATen operator without torch, in one place.

A family of operators is a module, which has its rows by the files of torch that they were read in (`ROWS`). All who
have to know something of an operator ask its row: the count of FLOPs, the collector of hidden memory, layers, planners
and what applies their plans, and the check of dtypes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from fxmem.hardware.context import CublasWorkspaces
from fxmem.hardware.hidden_memory import Events, HiddenEvent, HiddenMemory, alloc, output
from fxmem.hardware.tensor_layouts import MemoryFormat, TensorLayout, is_tensor, read_layout
from fxmem.records.profile import Record, Target

Kind = Literal["matrix product", "convolution", "attention", "recurrent layer"]
FlopRule: TypeAlias = Callable[["NamedCall"], int]
"""FLOPs of a call."""
ScratchRule: TypeAlias = Callable[["Call"], HiddenMemory | Iterable[HiddenEvent] | None]
"""What a call allocates beside its results, in order; None where it allocates nothing, or nothing is known."""


class ConvSettings(Record):
    """The global switches a convolution looks at; the defaults are torch's."""

    allow_tf32: bool = True
    """`torch.backends.cudnn.allow_tf32`."""
    allow_tf32_in_rnn: bool = True
    """`torch.backends.cudnn.rnn.fp32_precision == "tf32"`."""
    deterministic: bool = False
    """`torch.backends.cudnn.deterministic` or `torch.use_deterministic_algorithms`."""
    enabled: bool = True
    """`torch.backends.cudnn.enabled`."""
    benchmark: bool = False
    """`torch.backends.cudnn.benchmark`: the plan is found by timing. The workspace is that of the plan taken without,
    all the same."""
    cudnn_version: int = 91900
    """As `torch.backends.cudnn.version()` gives it; decides a few exclusions only."""


@dataclasses.dataclass(frozen=True)
class Platform:
    """What runs the calls."""

    card: Target | None = None
    """None: the CPU."""
    torch_version: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: ConvSettings = dataclasses.field(default_factory=ConvSettings)
    deterministic: bool = False
    """Only deterministic kernels may run."""
    cublas: CublasWorkspaces | None = None
    """Of the card."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator; tensors may be anything with shape, stride and dtype."""

    name: str
    """The operator's, without `aten.` and overload."""
    args: Sequence[Any]
    """Positional, as the dispatcher saw them."""
    result: Any
    platform: Platform

    def layout(self, position: int = 0) -> TensorLayout:
        """Of an argument."""
        return read_layout(self.args[position])

    def layouts(self) -> list[TensorLayout]:
        """Of all arguments that are tensors."""
        return [read_layout(value) for value in self.args if is_tensor(value)]

    def argument(self, position: int, default: Any = None) -> Any:
        """An argument, or its default where the call has left it out."""
        return self.args[position] if len(self.args) > position else default

    @property
    def made(self) -> TensorLayout:
        """Layout of the result."""
        return read_layout(self.result)

    @property
    def results(self) -> list[Any]:
        """The results that there are."""
        several = self.result if isinstance(self.result, tuple | list) else [self.result]
        return [each for each in several if each is not None]

    @property
    def card(self) -> Target:
        """The card that the call runs on."""
        assert self.platform.card is not None
        return self.platform.card


class NamedCall:
    """One call as a count of FLOPs reads it: its arguments by their names in torch's schema, tensors as layouts.

    Also `result`, and as numbers `read`, the elements of the first argument, and `made`, those of the result.

    Args:
        values: all these, by name.
        describe: makes layouts of the tensors in a value, when it is asked for: lists of tensors are long.
    """

    def __init__(self, values: Mapping[str, Any], describe: Callable[[Any], Any]) -> None:
        self._values = values
        self._describe = describe

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(name)
        return self._describe(self._values[name])


@dataclasses.dataclass(frozen=True)
class Operator:
    """What is known of one operator, by its name without `aten.` and overload."""

    # --- its arithmetic -----------------------------------------------------------------------------------------------
    flops: FlopRule | int | tuple[int, int] | None = None
    """FLOPs, of the in-place and the foreach form too: per element of the result (0: it only moves or views), per
    element of the first argument and of the result, or by a rule. None: unknown."""
    uncounted: str = ""
    """Why its FLOPs stay unknown on purpose."""
    complex: int | None = None
    """Real operations in one complex operation."""
    corrects_torch: bool = False
    """Torch's own formula is wrong and not used."""
    # --- what it is ---------------------------------------------------------------------------------------------------
    kind: Kind | None = None
    """Of the heavy operators, in which nearly all FLOPs of a step are."""
    counts_macs: bool = False
    """Its FLOPs are multiply-adds, two each."""
    is_product: bool = False
    """A region of a checkpoint plan may keep its result, so that only what is cheap runs again (`Region.keeps`)."""
    uses_cublas: bool = False
    """It runs on a cuBLAS handle, and so allocates its thread's workspace."""
    one_dtype: tuple[int, ...] = ()
    """Positions of arguments that its kernel takes in one dtype only, which torch's fake kernel does not check."""
    # --- its memory ---------------------------------------------------------------------------------------------------
    cuda: ScratchRule | None = None
    """What its kernel hides on a card."""
    cpu: ScratchRule | None = None
    """What its kernel hides on the CPU."""
    scratch: ScratchRule | None = None
    """What it hides on both, where there is no rule for the one."""
    copies: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    """Positions of arguments that both copy where they are not contiguous: before the results are made, and after."""
    is_opaque: bool = False
    """Its kernel is not searched for other operators that it calls: it allocates nothing but its results, or a library
    chooses by the machine."""
    order: tuple[int, ...] = ()
    """Which results its kernel allocates, in its order, where that is not the order of the results."""
    # --- its traffic --------------------------------------------------------------------------------------------------
    traffic: Literal["picks", "puts", "overwrites"] | None = None
    """Where its kernel does not read and write each argument whole: it `picks` as much of the first as it writes; in
    place it `puts` there as much as it is given, or `overwrites` without reading."""
    index_at: int | None = None
    """Position of the argument that has to be int32 or int64, which torch's fake kernel does not check."""
    # --- where it was read --------------------------------------------------------------------------------------------
    source: str = ""
    """Files of torch; `register` fills them in."""
    since: str = ""
    """The first release that has it so, where that is later than the oldest that fxmem knows."""

    def may_hide(self, platform: Platform) -> bool:
        """Whether a call may hide something there."""
        return self._rule(platform) is not None or any(self.copies)

    def _rule(self, platform: Platform) -> ScratchRule | None:
        return (self.cpu if platform.card is None else self.cuda) or self.scratch

    def count(self, call: NamedCall) -> int:
        """FLOPs of a call. The operator's are known."""
        if callable(self.flops):
            return self.flops(call)
        assert self.flops is not None
        per_read, per_made = (0, self.flops) if isinstance(self.flops, int) else self.flops
        read: int = call.read
        made: int = call.made
        return per_read * read + per_made * made

    def memory(self, call: Call) -> HiddenMemory | None:
        """What a call hides; the copies of arguments last until it returns."""
        rule = self._rule(call.platform)
        found = None if rule is None else rule(call)
        memory = found if found is None or isinstance(found, HiddenMemory) else HiddenMemory(events=tuple(found))
        before, after = (_contiguous_copies(call, positions) for positions in self.copies)
        if not before and not after:
            return memory
        events = memory.events if memory is not None else tuple(output(f"result {n}") for n in range(len(call.results)))
        made = sum(event.action == "output" for event in events)
        assert all(event.action == "output" for event in events[:made])
        return HiddenMemory(events=(*before, *events[:made], *after, *events[made:]))


OPERATORS: Final[dict[str, Operator]] = {}
"""The rows, by the operator's name without `aten.` and overload; outside aten with its namespace."""
_BY_PREFIX: Final[dict[str, Operator]] = {}


def register(rows: Mapping[str, Mapping[str, Operator]]) -> None:
    """Register the rows of a family.

    Args:
        rows: by the files of torch where they were read (below `aten/src/ATen/native` unless they say otherwise), and
            by the names that share a row, separated by white space. A name that ends in `*` stands for all operators
            that begin so and have no row.

    Raises:
        ValueError: an operator has a row already.
    """
    for source, of_source in rows.items():
        for name, row in ((name, row) for names, row in of_source.items() for name in names.split()):
            table = _BY_PREFIX if name.endswith("*") else OPERATORS
            if name.removesuffix("*") in table:
                raise ValueError(f"expected one row for {name}, got a second one from {source}")
            table[name.removesuffix("*")] = dataclasses.replace(row, source=source)


def find_operator(name: str) -> Operator | None:
    """The row of an operator; None where nothing is known.

    Args:
        name: with or without `aten.` and overload.
    """
    short = short_name(name)
    return OPERATORS.get(short) or next((row for start, row in _BY_PREFIX.items() if short.startswith(start)), None)


def short_name(name: str) -> str:
    """`addmm` of `aten.addmm.default`."""
    return name.removeprefix("aten.").removeprefix("aten::").partition(".")[0]


def results_only(call: Call) -> Events:
    """The kernel was looked at and allocates its results."""
    return (output("result"),)


def dense_gradient(call: Call) -> Events | None:
    """Kernels of the CPU that read a dense gradient copy one that is not.

    Such is a sum's: one number seen from everywhere.
    """
    gradient = call.layout()
    if gradient.is_contiguous() or gradient.is_contiguous(MemoryFormat.CHANNELS_LAST):
        return None
    return output("result"), alloc("dense gradient", gradient.nbytes)


def undetermined(call: Call) -> Events:
    """A buffer of unknown size: a library or the data decide it."""
    return (alloc("temporaries", None),)


def _contiguous_copies(call: Call, positions: Sequence[int]) -> Events:
    layouts = ((position, call.layout(position)) for position in positions)
    return tuple(
        alloc(f"contiguous argument {position}", layout.nbytes)
        for position, layout in layouts
        if not layout.is_contiguous()
    )


def count_factors(c: NamedCall) -> int:
    """How many scalar factors are there and not 1: foreach ops call `value` also `scalars`, and either may be a list or
    tensor."""
    given = [getattr(c, name) for name in ("alpha", "beta", "value", "scalars") if hasattr(c, name)]
    return sum(not (isinstance(factor, int | float) and factor == 1) for factor in given)


def layouts_among(value: Any) -> list[TensorLayout]:
    """The layouts of a call's argument or result: itself, or those in its tuple or list."""
    return [each for each in (value if isinstance(value, list | tuple) else (value,)) if isinstance(each, TensorLayout)]
