"""Small bugs put into the package one at a time, and whether the tests notice: `make mutants`.

A mutant is one changed spot: a comparison, an operator, a constant, `and` for `or`, `not` taken away, a statement left
out. Each runs in a copy of the repository against the test files of its module, until the first failure; which spots
are taken is drawn from a fixed seed. What is written goes on where it stopped on the same day. A survivor is a test
that is missing, or a change that changes nothing.

    make mutants MUTANTS_ARGS="--each 12 --only allocator"
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import RESULTS

ROOT = Path(__file__).parents[2]
MODULES = {
    "memory/allocator/caching_allocator.py": ["memory/test_allocator.py"],
    "memory/allocator/settings.py": ["memory/test_allocator.py"],
    "memory/liveness.py": ["memory/test_liveness.py", "validation/test_verdict.py"],
    "simulation/recording/profile_builder.py": ["simulation/test_analysis.py", "simulation/test_step.py"],
    "simulation/recording/observe/autograd_engine.py": [
        "simulation/recording/observe/test_autograd_engine.py",
        "simulation/recording/observe/test_inplace_nodes.py",
    ],
    "simulation/recording/observe/graph_task.py": ["simulation/recording/observe/test_autograd_engine.py"],
    "simulation/recording/observe/backward_hooks.py": ["simulation/recording/observe/test_autograd_engine.py"],
    "planning/lookups.py": ["planning"],
    **{
        f"hardware/operators/{family}.py": ["hardware", "simulation/recording/flops", *more]
        for family, more in {
            "attention": [],
            "convolution": [],
            "images": ["simulation/kernels/test_composed.py"],
            "indices": ["simulation/kernels/test_composed.py", "simulation/recording/observe/test_inplace_nodes.py"],
            "losses": ["simulation/kernels/test_losses.py"],
            "norms": ["simulation/kernels/test_composed.py"],
            "products": ["simulation/kernels/test_copies.py"],
            "recurrent": [],
            "reductions": ["simulation/kernels/test_copies.py"],
        }.items()
    },
    "hardware/context.py": ["hardware/workspaces"],
    "hardware/workspaces/insertion.py": ["hardware/workspaces"],
}
"""By module of the package, the test files that should notice."""
SECONDS = 240
"""Of one run; a mutant that never ends is caught."""

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
               ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+", ast.LShift: ">>"}


class Mutant(NamedTuple):
    """One changed spot."""

    start: int
    end: int
    text: str
    """What stands there instead."""


def mutants(source: str) -> Iterator[Mutant]:
    """All of a module, in the order of its text."""
    tree = ast.parse(source)
    lines = source.encode().splitlines(keepends=True)
    begins = [sum(map(len, lines[:number])) for number in range(len(lines))]

    def at(line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return begins[line - 1] + column

    def whole(node: Any, text: str) -> Mutant:
        return Mutant(at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), text)

    def between(left: Any, right: Any, text: str) -> Mutant:
        return Mutant(at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset), f" {text} ")

    raw = source.encode()
    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield between(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            gap = between(node.left, node.right, OPERATORS[type(node.op)])
            if b"(" not in raw[gap.start : gap.end] and b")" not in raw[gap.start : gap.end]:
                yield gap
        elif isinstance(node, ast.BoolOp):
            gap = between(node.values[0], node.values[1], "or" if isinstance(node.op, ast.And) else "and")
            if b"(" not in raw[gap.start : gap.end] and b")" not in raw[gap.start : gap.end]:
                yield gap
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(at(node.lineno, node.col_offset), at(node.operand.lineno, node.operand.col_offset), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield whole(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield whole(node, str(node.value + 1))
        elif isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(getattr(node, "value", None), ast.Constant):
            yield whole(node, "pass")


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations and what only describes."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert):
                yield child
                yield from _code(child)


def is_caught(copy: Path, tests: list[str]) -> bool:
    """Whether the tests fail in this copy."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{each}" for each in tests)],
            cwd=copy,
            env=environment,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    """Make, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=8, help="mutants of one module (8)")
    parser.add_argument("--only", default="", help="modules whose path has this in it")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    path = RESULTS / f"mutants-{datetime.date.today()}.json"
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made)
        for name in ("fxmem", "tests", "benchmarks", "schemas", "docs", "examples", "pyproject.toml", "README.md"):
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        for module, tests in MODULES.items():
            if given.only not in module:
                continue
            target = copy / "fxmem" / module
            original = target.read_bytes()
            every = list(mutants(original.decode()))
            if is_caught(copy, tests):
                raise SystemExit(f"{module}: its tests fail, or take too long, without any mutant")
            for mutant in random.Random(given.seed).sample(every, min(given.each, len(every))):
                line = original[: mutant.start].count(b"\n")
                before = original[mutant.start : mutant.end].decode()
                key = f"{module}:{line + 1}: {before.strip() or '(nothing)'} -> {mutant.text.strip() or '(nothing)'}"
                if key in results:
                    continue
                target.write_bytes(original[: mutant.start] + mutant.text.encode() + original[mutant.end :])
                began = time.monotonic()
                caught = is_caught(copy, tests)
                target.write_bytes(original)
                text = original.decode().splitlines()[line].strip()
                results[key] = {"caught": caught, "line": text, "seconds": round(time.monotonic() - began)}
                path.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{'caught  ' if caught else 'SURVIVED'} {key}    {text}", flush=True)
    caught = sum(result["caught"] for result in results.values())
    print(f"{caught} of {len(results)} mutants caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
