"""Bytes that an op reads and writes: what its kernel moves between the card's memory and its multiprocessors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation.recording.flops.count import find_row


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes that the call `out = func(*args, **kwargs)` reads and writes: each argument once, a repeated element once.

    Args:
        func: the operator. Views, and what only allocates, move nothing.
        args: its arguments; their shapes and strides are looked at, so tensors may be fake.
        kwargs: the same, by keyword.
        out: its result.
    """
    name = torch_common.op_name(func)
    row = find_row(func)
    traffic = None if row is None else row.traffic
    # A tensor that is given twice counts twice: a call that looks the same may be given two.
    given = list(torch_common.iterate_tensors((args, kwargs)))
    writes = torch_common.is_mutable(func)
    storages = {_storage(tensor) for tensor in given}
    made = [tensor for tensor in _tensors(out) if writes or _storage(tensor) not in storages]
    if (not made and not writes) or "empty" in name:
        return 0
    if traffic == "picks":
        return 2 * _size(made) + _size(given[1:])
    if traffic == "puts" and name.endswith("_"):
        return _size(given[1:]) + 2 * _size(given[-1:])
    read = given
    if writes:
        declared = zip(torch_common.op_arguments(func), [*args, *kwargs.values()], strict=False)
        changed = _tensors([value for argument, value in declared if argument.is_write])
        made = _tensors([changed, made])
        read = given[len(changed) :] if traffic == "overwrites" and name.endswith("_") else given
    return _size(read) + _size(made) + _reread(func, name, args, given, made)


def host_bytes(name: str, args: Sequence[Any], out: Any) -> int:
    """Bytes that the call copies between the card and the host's memory.

    Args:
        name: the operator's qualified overload.
        args: its arguments.
        out: its result.
    """
    if not name.startswith(("aten.copy_.", "aten._to_copy.")):
        return 0
    given = args[name.startswith("aten.copy_.")]
    if not (isinstance(given, torch.Tensor) and isinstance(out, torch.Tensor)) or given.device.type == out.device.type:
        return 0
    return _nbytes(out) if "cpu" in (given.device.type, out.device.type) else 0


def _reread(
    func: Any, name: str, args: Sequence[Any], given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> int:
    """What a batch norm reads twice: statistics of the batch need its whole input before the first result. One that is
    taken to parts (`SyncBatchNorm`) makes either statistics or the result."""
    if "batch_norm" not in name or len(made) == 1 or all(tensor.shape != given[0].shape for tensor in made):
        return 0
    flags = [i for i, argument in enumerate(torch_common.op_arguments(func)) if argument.name in ("training", "train")]
    if not all(args[i] for i in flags if i < len(args)):
        return 0
    return _size([tensor for tensor in given if tensor.shape == given[0].shape])


def size_of_tensors(value: Any) -> int:
    """Bytes of the tensors in a value, each once."""
    return _size(_tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, each once."""
    return list({id(tensor): tensor for tensor in torch_common.iterate_tensors(value)}.values())


def _storage(tensor: torch.Tensor) -> int:
    return torch_common.storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_nbytes(tensor) for tensor in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements; those that a stride of 0 repeats count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
