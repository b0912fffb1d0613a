"""Ranks that run for real over gloo, each in a process of its own, and the prediction of each.

Set aside is what the backend allocates within its calls and in its threads: gloo copies what it sends, NCCL does not.
Of products in bfloat16 oneDNN's scratch is, which depends on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from fxmem.hardware import catalogue
from fxmem.records.profile import Report
from fxmem.records.validation import ProgramMeasurement
from fxmem.simulation.program import IsolationSettings, Launch, RunSettings, launch_apart, read_rule
from tests.sharded_models import COMPILED

SPREAD: Final = str(Path(__file__).parent / "programs" / "spread.py")
_STEPS: Final = 6
NUMBER: Final = 4
"""Bytes of a number on the host that is read a moment earlier or later."""
_MEASURE: Final = """
import contextlib, multiprocessing, os, pathlib, sys, threading, time
import torch._dynamo, torch.distributed.tensor, torch.distributed.fsdp, torch.distributed.pipelining  # once for all
import tests.sharded_models
from fxmem._torch.compiler.dynamo import load_compiler
from fxmem.simulation.program import Launch
from fxmem.validation import measure_program
from tests.simulation.recording.compiled.real import without_kernels
torch.set_num_threads(1)

class Sent:  # gloo's work keeps what it sent for as long as it is there, that of NCCL until it has been waited for
    def __init__(self, work):
        self.work = work
    def wait(self):
        self.work.wait()
        self.work = None

isend = torch.distributed.isend
def send(*args, **kwargs):
    return Sent(isend(*args, **kwargs))
torch.distributed.isend = torch.distributed.distributed_c10d.isend = send

def settled(wait):  # one of gloo's threads drops its work a moment after that is done, which all must have begun
    def wait_settled(*args, **kwargs):
        if are_alike:
            meeting.wait(60)
        time.sleep(0.003)
        result = wait(*args, **kwargs)
        time.sleep(0.001)
        return result
    wait_settled.default = getattr(wait, "default", None)  # which the compiler's partitioner looks for
    return wait_settled

def unseen(function):  # the profiler sees one thread; one of gloo's may drop what DDP broadcasts before the first step
    def call(*args, **kwargs):
        thread = threading.Thread(target=function, args=args, kwargs=kwargs)
        thread.start()
        thread.join()
    return call

for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
    setattr(torch.nn.parallel.distributed, name, unseen(getattr(torch.nn.parallel.distributed, name)))

collectives = torch.ops._c10d_functional
plain = torch.distributed.Work.wait, collectives.wait_tensor
folder, steps, script, *wanted = sys.argv[1:]
if tests.sharded_models.COMPILED.keys() & set(wanted):
    load_compiler()
for world, kind in zip(map(int, wanted[::2]), wanted[1::2]):
    meeting = multiprocessing.Barrier(world)
    compiles = kind in tests.sharded_models.COMPILED
    are_alike = compiles or kind in tests.sharded_models.CONFIGURATIONS
    are_alike = are_alike or kind.startswith(("ZeRO-", "experts", "data", "tensor"))  # they wait as often
    torch.distributed.Work.wait, collectives.wait_tensor = map(settled, plain)
    for rank in range(world):
        if not os.fork():
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), STORE=f"{folder}/{kind} {world} meet")
            if kind in tests.sharded_models.HALF or "bf16" in kind:
                measure_program._SET_ASIDE += tests.sharded_models.PRODUCTS
            else:
                measure_program.WRAPPER_PRODUCTS = ()
            with without_kernels() if compiles else contextlib.nullcontext():
                measured = measure_program._measure_on_cpu(Launch(script, (kind,)), int(steps), compiles=compiles)
            pathlib.Path(folder, f"{kind} {world} {rank}").write_text(measured.model_dump_json())
            os._exit(0)
    for rank in range(world):
        os.wait()
"""


def measure(
    folder: Path, *wanted: tuple[str, int], script: str = SPREAD, settled: int = 1
) -> dict[tuple[str, int, int], int]:
    """The peak of each rank of kinds of a script in worlds of so many ranks, run for real.

    Of the steps after those in which the script settles it is the lowest: the backend's threads free some tensors of a
    step later than the step has done with them.
    """
    pairs = [word for kind, world in wanted for word in (str(world), kind)]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), str(_STEPS), script, *pairs],
        capture_output=True,
        text=True,
        check=False,
        timeout=60 * max(4, len(wanted)),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PAUSE": "0.02"},
    )
    found: dict[tuple[str, int, int], int] = {}
    for kind, world in wanted:
        for rank in range(world):
            file = folder / f"{kind} {world} {rank}"
            assert file.exists(), done.stderr
            measured = ProgramMeasurement.model_validate_json(file.read_bytes())
            assert measured.ending == f"stopped after step {_STEPS}", done.stderr
            rounds = measured.rounds[settled:]
            found[kind, world, rank] = min(each.peak_without_kernel_scratch_bytes or 0 for each in rounds)
    return found


def predict(kind: str, world: int, rank: int, script: str = SPREAD, steps: int = 2) -> Report:
    """The same rank on the CPU's pretended memory."""
    return launch_apart(
        Launch(script, (kind,), ranks=world, rank=rank),
        catalogue.target("cpu"),
        RunSettings(
            steps,
            compile="as-is" if kind in COMPILED else None,
            rule=read_rule("worst" if kind.endswith("worst") else "balanced"),
        ),
        IsolationSettings(),
    ).profile


def last_step_bytes(predicted: Report) -> int:
    """What the last step requested at most."""
    assert predicted.step.program is not None
    return predicted.step.program.steps[-1].requested_bytes


def compare(kind: str, world: int, rank: int, measured: int, tolerance: int = NUMBER) -> tuple[int, int]:
    """A rank's measured and predicted peak; measured again, at most twice, where they differ by more than tolerated.

    A tensor whose last reference one of gloo's threads drops is not seen freed; that adds to some runs.
    """
    predicted = last_step_bytes(predict(kind, world, rank))
    for _ in range(2):
        if abs(predicted - measured) > tolerance:
            with tempfile.TemporaryDirectory() as folder:
                measured = min(measured, measure(Path(folder), (kind, world))[kind, world, rank])
    return measured, predicted
