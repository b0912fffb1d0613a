"""Each rank of a program runs in a process of its own, and its output is shown where that helps."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Final

import joblib  # type: ignore[import-untyped]
import pytest

from fxmem.cli.verbs import run as run_verb
from fxmem.errors import AnalysisError, UsageError
from fxmem.memory.report_reader import load_report
from fxmem.simulation.processes.executor import Cost, count_workers, read_backend
from tests.cores import two_cores
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


CLUSTERED: Final = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
open(f"{rank}.txt", "w").write("apart")
model = torch.nn.Linear(64, 64 * (1 + rank), bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    if rank:
        dist.recv(torch.zeros(8, 64, device="cuda"), rank - 1)
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    if rank < 3:
        dist.send(torch.zeros(8, 64, device="cuda"), rank + 1)
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
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def test_frameworks_keep_the_groups_of_one_rank(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        two_cores(),
        open(2, "w", buffering=1, closefd=False) as stream,  # not pytest's own
        contextlib.redirect_stderr(stream),
    ):
        code, _ = called(run_verb, "--ranks", "4", "--json", "report.json", script, "9")
    assert code == 0
    ranks = load_report(Path("report.json")).step.ranks
    assert ranks is not None
    assert [(each.first, each.last, each.compared) for each in ranks.classes] == [(0, 2, (2,)), (3, 3, ())]
    assert capfd.readouterr().err.count("speaks") == 1
    assert not Path("index.txt").exists()


def test_ranks_run_on_a_cluster_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real scheduler of dask with two workers, each a process."""
    distributed = pytest.importorskip("distributed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CLUSTERED)
    spawned = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with distributed.LocalCluster(**spawned) as cluster:
            code, _ = called(
                *(run_verb, "--ranks", "4", "--backend", f"dask:{cluster.scheduler_address}"),
                *("--json", "there.json", "train.py"),
            )
    assert code == 0
    code, _ = called(run_verb, "--ranks", "4", "--json", "here.json", "train.py")
    assert code == 0
    there, here = (load_report(Path(name)) for name in ("there.json", "here.json"))
    assert there.step.ranks is not None
    assert [(each.first, each.last) for each in there.step.ranks.classes] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert there.step.ranks == here.step.ranks
    assert sorted(each.name for each in tmp_path.iterdir() if each.suffix == ".txt") == []


@pytest.mark.parametrize("text", ["dask", "dask:8786", "ray:auto", "loky:2"])
def test_a_backend_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected --backend loky or dask:tcp://HOST:PORT"):
        read_backend(text)


def test_processes_start_where_they_pay() -> None:
    with two_cores():
        cores = joblib.cpu_count()
        assert count_workers(1) == 1
        assert count_workers(64) == cores
        assert count_workers(64, Cost(0.01)) == 1  # sooner done than another process has imported torch
        assert count_workers(64, Cost(60.0)) == cores
        assert count_workers(64, Cost(60.0, 1 << 60)) == 1  # of whose memory there is one at most


def test_what_a_rank_prints_is_shown_where_it_fails(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = "the program raised ValueError: no such token, before anything ran on h100"
    with two_cores(), pytest.raises(AnalysisError, match=said):
        called(run_verb, "--ranks", "4", script, "3")
    said = capfd.readouterr().err
    assert said.index("rank 0 speaks") < said.index("rank 3 speaks") < said.index("ValueError: no such token")
