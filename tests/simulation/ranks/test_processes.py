"""Each rank of a program runs in a process of its own, and its output is shown where that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from fxmem.cli.verbs import run as run_verb
from fxmem.errors import AnalysisError
from fxmem.memory.report_reader import load_report
from tests.verbs import called

pytestmark = pytest.mark.truth

LIBRARY: Final = "groups = {}\n"
SCRIPT: Final = """
import os, sys
import torch
import torch.distributed as dist
import framework  # keeps its groups in a global of its module, as DeepSpeed and Megatron do

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
assert not framework.groups
framework.groups[rank] = dist.new_group(list(range(world)))
if rank == 0:
    open("index.txt", "w").write("built by the first")
dist.barrier()
assert open("index.txt").read() == "built by the first"
print("rank", rank, "speaks")
if rank == int(sys.argv[1]):
    raise ValueError("no such token")
model = torch.nn.Linear(64, 64 * (1 + rank % 2), bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad, group=framework.groups[rank])
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "framework.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stderr", open(2, "w", buffering=1, closefd=False))  # noqa: SIM115 - as in a process of its own
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def test_frameworks_keep_the_groups_of_one_rank(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = called(run_verb, "--ranks", "4", "--json", "report.json", script, "9")
    assert code == 0
    ranks = load_report(Path("report.json")).step.ranks
    assert ranks is not None
    assert [(each.first, each.last, each.compared) for each in ranks.classes] == [(0, 2, (2,)), (3, 3, ())]
    assert capfd.readouterr().err.count("speaks") == 1
    assert not Path("index.txt").exists()


def test_what_a_rank_prints_is_shown_where_it_fails(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        AnalysisError, match="the program raised ValueError: no such token, before anything ran on h100"
    ):
        called(run_verb, "--ranks", "4", script, "3")
    said = capfd.readouterr().err
    assert said.index("rank 0 speaks") < said.index("rank 3 speaks") < said.index("ValueError: no such token")
