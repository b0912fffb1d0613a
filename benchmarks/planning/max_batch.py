"""The largest batch of well-known models, and that it is exact: `python -m benchmarks.planning.max_batch`.

For each model the largest batch of a training step with AdamW on a card of 24 GB, as `fxmem max-batch` finds it; then
two analyses made afresh, of which that of the size found has to fit and that of the next size must not. Written to
benchmarks/results/max-batch-DATE.md. Exits 1 where that does not hold.
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

import torch

from benchmarks import RESULTS, make_inputs
from fxmem.cli.specs import build_model
from fxmem.cli.specs.inputs import parse_input
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.request import StepRequest
from fxmem.whatif.max_batch import max_batch

TARGET = "rtx4090"
MODELS: tuple[tuple[str, dict[str, object], tuple[str, ...]], ...] = (
    ("torchvision:resnet50", {}, ("Nx3x224x224",)),
    ("torchvision:vgg16", {}, ("Nx3x224x224",)),
    ("torchvision:densenet121", {}, ("Nx3x224x224",)),
    ("torchvision:mobilenet_v3_large", {}, ("Nx3x224x224",)),
    ("torchvision:efficientnet_b0", {}, ("Nx3x224x224",)),
    ("torchvision:vit_b_16", {}, ("Nx3x224x224",)),
    ("torchvision:swin_t", {}, ("Nx3x224x224",)),
    ("timm:convnext_tiny", {}, ("Nx3x224x224",)),
    ("timm:mixer_b16_224", {}, ("Nx3x224x224",)),
    ("hf:BertForMaskedLM", {}, ("input_ids:Nx512", "labels:Nx512")),
    ("hf:GPT2LMHeadModel", {}, ("input_ids:Nx1024", "labels:Nx1024")),
    ("hf:LlamaForCausalLM",
     {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4, "num_attention_heads": 32,
      "num_key_value_heads": 4, "vocab_size": 32000},
     ("input_ids:Nx1024", "labels:Nx1024")),
)  # fmt: skip


def analysed(spec: str, settings: dict[str, object], inputs: tuple[str, ...], size: int) -> Any:
    """The step at one size, from the model on."""
    built = build_model(spec, settings)
    args, kwargs = make_inputs(
        [parse_input(text.replace("N", str(size), 1)) for text in inputs], weights_dtype=built.weights_dtype
    )
    return analyze_step(built.module, StepRequest(args=args, kwargs=kwargs, name=spec, target=TARGET))


def main() -> int:
    """Search, check, and write the page."""
    rows, wrong = [], 0
    for spec, settings, inputs in MODELS:
        began = time.perf_counter()
        curve = max_batch(analysed(spec, settings, inputs, 4))
        seconds = time.perf_counter() - began
        largest = curve.largest or 0
        peaks = [analysed(spec, settings, inputs, size).peak for size in (largest, largest + 1)]
        exact = [peak.fits for peak in peaks] == [True, False]
        wrong += not exact
        below, above = (
            f"{(peak.allocated_bytes or 0) / 2**30:.3f} / {(peak.reserved_bytes or 0) / 2**30:.3f}" for peak in peaks
        )
        row = (
            f"| {spec} | {largest} | {below} | {above} | {'yes' if exact else 'NO'} | {len(curve.points)} | "
            f"{seconds:.0f} |"
        )
        print(row, flush=True)
        rows.append(row)
    page = [
        "# The largest batch", "",
        f"The largest batch of a training step with AdamW, float32, on an {TARGET}, by `fxmem max-batch`; then the "
        f"size found and the next, "
        "analysed afresh. Peaks in GiB, allocated / reserved as on a card without a bound: on this one the allocator "
        "gives its cache back before it fails, and "
        f"fragmentation may make it fail below the card's memory. torch {torch.__version__}. Made by `python "
        f"benchmarks/planning/max_batch.py`.", "",
        "| model | largest | peak there | peak at the next size | fits, and the next does not | analyses | seconds |",
        "|---|---:|---:|---:|---|---:|---:|", *rows, "",
    ]  # fmt: skip
    (RESULTS / f"max-batch-{datetime.date.today()}.md").write_text("\n".join(page), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
