"""Private names of inductor: graphs that it records as CUDA graphs.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxmem._torch.common import nested, patch, replace_all

Model = Callable[[list[Any]], Any]
"""What inductor wrote, called with a list of arguments that it empties."""


def route_cuda_graphs(
    capture: Callable[[Model, frozenset[int], frozenset[int]], Model], note_skip: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Let `capture(model, static, written)` stand for what records a CUDA graph.

    Of its arguments, the `static` ones keep their place, and the graph writes into the `written` ones.

    Inductor itself says which graphs are recorded, and `note_skip(why)` is called for one that is not.

    `torch._inductor.compile_fx.cudagraphify` (since 2.0); `log_cudagraph_skip_and_bump_counter` of
    torch/_inductor/cudagraph_utils.py (since 2.4), which compile_fx.py and output_code.py have imported.
    """
    from torch._inductor import compile_fx, output_code

    def cudagraphify(
        model: Model, static_input_idxs: Sequence[int] = (), *, mutated_input_idxs: Sequence[int] = (), **_: Any
    ) -> Model:
        return capture(model, frozenset(static_input_idxs), frozenset(mutated_input_idxs))

    def log_skip(message: str) -> None:
        note_skip(message.split("\n")[0])

    logs = [(owner, "log_cudagraph_skip_and_bump_counter", log_skip) for owner in (compile_fx, output_code)]
    return nested(patch(compile_fx, "cudagraphify", lambda _: cudagraphify), replace_all(logs))


def copy_inputs(inputs: list[Any], moving: Sequence[int]) -> None:
    """Put copies in the place of arguments, as a recording does.

    `CUDAGraphNode._allocate_and_copy_recording_inputs` of torch/_inductor/cudagraph_trees.py (since 2.1): all copies
    are allocated, then filled, then the arguments are let go. `static_input` of torch/_inductor/compile_fx.py (since
    2.0), `get_expanded_dims` and `index_expanded_dims` of torch/_inductor/output_code.py (since 2.6).
    """
    from torch._inductor import compile_fx, output_code

    copies = [compile_fx.static_input(inputs[index]) for index in moving]
    filled, read = [], []
    for copy, index in zip(copies, moving, strict=True):
        dims = output_code.get_expanded_dims(inputs[index])
        filled.append(output_code.index_expanded_dims(copy, dims))
        read.append(output_code.index_expanded_dims(inputs[index], dims))
        inputs[index] = copy
    if filled:
        torch._foreach_copy_(filled, read)
