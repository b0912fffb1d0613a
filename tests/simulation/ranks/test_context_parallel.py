"""Ranks whose sequences are split by torch's `context_parallel`: its ring, with the kernel of the card."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel

import fxmem
from fxmem.records.profile import Kind

RANKS: Final = 4
BATCH, HEADS, TOKENS, SIZE = 1, 2, 256, 64
SHARE: Final = BATCH * HEADS * TOKENS // RANKS * SIZE
"""Numbers of a rank's queries; of its keys, and of its values."""


def attend(method: str, rank: int) -> fxmem.Recording:
    """A step of attention on a part of the tokens, whose keys and values go round by all-gather or by all-to-all."""
    before = _attention._cp_options.rotate_method
    try:
        _attention.set_rotate_method(method)
        with fxmem.record("h100", ranks=RANKS, rank=rank, steps=1) as recorded:
            dist.init_process_group("nccl")
            mesh = init_device_mesh("cuda", (RANKS,))
            layer = torch.nn.Linear(SIZE, 3 * SIZE, dtype=torch.bfloat16, device="cuda")
            optimizer = torch.optim.SGD(layer.parameters())
            x = torch.randn(BATCH, HEADS, TOKENS, SIZE, dtype=torch.bfloat16, device="cuda")
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], no_restore_buffers={x}):
                parts = layer(x).chunk(3, -1)
                torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()
            optimizer.step()
    finally:
        _attention._cp_options.rotate_method = before
    return recorded


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_keys_and_values_go_round(method: str, rank: int) -> None:
    """As `_templated_ring_attention` and its backward are written (torch/distributed/tensor/experimental)."""
    profile = attend(method, rank).profile
    ran = Counter(each.name for each in profile.ops if each.name.startswith("aten._scaled_dot_product"))
    assert sorted(ran.values()) == [RANKS, RANKS]  # forward, backward
    ranks = profile.step.ranks
    assert ranks is not None
    moved = {each.kind: (each.count, each.moved_bytes) for each in ranks.collectives}
    pair, others = 2 * SHARE * 2, RANKS - 1  # a rank's keys and values in bfloat16; their gradients are in float32
    gradients = RANKS * 2 * pair * others // RANKS
    if method == "allgather":
        assert moved == {"all-gather": (2, 2 * pair * others), "all-to-all": (RANKS, gradients)}
    else:
        assert moved == {"all-to-all": (2 * others + RANKS, 2 * others * pair * others // RANKS + gradients)}
    saved = sorted(each.nbytes for each in profile.storages if each.kind is Kind.SAVED)
    sums = SHARE // SIZE * 4  # the log-sum-exp, in float32
    assert saved == [8, 8, sums, SHARE * 2, 3 * SHARE * 2]  # seeds; what attention returned; the layer's result


def test_attention_on_dtensors_runs_the_kernel_of_the_card() -> None:
    with fxmem.record("h100", ranks=RANKS, rank=1, steps=1) as recorded:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (RANKS,))
        heads = torch.randn(BATCH, 2, TOKENS, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        whole = torch.distributed.tensor.DTensor.from_local(heads, mesh, [torch.distributed.tensor.Shard(1)])
        found = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole)
        found.to_local().sum().backward()
    assert any("dot_product" in each.name for each in recorded.profile.ops)
    assert found.shape == (BATCH, 2 * RANKS, TOKENS, SIZE)


@pytest.mark.truth
def test_a_compiled_ring_runs_as_often() -> None:
    """What dynamo traces of it is DTensors."""
    _attention._enable_context_parallel_dispatcher()
    try:
        with fxmem.record("h100", ranks=RANKS, rank=1, steps=1, compile="as-is") as recorded:
            dist.init_process_group("nccl")
            mesh = init_device_mesh("cuda", (RANKS,))

            def attend(x: torch.Tensor) -> torch.Tensor:
                whole = torch.distributed.tensor.DTensor.from_local(x, mesh, [torch.distributed.tensor.Shard(2)])
                found: Any = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
                return found.to_local().sin()

            x = torch.randn(BATCH, HEADS, TOKENS, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            torch.compile(attend)(x).sum().backward()
    finally:
        _attention._disable_context_parallel_dispatcher()
    ran = Counter(each.name for each in recorded.profile.ops if each.name.startswith("aten._scaled_dot_product"))
    assert sorted(ran.values()) == [RANKS, RANKS]
