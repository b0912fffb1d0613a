"""What public scripts do on their way to a card, each in its smallest form."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import ctypes
import gc
import json
import linecache
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.__main__ import _unwind_on_sigterm
from fxmem.errors import AnalysisError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.context import context_range
from fxmem.simulation.program import Launch, RunSettings, find_started, launch
from fxmem.simulation.recording.error_advice import describe_end, user_code_error


def least_context(card: str) -> int:
    """Bytes that a process takes at the least beside its segments."""
    found = context_range(catalogue.target(card))
    assert found is not None
    return found.low


def test_a_wrapper_may_have_a_list_of_buffers() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            self.buffers = [torch.zeros(3, device="cuda")]  # type: ignore[assignment]

        def forward(self, size: int) -> Any:
            return self.module(torch.ones(2, size, device="cuda"))

    with fxmem.record("h100", steps=2) as recorded:
        model = Wrapper(nn.Linear(4, 4).cuda())
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(4).sum().backward()
            optimizer.step()
    assert len(recorded.rounds) == 2


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
    for _ in range(6000):  # a signal that comes just before a sleep begins does not wake it
        time.sleep(0.1)


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
        "import torch\nx = torch.zeros(4, 128, device='cuda')\ntorch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))\n"
    )
    launched = launch(Launch(str(script)), catalogue.target("h100"), RunSettings(until="end", max_operators=100))
    assert launched.raised
    assert "torch's cond is compiled or chosen at run time" in launched.recorded.ending
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
    used = (least_context("h100") >> 20) + 20
    assert f"NVIDIA H100 80GB HBM3, {used}MiB / 81" in said
    assert asked.startswith(f"NVIDIA H100 80GB HBM3, {used}, 81")
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


def test_an_error_of_the_pretended_card_says_so() -> None:
    @torch.library.custom_op("fxmem_tests::unfaked", mutates_args=())
    def unfaked(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with fxmem.record("h100"):
        x = torch.zeros(8, device="cuda")
        with pytest.raises(RuntimeError) as raised:
            unfaked(x)
    said = describe_end(raised.value)
    assert "it comes of the pretended card, on which fxmem_tests::unfaked needs a fake kernel" in said
    assert "@torch.library.register_fake('fxmem_tests::unfaked')" in said
    lost = OSError("libcuda.so.1: cannot open shared object file")
    assert "it comes of the pretended card, which has no driver" in describe_end(lost)
    assert describe_end(ValueError("of its own")) == "ValueError: of its own"


def test_an_error_without_a_network_says_how_to_do_without() -> None:
    error = OSError("We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them")
    assert "; no weights are needed: make the model from a configuration" in describe_end(error)
    assert "fxmem analyze hf:ORG/NAME needs none" in str(user_code_error(error, "clf.py:make"))
    assert "no weights" in describe_end(OSError("[Errno -3] Temporary failure in name resolution"))


def test_a_loss_behind_a_reentrant_checkpoint_says_how_it_lost_its_graph() -> None:
    with fxmem.record("h100"):
        model, x = nn.Linear(8, 8).cuda(), torch.zeros(2, 8, device="cuda")
        checkpoint(lambda each: model(each).sum(), x, use_reentrant=False).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, that gradients will be None
            loss = checkpoint(lambda each: model(each).sum(), x, use_reentrant=True)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
    assert "checkpoint(..., use_reentrant=True) of arguments that need no gradient" in describe_end(raised.value)


_OF_IPYTHON = """%matplotlib inline
files = !ls
found = [7]
if not files:
    found[0] = !ls -l \\
        *.py
    kept = %who_ls
assert (files, found, kept, 7 != 5) == ([], [[]], None, True)
str.join?
?str
"""
_SCRIPT = """
import os, sys, torch
assert sys.argv[1:] == ["--lr", "1"]
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
model(torch.ones(2, 8, device="cuda")).sum().backward()
"""


def test_a_rank_finds_its_own_card_among_those_of_its_machine() -> None:
    with fxmem.record("h100", ranks=4, rank=3):
        for count in (torch.cuda.device_count(), torch.accelerator.device_count()):
            assert count >= 4
            assert not count < 4
            assert count == 4
            assert count != "4"
            assert (256 // count, 6 / count, count * 2, int(count), f"{count}") == (64, 1.5, 8, 4, "4")
            assert list(range(count)) == [0]
            assert 3 % count == 0
    with fxmem.record("h100"):
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 1


_CARDS = "as many processes as there are cards"


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        (("torchrun", "--nproc_per_node=8", "train.py"), ["torchrun of 8 processes", "init_process_group"]),
        (("accelerate", "launch", "--mixed_precision", "bf16", "train.py"), []),
        (("-m", "torch.distributed.run", "-m", "pkg.train"), ["init_process_group"]),
        (("torchrun", "--nproc_per_node=gpu", "train.py"), [f"torchrun of {_CARDS}", "init_process_group"]),
        (("python", "-u", "-Wdefault", "-X", "dev", "train.py"), []),
        (("python3", "-um", "pkg.train"), []),
        (("deepspeed", "--no_local_rank", "train.py"), [f"deepspeed of {_CARDS}", "init_process_group"]),
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
    cells = [("markdown", "# A title"), ("code", _OF_IPYTHON), ("code", "%%bash\nls"), ("code", _SCRIPT)]
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
    ("command", "said"),
    [
        ("torchrun --no-python ls", "got ls without Python"),
        ("torchrun --nprocs 2 train.py", "unrecognized arguments: --nprocs; closest: "),
        ("torchrun --help", "it asks for its help"),
        ("torchrun no.py", "got 'no.py', which is no file"),
        ("torchrn train.py", "got 'torchrn', which is no file; closest: torchrun"),
        ("accelerate config", "expected `accelerate launch`"),
        ("accelerate launch --num_proc 2 train.py", "unrecognized arguments: --num_proc; closest: "),
        ("deepspeed --num_gps 2 train.py", "unrecognized arguments: --num_gps; closest: --num_gpus"),
        ("fabric run no.py", "got 'no.py', which is no file"),
        ("lightning fit", "expected `lightning run` with a script"),
        ("python -c pass", "after python; got -c"),
        ("python -", "got a program on standard input"),
        ("python -u", "after python; got nothing"),
        ("no.ipynb", "which is no file"),
    ],
)
def test_what_starts_no_program_of_python_is_refused(command: str, said: str) -> None:
    program, *arguments = command.split()
    with pytest.raises(UsageError, match="expected") as refused:
        launch(Launch(program, tuple(arguments)), catalogue.target("h100"), RunSettings(until="end", max_operators=100))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("command", "ranks", "per_machine", "arguments"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py -x", 8, 4, ("-x",)),
        ("torchrun --nnodes 2:4 --nproc-per-node 4 -m train -x", 8, 4, ("-x",)),
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py -x", 2, 2, ("--local-rank=0", "-x")),
        ("python -m torch.distributed.launch --use-env --nproc_per_node 2 train.py", 2, 2, ()),
        ("deepspeed --num_nodes 2 --num_gpus 8 --master_port 1 train.py -x", 16, 8, ("--local_rank=0", "-x")),
        ("deepspeed -i a:0,2@b:1,3 --no_local_rank --module train -x", 4, 2, ("-x",)),
        ("deepspeed -H hosts --num_nodes 2 train.py", 12, 8, ("--local_rank=0",)),
        ("deepspeed -i a train.py", None, 8, ("--local_rank=0",)),
        ("fabric run train.py --devices 4 -x --num-nodes=2 -y", 8, 4, ("-x", "-y")),
        ("lightning run model --devices 0,2 train.py", 2, 2, ()),
        ("fabric run --devices -1 train.py", None, 8, ()),
        ("accelerate launch --num_processes 4 train.py -x", 4, 4, ("-x",)),
        (
            "accelerate launch --num_processes 4 --num_machines 2 --machine_rank 0 --main_process_ip a train.py -x",
            4,
            2,
            ("-x",),
        ),
    ],
)
def test_processes_of_a_launcher_are_ranks(
    command: str,
    ranks: int | None,
    per_machine: int,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("# machines\na slots=8\nb slots=4\nc slots=4\n")
    program, *words = command.split()
    started = find_started(Launch(program, tuple(words)))
    assert started.program.removesuffix(".py") == "train"
    assert (started.ranks, started.per_machine, started.arguments) == (ranks, per_machine, arguments)
    assert started.command == command
    assert find_started(Launch(program, tuple(words), ranks=3, rank=1)).ranks == 3


def test_fabric_and_accelerate_find_what_their_launcher_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    words = "run --strategy fsdp --precision bf16-true --devices auto train.py".split()
    told = dict(find_started(Launch("fabric", tuple(words))).environment)
    assert {name: value for name, value in told.items() if name.startswith("LT_")} == {
        "LT_CLI_USED": "1",
        "LT_STRATEGY": "fsdp",
        "LT_DEVICES": "auto",
        "LT_NUM_NODES": "1",
        "LT_PRECISION": "bf16-true",
    }
    words = "launch --use_fsdp --fsdp_version 2 --num_processes 2 train.py".split()
    told = dict(find_started(Launch("accelerate", tuple(words))).environment)
    assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"]) == ("true", "2")


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


def test_parameters_of_a_copy_are_detached_in_place() -> None:
    with fxmem.record("h100"):
        average = copy.deepcopy(nn.Linear(8, 8).cuda())
        for parameter in average.parameters():
            assert parameter.detach_() is parameter
    assert not any(parameter.requires_grad for parameter in average.parameters())


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
    assert (found.used, found.total) == (
        reserved + least_context("rtx3080"),
        recorded.profile.target.memory_bytes,
    )
    assert found.total - found.used == found.free
    assert not hasattr(library, "nvmlDeviceSetPowerManagementLimit")
    assert [each.what for each in recorded.made_up] == ["libnvidia-ml: of the pretended card"]
    assert ctypes.CDLL is before


@pytest.mark.parametrize("card", ["rtx3080", "h100"])
def test_a_tracker_of_lines_prints_what_the_card_would_have_said(card: str) -> None:
    """As profilers of lines do: before each line the memory that NVML knows of, and the tensors alive."""
    pynvml = pytest.importorskip("pynvml")
    rows: list[tuple[str, int, int, set[tuple[int, ...]]]] = []

    def work(x: torch.Tensor) -> None:
        y = x[:, :3] * 2
        del x
        torch.cuda.empty_cache()
        y.sum()

    def track(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is not work.__code__:
            return None
        if event == "line":
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
            assert process.pid == os.getpid()
            used = pynvml.nvmlDeviceGetMemoryInfo(device).used
            assert (used, pynvml.nvmlDeviceGetGraphicsRunningProcesses(device)) == (process.usedGpuMemory, [])
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            alive = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.is_cuda]
            rows.append((line, used, torch.cuda.memory_allocated(), {tuple(each.shape) for each in alive}))
        return track

    with fxmem.record(card, steps=1):
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, nobody = pynvml.nvmlDeviceGetName(device), pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        before = sys.gettrace()
        sys.settrace(track)
        work(torch.ones(1 << 20, 7, device="cuda"))
        sys.settrace(before)
    x, y = ((1 << 20, width) for width in (7, 3))
    large, small, context = 28 << 20, 12 << 20, least_context(card)
    assert (name, nobody) == (catalogue.target(card).full_name, [])
    assert rows == [
        ("y = x[:, :3] * 2", context + large, large, {x}),
        ("del x", context + large + small, large + small, {x, y}),
        ("torch.cuda.empty_cache()", context + large + small, small, {y}),
        ("y.sum()", context + small, small, {y}),
    ]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_large_layer_under_weight_norm_moves() -> None:
    """DINO's head: a weight is computed from its parameters before they move, and one of them is frozen."""
    with fxmem.record("h200"):
        x = torch.randn(4, 256).cuda()
        layer = nn.utils.weight_norm(nn.Linear(256, 65_536, bias=False))
        layer.weight_g.data.fill_(1)
        layer.weight_g.requires_grad = False
        direction = layer.weight_v
        optimizer = torch.optim.SGD([direction], lr=0.1)
        moved = layer.cuda()
        is_same, held = moved.weight_v is direction, torch.cuda.memory_allocated()
        moved(x).sum().backward()
        optimizer.step()
    assert is_same
    assert held == 4 * (65_536 * (256 + 1) + 4 * 256)


def test_a_layer_moves_while_a_graph_or_autocast_refers_to_it() -> None:
    """`.data =`, as a card does: nothing is allocated, and the graph's gradients reach the layer."""
    with fxmem.record("t4"):
        layer, x = nn.Linear(250, 1000, bias=False).cuda(), torch.ones(2, 250, device="cuda")
        with torch.autocast("cuda"):
            loss = layer(x).sum()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer.to("cuda:0")
            most = torch.cuda.max_memory_allocated()
            loss.backward()
        has_gradient, output = layer.weight.grad is not None, layer(x)
        layer.cpu().cuda().half()
        there = layer.weight.dtype, layer.weight.device.type, output.grad_fn is not None
        other = nn.Linear(250, 500, bias=False, device="cuda")
        torch.utils.swap_tensors(layer.weight, other.weight)
        shapes = [tuple(each.weight.shape) for each in (layer, other)]
    assert before == most
    assert has_gradient
    assert there == (torch.float16, "cuda", True)
    assert shapes == [(500, 250), (1000, 250)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bits must be\nbetween 1 and 8"), "ValueError: bits must be between 1 and 8"),
        (KeyError("bits"), "KeyError: 'bits'"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_an_error_that_torch_brings_from_elsewhere_is_said_as_it_was_there(error: Exception, said: str) -> None:
    try:
        raise error
    except type(error):
        brought = torch._utils.ExceptionWrapper(where="in DataLoader worker process 3")
    with pytest.raises(type(error), match="Original Traceback") as raised:
        brought.reraise()
    assert describe_end(raised.value) == f"{said} (in DataLoader worker process 3)"
