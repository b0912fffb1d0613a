"""Values of tensors that a program makes from constants. Its decisions about them come out as in a real run.

A FakeTensor has no values, and most programs never ask. But some build positions or masks from `arange` and `ones` and
look at them ("is any sequence packed?") to choose a cheaper way; libraries that notice a FakeTensor then take the
dearer way. Such values do not depend on data, so they can simply be computed: each integer or boolean tensor that comes
from constants, or from inputs whose values were given, carries its real value along. So does a floating-point tensor
made from these: masks of 0 and 1, or of 0 and the lowest number, that a program compares with 0 again.

Values are kept for up to `LIMIT` elements in memory, on the CPU; whatever is made from unknown tensors is unknown, and
so is every parameter, buffer and input in floating point.

Three things are assumed rather than known, and said so among a profile's assumptions: that all numbers are finite, so
that a program that asks (`isfinite(x).all()`) goes the way it goes when nothing is wrong; that what it checks of its
tensors (`assert`, `if ...: raise`, `torch._check_tensor_all`, arguments of distributions) holds; and that a single
random number drawn on the CPU is the middle of its range, so that layer drop (p < 0.5) keeps the layer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.compiler.inlined import outside_compiler
from fxmem.errors import forget_frames

aten = torch.ops.aten

LIMIT = 1 << 20
"""Elements in memory: what is expanded counts once."""
_MOST_GIVEN: Final = 1 << 24
"""Elements of an input whose values were given, and of what is made from one of more than `LIMIT`."""
_FEW: Final = 1 << 12
"""Elements of a tensor of the host whose values are kept whatever they are."""

_LIBRARY = "transformers.utils.import_utils"
VALUE = "_fxmem_value"
"""The attribute in which a fake tensor carries its value."""
_FACTORIES = frozenset(
    "arange linspace logspace full zeros ones scalar_tensor eye tril_indices triu_indices full_like zeros_like "
    "ones_like new_zeros new_ones new_full".split()
)
_UNIFORM_: Final[Any] = aten.uniform_.default
_DRAWS: Final = (aten.rand.default, _UNIFORM_)
_UNIFORM = "_fxmem_uniform"
_WHETHER_FINITE: Final[dict[Any, bool]] = {
    **dict.fromkeys((torch.isfinite, torch.Tensor.isfinite), True),
    **{getattr(home, name): False for home in (torch, torch.Tensor) for name in ("isnan", "isinf")},
}
"""What each of these answers everywhere if all numbers are finite."""
_OF_ITSELF: Final[dict[Any, bool]] = {
    function: name in ("eq", "le", "ge")
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for function in (getattr(torch, name), getattr(torch.Tensor, name), getattr(torch.Tensor, f"__{name}__"))
}
"""What each of these answers everywhere for a number and itself."""
_REDUCTIONS: Final = tuple(getattr(home, name) for home in (torch, torch.Tensor) for name in ("all", "any", "sum"))


def give(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Attach a copy of `value` to `fake`, for an integer or boolean CPU tensor."""
    is_real = value.device.type == "cpu" and not isinstance(value, torch_common.FakeTensor)
    if is_real and _is_integer(value, _MOST_GIVEN):
        with torch_common.no_modes():
            setattr(fake, VALUE, value.detach().clone())


def give_from_host(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Attach a copy of what the host has computed: of few numbers, and of a mask of zeros and ones; of no parameter."""
    is_parameter = isinstance(value, torch.nn.Parameter) or value.requires_grad
    if is_known(fake) or is_parameter or not _is_trackable(value, _MOST_GIVEN):
        return
    with torch_common.no_modes():
        numbers = value.detach()
        if numbers.numel() <= _FEW or (_is_mask(numbers.flatten()[:_FEW]) and _is_mask(numbers)):
            setattr(fake, VALUE, numbers.to(fake.dtype, copy=True))


def _is_mask(numbers: torch.Tensor) -> bool:
    return numbers.dtype is torch.bool or bool(((numbers == 0) | (numbers == 1)).all())


def attach(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Attach a value to a fake tensor, whatever its size and dtype; it is not copied."""
    setattr(fake, VALUE, value)


def overwrite(tensor: torch.Tensor, numbers: Any) -> None:
    """Give a tensor, fake or of the host, these numbers: what a collective writes."""
    with torch_common.no_modes():
        value = torch.tensor(numbers, dtype=tensor.dtype, device="cpu").reshape(tensor.shape)
        if isinstance(tensor, torch_common.FakeTensor):
            attach(tensor, value)
        else:
            tensor.copy_(value)


def is_known(tensor: Any) -> bool:
    """Whether a tensor's values are there to be read."""
    return _value(tensor) is not None


def find_value(tensor: Any) -> torch.Tensor | None:
    """A tensor's values, on the CPU and not to be written to; None if they are not known."""
    value = _value(tensor)
    return None if value is None or (value.numel() and not value.untyped_storage().nbytes()) else value


def replacement(function: Any) -> Callable[..., Any] | None:
    """What to run instead of a torch function that checks values or reads tensors' memory. None for every other."""
    try:
        return _REPLACEMENTS.get(function)
    except TypeError:  # not hashable
        return None


def _mark_finite(function: Any, everywhere: bool) -> Callable[..., Any]:
    """A function with the same answer for all numbers, which its result carries along."""

    def call_and_mark(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        setattr(result, _UNIFORM, everywhere)
        if isinstance(result, torch_common.FakeTensor) and not result.dim():
            fill(result, everywhere)
        return result

    return call_and_mark


def _compare_with_itself(function: Any, everywhere: bool) -> Callable[..., Any]:
    """A comparison, whose result is known where it is that of a tensor with itself."""
    marked = _mark_finite(function, everywhere)

    def compare(*args: Any, **kwargs: Any) -> Any:
        return (marked if len(args) > 1 and args[0] is args[1] else function)(*args, **kwargs)

    return compare


def _reduce_uniform(function: Any) -> Callable[..., Any]:
    """A reduction, whose result is known where all that it reduces is the same, or where it is a check that holds."""
    holds, sums = function in torch_common.CHECKS, function.__name__ == "sum"

    def reduce(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        uniform = True if holds else getattr(args[0] if args else kwargs.get("input"), _UNIFORM, None)
        is_followed = uniform is not None and not (sums and uniform)
        if is_followed and isinstance(result, torch_common.FakeTensor) and not is_known(result):
            fill(result, uniform)
        return result

    return reduce


def fill(fake: torch.Tensor, number: Any) -> None:
    """Attach a value that is the same everywhere."""
    with torch_common.no_modes():
        setattr(fake, VALUE, torch.full(fake.shape, number, dtype=fake.dtype, device="cpu"))


def _of_numbers(data: Any, *, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """`torch.tensor` of a list with scalar tensors in it, whose memory it would read: their numbers, which may be
    known, in their place. Pinned memory it would ask the driver for, beneath all operators."""
    if isinstance(data, (list, tuple)):
        data = torch_common.tree_map_only(torch_common.FakeTensor, lambda x: x if x.dim() else x.item(), data)
    return torch.tensor(data, **kwargs)


def _unpack_sequences(function: Callable[..., Any]) -> Callable[..., Any]:
    """`x[rows, columns]`, where sequences of scalar tensors become the tensors that indexing makes of them; it would
    read their memory."""

    def pick(tensor: torch.Tensor, index: Any, *value: Any) -> Any:
        if isinstance(index, tuple):
            index = tuple(_row(each, tensor.device) if isinstance(each, (list, tuple)) else each for each in index)
        return function(tensor, index, *value)

    return pick


def _row(numbers: Any, device: torch.device) -> Any:
    fakes = [each for each in numbers if isinstance(each, torch_common.FakeTensor)]
    if not fakes or any(each.dim() for each in fakes):
        return numbers
    if all(map(is_known, fakes)) or any(each.dtype is torch.bool for each in fakes):
        return _of_numbers(numbers, device=device)
    return torch.empty(len(numbers), dtype=torch.int64, device=device)


def _copy_deeply(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """As `Tensor.__deepcopy__` does, a copy of a leaf, with its gradient and attributes; it would copy its memory. Of a
    parameter, as `Parameter.__deepcopy__` does: a clone, without those."""
    if not torch_wrappers.is_fake(tensor):
        with torch_common.no_modes(), torch_common.pause_observers():
            return copy.deepcopy(tensor, memo)
    if id(tensor) in memo:
        return memo[id(tensor)]
    if isinstance(tensor, torch_common.FakeTensor) and isinstance(tensor, torch.nn.Parameter):
        memo[id(tensor)] = torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
        return memo[id(tensor)]
    if isinstance(tensor, torch_common.FakeTensor):
        made: Any = _copy_memory(tensor.detach(), memo)
        tensor.detach().new_empty(())  # into which the copy's storage is set
    else:  # a wrapper is cloned, and the clone's parts give way to copies of the original's
        with torch.no_grad():
            _, made = tensor.clone(), torch_wrappers.rebuild(tensor, lambda part: _copy_deeply(part, memo))
    for name, value in vars(tensor).items():
        if name not in vars(made) or name == "_is_param":
            made.__dict__[name] = copy.deepcopy(value, memo)
    made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    if tensor.grad is not None:
        made.grad = _copy_deeply(tensor.grad, memo)
    return made


@torch.no_grad()
def _copy_memory(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a tensor within a copy of its whole storage, made once for all."""
    copies = memo.setdefault(id(_copy_memory), {})
    key = torch_common.storage_key(tensor)
    if key not in copies:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        copies[key] = (tensor if tensor.numel() == count else tensor.as_strided((count,), (1,), 0)).clone()
    whole: torch.Tensor = copies[key]
    if whole.dtype is not tensor.dtype:
        return tensor.clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


_REPLACEMENTS: Final[dict[Any, Callable[..., Any]]] = {
    torch.tensor: _of_numbers,
    torch.Tensor.__deepcopy__: _copy_deeply,
    **{function: _unpack_sequences(function) for function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)},
    **{function: _mark_finite(function, everywhere) for function, everywhere in _WHETHER_FINITE.items()},
    **{function: _compare_with_itself(function, everywhere) for function, everywhere in _OF_ITSELF.items()},
    **{function: _reduce_uniform(function) for function in (*_REDUCTIONS, *torch_common.CHECKS)},
}


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """After an op ran on fakes: carry its value along if it can be known, forget it if it can no longer be."""
    if not isinstance(result, torch.Tensor):
        if result is None and torch_common.is_mutable(func):
            for tensor in torch_common.iterate_tensors(args):
                forget(tensor)
        if isinstance(result, (tuple, list)) and any(_is_trackable(t) for t in result if isinstance(t, torch.Tensor)):
            value = _compute(func, args, kwargs)
            for fake, real in zip(result, value if isinstance(value, (tuple, list)) else (), strict=False):
                if isinstance(real, torch.Tensor) and _is_trackable(real):
                    setattr(fake, VALUE, real)
        return
    if func in _DRAWS and result.numel() == 1 and torch_common.device_type(result) == "cpu":
        low, high = (args[1:3] + (0.0, 1.0)[len(args) - 1 :]) if func is _UNIFORM_ else (0.0, 1.0)
        fill(result, (low + high) / 2)
        return
    if not (_is_trackable(result) or _is_of_a_large_input(result, args)) or (
        # Torch's own zeros and ones, which something writes to: state of optimizers, the gradient of a loss.
        result.dtype.is_floating_point and "memory_format" in kwargs and _is_factory(func)
    ):
        return
    value = _compute(func, args, kwargs)
    if value is None:
        if torch_common.is_mutable(func):
            forget(result)
    elif isinstance(value, torch.Tensor) and value.shape == result.shape:
        setattr(result, VALUE, value)


_SHRINK: Final = (aten._unique2.default, aten.unique_consecutive.default)
"""Operators whose results are as large as their argument on a card before they shrink; a storage does not shrink."""


def recover(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: torch_common.FakeTensorMode
) -> tuple[bool, Any]:
    """(whether known, result) of an op that a FakeTensor cannot answer: the number itself, or fakes of the true shape
    where the op's tensors are.

    Unknown numbers picked by a known mask are as many as the mask picks.
    """
    if func is aten.nonzero.default and (mask := find_value(args[0])) is not None:
        return True, _places(mask, mask.shape, mode, args[0].device)
    value = _compute(func, args, kwargs)
    if value is None:
        return _select_masked(func, args, mode)
    device = next(iter(torch_common.iterate_tensors(args))).device
    room = args[0].numel() if func in _SHRINK and device.type == "cuda" else 0
    return True, torch_common.tree_map_only(torch.Tensor, lambda each: _fake(each, mode, device, room), value)


def _fake(value: torch.Tensor, mode: torch_common.FakeTensorMode, device: torch.device, room: int = 0) -> torch.Tensor:
    """A fake with this value, in a storage that has room for so many numbers."""
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if room > value.numel() > 0:
            fake = torch.empty(room, dtype=value.dtype, device=device).resize_(value.shape)
    setattr(fake, VALUE, value)
    return fake


def _places(
    mask: torch.Tensor, shape: torch.Size, mode: torch_common.FakeTensorMode, device: torch.device
) -> torch.Tensor:
    """`mask.expand(shape).nonzero()` of known numbers; of more than `LIMIT`, as in a mask expanded to features, only
    their count is found."""
    with torch_common.no_modes():
        mask = mask.expand(shape)
        if mask.numel() <= LIMIT:
            return _fake(mask.nonzero(), mode, device)
        once = mask[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride())]
        count = int(once.count_nonzero()) * (mask.numel() // once.numel())
    with mode:
        return torch.empty(mask.dim(), count, dtype=torch.int64, device=device).t()


def _select_masked(func: Any, args: tuple[Any, ...], mode: torch_common.FakeTensorMode) -> tuple[bool, Any]:
    """`x[mask]` and `x.masked_select(mask)`, where the mask is known."""
    if func not in (aten.index.Tensor, aten.masked_select.default):
        return False, None
    source, indices = args[0], args[1] if func is aten.index.Tensor else [args[1]]
    places: list[torch.Tensor | None] = []
    for index in indices:
        mask = find_value(index) if index is not None and index.dtype is torch.bool else None
        if mask is None:
            places.append(index)
            continue
        fake = _places(mask, mask.shape if func is aten.index.Tensor else source.shape, mode, source.device)
        with mode:
            places += fake.unbind(1)
    if any(index is not None and index.dtype is torch.bool for index in places):
        return False, None
    with mode:
        return True, aten.index.Tensor(source, places)


@contextlib.contextmanager
def libraries_ask_for_values() -> Iterator[Callable[[], None]]:
    """Let libraries treat FakeTensors with values as ordinary tensors. They would take every FakeTensor for one that is
    being traced, without values.

    transformers asks `is_fake_tensor` (transformers/utils/import_utils.py, since 4.56). What is yielded is to be called
    where a program may have imported it since.
    """
    asked: list[Any] = []

    def ask_for_values(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return outside_compiler(lambda tensor: original(tensor) and not is_known(tensor))

    with contextlib.ExitStack() as stack:

        def ask() -> None:
            module = sys.modules.get(_LIBRARY)
            if not asked and hasattr(module, "is_fake_tensor"):
                asked.append(module)
                stack.enter_context(torch_common.patch(module, "is_fake_tensor", ask_for_values))

        ask()
        yield ask


def _is_integer(tensor: torch.Tensor, limit: int = LIMIT) -> bool:
    return _is_trackable(tensor, limit) and not tensor.dtype.is_floating_point


def _is_trackable(tensor: torch.Tensor, limit: int = LIMIT) -> bool:
    if tensor.dtype.is_complex or tensor.layout is not torch.strided:
        return False
    return tensor.numel() <= limit or tensor.untyped_storage().nbytes() <= limit * tensor.element_size()


def _is_of_a_large_input(result: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a result is followed although it has more than `LIMIT` elements."""
    return _is_trackable(result, _MOST_GIVEN) and any(
        value.numel() > LIMIT for each in torch_common.iterate_tensors(args) if (value := _value(each)) is not None
    )


def _value(tensor: Any) -> torch.Tensor | None:
    if isinstance(tensor, torch_common.FakeTensor):
        value: torch.Tensor | None = getattr(tensor, VALUE, None)
        return value if value is not None else tensor.constant
    # A real tensor in a fake run: a literal the program wrote, or a constant of its own.
    is_real = isinstance(tensor, torch.Tensor) and torch_common.device_type(tensor) == "cpu"
    return tensor if is_real and (_is_integer(tensor) or not tensor.dim()) else None


def forget(tensor: torch.Tensor) -> None:
    """Something has written to it: its values are no longer known."""
    value: torch.Tensor | None = getattr(tensor, VALUE, None)
    if value is not None:
        # Views of it share the value's storage and must not be believed either; an empty storage says so.
        value.untyped_storage().resize_(0)
        delattr(tensor, VALUE)


@functools.cache
def _is_factory(func: Any) -> bool:
    return torch_common.op_name(func) in _FACTORIES and getattr(func, "namespace", "") == "aten"


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on real values, or None when one of them is not known."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    tensors = list(torch_common.iterate_tensors((args, kwargs)))
    factory = _is_factory(func)
    if not factory and (not tensors or any(find_value(each) is None for each in tensors)):
        return None
    if not all(isinstance(each, torch_common.FakeTensor) for each in torch_common.list_written(func, args, kwargs)):
        return None  # the program's own real tensor must not be written to

    def swap(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            value = _value(x)
            return value if value is not None else torch.empty(x.shape, dtype=x.dtype, device="meta")
        return torch.device("cpu") if isinstance(x, torch.device) else x

    with torch_common.no_modes():
        arguments, options = torch_common.tree_map(swap, (args, kwargs))
        if factory and tensors:
            options = {**options, "device": torch.device("cpu")}
        try:
            return func(*arguments, **options)
        except Exception as error:  # an op without a CPU kernel: unknown, and the fake run goes on
            forget_frames(error)
            return None
