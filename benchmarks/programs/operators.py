"""Every operator of torch's own list, forward and backward, predicted and measured on the CPU: `make operators`.

The list is `op_db` of `torch.testing._internal`, with which torch tests its operators; sample arguments come with it.
An operator is a model whose parameters are the floating-point arguments; it runs once with gradients of ones and once
without gradients. What is predicted is held to the profiler's log, libraries' workspaces (`measure_cpu`) set aside.

    python -m benchmarks.programs.operators [--only NAME ...] [--rows FILE]

Each run is a line of the file of rows, by default one of today in the folder for temporary files: started again, it
goes on where it stopped. The summary is benchmarks/results/operators-DATE.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
import tempfile
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks import RESULTS
from fxmem.errors import FxmemError
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.request import StepRequest
from fxmem.validation.measure_cpu import measure_cpu

TOLERANCE = 1e-4
LARGER = 4
"""Factor on the sides of torch's samples, so that a kernel's numbers do not disappear among single ones."""
HUGE = ("grid_sampler_3d",)
"""Operators with samples of five such sides, 15 GB; theirs stay as small as torch has them."""
SINGLE_NUMBERS = 64
"""Bytes that are let pass: numbers that kernels of the CPU wrap as tensors, up to a handful alive at once."""
MODES = ("train", "infer")


class Operator(nn.Module):
    """One operator on sample arguments, of which those that are differentiable are parameters.

    Args:
        call: what is called.
        arguments: `(positional, by name)`.
    """

    def __init__(self, call: Callable[..., Any], arguments: tuple[Sequence[Any], dict[str, Any]]) -> None:
        super().__init__()
        self.call = [call]  # in a list: a module would become a submodule
        self.leaves, self.spec = tree_flatten(arguments)
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                value = leaf.detach().clone()
                if leaf.requires_grad:
                    self.register_parameter(f"leaf_{index}", nn.Parameter(value))
                else:
                    self.register_buffer(f"leaf_{index}", value)
                self.leaves[index] = None

    def forward(self) -> Any:
        """What the operator returns."""
        own = dict((*self.named_parameters(), *self.named_buffers()))
        leaves = [own.get(f"leaf_{index}", leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.call[0](*args, **kwargs)


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*results)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = tuple(torch.ones_like(result) for result in ctx.saved_tensors)
        return found if len(found) > 1 else found[0]


def gradient_of_ones(out: Any) -> torch.Tensor:
    """A loss whose gradient for each differentiable result is one everywhere, and which computes nothing."""
    results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    made: torch.Tensor = _Ones.apply(*results)
    return made


def operators() -> list[Any]:
    """torch's list, the operators that take float32."""
    # torch's tests want a package that only they use; the list of operators needs the name of its class only.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal import common_methods_invocations as listed
    from torch.testing._internal.opinfo.definitions import _masked, fft, linalg, special

    for module in (listed, _masked, fft, linalg, special):
        for name in {"XS", "S", "M", "L"} & vars(module).keys():
            setattr(module, name, LARGER * getattr(module, name))
    torch.testing._utils.freeze_rng_state = (
        contextlib.nullcontext
    )  # copies of generators' states are not the operator's
    return [info for info in listed.op_db if torch.float32 in info.dtypes]


@contextlib.contextmanager
def _own_sizes(info: Any) -> Iterator[None]:
    """Give this operator's samples the sizes that torch has."""
    module = vars(sys.modules[info.sample_inputs_func.__module__])
    larger = {name: module[name] for name in ("S", "M", "L")}
    module.update({name: size // LARGER for name, size in larger.items()})
    try:
        yield
    finally:
        module.update(larger)


def full_name(info: Any) -> str:
    """The name of an operator with that of its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def sample(info: Any, gradients: bool) -> tuple[Sequence[Any], dict[str, Any]] | None:
    """The arguments with the most numbers among torch's samples; None without any."""
    torch.manual_seed(0)
    with _own_sizes(info) if info.name in HUGE else contextlib.nullcontext():
        found = list(info.sample_inputs("cpu", torch.float32, requires_grad=gradients and info.supports_autograd))

    def numbers(each: Any) -> int:
        leaves = tree_flatten((each.input, each.args, each.kwargs))[0]
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

    if not found:
        return None
    largest = max(found, key=numbers)
    return (largest.input, *largest.args), largest.kwargs


def run(info: Any, mode: str) -> dict[str, Any] | None:
    """One operator, predicted and measured; None where eager does not run it so."""
    train = mode == "train"
    if train and not info.supports_autograd:
        return None
    name = full_name(info)
    row: dict[str, Any] = {"operator": name, "mode": mode}
    try:
        arguments = sample(info, train)
    except Exception:
        return None
    if arguments is None:
        return None
    request = StepRequest(
        mode=mode,
        loss=gradient_of_ones if train else None,
        optimizer=None,
        target="cpu",
        name=name,  # type: ignore[arg-type]
    )

    def model() -> Operator:
        torch.manual_seed(0)
        return Operator(info.op, arguments).train(train)

    try:
        measured = measure_cpu(model(), request, steps=2)
    except Exception as error:
        return None if "requires_grad" in str(error) else {**row, "eager": _line(error)}
    row |= {"measured": measured.peak_without_kernel_scratch_bytes, "at": measured.peak_op}
    try:
        analysis = analyze_step(model(), request)
    except FxmemError as error:
        return {**row, "refused": _line(error)}
    unknowns = [unknown.what for unknown in analysis.profile.unknowns if unknown.topic == "memory"]
    bounded = any("taken at its largest" in assumption.text for assumption in analysis.profile.assumptions)
    return {**row, "predicted": analysis.peak.requested_bytes, "unknowns": unknowns, "bounded": bounded}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def needs_values(row: dict[str, Any]) -> bool:
    """Whether a run was refused because its memory depends on the data, or because its tensors are sparse."""
    reasons = "depend on the data", "expected dense tensors", "its data is", "aten::_to_sparse cannot"
    return any(why in row.get("refused", "") for why in reasons)


def agrees(row: dict[str, Any]) -> bool:
    """Whether a run is within the tolerance, has a listed unknown, or hangs on data and is at most the largest."""
    if "refused" in row:
        return False
    if row.get("bounded") and row["predicted"] >= row["measured"]:
        return True
    allowed = max(TOLERANCE * row["measured"], SINGLE_NUMBERS)
    return abs(row["predicted"] - row["measured"]) <= allowed or bool(row["unknowns"])


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of the results, in Markdown."""
    by_operator = defaultdict(list)
    for row in rows:
        if "eager" not in row:
            by_operator[row["operator"]].append(row)
    refused = sorted(name for name, runs in by_operator.items() if any(map(needs_values, runs)))
    held = {name: runs for name, runs in by_operator.items() if name not in refused}
    good = sum(all(map(agrees, runs)) for runs in held.values())
    unknown = sum(all(map(agrees, runs)) and any(run["unknowns"] for run in runs) for runs in held.values())
    yield f"# Operators of torch's list, predicted and measured on the CPU, {datetime.date.today()}"
    yield ""
    yield (
        f"torch {torch.__version__}, one thread. {len(by_operator)} operators in {sum(map(len, held.values()))} runs; "
        f"{len(refused)} need values or are sparse, and are refused. **{good} of {len(held)} "
        f"({100 * good / max(1, len(held)):.1f} %)** are within {TOLERANCE:.2%} (or {SINGLE_NUMBERS} bytes) in every "
        f"run; {unknown} of them list an unknown."
    )
    yield ""
    yield "| operator | mode | predicted | measured | ran at the peak |"
    yield "|---|---|---:|---:|---|"
    for row in (run for runs in held.values() for run in runs if not agrees(run)):
        yield (
            f"| {row['operator']} | {row['mode']} | {row.get('predicted', 'refused')} | {row['measured']} | "
            f"{row['at'] or 'between two operators'} |"
        )
    yield ""
    yield f"Refused: {', '.join(refused)}."


def main() -> None:
    """Run the sweep and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="operators; default all")
    name = f"operators-{datetime.date.today()}"
    parser.add_argument("--rows", type=Path, default=Path(tempfile.gettempdir()) / f"fxmem-{name}.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    done = {(row["operator"], row["mode"]) for row in found}
    with options.rows.open("a") as file:
        for info in operators():
            if options.only and info.name not in options.only:
                continue
            for mode in MODES:
                row = None if (full_name(info), mode) in done else run(info, mode)
                if row is not None:
                    found.append(row)
                    print(json.dumps(row), file=file, flush=True)
    lines = list(summary(found))
    print("\n".join(lines))
    if not options.only:
        (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
