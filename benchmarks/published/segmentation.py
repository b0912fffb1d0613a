"""Hold what mmsegmentation published of its trainings on four V100 against its own networks: rank 0 of four.

    python -m benchmarks.published.segmentation FOLDER [--only 'PATTERN']

FOLDER has mmsegmentation 0.20.2, whose configurations these are, and what it imports:
`pip install --no-deps --target FOLDER mmsegmentation==0.20.2 mmcv==1.4.2 opencv-python-headless addict yapf
platformdirs prettytable wcwidth`. mmcv's own operators are not needed.

Rows are in `segmentation.toml`; each is trained for four steps by `segmentation_train.py` (`fxmem run --target
v100-32gb --ranks 4`), and what is compared is the program's own `torch.cuda.max_memory_allocated()`. cuDNN 9.10 has
kernels for a V100, which the installed one has no more: `fxmem doctor --fetch cudnn 9.10`. Writes
`benchmarks/results/segmentation-DATE.md`; rows that ran before on the same day stay unless they are run again.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks import RESULTS
from fxmem.hardware.catalogue import target
from fxmem.simulation.kernels.kernel_settings import asked_cudnns

HERE: Final = Path(__file__).parent
TARGET: Final = "v100-32gb"
_OPTIONS: Final = ("--target", TARGET, "--ranks", "4", "--rank", "0", "--steps", "4")
_WORD: Final = "max_memory_allocated "


def train(folder: Path, config: str) -> int:
    """Bytes that rank 0 allocates at the peak of four steps."""
    paths = [str(HERE.parents[1]), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Before torch 2.0 the workspaces of cuBLAS were not the allocator's.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    path = folder / "mmseg" / ".mim" / "configs" / config
    script = ("torchrun", "--nproc-per-node", "4", str(HERE / "segmentation_train.py"), str(path))
    command = [sys.executable, "-m", "fxmem", "run", *_OPTIONS, *script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(_WORD)]
    if done.returncode or not said:
        raise SystemExit(f"{config}: {done.stdout[-500:]}\n{done.stderr[-2000:]}")
    return max(int(line.removeprefix(_WORD)) for line in said)


def compare(row: dict[str, Any], predicted: int) -> str:
    """The line of a row. A figure of three digits is MiB / 1000, others are GiB."""
    figure: str = row["gb"]
    unit, word = (1000 << 20, "1,000 MiB") if len(figure.partition(".")[2]) == 3 else (1 << 30, "GiB")
    error = 100 * (predicted / unit / float(figure) - 1)
    return f"| {row['config']} | {figure} {word} | {predicted / unit:.3f} | {error:+.2f} % |"


def main() -> None:
    """Train what is wanted, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has mmsegmentation 0.20.2 and mmcv 1.4.2")
    parser.add_argument("--only", default="*", help="pattern of the configurations' names")
    given = parser.parse_args()
    rows = tomllib.loads((HERE / "segmentation.toml").read_text(encoding="utf-8"))["rows"]
    file = RESULTS / f"segmentation-{datetime.date.today():%Y-%m-%d}.md"
    before = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in before if line.startswith("| ")}
    wanted = [row for row in rows if fnmatch.fnmatch(row["config"], given.only)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda row: train(given.folder.resolve(), row["config"]), wanted)
        for row, predicted in zip(wanted, found, strict=True):
            lines[row["config"]] = compare(row, predicted)
            print(lines[row["config"]], flush=True)
    kept = [lines[row["config"]] for row in rows if row["config"] in lines]
    errors = [abs(float(line.split(" | ")[3].split()[0])) for line in kept]
    within = ", ".join(f"{sum(error <= most for error in errors)} within {most:g} %" for most in (0.1, 0.5, 3))
    library = next(iter(asked_cudnns(target(TARGET))), None)
    asked = "no cuDNN that has kernels for it" if library is None else f"cuDNN {library.version}"
    head = [
        "# Segmentation networks on four V100, as published and as their own code is predicted",
        "",
        f"mmsegmentation's model zoo; torch {torch.__version__}, {asked}. {len(kept)} figures: mean",
        f"{sum(errors) / len(errors):.2f} %, median {median(errors):.2f} %; {within}.",
        "",
        "| Configuration | Published | Predicted | Error |",
        "|---|---:|---:|---:|",
    ]
    file.write_text("\n".join([*head, *kept, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
