"""Count the combinations of a subject, a verb and an option that the command line refuses: `make refusals`.

Each verb that asks about memory is called on each kind of subject, alone and with each of its own options, up to where
the first analysis would begin. A refusal is exit code 2 before that. A subject that a verb refuses counts once for
itself and once for each of the verb's options, since none of them can be asked of it. The number may only fall.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

MODEL = """
import torch


def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
"""
SUBJECTS = {
    "model": (["model.py:build", "--input", "4x8"], []),
    "model compiled": (["model.py:build", "--input", "4x8", "--compile"], []),
    "model at inference": (["model.py:build", "--input", "4x8", "--mode", "infer"], []),
    "model on ranks": (["model.py:build", "--input", "4x8", "--mesh", "fsdp=2"], []),
    "generation": (["hf:GPT2LMHeadModel", "--set", "n_layer=1", "--mode", "generate", "--new", "4"], []),
    "program": ([], ["--run", "train.py", "{}"]),
    "program compiled": (["--compile", "as-is"], ["--run", "train.py", "{}"]),
    "program on ranks": (["--ranks", "2"], ["--run", "train.py", "{}"]),
    "report of a step": (["report.json"], []),
    "report of a generation": (["generation.json"], []),
    "report of a program": (["program.json"], []),
}
"""What comes first and what comes last on the command line."""
VERBS = ("analyze", "plan", "advise", "max-batch", "cards", "shard", "validate", "show", "show --by line")
VERBS = (*VERBS, "show --by layer", "report", "graph", "graph --by time", "graph --by module", "export", "sweep")
NEEDED = {
    "shard": ["--cards", "2xh100", "--batch", "4"],
    "report": ["-o", "out.html"],
    "graph": ["-o", "out.svg"],
    "graph --by time": ["-o", "out.svg"],
    "graph --by module": ["-o", "out.svg"],
    "export": ["--to", "csv", "-o", "out.csv"],
    "sweep": ["--over", "batch=2,4"],
}
"""What a verb asks for whatever its subject is."""
OPTIONS = {
    "--budget": ["1GiB"],
    "--plan": [],
    "--strategy": ["chen"],
    "--application": ["operators"],
    "--host-memory": ["1GiB"],
    "--code": [],
    "--quick": [],
    "--no-plans": [],
    "--svg": ["out.svg"],
    "--html": ["out.html"],
    "--json": ["out.json"],
    "--goal": ["throughput"],
    "--dim": ["batch"],
    "--limit": ["64"],
    "--only": ["h100"],
    "--time": [],
    "--steps": ["3"],
    "--device": ["cpu"],
    "--tolerance": ["0.1"],
    "--check": [],
    "--full": [],
    "--depth": ["1"],
    "--max-boxes": ["9"],
    "--heat": ["flops"],
    "--focus": ["peak"],
    "--format": ["csv"],
    "--all": [],
    "--cards": ["2xh100"],
    "--seq": ["8"],
    "--over": ["card=t4,l4"],
    "--grid": ["grid.toml"],
    "--price": ["h100=2.99"],
    "--markdown": ["table.md"],
}
"""What is asked of a subject, in options of the verbs; what describes a model's step is the subject's own."""
OF_FILE = {"max-batch", "report", "graph", "graph --by time"}
"""Verbs whose `--plan` names a file."""
ANALYSES = (
    ("fxmem.simulation.step.analysis", "_trace"),
    ("fxmem.simulation.step.analysis", "trace_step"),
    ("fxmem.simulation.step.generation.recorded_generation", "generate_step"),
    ("fxmem.whatif.program_step", "launch_apart"),
    ("fxmem.whatif.program_step", "_in_another_process"),
    ("fxmem.validation.validate", "measure_program"),
    ("fxmem.validation.validate", "read_snapshot"),
    ("fxmem.whatif.fits", "run_forked"),
    ("fxmem.cli.output", "write_page"),
    ("fxmem.cli.verbs.report", "write_page"),
)
"""Where an analysis begins, or the page of a report, by module and name; those that there are."""


class _AcceptedError(BaseException):
    """Nothing was refused up to the first analysis."""


def _accept(*_: Any, **__: Any) -> Any:
    raise _AcceptedError


@contextlib.contextmanager
def _no_analysis() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name in ANALYSES:
            with contextlib.suppress(ImportError):
                holder = importlib.import_module(module)
                if hasattr(holder, name):
                    stack.enter_context(mock.patch.object(holder, name, _accept))
        yield


def is_refused(words: list[str]) -> str:
    """The refusal of a command; empty where it is none."""
    from fxmem.__main__ import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except _AcceptedError:
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    return said.getvalue().strip().splitlines()[-1] if code == 2 else ""


def commands() -> Iterator[tuple[str, str, str, list[str]]]:
    """Subject, verb and option of each combination, and its command."""
    from fxmem.cli.verbs import load

    for verb in VERBS:
        words = verb.split()
        module = load(words[0])
        forms = getattr(module, "FORMS", {None: ()})
        own = forms[words[-1] if len(words) > 1 else None]
        others = [each for each in itertools.chain(*forms.values()) if each not in own]
        own = {name for each in module.ARGUMENTS if each not in others for name in each.names}
        for subject, (first, last) in SUBJECTS.items():
            first = [*first, *NEEDED.get(verb, [])]
            yield subject, verb, "", [*words, *first, *last]
            for option, values in OPTIONS.items():
                if option in own and option not in first:
                    given = ["plan.json"] if option == "--plan" and verb in OF_FILE else values
                    yield subject, verb, option, [*words, *first, option, *given, *last]


def main() -> None:
    """Print the refusals by verb, and with --list each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each refusal")
    options = parser.parse_args()
    asked: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        import torch

        import fxmem

        Path("model.py").write_text(MODEL)
        Path("train.py").write_text("")
        Path("grid.toml").write_text('card = ["t4", "l4"]')
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        analysis = fxmem.analyze(model, torch.empty(4, 8))
        analysis.to_json("report.json")
        with fxmem.record("h100") as recorded:
            torch.nn.Linear(8, 8).cuda()(torch.ones(4, 8, device="cuda")).sum().backward()
        recorded.to_json("program.json")
        main_ = importlib.import_module("fxmem.__main__").main
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main_(["generate", *SUBJECTS["generation"][0][:3], "--new", "4", "--json", "generation.json"])
        Path("plan.json").write_text(fxmem.plan(analysis, budget="100%").to_json())
        # A command builds the parsers of all verbs.
        once = functools.cache(importlib.import_module("fxmem.cli.verbs").build_parser)
        with _no_analysis(), mock.patch("fxmem.__main__.build_parser", once):
            for subject, verb, option, words in commands():
                asked[verb] += 1
                why = is_refused(words)
                refused[verb] += bool(why)
                if why and options.list:
                    print(json.dumps([verb, subject, option, why]), flush=True)
    for verb in VERBS:
        print(f"{verb:<18}{refused[verb]:>5} of {asked[verb]:>4}", file=sys.stderr)
    print(f"{refused.total()} of {asked.total()} combinations are refused")


if __name__ == "__main__":
    main()
