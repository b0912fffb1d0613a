"""What FSDP2's copy-in of gradients hides: torch's allocator on a card's stand-in, and the CPU's own kernel."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch.distributed.fsdp import fully_shard  # which defines the operators

from fxmem._torch import kernels as torch_kernels
from fxmem.hardware.workspaces import copy_in_memory
from fxmem.validation.measure_cpu import quiet_profiler
from fxmem.validation.profiler_log import live_bytes, read_events
from tests.hardware.workspaces.peaks import peak_bytes

assert fully_shard
EVEN: Final = (640, 64), (640,), (128, 32)
UNEVEN: Final = (65, 64), (65,), (130, 32)
F, B, H = torch.float32, torch.bfloat16, torch.float16
IS_MIXED: Final = hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype")
NAME: Final = "chunk_cat_mixed_dtype" if IS_MIXED else "chunk_cat"


def _tensors(shapes: Any, dtypes: Any, out: torch.dtype, device: str = "meta") -> tuple[list[Any], torch.Tensor]:
    gradients = [torch.empty(shape, dtype=each, device=device) for shape, each in zip(shapes, dtypes, strict=True)]
    width = sum(-(-each.shape[0] // 4) * each[0].numel() for each in gradients)
    return gradients, torch.empty(4, width, dtype=out, device=device)


@pytest.mark.parametrize(
    ("dtypes", "out", "shapes", "expected"),
    [
        ((F, F, F), F, EVEN, [344]),
        ((B, B, B), F, UNEVEN, [216]),
        ((B, B, B), B, EVEN, [256]),
        ((H, H, H), F, EVEN, []),
        ((H, H, H), F, UNEVEN, [8704, 136, 8448]),
        ((B, B, F), F, EVEN, [328]),
        ((B, B, F), F, UNEVEN, [200]),
        ((H, H, F), F, EVEN, [163840, 2560, 344]),
        ((H, H, F), F, UNEVEN, [16640, 260, 216]),
    ],
)
def test_a_card_allocates_what_its_allocator_logged(dtypes: Any, out: Any, shapes: Any, expected: list[int]) -> None:
    gradients, buffer = _tensors(shapes, dtypes, out)
    memory = copy_in_memory("fsdp.chunk_cat_mixed_dtype.default", (gradients, 0, 4), buffer, on_card=True)
    assert [event.nbytes for event in (memory.events if memory else ())] == expected


def test_gradients_that_are_not_contiguous_are_padded_on_a_card() -> None:
    gradients = [torch.empty(64, 65, device="meta").t()]
    memory = copy_in_memory("fsdp.chunk_cat.default", (gradients, 0, 4), torch.empty(4, 68 * 16), on_card=True)
    assert memory is not None
    assert peak_bytes(memory) == 68 * 64 * 4


def _most_allocated(gradients: list[torch.Tensor], out: torch.Tensor) -> int:
    """Most bytes that the CPU's kernel has allocated at once."""
    with quiet_profiler(), torch_kernels.profiler() as profiled, torch.no_grad():
        getattr(torch.ops.fsdp, NAME)(gradients, dim=0, num_chunks=4, out=out)
    return max(live_bytes(0, read_events(profiled), {}))


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    ("dtypes", "out"), [((F, F, F), F), ((B, B, B), F), ((F, F, F), B), ((B, F, B), F), ((H, F, H), F), ((F, B, F), B)]
)
def test_the_cpus_kernel_allocates_as_predicted(shapes: Any, dtypes: Any, out: Any) -> None:
    if len(set(dtypes)) > 1 and not IS_MIXED:
        pytest.skip("gradients of several dtypes are joined since torch 2.15")
    gradients, buffer = _tensors(shapes, dtypes, out, device="cpu")
    memory = copy_in_memory(f"fsdp.{NAME}.default", (gradients, 0, 4), buffer, on_card=False)
    assert (peak_bytes(memory) if memory else 0) == _most_allocated(gradients, buffer)


def test_other_calls_hide_nothing_here() -> None:
    gradients, buffer = _tensors(EVEN, (F, F, F), F)
    assert copy_in_memory("fsdp.all_gather_copy_in.default", (gradients, buffer), None, on_card=True) is None
    assert copy_in_memory("fsdp.chunk_cat.default", (gradients, 0, 4), buffer, on_card=False) is None
