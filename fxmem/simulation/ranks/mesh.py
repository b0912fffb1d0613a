"""The words of `--mesh`: how many ranks share the work in which way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from fxmem.errors import UsageError, closest

Offload = Literal["cpu"]

_NAMES: Final = ("replicate", "fsdp", "tp")
_ADVICE: Final = {
    "dp ddp data hsdp dp_replicate": "say replicate=N, with fsdp=M beside it for HSDP",
    "zero zero2 zero3 deepspeed fsdp1 fsdp2 dp_shard": "say fsdp=N (fully_shard)",
    "sp sequence": "say tp=N, and for sequence parallel give your own function (--parallelize)",
    "cp context ulysses": "context parallel is not analysed: tp=N splits the heads, and checkpoints (fxmem plan) take "
    "less for long sequences",
    "ep expert experts": "expert parallel is not analysed, since what experts get depends on data: fsdp=N shards "
    "experts, too",
    "pp pipe pipeline": "a pipeline is analysed as a script with its schedule: fxmem run --ranks N train.py",
}
"""By the names that others use, what to do."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Ranks in up to three dimensions, the outermost first.

    Raises:
        UsageError: no ranks along a dimension.
    """

    replicate: int = 1
    """Copies of the sharded model, whose gradients are averaged."""
    fsdp: int = 1
    """Ranks that share parameters, gradients and optimizer state."""
    tp: int = 1
    """Ranks that share each product: neighbours, so that they are on one machine."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(f"expected {name} of at least 1 rank in the mesh, got {size!r}")
        if self.replicate > 1 and self.tp > 1 and self.fsdp == 1:
            raise UsageError(
                f"expected fsdp=N beside replicate={self.replicate} and tp={self.tp}: what tp leaves is sharded, not "
                f"copied; say fsdp={self.replicate},tp={self.tp}"
            )

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.replicate * self.fsdp * self.tp

    @property
    def dimensions(self) -> dict[str, int]:
        """By name, those with more than one rank; `fsdp` of one rank where there is no other."""
        found = {name: size for name in _NAMES if (size := getattr(self, name)) > 1}
        return found or {"fsdp": 1}

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dimensions.items())


def read_mesh(given: str | Mapping[str, Any] | Mesh, ranks: int | None = None) -> Mesh:
    """The mesh that words mean: `fsdp=8,tp=4`, or the same as a dict.

    Args:
        given: by name `fsdp`, `tp` and `replicate`.
        ranks: how many ranks there are, where that was said as well.

    Raises:
        UsageError: a name or a number that a mesh does not have, or another number of ranks.
    """
    if isinstance(given, Mesh):
        mesh = given
    elif isinstance(given, (str, Mapping)):
        mesh = Mesh(**(_split(given) if isinstance(given, str) else _check_names(given)))
    else:
        raise UsageError(f"expected a mesh such as 'fsdp=8,tp=4' or {{'fsdp': 8, 'tp': 4}}, got {given!r}")
    if ranks is not None and ranks != mesh.size:
        rest, left = divmod(ranks, mesh.size)
        fills = not left and mesh.replicate == 1
        advice = f"replicate={rest} beside it would make {ranks}" if fills else "leave --ranks"
        raise UsageError(f"expected a mesh of {ranks} ranks, got {mesh} of {mesh.size}; {advice}")
    return mesh


def check_offload(offload: str | None) -> None:
    """Raise a UsageError for another place than the host's memory."""
    if offload is not None and offload not in get_args(Offload):
        raise UsageError(f"expected offload 'cpu', got {offload!r}")


def _split(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.isdecimal():
            raise UsageError(f"expected a mesh as NAME=RANKS[,NAME=RANKS], e.g. fsdp=8,tp=4, got {text!r}")
        if name in found:
            raise UsageError(f"expected each dimension of a mesh once, got {name} twice")
        found[name] = int(size)
    return dict(_check_names(found))


def _check_names(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in given:
        if name not in _NAMES:
            said = next((advice for others, advice in _ADVICE.items() if name in others.split()), None)
            advice = closest(str(name), _NAMES) if said is None else f": {said}"
            raise UsageError(f"expected a mesh of fsdp, tp and replicate, got {name!r}{advice}")
    return given
