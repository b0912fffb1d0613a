"""Private names of both generations of FSDP, each with why and since when.

Checked on torch 2.11 and 2.15.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import _flat_param, _init_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param

from fxmem._torch.common import FakeTensor, nested, patch, storage_key, wrap


def fakes_are_sharded() -> AbstractContextManager[None]:
    """Both work on FakeTensors; nothing is allocated that a real rank would not.

    FSDP2 makes a view of each parameter for every rank to take one (`_chunk_with_empty`, since 2.4): that one alone is
    made, so that the world's size costs nothing.

    Shards that are offloaded to the host stay where they are: fakes have no pages to pin (`aten._pin_memory` has no
    fake form, as of 2.11), and those of real tensors the driver would pin.
    """
    return nested(
        patch(_fsdp_param, "_chunk_with_empty", lambda _: _Chunks),
        _shards_padded_once(),
        _flat_parameters(),
        _machines_of_all_their_cards(),
        patch(torch.Tensor, "pin_memory", lambda _: lambda tensor, *args, **kwargs: tensor),
    )


class _Chunks:
    """The chunks of a tensor, made when asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError(index)
        size, begin = self._tensor.size(self._dim), index * self._length
        if begin >= size and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._length, size - begin))


def _shards_padded_once() -> AbstractContextManager[None]:
    """FSDP2 pads unpadded shards before its first forward (`FSDPParam.reset_sharded_param`, since 2.4).

    It tells them by their addresses, which fakes do not have: those in the storage that it knows stay as they are."""

    def reset_sharded_param(original: Callable[..., Any], self: Any) -> None:
        known: Any = self._sharded_param_data
        local: Any = getattr(self.sharded_param, "_local_tensor", None)
        are_fake = isinstance(known, FakeTensor) and isinstance(local, FakeTensor)
        if are_fake and storage_key(known) == storage_key(local):
            self._sharding_spec = self.sharded_param._spec
        else:
            original(self)

    return wrap(_fsdp_param.FSDPParam, "reset_sharded_param", reset_sharded_param)


def _flat_parameters() -> AbstractContextManager[None]:
    """FSDP1's flat parameters stay fake where they are offloaded.

    `FlatParamHandle.flat_param_to` (since 1.13) moves shards to the host, where a program's tensors are real: one that
    goes to and fro has to stay itself.
    """

    def move(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        with self.flat_param.fake_mode if isinstance(self.flat_param, FakeTensor) else contextlib.nullcontext():
            original(self, *args, **kwargs)

    return wrap(_flat_param.FlatParamHandle, "flat_param_to", move)


def _machines_of_all_their_cards() -> AbstractContextManager[None]:
    """FSDP1 shards within machines by how many ranks these have.

    It asks for the cards that a rank finds, which is one here (`_init_intra_and_inter_node_groups`,
    torch/distributed/fsdp/_init_utils.py, since 2.0).
    """

    def make_groups(original: Callable[..., Any], group: Any, found: int) -> Any:
        return original(group, int(os.environ.get("LOCAL_WORLD_SIZE") or found))

    return wrap(_init_utils, "_init_intra_and_inter_node_groups", make_groups)
