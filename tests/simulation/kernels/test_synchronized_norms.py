"""`torch.nn.SyncBatchNorm`, whose parts have kernels for cards alone."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxmem
from benchmarks import RESULTS
from benchmarks.releases.ask import ask_rule, batch_norm_calls

LOGS = json.loads(max(RESULTS.glob("releases-*.json")).read_text(encoding="utf-8"))["2.11.0+cu130"]["calls"]
"""What torch's own C++ asked of its allocator on a stand-in for a card (`make -C benchmarks releases`)."""


def test_each_part_allocates_what_torch_s_own_code_does() -> None:
    with fxmem.record("h100"):
        found = {name: ask_rule(op, args, op(*args)) for name, op, args in batch_norm_calls()}
    assert found == {name: [nbytes for nbytes in LOGS[name]["log"] if nbytes > 0] for name in found}
    assert len(found) == 98


def network(norm: type[nn.Module], memory_format: torch.memory_format) -> nn.Module:
    layers = (nn.Conv2d(3, 64, 3, padding=1), norm(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), norm(64))
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_rank_synchronizes_its_norms(memory_format: torch.memory_format) -> None:
    images = torch.zeros(8, 3, 64, 64).to(memory_format=memory_format)
    alone, synchronized = (
        fxmem.analyze(
            lambda norm=norm: network(norm, memory_format), images, ranks=4, parallelize=DistributedDataParallel
        )
        for norm in (nn.BatchNorm2d, nn.SyncBatchNorm)
    )
    sent = [
        {each.kind: each.count for each in of.profile.step.ranks.collectives}  # type: ignore[union-attr]
        for of in (alone, synchronized)
    ]
    assert sent == [{"all-reduce": 1}, {"all-gather": 2, "all-reduce": 3}]
    # The input of each is saved, and 64 channels' statistics: of four ranks, and what blocks of channels last leave.
    more = synchronized.peak.requested_bytes - alone.peak.requested_bytes
    assert 0 <= more <= 1 << 20
    moved = [
        sum(each.moved_bytes or 0 for each in of.profile.ops if "batch_norm" in each.name)
        for of in (alone, synchronized)
    ]
    assert moved[1] == pytest.approx(moved[0], rel=0.001)
