"""Processes of a program that runs on a pretended card: one rank, alone or in a world that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.device_mesh
import torch.multiprocessing
import torch.nn.parallel

from fxmem._torch import common as torch_common
from fxmem._torch import distributed as torch_distributed
from fxmem.simulation.program.border import move_to_card
from fxmem.simulation.program.made_up import MadeUpNotes
from fxmem.simulation.ranks.mailbox import mail_patches
from fxmem.simulation.ranks.reducer import Replica
from fxmem.simulation.ranks.world import World


def process_patches(notes: MadeUpNotes, world: World | None) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """One process on one card: a rank of the world, or the first one, alone in its group."""

    def spawning(original: Callable[..., Any]) -> Callable[..., Any]:
        def spawn(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
            number = 0 if world is None else min(world.rank, nprocs - 1)
            which = "the first runs here, alone" if world is None else f"number {number} runs here"
            notes.note("answered", f"torch.multiprocessing.spawn of {nprocs}: {which}")
            fn(number, *args)

        return spawn

    def forwarding(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            return self.module(*move_to_card(inputs), **move_to_card(kwargs))

        return forward

    yield torch_common.patch(torch.multiprocessing, "spawn", spawning)
    yield torch_common.patch(torch.nn.DataParallel, "forward", forwarding)
    if torch.distributed.is_available():
        yield from _distributed(notes, world)


def _distributed(notes: MadeUpNotes, world: World | None) -> Iterator[contextlib.AbstractContextManager[Any]]:
    place = world or World(1)

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            which = "a group of one" if world is None else f"rank {place.rank} in a group of {place.size}"
            notes.note("answered", f"init_process_group: {which} that answers at once")
            torch_distributed.begin_fake_group(original, place.size, place.rank)

        return init_process_group

    yield place.prepared() if world is not None else torch_distributed.group_of_its_own()
    yield torch_distributed.default_device(torch.device("cuda"))
    for owner in (torch.distributed, torch.distributed.distributed_c10d, torch.distributed.device_mesh):
        yield torch_common.patch(owner, "init_process_group", beginning)

    yield from mail_patches(place.rank, place.mailbox)

    class NotedReplica(Replica):
        """`DistributedDataParallel` of a program."""

        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, *args, **kwargs)
            sent = "no communication" if world is None else "and what they send"
            notes.note("answered", f"DistributedDataParallel: one card, its gradient buckets counted, {sent}")

    yield torch_distributed.replace_ddp(NotedReplica)
