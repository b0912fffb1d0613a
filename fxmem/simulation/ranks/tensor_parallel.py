"""Tensor parallel by the plan that a model has of itself: by names, `*` for numbers, how each layer is split.

The `tp_plan` of transformers' models is `{"model.layers.*.self_attn.q_proj": "colwise", ...}`; a model of one's own may
have such an attribute, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fxmem.errors import UsageError
from fxmem.records.units import group

Styles = dict[str, str]
"""By the path of a layer, how it is split."""

_COLUMNS: Final = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS: Final = ("rowwise", "rowwise_split_input", "rowwise_rep")
_EMBEDDING: Final = "embedding_rowwise"
_WHOLE: Final = ("replicated_with_grad_allreduce", "replicate", "auto")
"""Layers that each rank has whole."""
_OTHERWISE: Final = (
    "Say fsdp=N alone, or give your own function that calls parallelize_module (--parallelize FILE.py:FN)"
)


def read_plan(model: nn.Module, size: int) -> Styles:
    """How each layer is split over `size` ranks.

    Raises:
        UsageError: the model has no plan, or one that is not known here; heads that `size` does not divide.
    """
    patterns = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(patterns, Mapping) or not patterns:
        kind = type(model).__name__
        raise UsageError(f"expected a model with a tp_plan for tp={size}; {kind} has none. {_OTHERWISE}")
    found: Styles = {}
    for path, module in model.named_modules():
        style = next((style for pattern, style in patterns.items() if _matches(pattern, path)), None)
        if style is not None and style not in _WHOLE:
            _check_layer(path, module, style, size)
            found[path] = style
    _check_heads(model, size)
    for tied in _find_tied(model):
        by_rows = {found.get(path) in (*_COLUMNS, _EMBEDDING) for path in tied}  # the weight's first dimension is split
        if len(by_rows) > 1 or any(path not in found for path in tied):
            for path in tied:
                found.pop(path, None)
    _check_rest(model, found, size)
    return found


def split(model: nn.Module, ranks: Any, styles: Styles) -> None:
    """Split a model over the ranks of a mesh of one dimension; the layers that are not named are replicated."""
    trained = {name: each.requires_grad for name, each in model.named_parameters(remove_duplicate=False)}
    tied = _find_tied(model)
    layers = (path for path, each in model.named_modules() if next(each.parameters(recurse=False), None) is not None)
    parallelize_module(model, ranks, {path: _make_style(styles.get(path)) for path in layers})
    for first, *others in tied:
        for other in others:
            model.get_submodule(other).weight = model.get_submodule(first).weight
    for name, each in model.named_parameters(remove_duplicate=False):
        each.requires_grad_(trained[name])


class _Replicated(ParallelStyle):
    """A layer that each rank has whole, on tensors that are the same on each."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def enter(_: Any, given: tuple[Any, ...], ranks: Any) -> Any:
            local = [isinstance(each, torch.Tensor) and not isinstance(each, DTensor) for each in given]
            return tuple(
                DTensor.from_local(each, ranks, [Replicate()], run_check=False) if is_local else each
                for each, is_local in zip(given, local, strict=True)
            )

        def leave(_: Any, result: Any, __: Any) -> Any:
            return result.to_local() if isinstance(result, DTensor) else result

        return distribute_module(module, device_mesh, None, enter, leave)


def _make_style(style: str | None) -> ParallelStyle:
    if style is None:
        return _Replicated()
    if style == _EMBEDDING:
        return RowwiseParallel(input_layouts=Replicate())
    if style in _COLUMNS:
        return ColwiseParallel() if style == "colwise" else ColwiseParallel(output_layouts=Replicate())
    return RowwiseParallel() if style == "rowwise" else RowwiseParallel(input_layouts=Replicate())


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None


# --- refusals ---------------------------------------------------------------------------------------------------------


def _check_layer(path: str, module: nn.Module, style: str, size: int) -> None:
    known = {**dict.fromkeys((*_COLUMNS, *_ROWS), nn.Linear), _EMBEDDING: nn.Embedding}
    if style not in known:
        raise UsageError(f"expected layers alone in the tp_plan for tp={size}, got {path} as {style}. {_OTHERWISE}")
    if type(module) is not known[style]:
        what = f"{known[style].__name__} at {path}, which the tp_plan splits ({style})"
        raise UsageError(f"expected {what}, got {type(module).__name__}. {_OTHERWISE}")


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            best = max((each for each in range(1, size) if heads % each == 0), default=1)
            raise UsageError(f"expected tp that divides {name}={heads}, got tp={size}; closest: tp={best}")


def _check_rest(model: nn.Module, styles: Styles, size: int) -> None:
    """Each layer that is left whole gets replicated tensors: that is done around single layers only."""
    for path, module in model.named_modules():
        owns = next(module.parameters(recurse=False), None) is not None
        if path not in styles and owns and next(module.children(), None) is not None:
            raise UsageError(
                f"expected parameters in layers alone for tp={size}; {path or type(model).__name__} has children and "
                f"parameters of its own. {_OTHERWISE}"
            )


def _find_tied(model: nn.Module) -> list[list[str]]:
    """The paths of layers that share their weight."""
    weights = ((path, getattr(module, "weight", None)) for path, module in model.named_modules())
    by_weight = group((id(weight), path) for path, weight in weights if isinstance(weight, nn.Parameter))
    return [paths for paths in by_weight.values() if len(paths) > 1]
