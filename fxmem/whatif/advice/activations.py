"""Activations in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from fxmem.records.advice import Effect
from fxmem.simulation.analysis import Analysis
from fxmem.simulation.model.fake_model import shadow_model
from fxmem.whatif.advice.uses import Uses
from fxmem.whatif.advice.variant import Change, NotApplicableError, Variant, code_for_modules, list_refused

_IN_PLACE = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.ELU, nn.CELU, nn.SELU)
"""Their backward needs the output alone (tools/autograd/derivatives.yaml), so nothing is lost when it overwrites the
input."""
_FROM_THE_RESULT = (nn.ELU, nn.CELU, nn.SELU)
"""Their derivative is computed from the output where that overwrites the input, otherwise from the input, and rounds
differently."""


def activation_changes(analysis: Analysis) -> Iterator[Change]:
    """Activations that overwrite their input, where autograd allows it."""
    allowed, refused = _sort_modules(analysis)

    def make(variant: Variant, _: Analysis) -> Variant:
        if not allowed:
            raise NotApplicableError(
                list_refused(refused) or "the model has no activation modules that could run in place and do not"
            )
        model = shadow_model(variant.model)
        for path in allowed:
            vars(model.get_submodule(path))["inplace"] = True
        return dataclasses.replace(variant, model=model)

    code = code_for_modules(allowed, "module.inplace = True")
    effect: Effect = (
        "rounding"
        if any(isinstance(analysis.model.get_submodule(path), _FROM_THE_RESULT) for path in allowed)
        else "none"
    )
    yield Change(
        "inplace", "activations in place", effect, code, make, note=f"not {list_refused(refused)}" if refused else ""
    )


def _sort_modules(analysis: Analysis) -> tuple[tuple[str, ...], dict[str, str]]:
    """Activation modules that may overwrite their input, and of the others why not."""
    profile, modules = analysis.profile, dict(analysis.model.named_modules())
    uses = Uses(profile)
    found: dict[str, str] = {}
    for index, node in enumerate(profile.nodes):
        module = modules.get(node.module) if node.op == "call_module" else None
        if not isinstance(module, _IN_PLACE) or module.inplace:
            continue
        reason = (
            "a negative slope needs the input"
            if getattr(module, "negative_slope", 1) < 0 or getattr(module, "alpha", 1) < 0
            else ""
        )
        found[node.module] = found.get(node.module, "") or reason or uses.obstacle(index)
    return tuple(path for path, reason in found.items() if not reason), {
        path: reason for path, reason in found.items() if reason
    }
