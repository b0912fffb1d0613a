"""Hold what Megatron-LM took on B200 and H100, as others published it, against its own code, run untouched.

    python -m benchmarks.published.megatron CHECKOUT [--path FOLDER] [--only 'NAME*']
    python -m benchmarks.published.megatron CHECKOUT --goldens [--path FOLDER] [--only 'gpt/*']

CHECKOUT is Megatron-LM at 23e00ed0. Beside fxmem's own dependencies it imports TransformerEngine and a few others, for
which FOLDER is put on the path: `pip install --target FOLDER --no-deps transformer-engine==2.11.0 onnx onnxscript
onnx_ir ml_dtypes nvdlfw_inspect six einops pybind11 tensorboard protobuf absl-py`; for `--goldens` also the folder
`apex` of NVIDIA/apex at 25.09, and `FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --target FOLDER --no-deps
--no-build-isolation flash-attn==2.7.3`. No kernels are needed. Call FOLDER `site-packages`, so that what is in it
counts as installed, not as the program's. Megatron compiles its data helper itself where there is a C++ compiler.

Rows and flags are in `megatron.toml`. Each rank that may be the largest is analysed in a process of its own. Writes
`benchmarks/results/megatron-DATE.md`; rows that ran before on the same day stay unless they are run again. Exit code 1
if a row is off by more than 0.5 %.

With `--goldens`, the cases are Megatron-LM's own functional tests: script, flags and variables are those of the
checkout's `model_config.yaml`, and the bytes those that Megatron itself logs on its last rank for TensorBoard, on the
card and under `fxmem run`. Only what no one else has is replaced: the data and the vocabularies, by made-up ones of the
same names and sizes (`megatron_data.py`), and Nemotron's tokenizer, by Megatron's `NullTokenizer` of as many tokens.
Loaders have no workers (`--num-workers 0`), and Mixtral 16 micro-batches in the place of 256: all are alike.
What is off by more than 0.5 % is explained in the table's `[goldens.causes]`. Writes `megatron-goldens-DATE.md`.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import math
import os
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from benchmarks import RESULTS
from fxmem.memory.report_reader import load_report

ROWS: Final = Path(__file__).with_name("megatron.toml")
ROOT: Final = Path(__file__).parents[2]
MOST_OFF: Final = 0.005
STEPS: Final = 3
_TAGS: Final = ("mem-max-allocated-bytes", "mem-allocated-bytes")
_GPT2: Final = 50257
_NEMOTRON: Final = 256000
"""Tokens of the vocabularies, with that for the end."""
_OF_SAMPLES: Final = ("--global-batch-size", "--train-iters", "--seq-length", "--encoder-seq-length")
_OF_DATA: Final = set(
    "--data-path --data-cache-path --vocab-file --merge-file --tokenizer-type --tokenizer-model".split()
)
_TOKENS: Final = {"bert": "my-bert_00_text_sentence", "t5": "my-t5_00_text_document"}
"""Models whose data sets have no mock."""
_DIMENSIONS: Final = ("tensor", "pipeline", "context", "expert")


def make_flags(table: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """The arguments of `pretrain_gpt.py` for a row."""
    sizes = {each: row["parallel"].get(each, 1) for each in _DIMENSIONS}
    replicas = row.get("ranks", table["ranks"]) // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
    tokens = str(row.get("tokens", 4096))
    flags = [*table["models"][row["model"]].split(), *table["flags"].split()]
    flags += ["--seq-length", tokens, "--max-position-embeddings", tokens]
    flags += ["--global-batch-size", str(row.get("micro_batches", 4) * replicas)]
    for name in ("tensor", "pipeline"):
        flags += [f"--{name}-model-parallel-size", str(sizes[name])]
    if sizes["context"] > 1:
        flags += ["--context-parallel-size", str(sizes["context"]), "--cp-comm-type", "a2a"]
    if row["model"] == "deepseek-v2":
        flags += ["--expert-model-parallel-size", str(sizes["expert"]), "--moe-router-num-groups", str(sizes["expert"])]
    return flags


def run(options: list[str], program: list[str], checkout: Path, path: str, variables: dict[str, str]) -> None:
    """Run a script of the checkout under `fxmem run`.

    Raises:
        SystemExit: it came to no report.
    """
    paths = [str(ROOT), str(checkout), *filter(None, [path, os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, "-m", "fxmem", "run", *options, *program]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    report = Path(options[options.index("--json") + 1])
    if not report.exists():
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-500:]}\n{done.stderr[-2000:]}")


def analyse(table: dict[str, Any], row: dict[str, Any], rank: int, checkout: Path, path: str) -> int:
    """Bytes that a rank allocates at its peak."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rank.json"
        options = ["--target", table["target"], "--ranks", str(row.get("ranks", table["ranks"])), "--rank", str(rank)]
        options += ["--steps", "2", "--compile", "as-is", "--json", str(report)]
        program = ["pretrain_gpt.py", *make_flags(table, row)]
        run(options, program, checkout, path, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        return load_report(report).peak.allocated_bytes or 0


def read_flags(case: str, config: dict[str, Any], values: dict[str, str]) -> list[str]:
    """The arguments of a case, as `_run_training.sh` makes them of its `model_config.yaml`."""
    made = case.split("/")[0] in _TOKENS
    flags = ["--num-workers", "0"]
    if not made:
        tokens = _NEMOTRON if "--tokenizer-model" in config["MODEL_ARGS"] else _GPT2
        flags += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(tokens - 1)]
    for name, value in config["MODEL_ARGS"].items():
        if made or name not in _OF_DATA or config["MODEL_ARGS"].get("--mock-data"):
            flags += [name] if value is True else [name, string.Template(str(value)).safe_substitute(values)]
    return flags


def read_golden(table: dict[str, Any], case: str, work: Path, checkout: Path, path: str) -> list[float]:
    """What Megatron logs of a case: most and present bytes of the first iteration and of the last."""
    sys.path.append(path)
    from tensorboard.backend.event_processing import event_accumulator

    ranks = table["more_ranks"].get(case, table["ranks"])
    file = checkout / "tests" / "functional_tests" / "test_cases" / case / "model_config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    model = case.split("/")[0]
    folder, data = work / case, work / "data"
    values = {f"CHECKPOINT_{each}_PATH": str(folder / each.lower()) for each in ("SAVE", "LOAD")}
    cache = work / "-".join([model, *(str(config["MODEL_ARGS"].get(each, 0)) for each in _OF_SAMPLES)])
    values |= {"DATA_PATH": str(data), "DATA_CACHE_PATH": str(cache), "TENSORBOARD_PATH": str(folder)}
    values |= {"DATA_BLEND": str(data / _TOKENS.get(model, "")), "WANDB_EXPERIMENT": "none"}
    options = ["--target", table["target"], "--torch", table["torch"], "--ranks", str(ranks), "--compile", "as-is"]
    options += ["--write", "--json"]
    program = [f"pretrain_{model if model in _TOKENS else 'gpt'}.py", *read_flags(case, config, values)]
    program += table["shorter"].get(case, "").split()
    variables = {name: str(value) for name, value in config["ENV_VARS"].items()}
    folder.mkdir(parents=True)
    if model in _TOKENS and not cache.exists():  # which rank 0 fills for those that read samples
        run([*options, str(folder / "first.json"), "--rank", "0", "--steps", "1"], program, checkout, path, variables)
    run(
        [*options, str(folder / "rank.json"), "--rank", str(ranks - 1), "--steps", str(STEPS)],
        program,
        checkout,
        path,
        variables,
    )
    log = event_accumulator.EventAccumulator(str(folder))
    log.Reload()
    found = [[event.value for event in log.Scalars(tag)] for tag in _TAGS]
    return [values[end] for values in found for end in (0, -1)]


def _lines_before(title: str) -> tuple[Path, dict[str, str]]:
    """Today's page, and its rows by their cases."""
    file = RESULTS / f"{title}-{datetime.date.today():%Y-%m-%d}.md"
    before = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return file, {line.split(" | ")[0].removeprefix("| "): line for line in before if line.startswith("| ")}


def hold_goldens(given: argparse.Namespace, table: dict[str, Any]) -> float:
    """Run the functional tests' cases, print and write their table; the largest error of those that ran."""
    checkout = given.checkout.resolve()
    file, lines = _lines_before("megatron-goldens")
    worst = 0.0
    with tempfile.TemporaryDirectory() as made:
        work = given.work or Path(made)
        data = work / "data"
        make = [sys.executable, "-m", "benchmarks.published.megatron_data", str(data)]
        paths = os.pathsep.join([str(ROOT), str(checkout)])
        if not data.exists():
            environment = {**os.environ, "PYTHONPATH": paths}
            subprocess.run(make, cwd=checkout, env=environment, check=True, capture_output=True)
        for case, published in table["cases"].items():
            if not fnmatch.fnmatch(case, given.only):
                continue
            try:
                predicted = read_golden(table, case, work, checkout, given.path)
            except SystemExit as error:
                lines[case], worst = f"| {case} | did not run {'| ' * 8}", math.inf
                print(lines[case], str(error)[-500:], flush=True)
                continue
            errors = [ours / theirs - 1 for ours, theirs in zip(predicted, published, strict=True)]
            worst = max(worst, *map(abs, errors))
            cells = (f"{ours:,.0f} | {each:+.2%}" for ours, each in zip(predicted, errors, strict=True))
            lines[case] = f"| {case} | {' | '.join(cells)} |"
            print(lines[case], flush=True)
    _write_goldens(file, table, lines)
    return worst


def _write_goldens(file: Path, table: dict[str, Any], lines: dict[str, str]) -> None:
    """Write the page of the functional tests: each case, how many are near, and why the others are not."""
    ran = {case: lines[case] for case in table["cases"] if case in lines}
    whole = [line for line in ran.values() if "%" in line]
    errors = [[abs(float(each.strip(" |%"))) / 100 for each in line.split(" | ")[2::2]] for line in whole]
    near = sum(max(each[:2]) <= MOST_OFF for each in errors)
    all_near = sum(max(each) <= MOST_OFF for each in errors)
    mean = statistics.mean(each for case in errors for each in case[:2])
    file.write_text(
        "\n".join(
            [
                "# Megatron-LM's functional tests on eight H100, as its own runs and as its own code is analysed",
                "",
                "Scripts, flags and variables of the `model_config.yaml` of each case in Megatron-LM 23e00ed0 with the",
                "Python of TransformerEngine 2.11.0 and apex 25.09, untouched, under `fxmem run`, torch",
                f"{torch.__version__} with `--torch {table['torch']}`; data and vocabularies are made up. Bytes that",
                "Megatron logs on its last rank, after its first iteration and after a later one, and how far they are",
                "from those of its golden values (container 25.05 or before, torch 2.8.0a0). `megatron.toml` has both.",
                "",
                f"{len(whole)} of {len(table['cases'])} cases ran. In {near} both peaks are within {MOST_OFF:.1%}, in",
                f"{all_near} what is alive as well; the mean error of a peak is {mean:.2%}.",
                "",
                "| Case | Peak, first | | Peak, last | | Alive, first | | Alive, last | |",
                "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
                *ran.values(),
                "",
                "## Why some are off, or did not run",
                "",
                *(f"- `{pattern}`: {' '.join(cause.split())}" for pattern, cause in table["causes"].items()),
                "",
            ]
        ),
        encoding="utf-8",
    )


def main() -> None:
    """Analyse the rows, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="Megatron-LM at 23e00ed0")
    parser.add_argument("--path", default="", help="folder with TransformerEngine 2.11.0")
    parser.add_argument("--goldens", action="store_true", help="the functional tests' cases instead")
    parser.add_argument("--work", type=Path, help="with --goldens: where reports and logs stay")
    parser.add_argument("--only", default="*", help="pattern of the rows' names")
    given = parser.parse_args()
    table = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    if given.goldens:
        sys.exit(hold_goldens(given, table["goldens"]) > MOST_OFF)
    file, lines = _lines_before("megatron")
    worst = 0.0
    for row in table["rows"]:
        if not fnmatch.fnmatch(row["name"], given.only):
            continue
        began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        found = {rank: analyse(table, row, rank, given.checkout.resolve(), given.path) for rank in row["analysed"]}
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        rank = max(found, key=lambda each: found[each])
        predicted, published = found[rank] / (1 << 30), row.get("allocated_gib")
        error = 0.0 if published is None else predicted / published - 1
        worst = max(worst, abs(error))
        beside = ("", "") if published is None else (f"{published:.2f}", f"{error:+.2%}")
        seconds = round((spent.ru_utime - began) / len(found))
        cells = (
            row["name"],
            beside[0],
            f"{predicted:.2f}",
            beside[1],
            str(rank),
            f"{seconds} s, {spent.ru_maxrss >> 10} MiB",
        )
        lines[row["name"]] = f"| {' | '.join(cells)} |"
        print(lines[row["name"]], flush=True)
    head = [
        "# Megatron-LM on eight B200, as published and as its own code is analysed",
        "",
        "`pretrain_gpt.py` of Megatron-LM 23e00ed0 with the Python of TransformerEngine 2.11.0, untouched, under",
        f"`fxmem run`, torch {torch.__version__}. Published by MooreThreads/SimuMax, of torch 2.10.0a0: the largest",
        "`max_memory_allocated` of all ranks, GiB. Rank: the largest of those that were analysed. Costs: processor",
        "time for each of them, and the most memory that one of them or of those before it took.",
        "",
        "| Case | Published | Predicted | Error | Rank | Costs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    wanted = [lines[row["name"]] for row in table["rows"] if row["name"] in lines]
    file.write_text("\n".join([*head, *wanted, ""]), encoding="utf-8")
    sys.exit(worst > MOST_OFF)


if __name__ == "__main__":
    main()
