"""Whether a model runs at all: the step for real on the CPU, with random weights, when its analysis has failed."""

from __future__ import annotations

from typing import Any

import torch

from fxmem._torch.common import tree_iter, tree_map_only
from fxmem.cli.specs import BuiltModel, build_model

__all__ = ["raises_in_eager"]

LARGEST_BYTES = 1_500_000_000
"""Of parameters: what is larger is run on meta, where operators check shapes and dtypes and compute nothing."""


def raises_in_eager(built: BuiltModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BaseException | None:
    """What a plain forward, and backward in training, raises with no fxmem around it; None if it runs."""
    small = sum(p.numel() * p.element_size() for p in built.module.parameters()) <= LARGEST_BYTES
    try:
        module = (
            build_model(built.spec, built.settings, mode=built.mode, device="cpu").module if small else built.module
        )
        real_args, real_kwargs = tree_map_only(
            torch.Tensor, _real if small else (lambda tensor: tensor.to("meta")), (args, kwargs)
        )
        with torch.set_grad_enabled(built.mode == "train"):
            output = module(*real_args, **real_kwargs)
            if built.mode == "train":
                _loss(output).backward()
    except Exception as error:
        if not small and isinstance(error, (NotImplementedError, RuntimeError)) and "meta" in str(error):
            return None
        return error
    return None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor
    made = torch.randn(tensor.shape) if tensor.is_floating_point() else torch.ones(tensor.shape)
    return made.to(tensor.dtype)


def _loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = [t for t in tree_iter(output) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]
    total: torch.Tensor = torch.stack([t.float().sum() for t in found]).sum()
    return total
