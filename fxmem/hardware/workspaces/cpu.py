"""What CPU kernels allocate beside their results, where the shapes determine it.

The scratch of oneDNN's convolutions and recurrent layers and of attention depends on the machine (instruction set,
threads) and is not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fxmem.hardware.workspaces.collector import Seen
from fxmem.hardware.workspaces.copies import COMPOSED, COPYING, add_copies, composed_memory
from fxmem.hardware.workspaces.hidden_memory import HiddenMemory, alloc, output
from fxmem.hardware.workspaces.tensor_layouts import MemoryFormat, read_layout
from fxmem.records.profile import Assumption, Phase, Unknown

_BATCH_NORM = "aten.native_batch_norm_backward.default"


class CpuCollector:
    """As `Collector`, for a step on the CPU."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything; a new step begins."""
        self._memory: dict[int, HiddenMemory] = {}

    def look(self, name: str, args: Sequence[Any], result: Any) -> Seen | None:
        """What a call hides; None for nothing."""
        memory = _batch_norm_backward(args, result) if name == _BATCH_NORM else None
        short = name.removeprefix("aten.").partition(".")[0]
        if short in COPYING:
            memory = add_copies(short, args, result, None)
        if short in COMPOSED:
            memory = composed_memory(short, args)
        return None if memory is None else Seen(name, multiplies=False, multiplies_lt=False, memory=memory)

    def saw(self, index: int, seen: Seen, phase: Phase) -> None:
        """Op `index` of the step was a call that hides this."""
        if seen.memory is not None:
            self._memory[index] = seen.memory

    def settle(self) -> dict[int, HiddenMemory]:
        """By op index, what it hides."""
        return self._memory

    def held_bytes(self) -> dict[str, int]:
        """Nothing is there before the step."""
        return {}

    def assumptions(self) -> Iterator[Assumption]:
        """Nothing is taken for granted."""
        yield from ()

    def unknowns(self) -> Iterator[Unknown]:
        """Nothing is left open."""
        yield from ()


def _batch_norm_backward(args: Sequence[Any], result: Any) -> HiddenMemory | None:
    """`batch_norm_backward_cpu_template` (aten/src/ATen/native/Normalization.cpp): for dense arguments it makes the
    input's gradient a second time.

    The second takes the first one's place once both are there. Arguments: grad_out, input, ...; results: the gradients
    that were asked for, or None.
    """
    grad, source = read_layout(args[0]), read_layout(args[1])
    dense = all(each.is_contiguous() or each.is_contiguous(MemoryFormat.CHANNELS_LAST) for each in (grad, source))
    if result[0] is None or not dense or grad.memory_format() is not source.memory_format():
        return None
    outputs = (output(f"gradient {position}") for position, each in enumerate(result) if each is not None)
    events = (*outputs, alloc("the input's first gradient", read_layout(result[0]).nbytes))
    return HiddenMemory(events=events, source="aten/src/ATen/native/Normalization.cpp")
