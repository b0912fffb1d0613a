"""Every parser of texts and files, and what it may answer: a value, or an `FxmemError` in one line.

`tests/cli/specs/test_hostile_specs.py` feeds them with hypothesis in every run of the tests, and
`make -C benchmarks fuzz-parsers` with atheris, which looks where the code has not been yet.

    python -m tests.fuzzing.parsers budget report        those two, a minute each
    python -m tests.fuzzing.parsers --seconds 600        all of them, ten minutes each

atheris (`pip install atheris`, Linux and macOS) is not among the development dependencies. What it finds is written to
the folder `--found` names; it goes into `FOUND` of the tests with the fix.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fxmem.__main__ import _parse
from fxmem.cli import specs
from fxmem.cli.spec_names import is_file_reference, is_reference
from fxmem.cli.specs import inputs, models
from fxmem.errors import FxmemError
from fxmem.hardware import catalogue
from fxmem.memory import liveness, report_reader
from fxmem.memory.allocator import read_settings
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.budget import parse_budget
from fxmem.memory.shortage import read_messages
from fxmem.records import json_reader
from fxmem.records.fits import Baseline, PeakBaseline
from fxmem.records.plan import Plan
from fxmem.records.profile import Peak, Phase, Report
from fxmem.records.shortage import Explanation
from fxmem.show.text.explanation import table
from fxmem.simulation.step import step
from fxmem.testing import peak_checks

__all__ = ["PARSERS", "SEEDS", "fed"]

_PEAK = Peak(requested_bytes=1000, phase=Phase.FORWARD, tick=0, by_kind={})
_HERE = Path("document.json")
_EXPECTED = "expected a document"


def _budget(text: str) -> None:
    assert parse_budget(text).resolve(_PEAK.counted_bytes).nbytes >= 0


def _tolerance(text: str) -> None:
    before = PeakBaseline.model_construct(requested_bytes=1000, allocated_bytes=None)
    assert peak_checks.allowed_growth(text, before) >= 0


def _input(text: str) -> None:
    spec = inputs.parse_input(text)
    if isinstance(spec, inputs.TensorSpec):
        assert inputs.parse_input(str(spec)) == spec
        inputs.make_batch([spec])


def _setting(text: str) -> None:
    for value in specs.parse_settings([text]).values():
        repr(value) if not isinstance(value, int) else None


def _model(text: str) -> None:
    # What is imported is trusted: a name that happens to be a module's is not followed.
    if not is_reference(text) or (is_file_reference(text) and not os.path.exists(text.rpartition(":")[0])):
        specs.build_model(text)


def _target(text: str) -> None:
    catalogue.target(text)


def _optimizer(text: str) -> None:
    step.make_optimizer(text, [torch.nn.Parameter(torch.zeros(2))])


def _allocator(text: str) -> None:
    read_settings({"PYTORCH_CUDA_ALLOC_CONF": text})


def _command(text: str) -> None:
    try:
        _parse(text.split("\n"))
    except SystemExit as leaving:  # --help, --version
        if leaving.code != 0:
            raise AssertionError("a mistake is an FxmemError") from leaving


def _report(text: str) -> None:
    content = json_reader.parse(text.encode(errors="surrogatepass"), _HERE, _EXPECTED)
    report = json_reader.validate(Report, content, _HERE, _EXPECTED)
    if report.ticks <= 2 * len(report.storages) + 1:
        liveness.check(report)
        report_reader.timeline(report)


def _message(text: str) -> None:
    """Whatever is found is a record that can be shown."""
    found = read_messages(text)
    if found:
        table(Explanation(source="-", shortages=found))


def _record(kind: type[Any]) -> Callable[[str], None]:
    def read(text: str) -> None:
        json_reader.validate(
            kind, json_reader.parse(text.encode(errors="surrogatepass"), _HERE, _EXPECTED), _HERE, _EXPECTED
        )

    return read


PARSERS: dict[str, Callable[[str], None]] = {
    "budget": _budget,
    "tolerance": _tolerance,
    "input": _input,
    "setting": _setting,
    "model": _model,
    "target": _target,
    "optimizer": _optimizer,
    "allocator": _allocator,
    "command": _command,
    "report": _report,
    "message": _message,
    "plan": _record(Plan),
    "baseline": _record(Baseline),
}
"""Parsers by name, each called with any text."""

_PEAK_JSON = '{"requested_bytes":0,"phase":"forward","tick":0,"by_kind":{}}'
_STEP_JSON = (
    '"inputs":[{"name":"x","shape":[2,3],"dtype":"float32"}],'
    '"step":{"mode":"train","optimizer":null,"loss":null,"precision":null}'
)
_COMMON_JSON = (
    f'"fxmem_version":"0","torch_version":"2","model":"m",{_STEP_JSON},"target":{{"name":"cpu","device":"cpu"}}'
)

SEEDS: dict[str, list[str]] = {
    "budget": ["8GiB", "60%", "0.6", "1,024 B", "512_000", ".5"],
    "tolerance": ["1%", "0.01", "64MiB", "0"],
    "input": [
        "32x3x224x224",
        "ids:8x1024:int64",
        "scalar:bf16",
        "file.py:make_batch",
        "C:\\m.py:make",
        "2,3:torch.float16",
    ],
    "setting": ["a=1", "b.c=[1,2]", 'd={"e":null}', "f=text", "g=(1,'x')", "h=0x10", "i=1e5"],
    "model": [
        "torchvision:resnt18",
        "timm:no_such",
        "hf:NoSuchModel",
        "hf:no/config.json",
        "file.py:make",
        "C:\\m.py:make",
        "pkg.mod:make",
    ],
    "target": ["h100", "NVIDIA H100 80GB HBM3", "a100-40gb", "4090", "cpu", "mine.json"],
    "optimizer": ["adamw:fused", "sgd:momentum=0.9,nesterov", "sgd-momentum", "adam:lr=1e-3,betas=(0.9,0.99)"],
    "allocator": [
        "expandable_segments:True",
        "max_split_size_mb:128,garbage_collection_threshold:0.6",
        "roundup_power2_divisions:[256:1,512:2,>:8]",
    ],
    "command": [
        "analyze\nm.py:f\n--input\n2x3",
        "show\n-\n--depth\n2",
        "compare\na.json\n--with\nbatch=4",
        "plan\nx\n--budget\n60%",
    ],
    "message": [
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 8.00 GiB total capacity; 5.00 GiB already allocated; "
        "0 bytes free; 512.00 MiB cached)",
        "[rank1]: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 3 has a total capacity of 16.00 GiB of which 5 "
        "bytes is free. Process 7 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has 6.50 GiB "
        "memory in use. 8.00 GiB allowed; Of the allocated memory 6.00 GiB is allocated by PyTorch, with 1.00 MiB "
        "allocated in private pools (e.g., CUDA Graphs), and 1.00 MiB is reserved by PyTorch but unallocated.",
        "MPS backend out of memory (MPS allocated: 1 GB, other allocations: 2 MB, max allowed: 3 GB). Tried to "
        "allocate 5 GB",
    ],
    "report": [
        f'{{"schema_version":"1",{_COMMON_JSON},"ticks":1,"phases":[{{"phase":"forward","begin":0,"end":1,"first_op":0,"last_op":0}}],"nodes":[],"ops":[],'
        f'"storages":[],"saved_bytes":0,"peak":{_PEAK_JSON}}}'
    ],
    "plan": [
        f'{{{_COMMON_JSON},"strategy":"auto","chosen":"flat","application":"modules","budget_bytes":null,"regions":[{{"first_node":0,"last_node":2}}],'
        f'"before":{_PEAK_JSON},"after":{_PEAK_JSON},"analysed":true,"forward_flops":null,"extra_flops":0}}'
    ],
    "baseline": [
        f'{{"schema_version":"1","peaks":{{"t":{{"fxmem_version":"0","torch_version":"2","target":"cpu",{_STEP_JSON},"requested_bytes":1,'
        '"allocated_bytes":null,"reserved_bytes":null,"phase":"forward","by_kind":{"saved":1},"by_node":{}}}}'
    ],
}
"""Texts that are good, or nearly, for each parser: where mutation begins."""


_WATCHED = (
    *(
        parse_budget,
        peak_checks.allowed_growth,
        inputs.parse_input,
        inputs._parse_dtype,
        specs.parse_settings,
        models._parse_value,
        specs.build_model,
    ),
    *(
        catalogue.target,
        step._parse,
        step._literal,
        read_settings,
        AllocatorSettings.from_string,
        _parse,
        json_reader.parse,
        json_reader.validate,
        json_reader._find_wide_object,
    ),
    *(
        liveness._contradictions,
        liveness._bad_indices,
        liveness._bad_ops,
        liveness._bad_phases,
    ),
)
"""Functions whose branches atheris sees: what it has reached there decides which texts it makes more of."""


def fed(name: str, text: str) -> None:
    """Give one parser one text. Whatever is not a value or an FxmemError in one line goes through."""
    try:
        PARSERS[name](text)
    except FxmemError as error:
        if len(str(error)) > 2000 + 8 * len(text):
            raise AssertionError("a message far longer than what it is about") from error


def main() -> None:
    """Fuzz the parsers named, each in a process of its own, and print what was done."""
    parser = argparse.ArgumentParser(prog="fuzz-parsers", description="Give the parsers texts that atheris makes.")
    parser.add_argument("names", nargs="*", choices=[[], *PARSERS], default=[], help="which (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="for each (default 60)")
    parser.add_argument("--found", default="fuzz-found", help="folder for texts that went wrong (default fuzz-found)")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # what the processes are started with
    options = parser.parse_args()
    if options.only:
        _fuzz(options.only, options.seconds, options.found)
        return
    Path(options.found).mkdir(exist_ok=True)
    failed = []
    for name in options.names or PARSERS:
        command = [
            sys.executable,
            "-m",
            "tests.fuzzing.parsers",
            "--only",
            name,
            "--seconds",
            str(options.seconds),
            "--found",
            options.found,
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
        lines = done.stdout.splitlines()
        runs = next((line.split()[1] for line in reversed(lines) if line.startswith("Done ")), "?")
        print(f"{name:12} {runs:>10} runs  {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode:
            failed.append(name)
            print("\n".join(lines[-25:]))
    sys.exit(f"went wrong: {', '.join(failed)}; see {options.found}" if failed else 0)


def _fuzz(name: str, seconds: int, found: str) -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("expected atheris, which is not installed: pip install atheris")

    def one(data: bytes) -> None:
        fed(name, data.decode(errors="surrogateescape"))

    for seed in SEEDS[name]:
        fed(name, seed)  # what is imported only when it is needed takes seconds once, and is not what is looked for
    for function in _WATCHED:
        atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as corpus:
        for index, seed in enumerate(SEEDS[name]):
            (Path(corpus) / str(index)).write_bytes(seed.encode())
        limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096", "-max_len=4096"]
        atheris.Setup(["fuzz-parsers", corpus, *limits, f"-artifact_prefix={found}/{name}-"], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
