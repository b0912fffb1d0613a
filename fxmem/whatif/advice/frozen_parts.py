"""Parts of a model that are not trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from torch import nn

from fxmem.simulation.step.analysis import Analysis
from fxmem.simulation.step.model.fake_model import meta_model
from fxmem.whatif.advice.variant import Change, Variant, code_for_modules


def frozen_changes(analysis: Analysis) -> Iterator[Change]:
    """All but the last part, and the largest part alone."""
    parts = [path for path in _parts(analysis.model) if _count_trained(analysis.model.get_submodule(path))]
    if len(parts) < 2:
        return
    sizes = {path: _count_trained(analysis.model.get_submodule(path)) for path in parts}
    largest = max(parts, key=sizes.__getitem__)
    yield _freeze_change("freeze:all-but-last", f"train {parts[-1]} alone (fine-tuning)", parts[:-1])
    if parts[:-1] != [largest]:
        yield _freeze_change(f"freeze:{largest}", f"freeze {largest} (fine-tuning)", [largest])


def _parts(model: nn.Module) -> list[str]:
    """Children, from the first module down that has several; in the order they are registered."""
    path, module = "", model
    while len(children := list(module.named_children())) == 1:
        name, module = children[0]
        path = f"{path}{name}."
    return [f"{path}{name}" for name, _ in children]


def _count_trained(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _freeze_change(key: str, title: str, paths: list[str]) -> Change:
    code = code_for_modules(paths, "module.requires_grad_(False)")
    note = "before the optimizer is made; batch norms still update their statistics"
    return Change(key, title, "training", code, _freeze(paths), note=note, excludes="frozen")


def _freeze(paths: list[str]) -> Callable[[Variant, Analysis], Variant]:
    def make(variant: Variant, _: Analysis) -> Variant:
        model = meta_model(variant.model)
        for path in paths:
            model.get_submodule(path).requires_grad_(False)
        return dataclasses.replace(variant, model=model)

    return make
