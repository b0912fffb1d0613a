"""A parallelize function of our own, for who has none: FSDP2 by blocks, tensor parallel by the model's own plan.

What it calls is public: `fully_shard`, `parallelize_module`, `DistributedDataParallel`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from fxmem.errors import UsageError, closest
from fxmem.records.units import Precision

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FREED: Final[dict[bool | None, str]] = {
    None: "gathered blocks are freed after forward, the rest after backward",
    True: "all that is gathered is freed after forward",
    False: "what is gathered stays until backward",
}
"""By `reshard_after_forward`, when what is gathered is freed."""


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """Shards a model over a mesh.

    Args:
        mesh: the ranks.
        reshard_after_forward: whether gathered parameters are freed after forward; None for those of blocks alone, as
            `fully_shard` does.
        offload: whether shards live in the host's memory (`CPUOffloadPolicy`).
        precision: what parameters are gathered in; None for their own dtype.
    """

    mesh: Mesh
    reshard_after_forward: bool | None = None
    offload: bool = False
    precision: Precision | None = None

    def __post_init__(self) -> None:
        if self.mesh.dimensions.get("fsdp") is None and (self.offload or self.reshard_after_forward is not None):
            what = "offload" if self.offload else "reshard_after_forward"
            raise UsageError(f"expected {what} with fsdp in the mesh, got {self.mesh}: FSDP alone shards and gathers")

    @property
    def takes_precision(self) -> bool:
        """Whether a step's precision is that of the gathered parameters; else it is autocast's."""
        return "fsdp" in self.mesh.dimensions

    def _read_styles(self, model: nn.Module) -> dict[str, str]:
        if self.mesh.tp == 1:
            return {}
        from fxmem.simulation.ranks.tensor_parallel import read_plan  # brings DTensor

        return read_plan(model, self.mesh.tp)

    def describe(self, model: nn.Module) -> Iterator[str]:
        """What is wrapped, in sentences; `model` is the whole one. Raises UsageError if the mesh does not fit it."""
        mesh = self.mesh
        if mesh.tp > 1:
            styles = self._read_styles(model)
            count = sum(next(each.parameters(recurse=False), None) is not None for each in model.modules())
            yield (
                f"mesh {mesh}: parallelize_module over tp of {mesh.tp} splits {len(styles)} of {count} layers with "
                f"parameters, by the model's own tp_plan; the others are replicated, with no sequence parallel"
            )
        if "fsdp" in mesh.dimensions:
            wrapped = " and ".join([*_count_blocks(model), "the model"])
            yield f"mesh {mesh}: fully_shard on {wrapped}; {_FREED.get(self.reshard_after_forward, _FREED[False])}"
        elif mesh.replicate > 1:
            yield f"mesh {mesh}: DistributedDataParallel on the model"
        if self.precision is not None:
            dtype = str(_DTYPES[self.precision]).removeprefix("torch.")
            yield (
                f"{self.precision} is FSDP2's MixedPrecisionPolicy: parameters are gathered in {dtype}, gradients "
                f"reduced in float32; there is no autocast"
            )
        if self.offload:
            yield "CPUOffloadPolicy: shards, their gradients and the optimizer's step are the host's"
        if mesh.size > mesh.tp:
            yield f"the inputs are the batch of one rank{' (of one group of tp)' if mesh.tp > 1 else ''}"

    def describe_compiled(self, model: nn.Module) -> str:
        """What is compiled, in a sentence."""
        blocks = _count_blocks(model)
        if not blocks:
            return "torch.compile on the model, before it is sharded"
        return f"torch.compile on each of {' and '.join(blocks)}, before it is sharded; the rest is eager code"

    def __call__(self, model: nn.Module) -> nn.Module:
        """Shard a model in place, with a process group of all ranks up."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = self.mesh.dimensions
        device = next((each.device.type for each in model.parameters()), "cpu")
        ranks = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        blocks = find_blocks(model)
        if self.mesh.tp > 1:
            from fxmem.simulation.ranks.tensor_parallel import split

            split(model, ranks["tp"], self._read_styles(model))
        if "fsdp" in sizes:
            self._shard_fully(model, blocks, ranks["replicate", "fsdp"] if "replicate" in sizes else ranks["fsdp"])
        elif self.mesh.replicate > 1:
            return nn.parallel.DistributedDataParallel(model)
        return model

    def _shard_fully(self, model: nn.Module, blocks: list[nn.Module], ranks: Any) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        settings: dict[str, Any] = {"mesh": ranks, "reshard_after_forward": self.reshard_after_forward}
        if self.precision is not None:
            dtype = _DTYPES[self.precision]
            settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if self.offload:
            settings["offload_policy"] = CPUOffloadPolicy()
        for block in blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)


def make_plan(
    mesh: str | Mapping[str, int] | None,
    ranks: int | None,
    parallelize: object,
    *,
    reshard_after_forward: bool | None = None,
    offload: str | None = None,
) -> MeshPlan | None:
    """The plan of a mesh; None for none.

    Raises:
        UsageError: a mesh that cannot be understood, or settings of a plan with none.
    """
    check_offload(offload)
    if mesh is None:
        if offload is not None or reshard_after_forward is not None:
            what = "offload" if offload is not None else "reshard_after_forward"
            raise UsageError(f"expected {what} with a mesh, e.g. fsdp=8; a function of your own says so itself")
        return None
    if parallelize is not None:
        raise UsageError("expected a mesh or parallelize: a plan of ours, or a function of your own")
    return MeshPlan(read_mesh(mesh, ranks), reshard_after_forward, offload is not None)


# --- blocks -----------------------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in the order of its modules: the units that FSDP gathers.

    They are those of the classes in `_no_split_modules`, as transformers says; else the outermost classes that repeat,
    where no one of them has more than half of the model's parameters. Containers and single layers are none.
    """
    said = (getattr(each, "_no_split_modules", None) or () for each in model.modules())
    names = set(itertools.chain.from_iterable(said))
    inside = [each for each in model.modules() if each is not model and type(each).__name__ in names]
    named = [each for each in inside if next(each.parameters(), None) is not None]
    if named:
        return named
    # by name: what is checkpointed is of a subclass that has its class's
    counts = Counter(type(each).__name__ for each in model.modules() if _may_be_block(each))
    whole = _count_parameters(model)

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            repeats = counts[type(child).__name__] > 1 and _may_be_block(child)
            if repeats and 0 < 2 * _count_parameters(child) <= whole:
                yield child
            else:
                yield from walk(child)

    return list(dict.fromkeys(walk(model)))


def _count_blocks(model: nn.Module) -> list[str]:
    return [f"{count} {name}" for name, count in Counter(type(block).__name__ for block in find_blocks(model)).items()]


def _may_be_block(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and next(module.children(), None) is not None


def _count_parameters(module: nn.Module) -> int:
    return sum(math.prod(each.shape) for each in module.parameters())


# --- the words of `--mesh` --------------------------------------------------------------------------------------------


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
