"""What a framework in ZeRO's form keeps, by kind: the smallest program that does so."""

from __future__ import annotations

import torch
from torch import nn

import fxmem
from fxmem.records.profile import Kind

WIDTH, RANKS = 48, 4
COUNT = 2 * WIDTH * WIDTH


def test_flat_parameters_and_master_weights_have_their_kinds() -> None:
    """As ZeRO-1 does it: parameters in one buffer, this rank's part of them in float32 for the optimizer."""
    with fxmem.record("h100", ranks=RANKS, rank=1, steps=2) as recorded:
        torch.distributed.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))).bfloat16().cuda()
        flat = torch.cat([each.data.flatten() for each in model.parameters()])
        for each, part in zip(model.parameters(), flat.split(WIDTH * WIDTH), strict=True):
            each.data = part.view(WIDTH, WIDTH)
        own = flat.chunk(RANKS)[1]
        master = own.float().requires_grad_()
        optimizer = torch.optim.AdamW([master], foreach=True)
        while True:
            model(torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16)).sum().backward()
            whole = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
            master.grad = whole.chunk(RANKS)[1].float()
            model.zero_grad()
            optimizer.step()
            own.copy_(master.detach())
            torch.distributed.all_gather_into_tensor(flat, own)
    found = recorded.profile
    kept = {
        kind: sorted(each.nbytes for each in found.storages if each.kind is kind and not each.birth and each.nbytes > 8)
        for kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE)
    }
    assert kept == {Kind.PARAMETER: [COUNT * 2], Kind.OPTIMIZER_STATE: [COUNT // RANKS * 4] * 3}
    names = {each.name for each in found.storages if each.kind is Kind.OPTIMIZER_STATE and each.nbytes > 8}
    assert names == {"master weights", "master weights.exp_avg", "master weights.exp_avg_sq"}
    layers = [node.params_bytes for node in found.nodes if node.op == "call_module"]
    assert layers == [WIDTH * WIDTH * 2] * 2
    assert sum(node.params_bytes for node in found.nodes) == COUNT * 2


def test_an_optimised_tensor_of_a_model_of_its_own_is_no_master_weight() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        weight = torch.zeros(64, device="cuda", requires_grad=True)
        optimizer = torch.optim.AdamW([weight], foreach=True)
        while True:
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(each.name != "master weights" for each in recorded.profile.storages)


def test_gathered_parameters_are_unsharded() -> None:
    """As ZeRO-3 does it: each rank keeps its shard, of which an all-gather makes the whole for the call."""
    with fxmem.record("h100", ranks=RANKS, rank=0, steps=2) as recorded:
        torch.distributed.init_process_group("nccl")
        layer = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        shard = layer.weight.data.flatten().chunk(RANKS)[0].clone()
        layer.weight.ds_tensor = shard  # type: ignore[assignment]  # where DeepSpeed has it
        layer.weight.data = torch.empty(0, device="cuda")
        optimizer = torch.optim.SGD([shard.requires_grad_()])
        while True:
            whole = torch.empty(WIDTH * WIDTH, device="cuda")
            torch.distributed.all_gather_into_tensor(whole, shard.detach())
            layer.weight.data = whole.view(WIDTH, WIDTH)
            layer(torch.randn(8, WIDTH, device="cuda")).sum().backward()
            layer.weight.grad, layer.weight.data = None, torch.empty(0, device="cuda")
            del whole
            shard.grad = torch.zeros_like(shard)
            optimizer.step()
    kinds = {each.nbytes: each.kind for each in recorded.profile.storages if each.kind is Kind.UNSHARDED}
    assert kinds == {WIDTH * WIDTH * 4: Kind.UNSHARDED}
    shards = [each.nbytes for each in recorded.profile.storages if each.kind is Kind.PARAMETER and not each.birth]
    assert shards == [WIDTH * WIDTH]  # a quarter, of four bytes each
