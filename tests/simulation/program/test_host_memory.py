"""The host's memory of programs: what is counted by arithmetic and by an H200, what is measured by real runs."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fxmem
from benchmarks.programs import host_runs
from fxmem.hardware import catalogue
from fxmem.records.parts import HostUse
from fxmem.records.profile import ProgramRun
from fxmem.records.units import GROWING
from fxmem.show.facts import find_fit
from fxmem.show.run_facts import describe_host, describe_host_growth, growth_facts
from fxmem.simulation.card.host_ledger import HostLedger
from fxmem.simulation.code.source_lines import program_call
from fxmem.simulation.processes.descendants import find_children
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch
from fxmem.simulation.run import host_memory
from fxmem.simulation.run.host_memory import _read_private, _read_resident, _Workers

MIB = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process has")


def run(tmp_path: Path, code: str, settings: RunSettings | None = None) -> RecordedProgram:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    return launch(Launch(str(file)), catalogue.target("h100"), settings or RunSettings()).recorded


STEP = """
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    out = model(torch.randn(1024, 256, device="cuda"))
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_linux
def test_a_model_is_counted_on_the_host_until_it_moves_to_the_card(tmp_path: Path) -> None:
    found = run(tmp_path, f"import torch\nlarge = torch.nn.Linear(8192, 16384, bias=False)\nlarge.cuda()\n{STEP}").host
    assert found.pretended_bytes == 8192 * 16384 * 4
    assert found.peak_bytes is not None
    assert found.process_bytes is not None
    assert found.peak_bytes == found.process_bytes + found.pretended_bytes
    assert found.place.endswith("train.py:2")
    assert found.call == "Linear"
    assert re.search(r" at Linear \(.*train.py:2\); 512.0 MiB of it pretended here", describe_host(found))
    assert found.after_bytes is not None
    assert found.after_bytes < found.peak_bytes - 400 * MIB  # it has moved


OFF_THE_CARD = """
import torch

def measure():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(16)]).cuda()
before, found = measure(), []
net.cpu()
found.append(measure() - before)
with torch.no_grad():
    net[0].weight[0] = 1
found.append(measure() - before)
array = net[1].weight.detach().numpy()
found.append(measure() - before)
found.append([float(array[0, 0]), net[0].weight[0, 0].item(), net[0].weight[1, 0].item()])
print(found, file=open("found", "w"))
"""


@on_linux
def test_what_comes_off_the_card_takes_no_memory_here_until_it_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    host = run(tmp_path, OFF_THE_CARD).host
    moved, written, shown, numbers = ast.literal_eval(Path("found").read_text())
    assert moved < 64 * MIB  # of a GiB
    assert 48 * MIB < written - moved < 96 * MIB  # one weight of 64 MiB, of which a row was written
    assert 48 * MIB < shown - written < 96 * MIB  # who has an array may write to that
    assert numbers == [0.0, 1.0, 0.0]
    assert host.pretended_bytes >= 14 * 64 * MIB
    assert host.peak_bytes is not None
    assert host.process_bytes is not None
    assert host.peak_bytes == host.process_bytes + host.pretended_bytes


def test_what_came_off_the_card_can_be_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = """
    import torch
    from torch import nn

    of_card = torch.randn(2048, 1024, device="cuda")
    held = nn.Parameter(of_card.t().cpu())
    assert held.is_leaf and held._base is None and held.stride() == (1, 1024)
    (held * 2).sum().backward()
    assert held.grad.shape == held.shape
    made = of_card.cpu()
    made.resize_(4096, 1024)[4095] = 3
    assert made.shape == (4096, 1024) and (made[4095] == 3).all()
    torch.save(of_card.cpu(), "saved.pt")
    assert torch.load("saved.pt", map_location="cpu").shape == (2048, 1024)
    """
    assert not run(tmp_path, code).program.failed


@on_linux
def test_what_is_around_a_function_is_not_what_the_program_called(tmp_path: Path) -> None:
    code = "import copy, torch, torchvision\nnet = torchvision.models.vgg19()\n"
    assert run(tmp_path, f"{code}net.cuda()\n{STEP}").host.call == "vgg19"  # a torchvision decorator's `inner_wrapper`
    found = run(tmp_path, f"{code}twin = copy.deepcopy(net)\ntwin.cuda()\n{STEP}").host
    assert found.place.endswith("train.py:3")
    assert found.call == ""  # Python's own `deepcopy`, and torch's `handle_torch_function` within


@pytest.mark.parametrize(
    ("file", "name", "called"),
    [
        ("serialization.py", "load", "load"),
        ("_tensor.py", "load", "load"),
        ("_subclasses/fake_tensor.py", "load", ""),
        ("_refs/__init__.py", "load", ""),
        ("utils/data/dataloader.py", "__next__", ""),
        ("utils/data/dataloader.py", "_next_data", "collate"),
    ],
)
def test_only_what_a_line_calls_by_name_is_named(file: str, name: str, called: str) -> None:
    """No stand-in for an operator, and nothing of a loop over a loader."""
    scope: dict[str, Any] = {"sys": sys, "program_call": program_call}
    inner = "collate" if "data" in file else "_inner"
    code = f"def {inner}():\n    return program_call(sys._getframe())\ndef {name}():\n    return {inner}()"
    exec(compile(code, str(Path(torch.__file__).parent / file), "exec"), scope)
    place, found = scope[name]()
    assert place.rpartition(":")[0].endswith("test_host_memory.py")
    assert found == called


@on_linux
def test_real_memory_is_measured_and_the_line_is_named(tmp_path: Path) -> None:
    code = f"""
import time, torch

def load():
    return [torch.ones(64 << 20), time.sleep(0.1)]  # long enough to be seen there

torch.optim.SGD([torch.ones(1)])  # from here on torch has all that an optimizer needs
data = load()
del data
{STEP}"""
    found = run(tmp_path, code).host
    small = run(tmp_path, f"import torch\n{STEP}").host
    assert found.process_bytes is not None
    assert small.process_bytes is not None
    assert found.process_bytes - small.process_bytes == pytest.approx(256 * MIB, rel=0.1)
    assert found.place.endswith("train.py:5")
    assert found.files_bytes


@on_linux
def test_reading_an_epoch_takes_nothing_of_the_host(tmp_path: Path) -> None:
    """The program has workers: only what reads its epoch calls `collate` in its process."""
    code = """
import torch
from torch.utils.data import DataLoader

def collate(rows):
    torch.ones({size} if torch.utils.data.get_worker_info() is None else 1)
    return torch.stack(rows)

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(96, 256), 8, num_workers=1, collate_fn=collate):
    model(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    small, large = (
        run(tmp_path, code.format(size=size), RunSettings(reads_epoch=True)).host.process_bytes or 0
        for size in (1, 128 << 20)
    )
    assert abs(large - small) < 100 * MIB


def test_results_kept_on_the_host_grow(tmp_path: Path) -> None:
    code = "import torch\nkept = []\n" + STEP + "    kept.append(out.detach().cpu())\n"
    found = run(tmp_path, code)
    program = found.program
    assert (program.growth_bytes, program.grown) == (0, ())  # of the card
    most = found.host.grown[0]
    assert (most.holder, most.nbytes, most.tensors, most.shape) == ("kept", 1024 * 256 * 4, 1, (1024, 256))
    line = code.splitlines().index("    kept.append(out.detach().cpu())") + 1
    assert most.kept_at.endswith(f"train.py:{line}")
    assert most.made_at == most.kept_at
    assert found.host.growth_bytes == MIB
    facts = growth_facts(found.profile.step)
    assert [each.label for each in facts] == ["Grows"]
    assert f"1,048,576 bytes of host memory a step, {most.kept_at} keeps kept: 1 tensor a step" in facts[0].text


def test_what_is_made_of_results_grows_and_a_twin_does_not(tmp_path: Path) -> None:
    kept = "    twice = out.detach().cpu().double()\n    kept.append(twice)\n"
    found = run(tmp_path, "import torch\nkept = []\n" + STEP + kept).host
    assert [(each.holder, each.nbytes) for each in found.grown] == [("kept", 2 * MIB)]
    twin = run(tmp_path, "import torch\nkept = []\n" + STEP + kept.replace("kept.append(twice)", "kept = [twice]")).host
    assert (twin.growth_bytes, twin.grown) == (0, ())


@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_arrays_that_lie_in_results_are_kept_by_their_list(tmp_path: Path, target: str) -> None:
    """Whom they belong to is seen through numpy, and that each epoch makes the list anew; a copy is numpy's own."""
    code = f"""
import torch
device = torch.device("cuda" if "{target}" == "h100" else "cpu")
model = torch.nn.Linear(256, 256).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    kept = []
    for step in range(20):
        out = model(torch.randn(1024, 256, device=device))
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(out.detach().cpu().numpy())
"""
    grown = []
    for each in (code, code.replace("numpy()", "numpy().copy()")):
        (tmp_path / "train.py").write_text(each, encoding="utf-8")
        found = launch(Launch(str(tmp_path / "train.py")), catalogue.target(target), RunSettings()).recorded
        grown.append(found.host.grown if target == "h100" else found.program.grown)
    assert [(each.holder, each.nbytes, each.ends, each.is_endless) for each in grown[0]] == [("kept", MIB, 20, True)]
    assert grown[1] == ()


@on_linux
def test_the_step_at_which_the_host_is_full(tmp_path: Path) -> None:
    code = "import torch\nkept = []\n" + STEP + "    kept.append(out.detach().cpu())\n"
    found = run(tmp_path, code.replace("range(100)", "range(100_000)"), RunSettings(host_bytes=64 << 30))
    assert len(found.program.steps) == GROWING  # as far as it takes to see no end
    after = found.host.after_bytes
    assert after is not None
    step = GROWING + 1 + ((64 << 30) - after) // MIB
    assert describe_host_growth(found.program).endswith(f"out of host memory at about step {step:,}")
    fit = find_fit(found.profile, found.peak)
    assert fit.exit_code == 0
    assert fit.fits_host is True
    assert fit.verdict.startswith("the host's memory grows by 1,048,576 bytes a step (")


@on_linux
def test_a_host_that_is_too_small_is_said_first(tmp_path: Path) -> None:
    found = run(tmp_path, f"import torch\n{STEP}", RunSettings(host_bytes=64 * MIB))
    fit = find_fit(found.profile, found.peak)
    assert (fit.fits_host, fit.exit_code) == (False, 4)
    assert re.match(r"does NOT fit the host: [\d.]+ [MG]iB of 64.0 MiB at .*train.py:\d+.*; fits: ", fit.verdict)


def test_what_is_not_measured_is_unknown_and_two_runs_are_equal(tmp_path: Path) -> None:
    settings = RunSettings(steps=2, measures_host=False)
    code = f"import torch\nkept = torch.ones(1 << 18).pin_memory()\n{STEP}"
    one, other = (run(tmp_path, code, settings).host for _ in range(2))
    assert one == other
    assert (one.peak_bytes, one.process_bytes, one.worker_adds_bytes, one.by_round) == (None, None, None, ())
    assert one.pinned_bytes == MIB


def test_a_host_that_says_nothing_is_unknown() -> None:
    unknown = HostUse(peak_bytes=None, process_bytes=None, limit_bytes=64 << 30)
    assert unknown.fits is None
    assert describe_host(unknown) == ""
    run = ProgramRun(ending="", rounds=(), shown=0, host=unknown)
    assert describe_host_growth(run) == ""


@on_linux
def test_what_passes_through_the_host_on_the_way_to_a_file_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One storage at a time by torch, all at once by safetensors, as on an H200 (512 MiB in eight layers: 65,200 KiB
    and 523,872 KiB above what was there; torch.load to the card 65,200)."""
    monkeypatch.chdir(tmp_path)
    peaks = []
    ways = ("pass", "torch.save(s, 'm.pt')", "save_file(s, 'm.st')", "torch.save(s, 'm.pt'); torch.load('m.pt')")
    for way in ways:
        code = f"""
        import torch
        from safetensors.torch import save_file
        torch.optim.SGD([torch.ones(1)])
        s = dict((str(i), torch.zeros(4096, 4096, device="cuda")) for i in range(8))
        {way}
        """
        found = run(tmp_path, code + STEP.replace("\n", "\n        ")).host
        peaks.append(found.pretended_bytes)
    assert peaks == [0, 64 * MIB, 512 * MIB, 64 * MIB]


def test_pinned_memory_is_what_a_card_says() -> None:
    with fxmem.record("h100") as found:
        first = torch.randn(750_000).pin_memory()
        second = torch.empty(1_000_000, pin_memory=True)
        del first
        third = torch.empty(625_000, pin_memory=True)
        said = torch.cuda.host_memory_stats()
        torch.ones(1, device="cuda")
    assert (said["allocated_bytes.current"], said["num_host_alloc"]) == (8_388_608, 2)
    assert found.host.pinned_bytes == 8_388_608
    assert second.numel() > third.numel()


class Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3, 16, 16)


@pytest.mark.truth
def test_pinned_batches_are_what_an_h200_had() -> None:
    """Blocks of 32 MiB there (3x256x256): two without workers, three more with two, four more with four."""
    blocks, said = 32 * 3 * 16 * 16 * 4, []
    block = 1 << (blocks - 1).bit_length()
    with fxmem.record("h100") as found:
        for workers in (0, 2, 4):
            for _, x in enumerate(DataLoader(Images(), batch_size=32, num_workers=workers, pin_memory=True)):
                x = x.cuda(non_blocking=True)  # `enumerate` keeps the other one
            del x
            said.append(torch.cuda.host_memory_stats()["allocated_bytes.current"] // block)
    assert said == [2, 5, 9]
    assert found.host.pinned_bytes == 9 * block


@on_linux
def test_the_process_that_asks_cudnn_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        counts = []
        for asking in (set[int](), {child.pid}):
            monkeypatch.setattr(host_memory, "ASKING", asking)
            workers = _Workers()
            workers.are_there = True
            workers.sample()
            counts.append(workers.count)
        child.communicate(b"\n")
    assert counts[0] - counts[1] == 1


@on_linux
@pytest.mark.truth
def test_workers_and_what_waits_in_shared_memory() -> None:
    others = {*find_children()}  # of tests before, which may not be over
    with fxmem.record("h100") as found:
        for x in DataLoader(Images(), batch_size=32, num_workers=2, prefetch_factor=3):
            x.cuda()
        del x
    batch = 32 * 3 * 16 * 16 * 4
    adds = found.host.worker_adds_bytes
    assert adds is not None
    assert MIB < adds < 200 * MIB
    assert found.host.batches_bytes in (0, 6 * batch, 7 * batch)  # wherever the peak was
    assert not {*find_children()} - others


@on_linux
def test_what_the_system_says() -> None:
    resident = _read_resident()
    assert resident is not None
    assert resident.highest >= resident.total > resident.anonymous > 0
    assert _read_resident("none") is None
    assert _read_private(1 << 30) is None


@on_linux
def test_a_moments_peak_is_the_hosts_where_the_cpu_is_the_target() -> None:
    with fxmem.record("cpu") as run:
        net = nn.Linear(1 << 10, 1 << 10)
        for _ in range(2):
            net(torch.randn(1 << 16, 1 << 10)).square().mean().backward()
    # A thousandth of the peak is looked at; the process itself may have as much less a moment later.
    unseen = (run.host.peak_bytes or 0) // 1000
    assert run.host.pretended_bytes + unseen >= max(each.requested_bytes for each in run.rounds) > 1 << 29


def test_state_is_left_as_it_was() -> None:
    before, fork = threading.active_count(), os.fork if hasattr(os, "fork") else None
    with contextlib.suppress(ZeroDivisionError), fxmem.record("h100"):
        nn.Linear(8, 8).cuda()(torch.ones(1, 8, device="cuda"))
        raise ZeroDivisionError
    assert threading.active_count() == before
    assert gc.isenabled()
    assert fork is None or os.fork is fork


EMPTY = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(4, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(2, 4).to(device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_linux
@pytest.mark.truth
def test_what_fxmem_has_itself_is_taken_off(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text(EMPTY, encoding="utf-8")
    environ = host_runs.environment()
    real = min(host_runs.measure([sys.executable, str(file)], environ) for _ in range(2))
    said = host_runs.predict([str(file)], environ)["peak_bytes"]
    assert abs(said / real - 1) < host_runs.TOLERANCE


@on_linux
@pytest.mark.truth
@pytest.mark.parametrize("name", ["averaged", "offloaded"])
def test_real_runs_have_as_much(name: str) -> None:
    assert abs(host_runs.error(host_runs.run(name, [], runs=1))) < host_runs.TOLERANCE


def test_copies_of_weights_that_are_not_there_take_no_memory() -> None:
    """As a cast of given weights is pinned, and again with each move to the card."""
    ledger, weights = HostLedger(), torch.zeros(1024)
    assert ledger.copy_stand_in(weights) is None
    ledger.note_stand_in(weights.untyped_storage())
    cast = ledger.copy_stand_in(weights, torch.bfloat16)
    assert cast is not None
    pinned = ledger.copy_stand_in(cast)
    assert pinned is not None
    assert (pinned.dtype, pinned.shape) == (torch.bfloat16, weights.shape)
    assert pinned.data_ptr() != cast.data_ptr()
    assert ledger.pretended_bytes == 2 * 2048
    assert ledger.copy_stand_in(torch.zeros(1024)) is None
    del pinned
    assert ledger.pretended_bytes == 2048
