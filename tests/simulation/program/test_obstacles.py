"""What public scripts do on their way to a card, each in its smallest form."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import ctypes
import json
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fxmem
from fxmem.__main__ import _unwind_on_sigterm
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.simulation.program import Launch, RunSettings, launch


def test_types_of_tensors_name_the_card() -> None:
    host = torch.ones(4, dtype=torch.uint8)
    before = torch.cuda.FloatTensor
    with fxmem.record("h100"):
        made = [
            host.type(torch.cuda.FloatTensor),
            host.type("torch.cuda.FloatTensor"),
            torch.cuda.FloatTensor(4),
            torch.cuda.FloatTensor(np.zeros(4)),
            torch.cuda.FloatTensor([1, 2, 3, 4]),
        ]
        found = [(each.type(), tuple(each.shape)) for each in made]
        kept = made[0].type(torch.float16).type()
        assert isinstance(made[0], torch.cuda.FloatTensor)
        assert not isinstance(host, torch.cuda.FloatTensor)
        assert torch.cuda.LongTensor([3]).item() == 3
    assert found == [("torch.cuda.FloatTensor", (4,))] * 5
    assert kept == "torch.cuda.HalfTensor"
    assert torch.cuda.FloatTensor is before


def test_inference_mode_moves_tensors_to_the_card() -> None:
    model = nn.Linear(8, 4)
    with fxmem.record("h100") as run:
        model.cuda()
        with torch.inference_mode():
            x = torch.ones(2, 8, dtype=torch.uint8)
            moved = x.to(device=torch.device("cuda"), dtype=torch.float32, memory_format=torch.contiguous_format)
            assert model(moved).cpu().device.type == "cpu"
            assert x.to(torch.float32).sum().item() == 16
    assert run.peak.requested_bytes >= 4 * (8 * 4 + 4 + 16)


def _say_and_sleep(connection: Connection) -> None:
    connection.send("here")
    time.sleep(600)


def test_processes_that_a_program_forks_can_be_terminated() -> None:
    with _unwind_on_sigterm():
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_say_and_sleep, args=(theirs,))
        child.start()
        ours.recv()  # a signal before it runs is lost
        child.terminate()
        child.join()
    assert child.exitcode == -signal.SIGTERM


def test_a_program_that_fails_before_it_uses_the_card_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import a_package_that_is_not_there\n")
    launched = launch(Launch(str(script)), catalogue.target("h100"), RunSettings(until="end", max_operators=100))
    assert launched.raised
    with pytest.raises(AnalysisError, match=r"raised ModuleNotFoundError: .*, before anything ran on h100"):
        launched.recorded.report()


def test_a_program_that_compares_types_gets_plain_numbers() -> None:
    with fxmem.record("h100") as run:
        total = torch.zeros(1, device="cuda").add(torch.rand(1, device="cuda")).item()
        assert type(total) is float
    assert [each.kind for each in run.made_up] == ["read", "read"]
    assert f"{Path(__file__).name}:" in run.made_up[1].what


def test_what_is_compiled_at_run_time_is_said_with_a_way_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.nn.attention.flex_attention import flex_attention\n"
        "q = torch.zeros(1, 4, 128, 64, device='cuda')\n"
        "flex_attention(q, q, q)\n"
    )
    launched = launch(Launch(str(script)), catalogue.target("h100"), RunSettings(until="end", max_operators=100))
    assert launched.raised
    assert "torch's flex_attention is compiled or chosen at run time" in launched.recorded.ending
    assert "--compile as-is follows it" in launched.recorded.ending


def test_nvidia_smi_speaks_of_the_pretended_card() -> None:
    with fxmem.record("h100") as run:
        kept = torch.zeros(1 << 20, 5, device="cuda")
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
        query = "nvidia-smi --query-gpu=name,memory.used,memory.total,fan.speed --format=csv,noheader,nounits"
        asked = subprocess.check_output(query, shell=True, text=True)
        assert shutil.which("nvidia-smi")
        assert subprocess.check_output(["echo", "nvidia-smi"], text=True) == "nvidia-smi\n"
        del kept
    assert "NVIDIA H100 80GB HBM3, 20MiB / 81" in said
    assert asked.startswith("NVIDIA H100 80GB HBM3, 20, 81")
    assert asked.endswith(", [N/A]\n")
    assert [each.kind for each in run.made_up] == ["answered", "answered"]


def test_a_thread_pool_works_on_the_card_where_work_is_handed_in() -> None:
    with fxmem.record("h100") as run, concurrent.futures.ThreadPoolExecutor(2) as pool:
        moved = list(pool.map(lambda each: each.to("cuda"), [torch.ones(1024)] * 3))
        failed = pool.submit(lambda: 1 / 0)
        assert isinstance(failed.exception(), ZeroDivisionError)
        del moved
    assert run.peak.requested_bytes == 3 * 4096


def test_a_thread_that_is_given_tensors_of_the_card_works_where_it_starts() -> None:
    """As one that draws them, or saves them, does."""
    read: list[list[float]] = []

    def draw(picture: torch.Tensor, *, scale: float) -> None:
        read.append((picture * scale).cpu().tolist())

    with fxmem.record("h100") as run:
        thread = threading.Thread(target=draw, args=(torch.ones(1024, device="cuda"),), kwargs={"scale": 2.0})
        thread.start()
        thread.join()
    assert [len(each) for each in read] == [1024]
    assert run.peak.requested_bytes == 2 * 4096


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_thread_that_uses_the_card_is_refused_by_its_line(is_moved: bool) -> None:
    batches: queue.Queue[torch.Tensor] = queue.Queue()

    def train() -> None:
        with fxmem.record("h100"):
            kept = torch.ones(4, device="cuda")

            def load() -> None:
                with contextlib.suppress(AnalysisError):
                    batches.put(kept + 1 if is_moved else torch.ones(4).to("cuda"))

            threading.Thread(target=load, name="loader", daemon=True).start()
            batches.get(timeout=60)  # nothing will come

    message = rf"main thread alone uses the card; 'loader' does at .*{Path(__file__).name}:\d+"
    with pytest.raises(AnalysisError, match=message):
        train()
    with pytest.raises(RuntimeError, match="NVIDIA"):
        torch.ones(4).to("cuda")  # torch has not taken the card for a real one


def test_what_is_traced_runs_as_it_was_written() -> None:
    with fxmem.record("h100") as run:
        model = nn.Linear(8, 4).cuda()
        traced = torch.jit.trace(model, torch.ones(2, 8, device="cuda"))
        assert traced(torch.ones(2, 8, device="cuda")).shape == (2, 4)
        assert list(traced.graph.nodes()) == []
        assert [name for name, _ in traced.named_parameters()] == ["weight", "bias"]
        torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert [each.what.partition(":")[0] for each in run.made_up] == ["torch.jit.trace"]


def test_a_library_may_say_what_parameters_become(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """As accelerate's `init_empty_weights` has it."""
        own(module, name, parameter)
        kept = module._parameters[name]
        if kept is not None:
            module._parameters[name] = type(kept)(kept.to("meta"), **vars(kept))

    with fxmem.record("h100"), monkeypatch.context() as patched:
        patched.setattr(nn.Module, "register_parameter", register)
        model = nn.Linear(2048, 1024)  # large enough to be made without memory
    assert model.weight.is_meta


_SCRIPT = """
import os, sys, torch
assert sys.argv[1:] == ["--lr", "1"]
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
model(torch.ones(2, 8, device="cuda")).sum().backward()
"""


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        (("torchrun", "--nproc_per_node=8", "train.py"), ["torchrun of 8 processes", "init_process_group"]),
        (("accelerate", "launch", "--mixed_precision", "bf16", "train.py"), []),
        (("-m", "torch.distributed.run", "-m", "pkg.train"), ["torchrun of 1 processes", "init_process_group"]),
        (("-m", "pkg.train"), []),
        (("train.ipynb",), []),
    ],
)
def test_what_starts_a_program_starts_it_here(
    command: tuple[str, ...], answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    for script in ("train.py", "pkg/__init__.py", "pkg/train.py"):
        (tmp_path / script).write_text("" if "__" in script else _SCRIPT)
    cells = [("markdown", "# A title"), ("code", "%matplotlib inline\n"), ("code", "%%bash\nls"), ("code", _SCRIPT)]
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [{"cell_type": a, "source": [b]} for a, b in cells]}))
    is_module = command[0] == "-m"
    program, *arguments = command[is_module:]
    launched = launch(
        Launch(program, (*arguments, "--lr", "1"), is_module),
        catalogue.target("h100"),
        RunSettings(until="end", max_operators=100),
    )
    assert not launched.raised
    assert launched.recorded.ending == "ran to its end"
    assert len(launched.recorded.rounds) == 1
    assert [each.what.partition(":")[0].partition(" on ")[0] for each in launched.recorded.made_up] == answers
    assert not {"RANK", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()
    assert not torch.distributed.is_initialized()
    monkeypatch.delitem(sys.modules, "pkg", raising=False)


@pytest.mark.parametrize(
    "command", [("torchrun", "--no-python", "ls"), ("accelerate", "config"), ("torchrun", "no.py"), ("no.ipynb",)]
)
def test_what_starts_no_program_of_python_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="expected"):
        launch(Launch(command[0], command[1:]), catalogue.target("h100"), RunSettings(until="end", max_operators=100))


def test_a_program_says_what_it_waits_for() -> None:
    with fxmem.record("h100") as run:
        said = [run.progress()]
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 8, device="cuda")).sum()
        said.append(run.progress())
        loss.backward()
        said.append(run.progress())
        optimizer.step()
        said.append(run.progress().partition(",")[0])
    assert said[0] == "set-up, 0 operators, waiting for the first call of a module"
    assert said[1].startswith("step 1, ")
    assert said[1].endswith("waiting for a backward")
    assert said[2].endswith("waiting for a step of SGD")
    assert said[3] == "step 2"


def test_a_copy_is_no_node_with_all_that_was_copied_before() -> None:
    with fxmem.record("h100") as run:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
        model(torch.ones(2, 8, device="cuda"))
        average = copy.deepcopy(model)
    assert [node.name for node in run.profile.nodes if "deepcopy" in node.name] == []
    assert {"model.0.weight", "average.0.weight"} <= {storage.name for storage in run.profile.storages}
    assert average[0].weight is not model[0].weight


class _Memory(ctypes.Structure):
    """`nvmlMemory_t` of nvml.h."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def test_a_monitor_asks_the_driver_s_library() -> None:
    """As pynvml does, by ctypes."""
    before = ctypes.CDLL
    device, count, major, minor = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
    name, found = ctypes.create_string_buffer(96), _Memory()
    with fxmem.record("rtx3080") as recorded:
        kept = torch.empty(1 << 20, device="cuda")
        library = ctypes.CDLL("libnvidia-ml.so.1")
        codes = [
            library.nvmlInit_v2(),
            library.nvmlDeviceGetCount_v2(ctypes.byref(count)),
            library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device)),
            library.nvmlDeviceGetName(device, name, ctypes.c_uint(96)),
            library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(found)),
            library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.pointer(minor)),
        ]
        reserved = torch.cuda.memory_reserved()
        assert ctypes.CDLL(None) is not library
    del kept
    assert codes == [0] * 6
    assert (count.value, major.value, minor.value) == (1, 8, 6)
    assert name.value == b"NVIDIA GeForce RTX 3080"
    assert (found.used, found.total) == (reserved, recorded.profile.target.memory_bytes)
    assert found.total - found.used == found.free
    assert not hasattr(library, "nvmlDeviceSetPowerManagementLimit")
    assert [each.what for each in recorded.made_up] == ["libnvidia-ml: of the pretended card"]
    assert ctypes.CDLL is before
