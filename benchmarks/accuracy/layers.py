"""Layers as we count them beside torchinfo, fvcore and ptflops: parameters, multiply-adds, output shapes.

    pip install torchinfo fvcore ptflops
    python -m benchmarks.accuracy.layers                  (about a minute; nothing is downloaded, and no GPU is needed)

Each tool is given the same model at inference, on the CPU, and the figures are set side by side as each reports them.
The counting rules differ; torchinfo's is applied to our layers, so that what it does not explain would be seen. Also
compared, layer by layer: parameters and output shape of every module that torchinfo lists and that our graph has as a
call.

Writes `benchmarks/accuracy/layers.md`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torchinfo
import torchvision
from fvcore.nn import FlopCountAnalysis
from ptflops import get_model_complexity_info

import fxmem
from fxmem.memory.by_layer import by_layer
from fxmem.records.breakdown import Layer

MODELS = (
    "alexnet",
    "vgg16",
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "densenet121",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
)
PRODUCTS = ("conv", "linear", "matmul", "einsum", "bmm", "addmm")
"""fvcore's names of what we count as MACs."""
BATCH, SIDE = 2, 224


def main() -> None:
    """Compare every model and write the table."""
    rows, notes = [], []
    for name in MODELS:
        row, unexplained = compared(name)
        rows.append(row)
        notes += unexplained
        print(" ".join(row), flush=True)
    Path(__file__).with_suffix(".md").write_text(written(rows, notes), encoding="utf-8")


def compared(name: str) -> tuple[list[str], list[str]]:
    """One model's row, and the leaves that differ."""
    build: Callable[[], torch.nn.Module] = getattr(torchvision.models, name)
    model = build().eval()
    image = torch.zeros(BATCH, 3, SIDE, SIDE)
    profile = fxmem.analyze(build, image.to("meta"), mode="infer", target="cpu").profile
    ours = by_layer(profile)
    macs, attention = (
        ours.total.macs,
        sum((op.flops or 0) // 2 for op in profile.ops if "scaled_dot_product" in op.name),
    )
    info = torchinfo.summary(model, input_data=image, verbose=0, depth=20)
    fvcore = FlopCountAnalysis(model, image).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    products = sum(count for op, count in fvcore.by_operator().items() if op in PRODUCTS)
    others = sorted(op for op, count in fvcore.by_operator().items() if count and op not in PRODUCTS)
    ptflops = {backend: _ptflops(build().eval(), backend) for backend in ("pytorch", "aten")}
    calls = {layer.path: layer for layer in ours.layers if layer.kind == "module" and layer.calls}
    theirs = {path: (tuple(leaf.output_size), leaf.trainable_params) for path, leaf in _leaves(info) if path in calls}
    differing = {path: leaf for path, leaf in theirs.items() if leaf != (calls[path].output_shape, calls[path].params)}
    counts = (info.total_params, ptflops["pytorch"][1], ptflops["aten"][1])
    row = [
        name,
        f"{ours.total.params:,}",
        "equal" if {*counts} == {ours.total.params} else " / ".join(f"{count:,}" for count in counts),
        f"{len(theirs) - len(differing)} of {len(theirs)}",
        f"{macs:,}",
        _beside(products, macs)
        if products != macs - attention or not attention
        else f"equal, but for {attention:,} of attention",
        f"{_beside(int(fvcore.total()), macs)}: {', '.join(others)}",
        f"{info.total_mult_adds:,}",
        _beside(torchinfo_macs(model, ours.layers), info.total_mult_adds),
        *(_beside(counted, macs) for counted, _ in ptflops.values()),
    ]
    return row, [
        f"{name}: {path} is {leaf} in torchinfo, {(calls[path].output_shape, calls[path].params)} here"
        for path, leaf in differing.items()
    ]


def _ptflops(model: torch.nn.Module, backend: str) -> tuple[int, int]:
    """MACs of the whole batch, and parameters."""
    with contextlib.redirect_stdout(io.StringIO()):
        macs, params = get_model_complexity_info(
            model, (3, SIDE, SIDE), as_strings=False, print_per_layer_stat=False, backend=backend
        )
    return int(macs) * BATCH, int(params)


def _leaves(info: Any) -> list[tuple[str, Any]]:
    """torchinfo's leaves by dotted path, the first call of each."""
    found: dict[str, Any] = {}
    for layer in info.summary_list:
        if not layer.is_leaf_layer or layer.layer_id in {known.layer_id for known in found.values()}:
            continue
        names, above = [], layer
        while above.parent_info is not None:
            names.append(above.var_name)
            above = above.parent_info
        found[".".join(reversed(names))] = layer
    return list(found.items())


def torchinfo_macs(model: torch.nn.Module, layers: Sequence[Layer]) -> int:
    """torchinfo's rule (`LayerInfo.calculate_macs`), from our layers: of each module that holds no other and ran,
    every element of `weight` and `bias` once per output pixel where the class's name has `Conv` in it, else once per
    sample."""
    ran = {layer.path: layer for layer in layers if layer.calls and layer.path}
    total = 0
    for path, layer in ran.items():
        module = model.get_submodule(path)
        if any(True for _ in module.children()):
            continue
        places = prod((layer.output_shape or ())[2:]) if "Conv" in type(module).__name__ else 1
        times = layer.calls if layer.kind == "module" else 1
        total += (
            BATCH
            * places
            * times
            * sum(parameter.numel() for name, parameter in module.named_parameters() if name in ("weight", "bias"))
        )
    return total


def _beside(theirs: int, ours: int) -> str:
    return "equal" if theirs == ours else f"{theirs:,} ({100 * (theirs / ours - 1):+.2f} %)"


def written(rows: list[list[str]], notes: list[str]) -> str:
    """The page."""
    versions = ", ".join(
        f"{tool} {importlib.metadata.version(tool)}"
        for tool in ("torchinfo", "fvcore", "ptflops", "torch", "torchvision")
    )
    lines = ["| " + " | ".join(HEADS) + " |", "|---|" + "---:|" * (len(HEADS) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    left = [f"- {note}" for note in notes] or ["None."]
    return TEXT.format(versions=versions, batch=BATCH, side=SIDE, table="\n".join(lines), left="\n".join(left))


HEADS = (
    "model",
    "parameters",
    "torchinfo, ptflops",
    "leaves alike",
    "MACs",
    "fvcore, products",
    "fvcore, all",
    "torchinfo",
    "its rule on our layers",
    "ptflops, pytorch",
    "ptflops, aten",
)
TEXT = """# Layers, beside other counters

Written by `python -m benchmarks.accuracy.layers`: inference, batch {batch} of {side}x{side} images, CPU. {versions}.

*Leaves alike*: of the modules that torchinfo lists and that are calls in our graph, how many have the same output \
shape and the same number of
parameters. *MACs* are ours, `fxmem show --by layer --mode infer`. A figure in another tool's column is its own, the \
difference from ours in brackets.

{table}

Leaves that differ:

{left}

## Why they differ

- **fvcore** calls a multiply-add a FLOP. Of matrix products and convolutions it counts what we count. It has no rule \
for
  `scaled_dot_product_attention`, and says so in a warning: the two products inside are missing, exactly. To its total \
it adds normalisation and
  pooling (named in the column), which for us are FLOPs and no MACs.
- **torchinfo** multiplies parameters: those of a convolution by its output's pixels, its bias included, those of \
everything else by the batch alone.
  So a normalisation has "mult-adds", a linear layer that is applied to every token or pixel is counted for one of \
them (hence ConvNeXt, ViT and Swin), and
  what has no parameters, or reads those of a module around it (attention), has none. The same rule on our layers \
gives its figure.
- **ptflops, pytorch** (its default) adds a MAC for each element of a bias, of a ReLU's result and of a pool's input, \
two for each element of a batch norm.
  ReLU and pooling modules are counted twice, by a hook on the module and by another on the function the module calls. \
AlexNet's
  4,505,296 more are 969,984 of convolutions' biases, 18,384 of linear layers', twice 986,368 of ReLUs and twice \
772,096 of pools. `F.linear` is not
  counted: Swin's attention calls it with weights of its own, 2,774,532,096 MACs.
- **ptflops, aten** adds a MAC for each element of a bias, as ResNet's 2000 (its one bias, twice) show; it has no rule \
for fused attention either.
"""

if __name__ == "__main__":
    main()
