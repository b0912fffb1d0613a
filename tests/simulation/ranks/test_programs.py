"""A training script as one rank of many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxmem
from fxmem._torch import kernels as torch_kernels
from fxmem.cli.verbs import plan as plan_verb
from fxmem.cli.verbs import run as run_verb
from fxmem.errors import UsageError
from fxmem.memory.report_reader import load_report
from fxmem.records.profile import Kind
from fxmem.validation.measure_cpu import quiet_profiler
from fxmem.validation.profiler_log import read_events
from tests.sharded_models import Llama, fsdp, loss, tokens
from tests.verbs import called

pytestmark = pytest.mark.truth

SCRIPT = """
import os
import torch
from tests.sharded_models import Llama, fsdp, loss, tokens

torch.distributed.init_process_group("nccl")
assert torch.distributed.get_rank() == int(os.environ["RANK"]) == 3
assert torch.distributed.get_world_size() == 8
device = f"cuda:{os.environ['LOCAL_RANK']}"
torch.cuda.set_device(device)
model = fsdp("cuda")(Llama().to(device))
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
while True:
    loss(model(tokens().to(device))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_runs_as_a_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    report = tmp_path / "rank.json"
    code, _ = called(run_verb, "--ranks", "8", "--rank", "3", "--json", str(report), str(tmp_path / "train.py"))
    assert code == 0
    found = load_report(report)
    ranks = found.step.ranks
    assert ranks is not None
    assert (ranks.world, ranks.rank) == (8, 3)
    assert {each.kind: each.count for each in ranks.collectives} == {"all-gather": 8, "reduce-scatter": 4}
    kinds = {each.kind for each in found.storages}
    assert {Kind.UNSHARDED, Kind.COMMUNICATION, Kind.PARAMETER} <= kinds
    same = fxmem.analyze(Llama, tokens(), loss=loss, ranks=8, rank=3, parallelize=fsdp("cuda"))
    shards = [each.nbytes for each in same.profile.storages if each.kind is Kind.PARAMETER]
    assert sorted(each.nbytes for each in found.storages if each.kind is Kind.PARAMETER) == sorted(shards)
    assert not torch.distributed.is_initialized()


PLANNED = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("nccl")
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
while True:
    model(torch.randn(4096, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_planned_as_a_rank(tmp_path: Path) -> None:
    script, plan, report = (tmp_path / name for name in ("train.py", "plan.json", "rank.json"))
    script.write_text(PLANNED)
    code, text = called(run_verb, "--ranks", "4", "--rank", "1", "--steps", "2", "--json", str(report), str(script))
    assert code == 0
    rank = ("--ranks", "4", "--rank", "1", "--steps", "2")
    code, text = called(plan_verb, *rank, "--budget", "90%", "--json", str(plan), "--run", str(script))
    assert code == 0
    assert "rank 1 of 4" in text
    found = fxmem.load_plan(plan)
    assert found.before.requested_bytes == load_report(report).peak.requested_bytes
    assert found.after.requested_bytes <= 0.9 * found.before.requested_bytes
    with pytest.raises(UsageError, match="expected --rank 1 with --ranks"):
        called(plan_verb, "--rank", "1", "--budget", "90%", "--run", str(script))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_script_without_a_mesh_shards_over_all_ranks(ranks: int) -> None:
    with fxmem.record(ranks=ranks, rank=0, steps=1) as recorded:
        torch.distributed.init_process_group("nccl")
        model = nn.Linear(64, 64, bias=False).cuda()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    shards = [each.nbytes for each in recorded.profile.storages if each.kind is Kind.PARAMETER]
    assert shards == [64 * 64 * 4 // ranks]


def test_a_model_may_be_sharded_on_meta_and_then_made_on_the_card() -> None:
    found = []
    for device in ("meta", "cuda"):
        with fxmem.record(ranks=4, rank=1, steps=2) as recorded:
            torch.distributed.init_process_group("nccl")
            with torch.device(device):
                model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
            for each in (*model, model):
                fully_shard(each)
            optimizer = torch.optim.AdamW(model.to_empty(device="cuda").parameters(), foreach=True)
            while True:
                model(torch.randn(4096, 64, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        shards = [each.nbytes for each in recorded.profile.storages if each.kind is Kind.PARAMETER]
        assert sorted(shards) == [64, 64, 64 * 64, 64 * 64]
        found.append(recorded.rounds[-1].requested_bytes)
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.distributed.optim's own
def test_zero_shares_the_optimizers_state_step_by_step() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    state = Counter[int]()
    for rank in range(2):
        with fxmem.record(ranks=2, rank=rank, steps=2) as recorded:
            torch.distributed.init_process_group("nccl")
            model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).cuda())
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, foreach=True)
            while True:
                model(torch.randn(8, 64, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ranks = recorded.profile.step.ranks
        assert ranks is not None
        assert {each.kind: each.count for each in ranks.collectives} == {"all-reduce": 1, "broadcast": 4}
        assert [each.phases for each in recorded.rounds] == [("forward", "backward", "optimizer")] * 2
        held = [each.nbytes for each in recorded.profile.storages if each.kind is Kind.OPTIMIZER_STATE]
        state.update(each for each in held if each > 4)  # the count of steps is on the host
    assert state == {64 * 64 * 4: 2, 64 * 4: 2, 64 * 32 * 4: 2, 32 * 4: 2}  # each on one rank alone


def test_replicas_are_found_by_whatever_name_they_have() -> None:
    def replicate(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    found = fxmem.analyze(Llama, tokens(), loss=loss, mesh={"replicate": 8}, rank=0).profile.storages
    assert fxmem.analyze(Llama, tokens(), loss=loss, ranks=8, rank=0, parallelize=replicate).profile.storages == found


@pytest.mark.parametrize("views", [False, True])
def test_replicas_have_gradient_buckets(views: bool) -> None:
    def replicate(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)

    analysis = fxmem.analyze(Llama, tokens(), loss=loss, ranks=8, parallelize=replicate)
    whole = sum(each.numel() for each in Llama().parameters()) * 4
    kind = Kind.GRADIENT if views else Kind.COMMUNICATION
    buckets = [each for each in analysis.profile.storages if each.kind is kind and not each.birth]
    assert sum(each.nbytes for each in buckets) == whole
    ranks = analysis.profile.step.ranks
    assert ranks is not None
    assert sum(each.moved_bytes for each in ranks.collectives) == pytest.approx(2 * whole * 7 / 8, abs=8)
    alone = fxmem.analyze(Llama, tokens(), loss=loss)
    more = analysis.peak.requested_bytes - alone.peak.requested_bytes
    assert (0 < more < whole) if views else more == whole
    assert nn.parallel.DistributedDataParallel.__module__ == "torch.nn.parallel.distributed"


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_replicas_keep_maps_of_used_parameters(options: dict[str, bool]) -> None:
    """Held to what the real reducer allocates as it is made."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 13), nn.Linear(13, 7), nn.Linear(7, 1))

    count = 6
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with quiet_profiler(), torch_kernels.profiler() as profiled:
            DistributedDataParallel(make(), **options)
    finally:
        torch.distributed.destroy_process_group()
    maps = [each for each in read_events(profiled) if each.nbytes == 4 * count]
    assert len(maps) == (2 if options else 0)

    def replicate(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, **options)

    for target, kept in (("cpu", len(maps)), ("h100", len(maps) // 2)):  # one of them is the host's
        analysis = fxmem.analyze(make, torch.ones(2, 10), target=target, ranks=2, parallelize=replicate)
        assert sum(each.nbytes == 4 * count for each in analysis.profile.storages if not each.birth) == kept
