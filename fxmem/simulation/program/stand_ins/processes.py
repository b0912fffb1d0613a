"""Processes of a program that runs on a pretended card: the first rank, alone in its group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing
import torch.nn.parallel

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.simulation.program.border import move_to_card
from fxmem.simulation.program.made_up import MadeUpNotes


def process_patches(notes: MadeUpNotes) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """One process on one card: the first rank, alone in its group."""

    def spawning(original: Callable[..., Any]) -> Callable[..., Any]:
        def spawn(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
            notes.note("answered", f"torch.multiprocessing.spawn of {nprocs}: the first runs here, alone")
            fn(0, *args)

        return spawn

    def forwarding(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            return self.module(*move_to_card(inputs), **move_to_card(kwargs))

        return forward

    yield torch_common.patch(torch.multiprocessing, "spawn", spawning)
    yield torch_common.patch(torch.nn.DataParallel, "forward", forwarding)
    if torch.distributed.is_available():
        yield from _distributed(notes)


def _distributed(notes: MadeUpNotes) -> Iterator[contextlib.AbstractContextManager[Any]]:
    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            notes.note("answered", "init_process_group: a group of one that answers at once")
            torch_programs.begin_fake_group(original)

        return init_process_group

    yield _group_of_its_own()
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        yield torch_common.patch(owner, "init_process_group", beginning)

    class Replica(_Replica):
        """`DistributedDataParallel` in a group of one."""

        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module, *args, **kwargs)
            notes.note("answered", "DistributedDataParallel: one card, its gradient buckets counted, no communication")

    for holder in (torch.nn.parallel, torch.nn.parallel.distributed):
        yield torch_common.patch(holder, "DistributedDataParallel", lambda _: Replica)


@contextlib.contextmanager
def _group_of_its_own() -> Iterator[None]:
    """End the process group that the program began and did not end."""
    before = torch.distributed.is_initialized()
    try:
        yield
    finally:
        if torch.distributed.is_initialized() and not before:
            torch.distributed.destroy_process_group()


_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


class _Replica(torch.nn.Module):
    """A model with the gradient buckets that torch's reducer keeps beside its gradients.

    Parameters go into buckets in reverse order, the first of 1 MiB and the others of 25 MiB, or of `bucket_cap_mb`
    (`_DEFAULT_FIRST_BUCKET_BYTES`, `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp);
    with `gradient_as_bucket_view` the gradients are their views, and there are none beside.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *_: Any,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        **__: Any,
    ) -> None:
        super().__init__()
        self.module = module
        limit = _BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20))
        self._buckets = [] if gradient_as_bucket_view else list(_buckets(module, limit))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """There is nothing to send."""
        yield


def _buckets(module: torch.nn.Module, limit: int) -> Iterator[torch.Tensor]:
    count, cap = 0, min(_FIRST_BUCKET, limit)
    last: torch.Tensor | None = None
    for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
        if last is not None and last.dtype is not parameter.dtype:
            yield torch.empty(count, dtype=last.dtype, device=last.device)
            count = 0
        last = parameter
        count += parameter.numel()
        if count * parameter.element_size() >= cap:
            yield torch.empty(count, dtype=parameter.dtype, device=parameter.device)
            count, cap = 0, limit
    if count and last is not None:
        yield torch.empty(count, dtype=last.dtype, device=last.device)
