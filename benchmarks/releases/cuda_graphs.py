"""CUDA graphs, predicted and on the stand-in: `python -m benchmarks.releases.cuda_graphs`.

On the stand-in for a card (`stand_in.py`), inductor's wrappers, `cudagraph_trees` and the caching allocator with its
private pools are torch's own; inductor's Triton kernels are left unbuilt, which allocate nothing. The second step
records; what it allocates, and what is reserved from then on, is compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import fxmem
from benchmarks.releases.stand_in import build
from fxmem._torch.compiler.inductor import _triton_driver, own_files

_STEPS = 5
_CARD = "NVIDIA H100 80GB HBM3"


class Residual(nn.Module):
    """Wide layers with norms; its output is not the loss."""

    def __init__(self, dropout: float = 0.0, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))
        self.norm, self.dropout, self.breaks = nn.LayerNorm(1024), nn.Dropout(dropout), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what each layer makes."""
        for number, layer in enumerate(self.layers):
            x = x + self.dropout(nn.functional.gelu(layer(self.norm(x))))
            if self.breaks and number == 1:
                torch._dynamo.graph_break()
        return x


def _narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 63), nn.ReLU())


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


CASES: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "two wide layers": (_wide, (2048, 512), "train"),
    "two wide layers, inference": (_wide, (2048, 512), "infer"),
    "a narrow layer": (_narrow, (16384, 64), "train"),
    "four blocks": (Residual, (3000, 1024), "train"),
    "four blocks, inference": (Residual, (3000, 1024), "infer"),
    "four blocks, dropout": (lambda: Residual(dropout=0.1), (3000, 1024), "train"),
    "four blocks, a graph break": (lambda: Residual(breaks=True), (3000, 1024), "train"),
}
"""By name: what builds the model, the shape of its input, and the mode."""


def predict(name: str) -> tuple[int | None, int | None]:
    """Allocated bytes of the step that records, and reserved bytes."""
    build_model, shape, mode = CASES[name]
    analysis = fxmem.analyze(build_model(), torch.zeros(shape), mode=mode, target="h100", compile="reduce-overhead")
    return analysis.peak.allocated_bytes, analysis.peak.reserved_bytes


class _Unbuilt:
    """A kernel of inductor's that does nothing."""

    def run(self, *_: Any, **__: Any) -> None:
        """Launch nothing."""


@contextlib.contextmanager
def _without_kernels() -> Any:
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.triton = lambda *_, **__: _Unbuilt()  # type: ignore[method-assign,assignment]
    AsyncCompile.wait = lambda *_: None  # type: ignore[method-assign,assignment]
    card = SimpleNamespace(shared_memory_per_block_optin=232448, multi_processor_count=132)
    with own_files(), _triton_driver(card, (9, 0)):
        yield


def measure(name: str) -> tuple[int, int]:
    """The same, on the stand-in that this process runs on."""
    build_model, shape, mode = CASES[name]
    torch.cuda.init()
    model, x = build_model().to("cuda"), torch.zeros(shape, device="cuda")
    model.train(mode == "train")
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, mode="reduce-overhead")
    allocated, reserved = 0, 0

    def step() -> None:
        out = compiled(x)
        if mode == "train":
            loss = out.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.set_grad_enabled(mode == "train"):
        for number in range(_STEPS):
            torch.cuda.reset_peak_memory_stats()
            step()
            if number == 1:
                allocated = torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved()
    return allocated, reserved


def main() -> None:
    """Print a table, one row a case."""
    with tempfile.TemporaryDirectory() as made:
        environ = {**os.environ, **build(Path(made)), "CARD_NAME": _CARD}
        print("| Step | Allocated | off | Reserved | off |\n|---|---:|---:|---:|---:|")
        for name in CASES:
            command = [sys.executable, "-m", "benchmarks.releases.cuda_graphs", name]
            ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if ran.returncode:
                sys.exit(f"{name}: {ran.stderr}")
            real = json.loads(ran.stdout.splitlines()[-1])
            cells = [f"{there:,} | {(mine or 0) - there:,}" for mine, there in zip(predict(name), real, strict=True)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) == 1:
        main()
    else:
        with _without_kernels():
            print(json.dumps(measure(sys.argv[1])))
