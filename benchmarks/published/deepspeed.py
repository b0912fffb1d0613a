"""Hold what DeepSpeed logged of its memory on four cards, as others published it, against its own code.

    python -m benchmarks.published.deepspeed CHECKOUT --path 0.15.1=FOLDER --path 0.16.9=FOLDER [--only 'NAME*']

CHECKOUT is hwang2006/large-scale-lm-tutorials at 20aadcbe, whose scripts run untouched. A FOLDER goes on the path for
what was published of this DeepSpeed; runs of another one are left out. 0.16.9 needs itself alone, and the packages of
then that are not among fxmem's own. Of 0.15.1, with the releases of then:
`DS_BUILD_OPS=0 pip install --target FOLDER --no-deps deepspeed==0.15.1 transformers==4.44.2 tokenizers==0.19.1
huggingface-hub==0.24.7 datasets==2.21.0 fsspec==2024.6.1 pyarrow dill xxhash multiprocess pandas python-dateutil pytz
tzdata requests urllib3 idna certifi charset-normalizer hjson msgpack py-cpuinfo ninja psutil pydantic pydantic-core
annotated-types typing-inspection tqdm pyyaml regex safetensors filelock`.

What is printed is what `see_memory_usage` itself finds, by torch's own counters. Rows are in `deepspeed.toml`. Writes
`benchmarks/results/deepspeed-DATE.md`; runs of before on the same day stay unless they are run again. Exit code 1 if a
figure is off by more than its last digit.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import RESULTS

RUNS: Final = Path(__file__).with_name("deepspeed.toml")
ROOT: Final = Path(__file__).parents[2]
_SCRIPTS: Final = "src/ch7_zero_redundancy_optimization"
_LINE: Final = re.compile(r"see_memory_usage\] (?:MA (\S+) GB +Max_MA (\S+) GB +CA (\S+) GB|(?!CPU)(.*\S))")
_LAST_DIGIT: Final = 0.01
_CHECKPOINT: Final = """
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

GPT2LMHeadModel(GPT2Config()).save_pretrained("gpt2")  # gpt2's own sizes
words = Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, []))
words.model.save("gpt2")
PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained("gpt2")
"""


def read_lines(text: str) -> dict[str, tuple[float, ...]]:
    """By its words, the three numbers of each line that `see_memory_usage` has logged."""
    found: dict[str, tuple[float, ...]] = {}
    words = ""
    for match in _LINE.finditer(text):
        if match[4]:
            words = match[4]
        else:
            found[words] = tuple(map(float, match.groups()[:3]))
    return found


def run_script(run: dict[str, Any], folder: Path, environment: dict[str, str]) -> dict[str, tuple[float, ...]]:
    """The lines that a script prints as rank 0 of 4."""
    options = ["--target", "a100-80gb", "--ranks", "4", "--rank", "0"]
    script = run["own"] if "own" in run else run["script"]
    command = [sys.executable, "-m", "fxmem", "run", *options, "deepspeed", "--num_gpus=4", *script.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = read_lines(done.stdout + done.stderr)
    if not found:
        raise SystemExit(f"{run['name']}: {done.stdout[-500:]}\n{done.stderr[-2000:]}")
    return found


def main() -> None:
    """Run the scripts, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="large-scale-lm-tutorials at 20aadcbe")
    parser.add_argument("--path", action="append", default=[], help="DeepSpeed's release and the folder that has it")
    parser.add_argument("--only", default="*", help="pattern of the runs' names")
    given = parser.parse_args()
    folders = dict(each.split("=", 1) for each in given.path)
    runs = tomllib.loads(RUNS.read_text(encoding="utf-8"))["runs"]
    file = RESULTS / f"deepspeed-{datetime.date.today():%Y-%m-%d}.md"
    before = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = {run["name"]: [line for line in before if line.startswith(f"| {run['name']} | ")] for run in runs}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    worst = 0.0
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(given.checkout / _SCRIPTS, Path(place, "scripts"))
        shutil.copy(Path(__file__).with_name("deepspeed_qwen.py"), folder)
        for run in runs:
            release = run.get("deepspeed", "0.15.1")
            if not fnmatch.fnmatch(run["name"], given.only) or release not in folders:
                continue
            paths = [str(ROOT), folders[release], *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths)}
            if "own" not in run and not Path(folder, "gpt2").exists():
                subprocess.run([sys.executable, "-c", _CHECKPOINT], cwd=folder, env=environment, check=True)
            found, rows[run["name"]] = run_script(run, folder, environment), []
            for words, *published in run["lines"]:
                predicted = found[words][: len(published)]
                off = max((round(b - a, 2) for a, b in zip(published, predicted, strict=True)), key=abs)
                worst = max(worst, abs(off))
                cells = (run["name"], words, json.dumps(published)[1:-1], json.dumps(predicted)[1:-1], f"{off:+.2f}")
                rows[run["name"]].append(f"| {' | '.join(cells)} |")
                print(rows[run["name"]][-1], flush=True)
    head = [
        "# DeepSpeed's own lines of memory, as published and as its own code prints them",
        "",
        f"Rank 0 of four; here torch {torch.__version__}. MA, Max_MA and CA in GiB, with two digits, as",
        "`see_memory_usage` prints them. Published of GPT-2 on four A100 by hwang2006/large-scale-lm-tutorials",
        "(20aadcbe), DeepSpeed 0.15.1; of Qwen2.5-1.5B by OpenDCAI/Dataflow-LoopAI, DeepSpeed 0.16.9, without CA.",
        "",
        "| Run | Line | Published | Predicted | Off |",
        "|---|---|---:|---:|---:|",
    ]
    file.write_text("\n".join([*head, *(line for run in runs for line in rows[run["name"]]), ""]), encoding="utf-8")
    sys.exit(worst > _LAST_DIGIT)


if __name__ == "__main__":
    main()
