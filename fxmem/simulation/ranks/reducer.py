"""DistributedDataParallel, whose reducer works in hooks of C++, told again in Python.

The rules are those of torch/csrc/distributed/c10d/reducer.cpp: buckets take parameters in the reverse order of
`parameters()`, the first of them up to 1 MiB and the others up to 25, or `bucket_cap_mb`; they are kept. The real one
sorts them anew after the first backward, by the order in which gradients came; that can move where a bucket ends. A
gradient is copied into its bucket, and a full bucket is reduced. With `gradient_as_bucket_view` the gradient becomes a
view of its bucket; else the bucket is copied back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch

from fxmem._torch import distributed as torch_distributed

_MIB: Final = 1 << 20
_FIRST_BUCKET, _BUCKET = _MIB, 25 * _MIB


class Replica(torch.nn.Module):
    """A model with the gradient buckets of DistributedDataParallel.

    Args:
        module: the model; its other arguments are those of DistributedDataParallel.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *_: Any,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        process_group: Any = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self._views, self._group, self._syncs = gradient_as_bucket_view, process_group, True
        limit = self.bucket_bytes_cap = _BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * _MIB)
        parameters = [each for each in module.parameters() if each.requires_grad][::-1]
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        self.gradient_buckets: list[torch.Tensor] = []
        self._members: list[list[torch.Tensor]] = []
        for indices in torch_distributed.assign_buckets(parameters, [min(_FIRST_BUCKET, limit), limit]):
            members: list[torch.Tensor] = [parameters[index] for index in indices]
            offsets = [0, *itertools.accumulate(each.numel() for each in members)]
            self._places.update(
                {each: (len(self.gradient_buckets), at) for each, at in zip(members, offsets, strict=False)}
            )
            self._members.append(members)
            first = members[0]
            self.gradient_buckets.append(torch.empty(offsets[-1], dtype=first.dtype, device=first.device))
        self._missing = [len(members) for members in self._members]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        with torch_distributed.split_by_buckets(self):
            return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is sent for what runs forward and backward inside."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _slot(self, parameter: torch.Tensor) -> torch.Tensor:
        bucket, offset = self._places[parameter]
        return self.gradient_buckets[bucket].narrow(0, offset, parameter.numel()).view_as(parameter)

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        if not self._syncs or parameter.grad is None:
            return
        slot = self._slot(parameter)
        slot.copy_(parameter.grad)
        if self._views:
            parameter.grad = slot
        bucket = self._places[parameter][0]
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return
        self._missing[bucket] = len(self._members[bucket])
        torch.distributed.all_reduce(self.gradient_buckets[bucket], group=self._group, async_op=True)
        for member in self._members[bucket] if not self._views else ():
            if member.grad is not None:
                member.grad.copy_(self._slot(member))
