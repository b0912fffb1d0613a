"""Inputs of another size: the dimensions that vary together, and the arguments with them changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from fxmem._torch.common import iterate_tensors, tree_map_only
from fxmem.errors import AnalysisError, UsageError
from fxmem.records.units import format_shape
from fxmem.simulation.recording.observe.fx_tracer import named_arguments


@dataclass(frozen=True)
class Resizing:
    """Dimensions of a step's inputs that vary together."""

    size: int
    """What they are."""
    axes: Mapping[int, tuple[int, ...]]
    """Number of a tensor, in the order of the arguments, to its dimensions."""
    names: tuple[str, ...]
    """Each as `NAME:AXIS`."""

    def resize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the dimensions of that size; a tensor that changes is on meta, laid out as it was."""
        numbers = count()
        made: dict[int, torch.Tensor] = {}

        def resize_tensor(tensor: torch.Tensor) -> torch.Tensor:
            axes = self.axes.get(next(numbers), ())
            if not axes:
                return tensor
            if id(tensor) not in made:  # one tensor that is passed twice stays one
                made[id(tensor)] = _resize(tensor, axes, size)
            return made[id(tensor)]

        return tuple(tree_map_only(torch.Tensor, resize_tensor, each) for each in args), {
            name: tree_map_only(torch.Tensor, resize_tensor, each) for name, each in kwargs.items()
        }


def resize_sequences(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with sequences of that length. Raises UsageError if there are none, or for a length below 1."""
    if length < 1:
        raise UsageError(f"expected sequences of at least 1, got {length}")
    return find_resizing(named_arguments(model, args, kwargs), "seq").resize(args, kwargs, length)


def find_resizing(arguments: Sequence[tuple[str, Any]], dim: str | int) -> Resizing:
    """Which dimensions of the named arguments `dim` means; see `fxmem.max_batch`.

    Raises:
        UsageError: it cannot be understood, or the inputs have no such dimension, or dimensions of several sizes.
    """
    tensors = list(_name_tensors(arguments))
    if not tensors:
        raise UsageError("expected inputs with a tensor to resize, got none")
    match dim:
        case "batch":
            places = _shared_dims(tensors, 0)
        case "seq":
            places = _sequence(tensors)
        case int() if not isinstance(dim, bool):
            places = _shared_dims(tensors, dim)
        case str() if ":" in dim:
            places = [_place(tensors, pair.strip(), dim) for pair in dim.split(",")]
        case str() if dim.isdecimal():
            places = _shared_dims(tensors, int(dim))
        case _:
            raise UsageError(
                f"expected a dimension as batch, seq, a number or NAME:AXIS[,NAME:AXIS]; got {dim!r}; "
                f"the inputs are {_list_tensors(tensors)}"
            )
    sizes = {tensors[number][1].shape[axis] for number, axis in places}
    if len(sizes) > 1 or 0 in sizes:
        raise UsageError(
            f"expected dimensions of one size above 0, got {', '.join(map(str, sorted(sizes)))} for {dim!r}; the "
            f"inputs are {_list_tensors(tensors)}"
        )
    axes: dict[int, tuple[int, ...]] = {}
    for number, axis in places:
        axes[number] = (*axes.get(number, ()), axis)
    return Resizing(size=sizes.pop(), axes=axes, names=tuple(f"{tensors[number][0]}:{axis}" for number, axis in places))


_Tensors = Sequence[tuple[str, torch.Tensor]]


def _name_tensors(arguments: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, by the argument's name; one of several in an argument also by its number
    there."""
    for name, argument in arguments:
        tensors = list(iterate_tensors(argument))
        yield from (
            (name if len(tensors) == 1 else f"{name}.{number}", tensor) for number, tensor in enumerate(tensors)
        )


def _list_tensors(tensors: _Tensors) -> str:
    return ", ".join(
        f"{name} {format_shape(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in tensors
    )


def _shared_dims(tensors: _Tensors, axis: int) -> list[tuple[int, int]]:
    shape = tensors[0][1].shape
    if not 0 <= axis < len(shape):
        raise UsageError(
            f"expected a dimension that the first input has, got {axis}; the inputs are {_list_tensors(tensors)}"
        )
    return [
        (number, axis)
        for number, (_, tensor) in enumerate(tensors)
        if tensor.dim() > axis and tensor.shape[axis] == shape[axis]
    ]


def _sequence(tensors: _Tensors) -> list[tuple[int, int]]:
    def is_tokens(tensor: torch.Tensor) -> bool:
        return tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex()

    shape = next((tensor.shape for _, tensor in tensors if is_tokens(tensor)), None)
    if shape is None:
        raise UsageError(
            f"expected a 2-d integer input (tokens) for the dimension seq; the inputs are {_list_tensors(tensors)}: "
            "write NAME:AXIS[,NAME:AXIS]"
        )
    alike = (
        number
        for number, (_, tensor) in enumerate(tensors)
        if tensor.shape == shape or (is_tokens(tensor) and tensor.shape[1] == shape[1])
    )
    return [(number, 1) for number in alike]


def _place(tensors: _Tensors, pair: str, dim: str) -> tuple[int, int]:
    name, _, axis = pair.rpartition(":")
    number = next((number for number, (known, _) in enumerate(tensors) if known == name), None)
    if number is None or not axis.removeprefix("-").isdecimal():
        raise UsageError(
            f"expected NAME:AXIS[,NAME:AXIS] with inputs of {_list_tensors(tensors)}; got {pair!r} in {dim!r}"
        )
    rank = tensors[number][1].dim()
    if not -rank <= int(axis) < rank:
        raise UsageError(
            f"expected an axis of {name} from 0 to {rank - 1}, got {axis} in {dim!r}; "
            f"the inputs are {_list_tensors(tensors)}"
        )
    return number, int(axis) % rank


def _resize(tensor: torch.Tensor, axes: tuple[int, ...], size: int) -> torch.Tensor:
    shape = [size if axis in axes else old for axis, old in enumerate(tensor.shape)]
    formats = [
        torch.contiguous_format,
        *({4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])),
    ]
    layout = next((each for each in formats if tensor.is_contiguous(memory_format=each)), None)
    settings: dict[str, Any] = {"dtype": tensor.dtype, "device": "meta", "requires_grad": tensor.requires_grad}
    try:
        if layout is not None:
            return torch.empty(shape, memory_format=layout, **settings)
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
        return torch.empty_permuted(shape, order, **settings)
    except RuntimeError as error:  # more bytes than an address can say
        raise AnalysisError(f"no tensor can be as large as {format_shape(shape)}") from error
