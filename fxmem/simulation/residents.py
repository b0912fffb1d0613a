"""Whose a storage is that outlives a step.

What optimizers keep is named by one rule for steps of models and for programs. A program's modules are named here as it
makes them; a step names its model's tensors itself, before it runs and in the order in which they move to the card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from fxmem._torch import common as torch_common
from fxmem.records.profile import Kind
from fxmem.simulation.observe.event_log import StepLog

_NOT_YET_NAMED: Final[dict[Kind, tuple[Kind | None, ...]]] = {
    Kind.PARAMETER: (None, Kind.BUFFER, Kind.INPUT, Kind.SAVED, Kind.OUTPUT),
    Kind.BUFFER: (None, Kind.INPUT, Kind.SAVED),
    Kind.OPTIMIZER_STATE: (None, Kind.BUFFER, Kind.INPUT, Kind.SAVED),
}
"""By kind, those that it takes the place of."""


def name_modules(log: StepLog, modules: Iterable[tuple[torch.nn.Module, str]]) -> dict[int, str]:
    """Name what modules keep, as far as a program has made it; the names of their parameters by `id`."""
    names: dict[int, str] = {}
    for module, root in modules:
        for path, parameter in module.named_parameters():
            name = f"{root}.{path}"
            if names.setdefault(id(parameter), name) != name:
                continue
            log.resident(parameter, Kind.PARAMETER, name, _NOT_YET_NAMED[Kind.PARAMETER])
            if parameter.grad is not None:
                log.resident(parameter.grad, Kind.GRADIENT, f"{name}.grad", None)
        for path, buffer in module.named_buffers():
            log.resident(buffer, Kind.BUFFER, f"{root}.{path}", _NOT_YET_NAMED[Kind.BUFFER])
    return names


def name_optimizer_state(log: StepLog, optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """Name what optimizers keep: the tensors of their state, each after its parameter.

    Args:
        log: of the storages.
        optimizers: those that have stepped, or may have.
        names: of parameters, by `id`.
    """
    for optimizer in optimizers:
        for parameter, state in torch_common.optimizer_state(optimizer).items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    name = f"{names.get(id(parameter), '')}.{key}".lstrip(".")
                    log.resident(value, Kind.OPTIMIZER_STATE, name, _NOT_YET_NAMED[Kind.OPTIMIZER_STATE])
