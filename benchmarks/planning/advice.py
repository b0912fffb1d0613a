"""What each change is really worth, for models people train: `python -m benchmarks.planning.advice`.

For each model every change of `fxmem advise` by itself, for an H100; the share of the allocated peak that it frees.
Written to benchmarks/results/advice-DATE.md.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from benchmarks import RESULTS, make_inputs
from fxmem.cli.specs import build_model
from fxmem.cli.specs.inputs import parse_input
from fxmem.records.advice import Advice
from fxmem.simulation.step.analysis import analyze_step
from fxmem.simulation.step.request import StepRequest

MODELS: tuple[tuple[str, str, dict[str, object], tuple[str, ...]], ...] = (
    ("ResNet-50, 64", "torchvision:resnet50", {}, ("64x3x224x224",)),
    ("VGG-19, 64", "torchvision:vgg19", {}, ("64x3x224x224",)),
    ("U-Net, 8", f"{Path(__file__)}:UNet", {}, ("8x1x572x572",)),
    ("DenseNet-121, 64", "torchvision:densenet121", {}, ("64x3x224x224",)),
    ("ViT-B/16, 64", "torchvision:vit_b_16", {}, ("64x3x224x224",)),
    ("GPT-2, 8 x 1024", "hf:GPT2LMHeadModel", {}, ("input_ids:8x1024", "labels:8x1024")),
    ("Llama-8B, 1 x 2048", "hf:LlamaForCausalLM",
     {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 8, "vocab_size": 128256},
     ("input_ids:1x2048", "labels:1x2048")),
)  # fmt: skip
GENERAL = {
    "release": "let go of outputs after their last use",
    "freeze": "the last part trained alone, or the largest frozen; the better of both",
}
"""Titles of changes that have another in each model."""


class UNet(nn.Module):
    """Ronneberger, Fischer and Brox 2015 (arXiv:1505.04597), figure 1: convolutions without padding, so that 572 pixels
    become 388."""

    def __init__(self, channels: int = 1, classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _twice(before, after) for before, after in zip([channels, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * after, after, 2, stride=2) for after in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_twice(2 * after, after) for after in reversed(widths[:-1]))
        self.dropout = nn.Dropout()  # "at the end of the contracting path", section 3.1
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the pixels in the middle."""
        skipped = []
        for block in self.down[:-1]:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.dropout(self.down[-1](x))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = up(x)
            x = merge(torch.cat([_cropped(skipped.pop(), x), x], 1))
        return self.head(x)


def _twice(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3), nn.ReLU(), nn.Conv2d(after, after, 3), nn.ReLU())


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    height, width = like.shape[-2:]
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    return x[..., top : top + height, left : left + width]


def advised(spec: str, settings: dict[str, object], inputs: tuple[str, ...]) -> Advice:
    """Every change but checkpoints, tried one by one; checkpoints stand in the planners' own table."""
    built = build_model(spec, settings)
    args, kwargs = make_inputs([parse_input(text) for text in inputs], weights_dtype=built.weights_dtype)
    return fxmem.advise(analyze_step(built.module, StepRequest(args=args, kwargs=kwargs, name=spec)), plans=False)


def main() -> None:
    """Try everything and write the page."""
    columns: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    peaks = {}
    for name, spec, settings, inputs in MODELS:
        print(name, flush=True)
        advice = advised(spec, settings, inputs)
        before = advice.before.counted_bytes
        peaks[name] = before
        for each in advice.suggestions:
            key = each.key.partition(":")[0]
            titles.setdefault(key, f"{GENERAL.get(key, each.title)} ({each.effect})")
            best = columns.setdefault(name, {}).get(key)
            share = 100 * each.saved_bytes / before
            columns[name][key] = f"{max(share, float(best[:-2]) if best else share):.1f} %"
        for other in advice.refused:
            refused.setdefault((other.key.partition(":")[0], other.reason), []).append(name)
    names = list(peaks)
    reasons = [f"- `{key}`: {why} ({'; '.join(dict.fromkeys(where))})" for (key, why), where in sorted(refused.items())]
    rows = [
        f"| {title} | " + " | ".join(columns.get(name, {}).get(key, "") for name in names) + " |"
        for key, title in titles.items()
    ]
    page = [
        "# What each change is worth", "",
        f"Share of the allocated peak of one training step that each change frees by itself, predicted for an H100, "
        f"AdamW, torch {torch.__version__}; empty: "
        "less than a thousandth, or not to be had. In brackets what it does to the numbers. Made by `python "
        "benchmarks/planning/advice.py`.", "",
        "| change | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names),
        "| peak, unchanged | " + " | ".join(f"{peaks[name] / 2**30:.2f} GiB" for name in names) + " |", *rows, "",
        "## What frees nothing, and why", "", *reasons, "",
    ]  # fmt: skip
    path = RESULTS / f"advice-{datetime.date.today()}.md"
    path.write_text("\n".join(page), encoding="utf-8")
    print("\n".join(page))


if __name__ == "__main__":
    main()
