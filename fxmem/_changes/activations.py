"""Activations in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from fxmem._changes.variants import Change, NotToBeHadError, Variant, for_modules
from fxmem.analysis import Analysis
from fxmem.faking import shadow_model
from fxmem.records import Kind, Profile

__all__ = ["activation_changes"]

_IN_PLACE = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.ELU, nn.CELU, nn.SELU)
"""Their backward needs the output alone (tools/autograd/derivatives.yaml), so nothing is lost when it overwrites the input."""
_LISTED = 3
"""Refused modules that are named."""


def activation_changes(analysis: Analysis) -> Iterator[Change]:
    """Activations that overwrite their input, where autograd allows it."""
    allowed, refused = _sorted_out(analysis)

    def make(variant: Variant, _: Analysis) -> Variant:
        if not allowed:
            raise NotToBeHadError(_why(refused) or "the model has no activation modules that could run in place and do not")
        model = shadow_model(variant.model)
        for path in allowed:
            vars(model.get_submodule(path))["inplace"] = True
        return dataclasses.replace(variant, model=model)

    code = for_modules(allowed, "module.inplace = True")
    yield Change("inplace", "activations in place", "none", code, make, note=f"not {_why(refused)}" if refused else "")


def _sorted_out(analysis: Analysis) -> tuple[tuple[str, ...], dict[str, str]]:
    """Activation modules that may overwrite their input, and of the others why not."""
    profile, modules = analysis.profile, dict(analysis.model.named_modules())
    keepers, readers = _uses(profile)
    found: dict[str, str] = {}
    for index, node in enumerate(profile.nodes):
        module = modules.get(node.module) if node.op == "call_module" else None
        if not isinstance(module, _IN_PLACE) or module.inplace:
            continue
        reason = "a negative slope needs the input" if getattr(module, "negative_slope", 1) < 0 or getattr(module, "alpha", 1) < 0 else ""
        for storage in {output.storage for source in node.inputs for output in profile.nodes[source].outputs}:
            reason = reason or _obstacle(profile, storage, index, keepers, readers)
        found[node.module] = found.get(node.module, "") or reason
    return tuple(path for path, reason in found.items() if not reason), {path: reason for path, reason in found.items() if reason}


def _uses(profile: Profile) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """For each storage the nodes that keep it for backward, and those that read it."""
    keepers: dict[int, set[int]] = {}
    readers: dict[int, set[int]] = {}
    for index, node in enumerate(profile.nodes):
        for storage in node.saved:
            keepers.setdefault(storage, set()).add(index)
        for source in node.inputs:
            for output in profile.nodes[source].outputs:
                if output.storage is not None:
                    readers.setdefault(output.storage, set()).add(index)
    return keepers, readers


def _obstacle(profile: Profile, storage: int | None, index: int, keepers: dict[int, set[int]], readers: dict[int, set[int]]) -> str:
    """Why the node at `index` must not overwrite a storage that it reads; empty if it may."""
    if storage is None:
        return "its input has no storage of its own"
    if profile.storages[storage].kind in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.OUTPUT) or not profile.storages[storage].birth:
        return f"its input is {profile.storages[storage].kind.value.replace('_', ' ')} of the step"
    kept = keepers.get(storage, set()) - {index}
    if kept:
        return f"{profile.nodes[min(kept)].name} keeps its input for backward"
    last = max(readers.get(storage, {index}))
    return f"{profile.nodes[last].name} reads its input afterwards" if last > index else ""


def _why(refused: dict[str, str]) -> str:
    listed = [f"{path} ({reason})" for path, reason in list(refused.items())[:_LISTED]]
    return ", ".join(listed) + (f" and {len(refused) - _LISTED} more" if len(refused) > _LISTED else "")
