"""What trainers ask of torch.distributed and of a card's generators beside the usual, as one rank of many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import fxmem


@pytest.fixture(scope="module")
def recorded() -> Any:
    """Rank 2 of 4, and what it found."""
    found: dict[str, Any] = {}
    with fxmem.record(ranks=4, rank=2, steps=1) as record:
        dist.init_process_group("nccl")
        beside = dist.new_group([0, 2], backend="gloo")
        found["size"], found["rank"] = beside.size(), dist.get_rank(beside)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, {"rank": dist.get_rank()})
        found["objects"] = everyone
        at_one: list[Any] | None = [None] * 2 if dist.get_rank() == 2 else None
        dist.gather_object("here", at_one, group=beside, group_dst=1)
        found["gathered"] = at_one
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {rank}" for rank in range(4)], src=2)
        found["scattered"] = mine
        flags, seed = torch.zeros(3, dtype=torch.int64, device="cuda"), torch.full((1,), 7, device="cuda")
        for each in (flags, seed):
            dist.broadcast(each, src=0)
        found["flags"], found["seed"] = flags.tolist(), seed.item()
        on_host = torch.ones(3)
        dist.all_reduce(on_host, group=beside)
        dist.monitored_barrier(beside)
        found["on host"] = on_host.tolist()
        generator = torch.cuda.default_generators[0]
        torch.cuda.set_rng_state(generator.get_state())
        generator.graphsafe_set_state(generator.clone_state().graphsafe_get_state())
        found["state"], found["of"] = generator.get_state().nbytes, torch.Generator("cuda").device.type
        layer = torch.nn.Linear(64, 64, bias=False, device="cuda")
        whole, part = (torch.zeros(size, device="cuda") for size in (64 * 64, 64 * 16))
        optimizer = torch.optim.SGD([part])
        layer(torch.randn(8, 64, device="cuda", generator=generator)).sum().backward()
        part.grad = torch.empty_like(part)
        with _coalescing_manager(async_ops=True) as work:
            dist.reduce_scatter_tensor(part.grad, whole, async_op=True)
            dist.reduce_scatter_tensor(part, whole, async_op=True)
        work.wait()
        with _coalescing_manager(async_ops=True) as work:
            dist.all_reduce(part.grad, async_op=True)
            dist.all_reduce(whole, async_op=True)
        work.wait()
        with _coalescing_manager(device=torch.device("cuda")):
            dist.all_gather_into_tensor(whole, part)
        optimizer.step()
    return record, found


def test_groups_of_any_backend_answer(recorded: Any) -> None:
    _, found = recorded
    assert (found["size"], found["rank"]) == (2, 1)
    assert found["on host"] == [1.0, 1.0, 1.0]
    assert not dist.is_initialized()


def test_objects_of_absent_ranks_are_its_own(recorded: Any) -> None:
    record, found = recorded
    assert found["objects"] == [{"rank": 2}] * 4
    assert found["gathered"] == ["here", "here"]
    assert found["scattered"] == ["for 2"]
    assert "objects of all ranks: each as that of rank 2" in [each.what for each in record.made_up]


def test_flags_that_another_rank_sets_are_set(recorded: Any) -> None:
    record, found = recorded
    assert (found["flags"], found["seed"]) == ([1, 1, 1], 7)
    assert "whole numbers that another rank broadcasts: 1" in [each.what for each in record.made_up]


def test_collectives_that_go_as_one_are_counted(recorded: Any) -> None:
    ranks = recorded[0].profile.step.ranks
    moved = {
        each.kind: (each.count, each.moved_bytes) for each in ranks.collectives if ranks.groups[each.group].size == 4
    }
    assert moved["reduce-scatter"] == (1, 2 * 64 * 64 * 4 * 3 // 4)
    assert moved["all-gather"] == (1, 64 * 64 * 4 * 3 // 4)
    assert moved["all-reduce"] == (1, 2 * (64 + 16) * 64 * 4 * 3 // 4)


def test_a_card_has_a_generator_with_a_state(recorded: Any) -> None:
    _, found = recorded
    assert found["state"] == 16
    assert found["of"] == "cuda"
    assert torch.Generator().get_state().nbytes > 16


def test_experts_get_their_shares() -> None:
    """Tokens are sent to experts on other ranks, by counts that are read back, as mixtures of experts do it."""
    tokens, experts, chosen, width, world = 68, 16, 2, 16, 4  # of 136, for 16 experts
    share, own = tokens * chosen // world, experts // world
    with fxmem.record(ranks=world, rank=1, steps=1) as recorded:
        dist.init_process_group("nccl")
        router = torch.nn.Linear(width, experts, device="cuda")
        x = torch.randn(tokens, width, device="cuda")
        probabilities, places = torch.topk(router(x).softmax(-1), chosen, dim=1)
        route = torch.zeros(tokens, experts, dtype=torch.int32, device="cuda").scatter(1, places, 1).bool()
        counts = route.sum(dim=0)
        of_all = torch.empty(world * experts, dtype=counts.dtype, device="cuda")
        dist.all_gather_into_tensor(of_all, counts)
        of_each, sends = counts.tolist(), counts.view(world, -1).sum(1).tolist()
        incoming = of_all.view(world, experts)[:, own : 2 * own]
        receives, per_expert = incoming.sum(1).tolist(), incoming.sum(0).tolist()
        rows = torch.arange(tokens, device="cuda").expand(experts, -1).masked_select(route.T.contiguous())
        received = torch.empty(sum(receives), width, device="cuda")
        dist.all_to_all_single(received, x[rows], receives, sends)
        assert len(received.split(per_expert)) == own
        probabilities.sum().backward()
        torch.optim.SGD(router.parameters()).step()
    assert rows.shape == (tokens * chosen,)
    assert sends == receives == [share] * world
    assert sum(per_expert) == share * world
    assert set(per_expert) == {4 * 8, 4 * 9}
    assert sum(of_each) == tokens * chosen
    assert set(of_each) == {8, 9}
    said = [each.text for each in recorded.profile.assumptions if "--routing" in each.text]
    share_said = "each expert gets an equal share of the tokens, of 16 with 2 for each token, on all ranks alike"
    assert said == [f"{share_said} (fxmem run --routing)"]
