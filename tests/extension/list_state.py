"""An optimizer that keeps its state in lists, as the patch of a rule for optimizer state has it."""

from __future__ import annotations

from typing import Any

import torch

import fxmem
from fxmem.records.profile import Kind


class Averaged(torch.optim.SGD):
    """Keeps what it had two steps ago, in a list."""

    def step(self, closure: Any = None) -> Any:
        """As SGD, and remember."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", [torch.zeros_like(parameter) for _ in range(2)])
        return super().step(closure)


def names() -> set[str]:
    """What is named as optimizer state."""
    analysis = fxmem.analyze(torch.nn.Linear(8, 4), torch.empty(2, 8), optimizer=Averaged)
    return {each.name for each in analysis.profile.storages if each.kind is Kind.OPTIMIZER_STATE}
