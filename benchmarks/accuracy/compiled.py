"""Compiled steps that an H100 ran, predicted with no card: `python -m benchmarks.accuracy.compiled [ROW ...]`.

The truth is `benchmarks/results/gpu/h100-compiled-generated-2026-11-22.json.gz`: peaks of `torch.cuda.memory_stats`,
and each allocation and free of a step in order. `about` there says how each was run. Printed as Markdown.

*Events* are the requested sizes that are on one side and not on the other, frees left out: workspaces of convolutions
that cuDNN without a driver names otherwise, above all.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import fxmem
from benchmarks import RESULTS

TRUTH = RESULTS / "gpu/h100-compiled-generated-2026-11-22.json.gz"


class LossOnly(nn.Module):
    """The compiled model inside a step that drops its output at once, as the measured script does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = torch.compile(model)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss."""
        return self.model(input_ids=input_ids, labels=labels).loss


def build(name: str) -> tuple[nn.Module, Any]:
    """The model of a row, on meta, and its batch."""
    if name == "hf-llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=8,
            hidden_size=2048,
            intermediate_size=5632,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=32000,
            use_cache=False,
        )
        ids = torch.zeros(4, 1024, dtype=torch.int64)
        return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}
    if name == "hf-gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        ids = torch.zeros(8, 512, dtype=torch.int64)
        return GPT2LMHeadModel(GPT2Config(use_cache=False)), {"input_ids": ids, "labels": ids}
    import timm
    import torchvision

    images = torch.zeros(32, 3, 224, 224)
    if hasattr(torchvision.models, name):
        return getattr(torchvision.models, name)(), images
    return timm.create_model(name), images


def predict(row: str, truth: dict[str, Any]) -> str:
    """A row of the table."""
    _, kind, name = row.split("/")
    with torch.device("meta"):
        model, inputs = build(name)
    hugging, compile = name.startswith("hf-") and kind == "train", "default"
    if hugging:
        model, compile = LossOnly(model), "as-is"
    begin = time.process_time()
    options = {"mode": kind, "compile": compile, "keep_outputs": False}  # as it was measured: a step in a function
    analysis = fxmem.analyze(model, inputs, target="h100", **options)  # type: ignore[arg-type]
    seconds = time.process_time() - begin
    peak, real = analysis.peak, truth["peak"]
    mine = Counter(storage.nbytes for storage in analysis.profile.storages if storage.birth)
    theirs = Counter(event for event in truth["events"] if isinstance(event, int) and event > 0)
    strange = (mine - theirs).total() + (theirs - mine).total()
    offs = [
        f"{100 * ((ours or 0) / real[key] - 1):+.2f} %"
        for ours, key in (
            (peak.requested_bytes, "requested"),
            (peak.allocated_bytes, "allocated"),
            (peak.reserved_bytes, "reserved"),
        )
    ]
    figures = (f"{peak.requested_bytes:,}", f"{real['requested']:,}", *offs, f"{strange} of {theirs.total()}")
    return f"| {row} | {' | '.join(figures)} | {seconds:.0f} |"


def main() -> None:
    """Print the table."""
    results = json.loads(gzip.decompress(TRUTH.read_bytes()))["results"]
    rows = sys.argv[1:] or [row for row in results if row.startswith("default/")]
    print("| step | predicted, requested | real | off | allocated | reserved | events that differ | CPU seconds |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(predict(row, results[row]), flush=True)


if __name__ == "__main__":
    main()
