"""DistributedDataParallel, whose reducer works in hooks of C++, told again in Python.

The rules are those of torch/csrc/distributed/c10d/reducer.cpp: buckets take parameters in the reverse order of
`parameters()`, the first of them up to 1 MiB and the others up to 25, or `bucket_cap_mb`. Unless parameters may be
unused, a program begins with one bucket of all, which the forward after the first backward frees for these, then in the
order in which gradients came (seen on an H200); in a loop of our own they are there from the start. A gradient is
copied into its bucket, and a full bucket is reduced. With `gradient_as_bucket_view` the gradient becomes a view of its
bucket; else the bucket is copied back.

A communication hook reduces a bucket in the place of that; what it returns is kept until it returns another, and is
copied to the gradients when backward is over (`finalize_backward`). The gradient of an embedding with `sparse=True`
has no bucket; NCCL refuses it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import distributed as torch_distributed

_MIB: Final = 1 << 20
_NO_SPARSE: Final = "Tensors must be CUDA and dense"
"""What NCCL's process group answers where it is to reduce a sparse tensor (`check_gpu_single_tensor`)."""
_FIRST_BUCKET, _BUCKET = _MIB, 25 * _MIB


class GradientBucket:
    """What a communication hook is called with (`torch.distributed.GradBucket`).

    Args:
        index: its number, in the order in which buckets are reduced.
        count: how many there are.
        buffer: its gradients, flat.
        members: its parameters.
        views: its gradients, each with its parameter's shape.
    """

    def __init__(
        self,
        index: int,
        count: int,
        buffer: torch.Tensor,
        members: list[torch.Tensor],
        views: Callable[[], list[torch.Tensor]],
    ) -> None:
        self._index, self._count, self._buffer, self._members, self._views = index, count, buffer, members, views

    def index(self) -> int:
        """Its number."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last to be reduced."""
        return self._index == self._count - 1

    def buffer(self) -> torch.Tensor:
        """Its gradients, flat."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Reduce another tensor."""
        self._buffer = tensor

    def parameters(self) -> list[torch.Tensor]:
        """Its parameters."""
        return list(self._members)

    def gradients(self) -> list[torch.Tensor]:
        """Its gradients, each with its parameter's shape."""
        return self._views()


_SIGNATURE: Final = inspect.signature(torch.nn.parallel.DistributedDataParallel)
_ASKED_FOR: Final = (
    "module device_ids output_device dim broadcast_buffers process_group "
    "find_unused_parameters gradient_as_bucket_view static_graph"
).split()


@torch_distributed.answer_private_names
class DistributedDataParallel(torch.nn.Module):
    """A model with the gradient buckets of torch's DistributedDataParallel, by whose name it is reported.

    Args:
        module: the model; its other arguments, and what it is asked for by name, are those of DistributedDataParallel.
    """

    begins_as_one: ClassVar[bool] = False
    """Whether there is one bucket of all parameters until the first backward is over."""

    module: torch.nn.Module
    broadcast_buffers: bool | None
    process_group: Any
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = _SIGNATURE.bind(module, *args, **kwargs)
        given.apply_defaults()
        for name in _ASKED_FOR:
            setattr(self, name, given.arguments[name])
        syncs = given.arguments.get("forward_sync_buffers")  # since torch 2.15, in the place of the other
        syncs = self.broadcast_buffers in (None, True) if syncs is None else syncs
        self.broadcast_buffers = self.forward_sync_buffers = syncs
        self.require_backward_grad_sync = True
        self.device = next((each.device for each in module.parameters()), None)
        bucket_cap_mb = given.arguments["bucket_cap_mb"]
        limit = self.bucket_bytes_cap = _BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * _MIB)
        self._hook: Callable[[GradientBucket], Any] | None = None
        self._pending: dict[int, Any] = {}
        """By bucket, the future that the hook has returned in this backward."""
        self._reduced: dict[int, torch.Tensor] = {}
        """By bucket, what the hook has made of it."""
        self._is_rebuilt = False
        """Whether the forward after the first backward has begun, which makes buckets anew."""
        tables: Any = (each for each in module.modules() if getattr(each, "sparse", False))
        self._sparse: set[torch.Tensor] = {each.weight for each in tables}
        wanted: Iterator[torch.Tensor] = (
            each for each in module.parameters() if each.requires_grad and each not in self._sparse
        )
        parameters: list[torch.Tensor] = list(wanted)[::-1]
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        self.gradient_buckets: list[torch.Tensor] = []
        self._members: list[list[torch.Tensor]] = []
        self._missing: list[int] = []
        self._limits = [min(_FIRST_BUCKET, limit), limit]
        self._can_rebuild = self.begins_as_one and all(each.is_cuda for each in parameters)
        self._rebuilds = self._can_rebuild and (self.static_graph or not self.find_unused_parameters)
        self._came: list[torch.Tensor] = []
        """The parameters in the order in which the first gradients came."""
        self._retired: list[torch.Tensor] = []
        """With views, on a card, the bucket that was the first: it goes with the first gradient in the others."""
        if self.begins_as_one and parameters:
            self._verify(parameters)
        self._make_buckets(parameters, [sys.maxsize] if self._rebuilds else self._limits)
        self._used: list[torch.Tensor] = []
        """Which parameters this rank has used, and any rank: a number for each (`initialize_local_used_map`)."""
        self._reduces_used = self.find_unused_parameters and not self.static_graph
        if self.find_unused_parameters or self.static_graph:
            self._map_used()
        for parameter in (*parameters, *self._sparse):
            parameter.register_post_accumulate_grad_hook(_call_while_alive(self._take))  # type: ignore[no-untyped-call]

    def use_static_graph(self) -> None:
        """From now on as with `static_graph=True`."""
        self.static_graph, self._reduces_used, self._rebuilds = True, False, self._can_rebuild
        if not self._used and self._places:
            self._map_used()

    def _map_used(self) -> None:
        parameters = list(self._places)
        devices = torch.device("cpu"), parameters[0].device
        self._used = [torch.zeros(len(parameters), dtype=torch.int32, device=device) for device in devices]

    def _make_buckets(self, parameters: list[torch.Tensor], limits: list[int]) -> None:
        self._places, self._members, self.gradient_buckets = {}, [], []
        for number, indices in enumerate(torch_distributed.assign_buckets(parameters, limits)):
            members: list[torch.Tensor] = [parameters[index] for index in indices]
            offsets = [0, *itertools.accumulate(each.numel() for each in members)]
            self._places.update({each: (number, at) for each, at in zip(members, offsets, strict=False)})
            self._members.append(members)
            first = members[0]
            self.gradient_buckets.append(torch.empty(offsets[-1], dtype=first.dtype, device=first.device))
        self._missing = [len(members) for members in self._members]

    @staticmethod
    def _verify(parameters: list[torch.Tensor]) -> None:
        """`_verify_params_across_processes`: how many parameters the ranks have, then sizes and strides of each."""
        device = parameters[0].device
        kept = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(3)]
        kept.pop()
        torch.empty(2 * sum(each.dim() for each in parameters), dtype=torch.int64, device=device)

    @torch.no_grad()
    def _rebuild_once(self) -> None:
        """`rebuild_buckets`: the ranks agree about the order, and the one bucket goes before the others come."""
        if not self._rebuilds or not 0 < len(self._came) == len(self._places):
            return
        parameters, device = self._came, self._came[0].device
        numbers = torch.empty(len(parameters) + 1, dtype=torch.int32, device=device)
        count = len(torch_distributed.assign_buckets(parameters, self._limits))
        sizes = torch.empty(count, dtype=torch.int32, device=device)
        del sizes, numbers
        gradients = [each.grad for each in parameters] if self.gradient_as_bucket_view else []
        self._rebuilds, self._came = False, []
        self._retired = self.gradient_buckets if self.gradient_as_bucket_view and device.type == "cuda" else []
        self._make_buckets(parameters, self._limits)
        for parameter, gradient in zip(parameters, gradients, strict=False):
            if gradient is not None:
                parameter.grad = self._slot(parameter).copy_(gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        if self._reduced and not self._is_rebuilt:
            self._is_rebuilt = True
            self._reduced.clear()
        if self._rebuilds and torch.is_grad_enabled():
            self._rebuild_once()
        with torch_distributed.split_by_buckets(self):
            return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is sent for what runs forward and backward inside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Reduce buckets by a hook of the program's."""
        self._hook = functools.partial(hook, state)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(self.process_group, torch_distributed.builtin_hook(comm_hook_type))

    def _slots(self, bucket: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of a bucket, or of what a hook made of it: one for each parameter."""
        places = [(member, self._places[member][1]) for member in self._members[bucket]]
        return [buffer.narrow(0, offset, member.numel()).view_as(member) for member, offset in places]

    def _slot(self, parameter: torch.Tensor) -> torch.Tensor:
        bucket, offset = self._places[parameter]
        return self.gradient_buckets[bucket].narrow(0, offset, parameter.numel()).view_as(parameter)

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        if not self.require_backward_grad_sync or parameter.grad is None:
            return
        if parameter in self._sparse:
            if parameter.is_cuda:
                raise ValueError(_NO_SPARSE)
            return
        bucket, slot = self._places[parameter][0], self._slot(parameter)
        if self._rebuilds and len(self._came) < len(self._places):
            self._came.append(parameter)
        slot.copy_(parameter.grad)
        if self.gradient_as_bucket_view:
            parameter.grad = slot
            self._retired = []
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return
        self._missing[bucket] = len(self._members[bucket])
        buffer = self.gradient_buckets[bucket]
        if self._hook is None:
            torch.distributed.all_reduce(buffer, group=self.process_group, async_op=True)
            self._share_used(bucket)
            self._copy_back(bucket, buffer)
            return
        if not self._pending:
            torch_autograd.call_after_backward(self._finish)
        slots = functools.partial(self._slots, bucket, buffer)
        self._pending[bucket] = self._hook(
            GradientBucket(bucket, len(self.gradient_buckets), buffer, self._members[bucket], slots)
        )
        self._share_used(bucket)

    def _share_used(self, bucket: int) -> None:
        """With the last bucket the ranks say which parameters they have used."""
        if self._used and bucket == len(self.gradient_buckets) - 1:
            self._used[1].copy_(self._used[0])
            if self._reduces_used:
                torch.distributed.all_reduce(self._used[1], group=self.process_group, async_op=True)
            self._used[0].zero_()

    def _copy_back(self, bucket: int, buffer: torch.Tensor) -> None:
        if self.gradient_as_bucket_view and buffer is self.gradient_buckets[bucket]:
            return
        for member, slot in zip(self._members[bucket], self._slots(bucket, buffer), strict=True):
            if member.grad is not None:
                member.grad.copy_(slot)

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: wait for what the hook began."""
        for bucket, future in sorted(self._pending.items()):
            result = future.wait()
            self._reduced[bucket] = result[0] if isinstance(result, (list, tuple)) else result
            self._copy_back(bucket, self._reduced[bucket])
        self._pending.clear()


def _call_while_alive(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """The method of an object that this does not keep alive: a model that is deleted goes at once, hooks and all."""
    reference = weakref.WeakMethod(method)

    def call(parameter: torch.Tensor) -> None:
        found = reference()
        if found is not None:
            found(parameter)

    return call
