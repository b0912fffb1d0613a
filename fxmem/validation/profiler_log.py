"""The log of the CPU's allocator as torch.profiler records it, with each operator's scratch."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.profiler import profile

from fxmem._torch import kernels as torch_kernels
from fxmem.records.pause_gc import pause_gc
from fxmem.records.profile import Phase
from fxmem.records.validation import MeasuredOp

WORKSPACE_KERNELS = (
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.mkldnn_rnn_layer.default",
    "aten.mkldnn_rnn_layer_backward.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
)
"""Leaf operators whose scratch is set aside by default: oneDNN lays out the memory of convolutions and
recurrent layers as it likes, and the CPU's flash attention takes buffers for each thread."""

WRAPPER_PRODUCTS = ("aten.mm.out", "aten.addmm.out", "aten.bmm.out")
"""Products as wrappers of inductor call them, for which oneDNN lays out bfloat16 anew."""

_RESULTS_OF_KNOWN_SHAPE = {"aten.mkldnn_rnn_layer.default": 3}
"""Operators that beside so many results, made before it, return a tensor for their own backward: output, hidden and
cell state, workspace (`mkldnn_rnn_layer`, aten/src/ATen/native/mkldnn/RNN.cpp)."""

_OPERATOR = re.compile(r"\w+::\w+")
MARK = "fxmem.simulation.step.step:"
"""What the name of a mark begins with that opens a part of the step, or ends a round."""
LOADER = "fxmem.data_loader"
"""The name of a data loader's work, in which what is allocated and freed is scratch as an operator's is."""

BACKEND = "fxmem.backend"
"""The name of a collective's work: what a backend allocates within it, or in a thread of its own, is the backend's."""
_COLLECTIVE = "c10d::"


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCall:
    """One call of a leaf operator."""

    name: str
    """Qualified overload, e.g. `aten.convolution.default`."""
    input_shapes: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ProfilerEvent:
    """One allocation or free."""

    nbytes: int
    """Positive for an allocation, negative for a free."""
    address: int
    phase: Phase = Phase.FORWARD
    call: MeasuredCall | None = None
    """The call during which it happens; None between two operators."""
    path: tuple[str, ...] = ()
    """Operators it happens in, from the leaf operator to the innermost."""


def scratch_events(events: Sequence[ProfilerEvent]) -> dict[int, MeasuredCall]:
    """Indices of the allocations of a call's scratch, and of their frees, with the call."""
    born: dict[tuple[int, int], int] = {}  # by size, too: events of two threads may be in the wrong order
    freed: dict[int, int] = {}
    scratch: dict[int, MeasuredCall] = {}
    for index, event in enumerate(events):
        if event.nbytes > 0:
            born[event.address, event.nbytes] = index
            continue
        birth = born.pop((event.address, -event.nbytes), None)
        if birth is None:
            continue
        freed[birth] = index
        call = event.call
        if call is not None and events[birth].call is call:
            scratch[birth] = scratch[index] = call
    for birth, call in list(_kept(events, scratch)):
        scratch[birth] = call
        if birth in freed:
            scratch[freed[birth]] = call
    return dict(sorted(scratch.items()))


def _kept(events: Sequence[ProfilerEvent], scratch: Mapping[int, MeasuredCall]) -> Iterator[tuple[int, MeasuredCall]]:
    """What an operator with a workspace keeps after its call and does not return; and what a backend allocates,
    whichever of its threads frees it."""
    made: Counter[MeasuredCall] = Counter()
    for index, event in enumerate(events):
        call = event.call
        if event.nbytes <= 0 or call is None or index in scratch:
            continue
        made[call] += call.name in _RESULTS_OF_KNOWN_SHAPE
        if call.name == BACKEND or made[call] > _RESULTS_OF_KNOWN_SHAPE.get(call.name, 0):
            yield index, call


def live_bytes(resident: int, events: Sequence[ProfilerEvent], without: Mapping[int, MeasuredCall]) -> list[int]:
    """Bytes alive before the first event and after each, the events `without` not counted."""
    return list(
        itertools.accumulate(
            (0 if index in without else event.nbytes for index, event in enumerate(events)), initial=resident
        )
    )


_MARKS: Final[dict[str, Phase | None]] = {**{each.value: each for each in Phase}, "loss": Phase.FORWARD, "round": None}
"""The phase that begins with a mark; None where a round of a program ends."""


@pause_gc()
def read_events(profiled: profile) -> list[ProfilerEvent]:
    """The memory events of a profile in order of time."""
    return read_rounds(profiled)[0]


@pause_gc()
def read_rounds(profiled: profile, *, apart: bool = False) -> tuple[list[ProfilerEvent], list[int]]:
    """The memory events in order of time, and their number at each round's end.

    With `apart`, threads without marks are those of a backend of torch.distributed.
    """
    log = _read_log(profiled, apart=apart)
    counts = itertools.accumulate(int(isinstance(entry, ProfilerEvent)) for entry in log)
    ends = [count for count, entry in zip(counts, log, strict=True) if entry is None]
    return list(assign_phases(entry for entry in log if entry is not None)), ends


def _read_log(profiled: profile, *, apart: bool = False) -> list[ProfilerEvent | Phase | None]:
    found: list[tuple[int, ProfilerEvent | Phase | None]] = []
    pending: list[tuple[Any, MeasuredCall | None, tuple[str, ...]]] = [
        (root, None, ()) for root in torch_kernels.event_tree(profiled)
    ]
    steps_threads = {torch_kernels.thread(root) for root, _, _ in pending if root.name.startswith(MARK)}
    while pending:
        entry, call, path = pending.pop()
        name = entry.name
        if name.startswith(_COLLECTIVE) or (apart and torch_kernels.thread(entry) not in steps_threads):
            call, path = MeasuredCall(BACKEND), (BACKEND,)
        if torch_kernels.is_allocation(entry):  # has no children
            block = entry.extra_fields
            if block.device.type == "cpu":
                found.append((entry.start_time_ns, ProfilerEvent(block.alloc_size, block.ptr, call=call, path=path)))
            continue
        if _OPERATOR.fullmatch(name):
            if torch_kernels.is_function(entry):
                call = call or _leaf_call(entry)
                path = (*path, _qualified_name(entry)) if call else path
        elif name.startswith(MARK):
            found.append((entry.start_time_ns, _MARKS[name.removeprefix(MARK)]))
        elif name == LOADER:
            call, path = MeasuredCall(LOADER), (LOADER,)
        pending += [(child, call, path) for child in entry.children]
    found.sort(key=lambda timed: timed[0])
    return [entry for _, entry in found]


def fill_shapes(events: Sequence[ProfilerEvent], earlier: Sequence[ProfilerEvent]) -> list[ProfilerEvent]:
    """The events; calls without shapes get those of the same operator's last call in earlier steps.

    A call of an operator that the earlier steps called less often keeps no shapes.
    """
    shaped: dict[str, list[MeasuredCall]] = defaultdict(list)
    for call in _calls(earlier):
        shaped[call.name].append(call)
    latest = {call: shaped[call.name].pop() for call in reversed(_calls(events)) if shaped[call.name]}
    return [replace(event, call=latest.get(event.call, event.call)) if event.call else event for event in events]


def _calls(events: Sequence[ProfilerEvent]) -> list[MeasuredCall]:
    return list(dict.fromkeys(event.call for event in events if event.call))


def _leaf_call(entry: Any) -> MeasuredCall | None:
    """The call, unless the operator is composite or is autocast's wrapper. That one casts the arguments and calls the
    operator itself."""
    name = f"{entry.name}.{entry.overload_name}" if entry.overload_name else entry.name
    if torch_kernels.is_composite(name):
        return None
    inner = (child for child in entry.children if torch_kernels.is_function(child))
    if torch_kernels.has_autocast(name) and any(
        child.name == entry.name and child.overload_name == entry.overload_name for child in inner
    ):
        return None
    shapes = tuple(tuple(value.sizes) if hasattr(value, "sizes") else None for value in entry.extra_fields.inputs)
    return MeasuredCall(_qualified_name(entry), shapes)


def _qualified_name(entry: Any) -> str:
    return f"{entry.name.replace('::', '.')}.{entry.overload_name or 'default'}"


def assign_phases(entries: Iterator[ProfilerEvent | Phase]) -> Iterator[ProfilerEvent]:
    """The events, each in the phase of the last mark before it."""
    phase = Phase.FORWARD
    for entry in entries:
        if isinstance(entry, Phase):
            phase = entry
        else:
            yield ProfilerEvent(entry.nbytes, entry.address, phase, entry.call, entry.path)


@dataclass
class _Tally:
    """Scratch of one call."""

    phase: Phase
    kernel: tuple[str, ...]
    allocations: int = 0
    alive: int = 0
    most: int = 0
    at_peak: int = 0


def scratch_by_op(
    events: Sequence[ProfilerEvent], scratch: Mapping[int, MeasuredCall], peak: int
) -> tuple[MeasuredOp, ...]:
    """One row per operator, kernel, phase and input shapes, the largest scratch first."""
    calls: dict[MeasuredCall, _Tally] = {}
    for index, call in scratch.items():
        event = events[index]
        tally = calls.setdefault(call, _Tally(event.phase, event.path))
        if event.call is call:  # what is kept is freed elsewhere
            tally.kernel = tuple(
                mine
                for mine, other in itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(tally.kernel, event.path, strict=False)
                )
            )
        tally.allocations += event.nbytes > 0
        tally.alive += event.nbytes
        tally.most = max(tally.most, tally.alive)
        tally.at_peak = tally.alive if index <= peak else tally.at_peak
    rows: dict[tuple[Any, ...], list[_Tally]] = defaultdict(list)
    for call, tally in calls.items():
        rows[call.name, tally.kernel[-1], tally.phase, call.input_shapes].append(tally)
    ops = [
        MeasuredOp(
            name=name,
            kernel=kernel,
            phase=phase,
            input_shapes=shapes,
            calls=len(tallies),
            allocations=sum(tally.allocations for tally in tallies),
            scratch_bytes=max(tally.most for tally in tallies),
            at_peak_bytes=sum(tally.at_peak for tally in tallies),
        )
        for (name, kernel, phase, shapes), tallies in rows.items()
    ]
    return tuple(sorted(ops, key=lambda op: -op.scratch_bytes))
