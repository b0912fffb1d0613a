"""Operators of packages whose own kernels for fake tensors are not enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from fxmem._torch import common as torch_common
from fxmem.errors import AnalysisError
from fxmem.simulation.asked import known_values

# --- managed memory of bitsandbytes, for paged optimizers; its kernels are rows (`packages.libbitsandbytes_cuda`) -----
# Managed memory is the host's, which a card reaches. torch's allocator knows nothing of it, on a card as here.


def patch_functions(functional: Any) -> torch_common.Patches:
    """Let paged tensors be made, filled and moved without a driver, and maps of quantisation have their numbers."""

    def fill(original: Callable[..., None], A: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(A, "is_paged", False):
            original(A, *args, **kwargs)

    def make_map(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch_common.no_modes():
            return original(*args, **kwargs)

    yield torch_common.replace(functional, "get_paged", _make_paged)
    yield torch_common.replace(functional, "prefetch_tensor", lambda *_, **__: None)
    yield torch_common.wrap(functional, "fill", fill, here=True)
    yield torch_common.wrap(functional, "create_dynamic_map", make_map, here=True)


def _make_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
    """A tensor of the host of as many elements, none of which takes memory here."""
    with torch_common.no_modes():
        made: Any = torch.zeros(1, dtype=dtype).expand(shape)
    made.is_paged, made.page_deviceid = True, 0
    return made


# --- what DeepSpeed builds with a compiler where it is first used, its optimizers' kernels; what its stages send ------
# Kernels are told by what they do with memory, as of DeepSpeed 0.19 (csrc/adam, csrc/lion, csrc/adagrad):
# `FusedAdam`, `FusedLion` on the card and `DeepSpeedCPUAdam`, `DeepSpeedCPULion`, `DeepSpeedCPUAdagrad` on the host
# write to the tensors that they are given, and allocate nothing.


_IN_PLACE: Final = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    **{f"cpu_{each}": (f"create_{each}", f"{each}_update", f"destroy_{each}") for each in ("adagrad", "lion")},
    "cpu_adam": ("create_adam", "adam_update", "adam_rollback", "destroy_adam"),
}
"""By the name of an extension, its functions, which return nothing."""
_NVME: Final = ("async_io", "gds", "pin_memory")
"""What offload to NVMe loads; its own way to pin memory first."""


def patch_builders(builder: Any) -> torch_common.Patches:
    """Let extensions be loaded without a compiler (`OpBuilder.load`)."""
    yield torch_common.wrap(builder.OpBuilder, "load", _load, here=True)


def patch_pipes(engine: Any) -> torch_common.Patches:
    """Let a stage know all that it sends of shapes (`PipelineEngine._send_tensor_meta`): of 256 numbers it writes the
    first few, and nobody reads the others, which are taken to be 0."""

    def empty(original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made, torch_common.FakeTensor):
            known_values.fill(made, 0)
        return made

    def send(original: Any, *args: Any, **kwargs: Any) -> Any:
        with torch_common.wrap(engine.torch, "empty", empty):
            return original(*args, **kwargs)

    yield torch_common.wrap(engine.PipelineEngine, "_send_tensor_meta", send, here=True)


def _load(original: Any, extension: Any, *args: Any, **kwargs: Any) -> Any:
    """The functions of an extension.

    Raises:
        AnalysisError: it reads and writes NVMe.
    """
    if extension.name in _NVME:
        raise AnalysisError(
            "expected DeepSpeed's offload to the CPU, got to NVMe, whose reads and writes are not followed; set "
            '"device": "cpu" in offload_optimizer and offload_param'
        )
    names = _IN_PLACE.get(extension.name)
    return original(extension, *args, **kwargs) if names is None else SimpleNamespace(**dict.fromkeys(names, _do))


def _do(*_: Any, **__: Any) -> None:
    """Write to tensors that have no values."""


# --- `flex_attention` as the kernels that inductor makes of it --------------------------------------------------------
# Eager code computes it with whole matrices of scores (`sdpa_dense` of torch/_higher_order_ops/flex_attention.py). A
# program that is analysed without its compiler still has the kernels' memory here, since few could run it otherwise.
# Read in torch/_inductor/kernel/flex/flex_attention.py of 2.11. Not counted: the parts of the keys that it takes
# apart for less than 128 queries (flex_decoding.py), whose number depends on the card.


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Without gaps, the dimensions in the order in which `like` has them, the last one innermost."""
    strides, size = [0] * len(shape), 1
    for dim in (len(shape) - 1, *sorted(range(len(shape) - 1), key=like.stride)):
        strides[dim], size = size, size * shape[dim]
    return like.new_empty_strided(shape, strides)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any, scale: float, options: Mapping[str, Any], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, log-sum-exps, the largest scores if they are asked for."""
    rows = query.shape[:-1]
    sums = query.new_empty(rows, dtype=torch.float32)
    largest = query.new_empty(rows if options.get("OUTPUT_MAX") else 0, dtype=torch.float32)
    return _empty(query, (*rows, value.shape[-1])), sums, largest


def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, gradient: Tensor | None, *further: Any
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Gradients: of keys and values that all items of the batch share, for each item first."""
    product_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    each = [_empty(like, (query.shape[0], *like.shape[1:])) for like in (query, key, value)]
    of_keys = [
        made.sum(0, keepdim=True) if made.shape != like.shape else made
        for made, like in zip(each[1:], (key, value), strict=True)
    ]
    captured = (torch.zeros_like(it) if isinstance(it, Tensor) and it.requires_grad else None for it in further[-2])
    del product_sums
    return each[0], of_keys[0], of_keys[1], tuple(captured)


FUSED: Final[Mapping[str, Callable[..., Any]]] = {"flex_attention": _forward, "flex_attention_backward": _backward}
"""By the name of the operator; called with its arguments, and makes its results as the kernel allocates them."""


# --- xformers ---------------------------------------------------------------------------------------------------------


def say_built(module: Any) -> torch_common.Patches:
    """The library counts as built for CUDA, which cannot be loaded without it."""
    yield torch_common.replace(module, "_built_with_cuda", True)


def dispatch_on_card(dispatch: Any) -> torch_common.Patches:
    """A kernel is chosen as with a torch that is built for CUDA."""

    def choose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch_common.replace(torch.version, "cuda", torch.version.cuda or "13.0"):
            return original(*args, **kwargs)

    for name in ("_dispatch_fw_priority_list", "_dispatch_bw"):
        yield torch_common.wrap(dispatch, name, choose, here=True)
