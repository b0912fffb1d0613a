"""Copies that softmax, layer norm and RMS norm make of arguments that are not contiguous, on a card as on the CPU.

Logits of `(batch, classes, tokens)` made by a transpose are copied whole by the loss, images of `channels_last` too,
and so is what `permute` hands a layer norm over channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxmem.hardware.workspaces.hidden_memory import HiddenEvent, HiddenMemory, alloc, output
from fxmem.hardware.workspaces.tensor_layouts import read_layout

COPYING: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # `host_softmax`, `host_softmax_backward` (aten/src/ATen/native/cuda/SoftMax.cu), aten/src/ATen/native/SoftMax.cpp.
    "_softmax": ((), (0,)),
    "_log_softmax": ((), (0,)),
    "_log_softmax_backward_data": ((), (0, 1)),
    # `layer_norm_cuda`, `layer_norm_backward_cuda` (cuda/layer_norm_kernel.cu), layer_norm.cpp. Backward: gradient,
    # input, ...
    "native_layer_norm": ((0,), ()),
    "native_layer_norm_backward": ((1,), (0,)),
    # `_fused_rms_norm_cuda`, `_fused_rms_norm_backward_cuda` in the same file.
    "_fused_rms_norm": ((0,), ()),
    "_fused_rms_norm_backward": ((1,), (0,)),
}
"""By operator, positions of the arguments that are copied before the results are made, and of those copied after."""


def with_copies(short: str, args: Sequence[Any], result: Any, memory: HiddenMemory | None) -> HiddenMemory | None:
    """What one of these operators hides, the copies that it makes of these arguments included; the copies last until it
    returns.

    Args:
        short: its name without `aten.` and overload.
        result: what the call returned: a tensor, or several of which some may be None.
        memory: what else it hides; None for nothing.
    """
    before, after = (_copies(args, positions) for positions in COPYING[short])
    if not before and not after:
        return memory
    results = [each for each in (result if isinstance(result, tuple | list) else [result]) if each is not None]
    events = (
        memory.events if memory is not None else tuple(output(f"result {number}") for number in range(len(results)))
    )
    made = sum(event.action == "output" for event in events)
    assert all(event.action == "output" for event in events[:made])
    return HiddenMemory(
        events=(*before, *events[:made], *after, *events[made:]),
        source=memory.source if memory is not None else "aten/src/ATen/native",
    )


def _copies(args: Sequence[Any], positions: Sequence[int]) -> tuple[HiddenEvent, ...]:
    layouts = ((position, read_layout(args[position])) for position in positions)
    return tuple(
        alloc(f"contiguous argument {position}", layout.nbytes)
        for position, layout in layouts
        if not layout.is_contiguous()
    )
