"""Stages of a pipeline, by torch's own schedules, in a script that is run as each of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed.pipelining  # once, for the forks of all ranks

import fxmem
from fxmem.cli.verbs import run as run_verb
from fxmem.errors import AnalysisError
from fxmem.memory.report_reader import load_report
from fxmem.records.profile import Kind
from fxmem.show.run_facts import rank_facts
from tests.verbs import called

pytestmark = pytest.mark.truth

SCRIPT: Final = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("nccl")
rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda")
kind = sys.argv[1]

layers = [nn.Linear(32, 32) for _ in range(4)] + ([nn.Linear(32, 7)] if rank == world - 1 else [])
stage = PipelineStage(nn.Sequential(*layers).to(device), rank, world, device)
schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[kind](stage, 4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(stage.submod.parameters())
for _ in range(3):
    inputs = (torch.zeros(16, 32, device=device),) if rank == 0 else ()
    more = {"target": torch.zeros(16, dtype=torch.int64, device=device)} if rank == world - 1 else {}
    schedule.step(*inputs, **more)
    optimizer.step()
    optimizer.zero_grad()
"""


def run(tmp_path: Path, *arguments: str) -> fxmem.records.profile.Report:
    script, report = tmp_path / "train.py", tmp_path / "rank.json"
    script.write_text(SCRIPT)
    *options, kind = arguments
    code, _ = called(run_verb, *options, "--json", str(report), str(script), kind)
    assert code == 0
    assert not torch.distributed.is_initialized()
    return load_report(report)


def test_each_stage_has_a_row(tmp_path: Path) -> None:
    found = run(tmp_path, "--ranks", "3", "1f1b")
    ranks = found.step.ranks
    assert ranks is not None
    assert [(each.first, each.size) for each in ranks.classes] == [(0, 1), (1, 1), (2, 1)]
    largest = max(ranks.classes, key=lambda each: (each.reserved_bytes, each.requested_bytes))
    assert ranks.rank == largest.first
    assert found.peak.requested_bytes == largest.requested_bytes
    labels = [fact.label for fact in rank_facts(found)]
    assert labels == ["Rank", "Rank 0", "Rank 1", "Rank 2", "Sends"]
    assert sum(fact.text.endswith("the table is of this one") for fact in rank_facts(found)) == 1
    alone = run(tmp_path, "--ranks", "3", "--rank", "1", "1f1b")
    assert alone.step.ranks is not None
    assert not alone.step.ranks.classes
    assert alone.peak.requested_bytes == ranks.classes[1].requested_bytes
    sent = {each.kind: (each.count, each.moved_bytes) for each in alone.step.ranks.collectives}
    assert sent == {"send": (8, 8 * 4 * 32 * 4), "receive": (8, 0)}


def test_another_schedule_runs(tmp_path: Path) -> None:
    """Of stages that interleave, real ranks are in `test_gloo.py`."""
    found = run(tmp_path, "--ranks", "2", "--rank", "1", "gpipe")
    whole = 4 * 32 * 33 * 4 + 33 * 7 * 4
    assert sum(each.nbytes for each in found.storages if each.kind is Kind.PARAMETER) == whole
    steps = found.step.program
    assert steps is not None
    assert steps.ending == "stopped after step 3"


def test_a_block_cannot_run_as_another_rank_first() -> None:
    def wait() -> None:
        with fxmem.record(ranks=2, rank=1):
            torch.distributed.init_process_group("nccl")
            torch.distributed.recv_object_list([None], src=0)

    with pytest.raises(AnalysisError, match="rank 1 waits for those of rank 0"):
        wait()


WAITING = {
    "for each other": ("recv_object_list([None], src=1 - dist.get_rank())", "wait for objects of each other"),
    "for nothing": (
        "recv_object_list([None], src=0) if dist.get_rank() else None",
        "expected rank 0 to send the objects that rank 1 waits for",
    ),
}


@pytest.mark.parametrize(("code", "words"), WAITING.values(), ids=WAITING)
def test_ranks_that_wait_in_vain_are_refused(tmp_path: Path, code: str, words: str) -> None:
    script = tmp_path / "wait.py"
    begin = "import torch.distributed as dist\ndist.init_process_group('nccl')\n"
    script.write_text(f"{begin}dist.{code}\n")
    with pytest.raises(AnalysisError, match=words):
        called(run_verb, "--ranks", "2", "--rank", "1", str(script))


@pytest.mark.usefixtures("compiler")
def test_objects_are_sent_and_broadcast(tmp_path: Path) -> None:
    """Where the program may compile, too."""
    (tmp_path / "own.py").write_text("import os\nRANK = os.environ['RANK']\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import own, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "rank = dist.get_rank()\n"
        "assert own.RANK == str(rank)\n"
        "got = ['settings', torch.empty(3, 5, device='cuda')] if rank == 0 else [None, None]\n"
        "dist.broadcast_object_list(got, src=0)\n"
        "assert got[0] == 'settings' and got[1].shape == (3, 5) and got[1].is_cuda\n"
        "if rank == 1:\n    dist.send_object_list([7], dst=2)\n    dist.send_object_list([8], group_dst=2)\n"
        "if rank == 2:\n    for number in (7, 8):\n"
        "        more = [None]\n        assert dist.recv_object_list(more, src=1) == 1 and more == [number]\n"
        "torch.zeros(rank + 1, device='cuda')\n"
    )
    code, _ = called(run_verb, "--ranks", "3", "--rank", "2", "--compile", "as-is", str(script))
    assert code == 0


def test_whole_numbers_are_sent(tmp_path: Path) -> None:
    """As DeepSpeed's stages send shapes: written to a part of a buffer, read one by one."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]\n"
        "rank = dist.get_rank()\n"
        "shape = torch.zeros(8, dtype=torch.int32, device='cuda')\n"
        "unknown = torch.randint(9, (2,), device='cuda')\n"
        "if rank == 2:\n"
        "    shape[:3].copy_(torch.tensor([5, 7, 11], dtype=torch.int32))\n"
        "    dist.send(torch.ones(64, 64, device='cuda'), 3)\n"
        "    dist.send(unknown, 3)\n"
        "    dist.isend(shape, 3).wait()\n"
        "if rank == 3:\n"
        "    dist.recv(torch.ones(64, 64, device='cuda'), 2)\n"
        "    dist.recv(unknown.zero_(), 2)\n"
        "    dist.batch_isend_irecv([dist.P2POp(dist.irecv, shape, 2)])[0].wait()\n"
        "    assert shape[0].item() == 5 and shape.tolist() == [5, 7, 11, 0, 0, 0, 0, 0]\n"
        "torch.zeros(int(shape.sum()) + 1, device='cuda').add_(1)\n"
    )
    report = tmp_path / "rank.json"
    code, _ = called(run_verb, "--ranks", "4", "--rank", "3", "--json", str(report), str(script))
    assert code == 0
    ranks = load_report(report).step.ranks
    assert ranks is not None
    assert [(each.size, each.spread) for each in ranks.groups] == [(2, 1)]  # the smallest that has both


def test_ranks_that_send_numbers_to_each_other_do_not_wait(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "rank = dist.get_rank()\n"
        "length, other = torch.full((1,), 8 + rank), torch.zeros(1, dtype=torch.int64)\n"
        "if rank == 0:\n    dist.recv(other, 1)\n"
        "dist.send(length, 1 - rank)\n"
        "if rank == 1:\n    dist.recv(other, 0)\n    assert other.item() == 8\n"
        "torch.zeros(4, device='cuda').add_(1)\n"
    )
    code, _ = called(run_verb, "--ranks", "2", "--rank", "1", str(script))
    assert code == 0
