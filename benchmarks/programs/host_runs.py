"""The host's memory of whole programs, predicted and measured: `make host-runs`.

    python -m benchmarks.programs.host_runs [--only NAME ...] [--runs 3]

Each program of `host_programs` runs for real on the CPU, several times, and is watched from outside: what /proc says of
its process (anonymous and shared pages, with the high-water mark), of its workers (what they alone have), and of the
shared memory of the system, which nobody else should use meanwhile. Of several runs the highest counts: workers that
the machine keeps waiting have less, and a host has to have room for the others. Then `fxmem run` says it, of a card:
what the programs do there is small beside what they have on the host. Where it is not, in `WHOLLY_ON_HOST`, it says it
of the CPU: a real run has the card's part in the same memory.

The table is benchmarks/results/host-DATE.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import RESULTS

PROGRAMS = Path(__file__).parent / "host_programs"
WHOLLY_ON_HOST = frozenset({"host_activations"})
TOLERANCE = 0.02
_INTERVAL_S = 0.004
_WORKERS_S = 0.25
_PREPARE = """
import sys, torch
from torch import nn
folder = sys.argv[1]
torch.save(nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(6)]).state_dict(), folder + "/model.pt")
from transformers import GPT2Config, GPT2LMHeadModel
GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=1024, n_head=16)).save_pretrained(folder + "/gpt2")
"""


def prepare(folder: str) -> dict[str, list[str]]:
    """Write what the programs read; their arguments."""
    subprocess.run([sys.executable, "-c", _PREPARE, folder], check=True, capture_output=True)
    return {"pretrained": [f"{folder}/gpt2"], "checkpoint": [f"{folder}/model.pt"]}


def _kib(file: str, *wanted: str) -> list[int]:
    found = {}
    with open(file, encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in wanted:
                found[name] = int(rest.split()[0]) << 10
    return [found[each] for each in wanted]


def _shared() -> int:
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def measure(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run a program for real; the most that it and its workers had at once, pages of files aside."""
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most, highest, last_files, looked, before = 0, 0, 0, 0.0, _shared()
    workers: dict[str, tuple[int, int]] = {}
    while process.poll() is None:
        with contextlib.suppress(OSError, KeyError, ValueError):
            own = f"/proc/{process.pid}"
            anonymous, shared, files, mark = _kib(f"{own}/status", "RssAnon", "RssShmem", "RssFile", "VmHWM")
            now = anonymous + shared + files
            lift = max(mark - now - max(last_files - files, 0), 0) if mark > highest else 0
            highest, last_files = max(highest, mark), files
            if time.monotonic() > looked + _WORKERS_S:
                workers = dict(_children(process.pid))
                looked = time.monotonic()
            private = sum(own + _anonymous(child) - then for child, (own, then) in workers.items())
            most = max(most, anonymous + lift + private + _shared() - before)
        time.sleep(_INTERVAL_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    return most


def _anonymous(child: str) -> int:
    with contextlib.suppress(OSError, KeyError):
        return _kib(f"/proc/{child}/status", "RssAnon")[0]
    return 0


def _children(pid: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Workers: what each alone has, and its anonymous pages then, shared ones included."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
            with contextlib.suppress(OSError, KeyError):
                own, shared = _kib(f"/proc/{child}/smaps_rollup", "Private_Dirty", "Pss_Shmem")
                yield child, (own - shared, _anonymous(child))


def predict(command: Sequence[str], environ: dict[str, str], target: str = "h100") -> dict[str, Any]:
    """What `fxmem run` says of the host."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = ["-m", "fxmem", "run", "--until", "end", "--target", target, "--json", str(report), *command]
        done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(report.read_text())["step"]["program"]["host"]
    return found


def environment() -> dict[str, str]:
    """The variables that a run has."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), *sys.path)))}


def run(name: str, arguments: Sequence[str], runs: int) -> dict[str, Any]:
    """One program: predicted, and measured several times."""
    environ = environment()
    script = str(PROGRAMS / f"{name}.py")
    real = [measure([sys.executable, script, *arguments], environ) for _ in range(runs)]
    said = predict([script, *arguments], environ, "cpu" if name in WHOLLY_ON_HOST else "h100")
    return {"name": name, "real": real, **said}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The results, in Markdown."""
    import torch

    yield f"# The host's memory of whole programs, predicted and measured, {datetime.date.today()}"
    yield ""
    errors = [error(row) for row in rows]
    noise = [spread(row) for row in rows]
    yield (
        f"torch {torch.__version__}, one thread, CPU. Measured: the highest of {len(rows[0]['real'])} real runs, those "
        f"of one program differing by up to {max(noise):.2%}. **{sum(abs(each) <= TOLERANCE for each in errors)} of "
        f"{len(rows)}** are within {TOLERANCE:.0%}; mean error {statistics.mean(map(abs, errors)):.2%}."
    )
    yield ""
    yield "| program | predicted | measured | error | runs differ | where |"
    yield "|---|---:|---:|---:|---:|---|"
    for row in rows:
        where = f"{row['call']} ({os.path.basename(row['place'])})" if row["call"] else os.path.basename(row["place"])
        cells = (f"{row['peak_bytes']:,}", f"{max(row['real']):,}")
        yield f"| {row['name']} | {' | '.join(cells)} | {error(row):+.2%} | {spread(row):.2%} | {where} |"


def error(row: dict[str, Any]) -> float:
    """Of the prediction, beside the highest of the real runs."""
    return float(row["peak_bytes"] / max(row["real"]) - 1)


def spread(row: dict[str, Any]) -> float:
    """Between the real runs."""
    return float((max(row["real"]) - min(row["real"])) / max(row["real"]))


def main() -> None:
    """Run the programs and write their table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="programs; default all")
    parser.add_argument("--runs", type=int, default=3, help="real runs of each")
    options = parser.parse_args()
    names = options.only or sorted(each.stem for each in PROGRAMS.glob("*.py"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = prepare(folder)
        for name in names:
            rows.append(run(name, arguments.get(name, []), options.runs))
            print(f"{name}: {error(rows[-1]):+.2%}", rows[-1], file=sys.stderr, flush=True)
    lines = list(table(rows))
    print("\n".join(lines))
    if not options.only:
        (RESULTS / f"host-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
