"""FSDP1, whose parameters are flat, in scripts that run on a card as one rank of many."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

import fxmem
from fxmem.cli.verbs import run as run_verb
from fxmem.memory.report_reader import load_report
from fxmem.records.profile import Kind
from fxmem.simulation.program import RecordedProgram
from tests.sharded_models import Llama, fsdp1, loss, tokens
from tests.verbs import called

WHOLE = sum(each.numel() * 4 for each in Llama().parameters())


def train(ranks: int, rank: int, *, clips: bool = False, waits: bool = False, **settings: Any) -> RecordedProgram:
    with fxmem.record("h100", ranks=ranks, rank=rank, steps=2) as recorded:
        torch.distributed.init_process_group("nccl")
        model = fsdp1("cuda", **settings)(Llama())
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            if waits:
                with model.no_sync():
                    loss(model(tokens().to("cuda"))).backward()
            loss(model(tokens().to("cuda"))).backward()
            if clips:
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return recorded


def calls(recorded: RecordedProgram) -> dict[tuple[str, int], int]:
    """How often each collective is called among how many ranks."""
    ranks = recorded.profile.step.ranks
    assert ranks is not None
    return {(each.kind, ranks.groups[each.group].size): each.count for each in ranks.collectives}


def test_flat_parameters_are_gathered_and_their_gradients_scattered() -> None:
    found = train(8, 3, clips=True)
    assert calls(found) == {("all-gather", 8): 7, ("reduce-scatter", 8): 4, ("all-reduce", 8): 1}
    assert found.peak.by_kind[Kind.PARAMETER] == WHOLE // 8
    gathered = [each for each in found.profile.storages if each.kind is Kind.UNSHARDED]
    root, block = sorted({each.nbytes for each in gathered})
    assert found.peak.by_kind[Kind.UNSHARDED] == root + 2 * block  # the root's stay through forward and backward
    assert 0 not in {each.stream for each in gathered}
    assert found.peak.reserved_high_bytes is not None  # what is freed waits for the stream that used it


def test_gradients_that_are_not_sent_yet_stay_whole() -> None:
    once, twice = train(8, 0), train(8, 0, waits=True)
    assert calls(twice) == {("all-gather", 8): 14, ("reduce-scatter", 8): 4}
    assert twice.peak.requested_bytes - once.peak.requested_bytes > WHOLE // 2


def test_offloaded_shards_leave_the_card() -> None:
    kept, offloaded = train(8, 0), train(8, 0, cpu_offload=CPUOffload(offload_params=True))
    assert calls(offloaded) == calls(kept)
    assert Kind.PARAMETER not in offloaded.peak.by_kind
    assert Kind.OPTIMIZER_STATE not in offloaded.peak.by_kind
    assert offloaded.peak.requested_bytes < kept.peak.requested_bytes - 2 * WHOLE // 8


def test_hybrid_sharding_is_within_machines_of_eight() -> None:
    found = train(16, 9, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert calls(found) == {("all-gather", 8): 7, ("reduce-scatter", 8): 4, ("all-reduce", 2): 4}
    assert found.peak.by_kind[Kind.PARAMETER] == WHOLE // 8


def test_accelerate_learns_anew_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.ModuleType("accelerate.state")
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        setattr(state, name, type(name, (), {"_shared_state": {"rank": "mine"}}))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    for rank in range(2):
        with fxmem.record("h100", ranks=2, rank=rank, steps=1):
            assert state.PartialState._shared_state == {}
            state.PartialState._shared_state["rank"] = rank
            torch.zeros(1, device="cuda")
        assert state.PartialState._shared_state == {"rank": "mine"}


def test_lightning_finds_the_devices_of_a_machine() -> None:
    def num_cuda_devices() -> int:
        """As Lightning counts them."""
        return torch.cuda.device_count()

    with fxmem.record("h100", ranks=16, rank=3):
        assert num_cuda_devices() == 8
        assert torch.cuda.device_count() == 1
        torch.zeros(1, device="cuda")


def test_a_rank_of_the_cpu_finds_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does when it is imported
    before = torch.cuda.is_available()
    with fxmem.record("cpu", ranks=2, rank=1):
        assert torch.cuda.is_available() == before
        torch.zeros(1)


ACCELERATE = """
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.sharded_models import Block, Llama, loss, tokens

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=1, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = Llama()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
assert accelerator.num_processes == 4
while True:
    accelerator.backward(loss(model(tokens().to("cuda"))))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.truth
def test_accelerate_shards_so_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "train.py"
    script.write_text(ACCELERATE)
    report = tmp_path / "rank.json"
    code, text = called(run_verb, "--ranks", "4", "--steps", "2", "--json", str(report), str(script))
    assert code == 0
    found = load_report(report)
    assert found.step.ranks is not None
    assert {each.kind: each.count for each in found.step.ranks.collectives}["reduce-scatter"] == 4
    assert "Ranks 0-3" in text
