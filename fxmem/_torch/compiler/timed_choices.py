"""Private names of inductor: what it decides by timing on the card, decided without one.

What moves no memory is not asked: block sizes and warps of a kernel (`coordinate_descent_tuning`,
`max_autotune_pointwise`, several configurations of one template), for its arguments stay the same.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch.common import nested, patch, wrap


class Timing(NamedTuple):
    """Who decides what inductor would time; each is told what is to be decided, in words."""

    pads: Callable[[str], bool]
    """Whether a matrix product is padded."""
    choose_kernel: Callable[[str, tuple[str, ...]], str]
    """Of the kinds of `KERNELS` that can compute an operator, the one that does."""
    fuses: Callable[[str], bool]
    """Whether two kernels become one."""


KERNELS: Final = ("ATen's kernel", "Triton template", "several kernels")
"""What can compute an operator. Several kernels are a small graph with buffers of its own, such as a product that is
split along its inner dimension (`decompose_k`)."""


class UnknownRateError(Exception):
    """The compiler asks how fast a card is whose rates nobody has published here."""


def decide_timing(timing: Timing) -> AbstractContextManager[None]:
    """Let `timing` decide what inductor decides by timing on the card."""
    return nested(_decide_padding(timing.pads), _decide_kernels(timing.choose_kernel), _decide_fusion(timing.fuses))


def _decide_padding(decide: Callable[[str], bool]) -> AbstractContextManager[None]:
    """Let `decide(call)` say whether a matrix product is padded; inductor times both on the card.

    `_should_pad` of torch/_inductor/fx_passes/pad_mm.py (since 2.3) first leaves out products that memory bounds
    (`is_mm_compute_bound`), by the card's rates; where these are not known, none is left out.
    """
    from torch._inductor.fx_passes import pad_mm

    def should_pad(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        if op not in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            return False
        m, k, n = mat1.shape[-2], mat1.shape[-1], mat2.shape[-1]
        with contextlib.suppress(UnknownRateError):
            if not pad_mm.is_mm_compute_bound(m, k, n, mat1.dtype):
                return False
        return decide(f"{op.__name__} of {_shapes(mat1.shape, mat2.shape)}")

    return patch(pad_mm, "_should_pad", lambda _: should_pad)


def _decide_kernels(decide: Callable[[str, tuple[str, ...]], str]) -> AbstractContextManager[None]:
    """Let `decide(call, kinds)` say which kind of kernel computes a product or a convolution.

    `AlgorithmSelectorCache.do_autotuning` and `make_precompile_fn` (since 2.9) build and time the choices.
    """
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def autotune(
        self: Any, name: str, nodes: Any, layout: Any, generators: Any, key: Any, choices: Any, *_: Any, **__: Any
    ) -> dict[Any, float]:
        kinds = {choice: _kernel_kind(choice) for choice in choices}
        offered = tuple(kind for kind in KERNELS if kind in kinds.values())
        taken = offered[0]
        if len(offered) > 1:
            taken = decide(f"{name} of {_shapes(*(node.get_size() for node in nodes))}", offered)
        ordered = sorted(choices, key=lambda choice: (kinds[choice] != taken, -_kept_bytes(choice)))
        return {choice: 1.0 + place * _FAR for place, choice in enumerate(ordered)}

    return nested(
        patch(AlgorithmSelectorCache, "do_autotuning", lambda _: autotune),
        patch(AlgorithmSelectorCache, "make_precompile_fn", lambda _: lambda *_, **__: dict),
    )


_FAR: Final = 1e6
"""How much later the next choice is: too late to win by what may be fused with it."""
_SPLIT: Final = re.compile(r"decompose_k_mm_(\d+)_split")


def _kernel_kind(choice: Any) -> str:
    """The kind of an inductor `ChoiceCaller`: `ExternKernelCaller` (since 2.0), `SubgraphChoiceCaller` (since 2.8)."""
    from torch._inductor.codegen.subgraph import SubgraphChoiceCaller
    from torch._inductor.select_algorithm import ExternKernelCaller

    if isinstance(choice, SubgraphChoiceCaller):
        return KERNELS[2]
    return KERNELS[0] if isinstance(choice, ExternKernelCaller) else KERNELS[1]


def _kept_bytes(choice: Any) -> float:
    """What orders choices of one kind by what their kernels take beside arguments and result: the most comes first.

    A template may have a workspace (`TritonTemplateCaller.workspace_arg`, since 2.6), a split product one partial
    result for each part; ATen's kernels stay in inductor's order.
    """
    parts = _SPLIT.search(choice.name)
    if parts is not None:
        return float(parts[1])
    workspace = getattr(choice, "workspace_arg", None)
    return 0.0 if workspace is None else float(workspace.count)


def _decide_fusion(decide: Callable[[str], bool]) -> AbstractContextManager[None]:
    """Let `decide(what)` say whether two kernels become one, where inductor builds and times them.

    It does so for what is fused with a template, and with `benchmark_fusion` and `benchmark_combo_kernel` for all.
    `Scheduler.speedup_by_fusion` answers with a `FusionResult` whose `callable_fn` times (since 2.9);
    `compile_kernel`, `benchmark_fused_nodes`, `benchmark_codegened_module` and `benchmark_combo_kernel` (since 2.6) are
    what it calls.
    """
    from torch._inductor.scheduler import FusionResult, Scheduler

    def speedup_by_fusion(original: Callable[..., Any], self: Any, first: Any, second: Any) -> Any:
        found = original(self, first, second)
        if found.callable_fn is None:
            return found
        return FusionResult.fuse(decide("two kernels") and bool(found.callable_fn()))

    def compile_kernel(self: Any, nodes: Any, hint_override: Any = None, **_: Any) -> tuple[None, Any]:
        self.generate_kernel_code_from_nodes(nodes, benchmark_kernel=True, hint_override=hint_override)  # or refuse
        launcher = SimpleNamespace(n_spills=0)
        return None, SimpleNamespace(triton_=SimpleNamespace(precompile=lambda: None, launchers=[launcher]))

    def benchmark_combo(*_: Any, **__: Any) -> tuple[float, float, list[str]]:
        return (0.0 if decide("independent kernels") else math.inf), 0.0, []

    def benchmark_alike(*_: Any, **__: Any) -> tuple[float, str]:
        return 1.0, ""

    return nested(
        wrap(Scheduler, "speedup_by_fusion", speedup_by_fusion),
        patch(Scheduler, "compile_kernel", lambda _: compile_kernel),
        patch(Scheduler, "benchmark_fused_nodes", lambda _: benchmark_alike),
        patch(Scheduler, "benchmark_codegened_module", lambda _: benchmark_alike),
        patch(Scheduler, "benchmark_combo_kernel", lambda _: benchmark_combo),
    )


def _shapes(*sizes: Any) -> str:
    return " by ".join("x".join(map(str, size)) for size in sizes)
