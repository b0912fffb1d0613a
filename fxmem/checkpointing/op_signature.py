"""What an ATen operator does, as far as its declaration says: what it writes to, and whether it draws."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fxmem._torch import common as torch_common

Place = tuple[int, str]
"""An argument, by position and name."""
_STATISTICS = frozenset({"running_mean", "running_var"})
_USES_BATCH = frozenset({"training", "train", "use_input_stats"})
"""Arguments that say whether running statistics are written to or read."""


@dataclass(frozen=True, slots=True)
class OpSignature:
    """What there is to know of an operator before it is called."""

    name: str
    """Qualified overload."""
    draws: bool
    """Whether it draws random numbers."""
    places: tuple[Place, ...]
    """All its arguments."""
    written: tuple[Place, ...]
    """Arguments that it writes to."""
    statistics: tuple[Place, ...]
    """Running statistics: kernels do not declare that they write to them."""
    switch: Place | None
    """The argument that says whether these are written to."""


@functools.cache
def read_signature(func: Any) -> OpSignature:
    """The signature of an `OpOverload`."""
    declared = torch_common.op_arguments(func)
    places = tuple((at, each.name) for at, each in enumerate(declared))
    return OpSignature(
        name=str(func),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        places=places,
        written=tuple(places[at] for at, each in enumerate(declared) if each.alias_info and each.alias_info.is_write),
        statistics=tuple(place for place in places if place[1] in _STATISTICS),
        switch=next((place for place in places if place[1] in _USES_BATCH), None),
    )


def find_argument(place: Place, args: Any, kwargs: Any) -> Any:
    """What a call gives for an argument; None if nothing."""
    return args[place[0]] if place[0] < len(args) else kwargs.get(place[1])


def find_tensors(places: Iterable[Place], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call gives for arguments."""
    return [tensor for place in places for tensor in torch_common.iterate_tensors(find_argument(place, args, kwargs))]
