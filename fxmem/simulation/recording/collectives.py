"""What the collectives of a step move, found by the operators that they end in."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.parts import Collective, CollectiveKind, RankedStep, RankGroup
from fxmem.records.profile import Kind
from fxmem.simulation.ranks.mailbox import World
from fxmem.simulation.recording.observe.event_log import StepLog

_KINDS: Final[dict[str, CollectiveKind]] = {
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), "all-gather"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_out"), "all-gather"),
    **dict.fromkeys(("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor"), "reduce-scatter"),
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"), "all-reduce"),
    **dict.fromkeys(("alltoall_", "alltoall_base_", "all_to_all_single"), "all-to-all"),
    **dict.fromkeys(("broadcast_", "broadcast"), "broadcast"),
    "send": "send",
    "recv_": "receive",
}

_UNSHARDED: Final = "fsdp.split_with_sizes_copy"
"""Copies what was gathered into the parameters, whole, as FSDP2 has them. FSDP1 gathers into flat parameters that take
their memory back for it."""


class Collectives:
    """The collectives of a step.

    Args:
        log: of the step.
        world: whose rank it is; None for a step on one card.
    """

    def __init__(self, log: StepLog, world: World | None) -> None:
        self._log = log
        self.world = world
        self.begin()

    def begin(self) -> None:
        """Forget the last round."""
        self._groups: dict[torch_distributed.GroupFacts, int] = {}
        self._counts: Counter[tuple[CollectiveKind, int]] = Counter()
        self._moved: Counter[tuple[CollectiveKind, int]] = Counter()
        self._host_bytes = 0

    def note_host(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Note what a rank keeps on the host: its parameters are there, while the target is another device."""
        tensors = [found for each in model.parameters() for found in (each, each.grad) if found is not None]
        if self._log.device_type == "cpu" or any(each.device.type != "cpu" for each in model.parameters()):
            return
        states = torch_common.optimizer_state(optimizer).values() if optimizer is not None else ()
        tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        parts = [part for each in tensors for part in torch_wrappers.parts(each)]
        storages = {torch_common.storage_key(part): part.untyped_storage().nbytes() for part in parts}
        self._host_bytes = max(self._host_bytes, sum(storages.values()))

    def note_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note a call of an operator, if it communicates; whether it does, or copies for one that does."""
        space, _, rest = name.partition(".")
        if space == "fsdp" and name.startswith(_UNSHARDED):
            self._log.mark(kwargs.get("out", ()), Kind.UNSHARDED)
        elif space in ("c10d", "_c10d_functional"):
            kind = _KINDS.get(rest.partition(".")[0])
            if kind is not None:
                self._note(kind, args, result)
                self._log.note_communication(result if space == "_c10d_functional" else args)
                if kind == "all-gather":
                    self._log.mark_grown(args, Kind.UNSHARDED)
                    if space == "c10d" and self._log.are_of_kind(args[1], Kind.PARAMETER):
                        self._log.mark(args[0], Kind.UNSHARDED, over=(None,))
        return space in ("c10d", "_c10d_functional", "fsdp")

    def _note(self, kind: CollectiveKind, args: tuple[Any, ...], result: Any) -> None:
        group = next(filter(None, map(torch_distributed.find_group, reversed(args))), None)
        if group is None:
            return
        if kind in ("send", "receive"):  # whose third argument is the other rank
            group = torch_distributed.find_group_of_pair(group, args[2])
        key = kind, self._groups.setdefault(group, len(self._groups))
        whole, size = max(map(_count_bytes, (*args, result)), default=0), len(group.ranks)
        self._counts[key] += 1
        passes = {"receive": 0, "all-reduce": 2}.get(kind, 1)  # how often a ring passes the whole tensor
        self._moved[key] += whole if kind in ("broadcast", "send") else passes * whole * (size - 1) // size

    def record(self) -> RankedStep | None:
        """The record of all of them; None for a step on one card."""
        if self.world is None:
            return None
        steps = {each: [after - before for before, after in itertools.pairwise(each.ranks)] for each in self._groups}
        groups = [
            RankGroup(name=each.name, size=len(each.ranks), spread=max(between, default=1))
            for each, between in steps.items()
        ]
        collectives = [
            Collective(kind=kind, group=group, count=count, moved_bytes=self._moved[kind, group])
            for (kind, group), count in sorted(self._counts.items(), key=lambda item: (item[0][1], item[0][0]))
        ]
        return RankedStep(
            world=self.world.size,
            rank=self.world.rank,
            groups=tuple(groups),
            collectives=tuple(collectives),
            host_bytes=self._host_bytes,
        )


def _count_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in torch_common.iterate_tensors(value))
