"""What a reader on the host gets for a tensor that no card has computed: numbers that are legal where they are read.

A softmax sums to one, an index is below its bound, a sort's places are all there, a norm is not zero, a mask lets all
through and a count is of all, as shapes that depend on data are counted at their largest; a square matrix is symmetric
and positive-definite; every other fraction is between a half and one and a half. `note` keeps with a tensor what its
operator says of it, through views, casts and copies; `make` gives the numbers.

A truth that is read by itself is no mask: it decides the way that the program goes on. That of a comparison with a
number is what the number itself would decide, and every other is `False` (`fxmem.simulation.asked.values`).
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from fxmem._torch import common as torch_common
from fxmem.simulation.asked import known_values

aten = torch.ops.aten

MOST: Final = 1 << 20
"""Elements of a tensor; a larger one is zeros."""
_MEANING: Final = "_fxmem_meaning"
_COMPARED: Final = "_fxmem_compared"


class Meaning(enum.Enum):
    """What the numbers of a tensor are."""

    PROBABILITY = "one of so many that sum to one"
    FRACTION = "between zero and one"
    INDEX = "below so many"
    PLACE = "below so many, and no two alike in a row"
    RISING = "below so many, each above the one before"
    COUNT = "of all that is there"


class Comparison(NamedTuple):
    """Of one number without a value with one that is known."""

    compare: Callable[[float, float], bool]
    mine: float | int | None
    """The first, where something is known of it."""
    is_float: bool
    other: float | int


def note(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, fills: bool = False) -> None:
    """After an operator ran on fakes: keep what its result means.

    `fills`: known numbers that are all picked, as shapes are counted at their largest, are known.
    """
    if func in _PASSED_ON:
        picks_all = fills and func is aten.index.Tensor and _picks_all_in_order(args[0], args[1], result)
        if picks_all and (value := known_values.find_value(args[0])) is not None:
            with torch_common.no_modes():
                known_values.attach(result, value.clone())
        unknown = [each for each in torch_common.iterate_tensors(result) if not known_values.is_known(each)]
        if unknown and (found := _find(args[0])) is not None:
            if found[0] is Meaning.RISING and func in _REORDERS:
                found = Meaning.INDEX, found[1]
            for each in unknown:
                setattr(each, _MEANING, found)
    elif (compare := _COMPARISONS.get(func)) is not None:
        if args[0].numel() == 1 and not args[0].dtype.is_complex:
            comparison = Comparison(compare, make_number(args[0]), args[0].dtype.is_floating_point, args[1])
            setattr(result, _COMPARED, comparison)
    elif (rule := _RULES.get(func)) is not None and (meaning := rule(*args, **kwargs)) is not None:
        setattr(result if isinstance(result, torch.Tensor) else result[1], _MEANING, meaning)


def find_comparison(tensor: torch.Tensor) -> Comparison | None:
    """What a truth is, where it comes of a comparison with a number."""
    return getattr(tensor, _COMPARED, None)


def find_bound(tensor: torch.Tensor) -> int | None:
    """How many different indices there may be in a tensor; None where nothing is known of it."""
    meaning, size = _find(tensor) or (None, 0)
    return size if meaning in (Meaning.INDEX, Meaning.PLACE, Meaning.RISING) else None


def _find(tensor: torch.Tensor) -> tuple[Meaning, int] | None:
    """What is noted of a tensor, or what its known numbers are as indices."""
    found: tuple[Meaning, int] | None = getattr(tensor, _MEANING, None)
    if found is not None or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return found
    value = known_values.find_value(tensor)
    if value is None or not value.numel():
        return None
    with torch_common.no_modes():
        least, most = (int(each) for each in value.long().aminmax())
    return (Meaning.INDEX, most + 1) if least >= 0 else None


def _picks_all_in_order(tensor: torch.Tensor, indices: list[torch.Tensor | None], result: torch.Tensor) -> bool:
    """Whether `tensor[index]` is `tensor`: a mask or rising places pick as many as there are."""
    index = indices[0]
    if len(indices) > 1 or index is None or index.dim() != 1 or result.shape != tensor.shape:
        return False
    return index.dtype is torch.bool or getattr(index, _MEANING, (None, 0))[0] is Meaning.RISING


def make_number(tensor: torch.Tensor) -> float | int | None:
    """The number of a tensor of one element, where something is known of it; a truth is none."""
    meaning, size = getattr(tensor, _MEANING, (None, 0))
    if tensor.dtype.is_floating_point:
        fractions: dict[Meaning | None, float] = {Meaning.PROBABILITY: 1 / max(size, 1), Meaning.FRACTION: 0.5}
        return float(size) if meaning is Meaning.COUNT else fractions.get(meaning)
    return int(size) if meaning is Meaning.COUNT and tensor.dtype is not torch.bool else None


def make(fake: torch.Tensor) -> torch.Tensor:
    """A real tensor of the same shape and dtype on the host; not to be called where fakes are made."""
    shape, dtype = tuple(fake.shape), fake.dtype
    meaning, size = getattr(fake, _MEANING, (None, 0))
    if not 0 < math.prod(shape) <= MOST:
        return torch.zeros(shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.full(shape, bool(shape))
    if meaning is Meaning.COUNT:
        return torch.full(shape, size, dtype=dtype)
    if meaning is Meaning.PLACE and shape:
        # A few of many frequencies are not the constant one: TimesNet divides by them.
        first = int(1 < shape[-1] < size)
        return ((torch.arange(shape[-1]) + first) % size).to(dtype).expand(shape).clone()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype)
    if meaning is Meaning.PROBABILITY and dtype.is_floating_point:
        return _share_out(shape, size, dtype)
    if meaning is Meaning.FRACTION:
        return torch.full(shape, 0.5, dtype=dtype)
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    if len(shape) > 1 and shape[-1] == shape[-2] > 1:
        numbers = (numbers + numbers.mT) / (2 * shape[-1]) + torch.eye(shape[-1])
    return numbers.to(dtype) if shape else torch.ones(shape, dtype=dtype)


def _share_out(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> torch.Tensor:
    """Probabilities along the last dimension of `count`.

    Each is so many of parts that the dtype has no rounding for, and the first has what is left over: the sum is one to
    the bit, unless there are fewer parts than probabilities.
    """
    parts = min(round(1 / torch.finfo(dtype).eps), MOST)
    if count > parts:
        return torch.full(shape, 1 / count, dtype=dtype)
    numbers = torch.full(shape, parts // count / parts, dtype=dtype)
    dim = next((dim for dim in reversed(range(len(shape))) if shape[dim] == count), None)
    if dim is not None:
        numbers.narrow(dim, 0, 1).add_(parts % count / parts)
    return numbers


def _indices(tensor: torch.Tensor, dim: int | None = None, *_: Any, **__: Any) -> tuple[Meaning, int]:
    return Meaning.INDEX, tensor.numel() if dim is None or not tensor.dim() else tensor.shape[dim]


def _places(tensor: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> tuple[Meaning, int]:
    return Meaning.PLACE, tensor.shape[dim] if tensor.dim() else 1


def _draws(tensor: torch.Tensor, count: int, replacement: bool = False, **_: Any) -> tuple[Meaning, int]:
    return Meaning.INDEX if replacement else Meaning.PLACE, tensor.shape[-1]


def _count(tensor: torch.Tensor, dim: int | list[int] | None = None, *_: Any, **__: Any) -> tuple[Meaning, int] | None:
    dims = [dim] if isinstance(dim, int) else dim or range(tensor.dim())
    summed = math.prod(tensor.shape[each] for each in dims)
    meaning, size = getattr(tensor, _MEANING, (None, 0))
    if meaning is Meaning.COUNT and not tensor.dtype.is_floating_point:
        return Meaning.COUNT, summed * size
    return (Meaning.COUNT, summed) if tensor.dtype is torch.bool else None


def _joined(tensors: list[torch.Tensor], *_: Any) -> tuple[Meaning, int] | None:
    bounds = [find_bound(each) for each in tensors]
    return (Meaning.INDEX, max(filter(None, bounds))) if all(bounds) else None


def _remainder(tensor: torch.Tensor, other: Any) -> tuple[Meaning, int] | None:
    return (Meaning.INDEX, other) if other > 0 and not tensor.dtype.is_floating_point else None


_RULES: Final[dict[Any, Callable[..., tuple[Meaning, int] | None]]] = {
    aten._softmax.default: lambda tensor, dim, *_, **__: (Meaning.PROBABILITY, _places(tensor, dim)[1]),
    aten.sigmoid.default: lambda tensor: (Meaning.FRACTION, 0),
    aten.ceil.default: lambda tensor: (Meaning.COUNT, 1),  # of a made-up fraction, which is up to one
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), _indices),
    **dict.fromkeys((aten.max.dim, aten.min.dim), _indices),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _places),
    aten.topk.default: lambda tensor, k, dim=-1, *_: _places(tensor, dim),
    aten.nonzero.default: lambda mask: (Meaning.RISING, mask.shape[0]) if mask.dim() == 1 else None,
    aten.cat.default: _joined,
    aten.remainder.Scalar: _remainder,
    aten.multinomial.default: _draws,
    aten.randperm.default: lambda count, **_: (Meaning.PLACE, count),
    aten.randint.default: lambda high, *_, **__: (Meaning.INDEX, high),
    # Backward begins with a gradient of one.
    aten.ones_like.default: lambda tensor, **_: None if tensor.dim() else (Meaning.COUNT, 1),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default), _count),
}
"""What an operator says of its result; of several, of the second."""
_NAMES: Final = (
    "view _unsafe_view reshape alias detach clone _to_copy expand permute t transpose unsqueeze squeeze select slice "
    "unbind index index_select gather lift_fresh flip"
)
_PASSED_ON: Final = frozenset(
    getattr(packet, overload)
    for packet in (getattr(aten, name) for name in _NAMES.split())
    for overload in packet.overloads()
    if overload in ("default", "int", "Tensor", "dim", "dims")
)
"""What an operator's first argument means its result does."""
_REORDERS: Final = frozenset({aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.flip.default})
_COMPARISONS: Final[dict[Any, Callable[[float, float], bool]]] = {
    getattr(aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
SAYS: Final = _PASSED_ON | _RULES.keys() | _COMPARISONS.keys()
"""Operators after which there is something to `note`."""
