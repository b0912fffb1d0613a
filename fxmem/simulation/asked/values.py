"""`Values`: what a program is answered where it needs numbers that no kernel has computed."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.asked import known_values, legal_values
from fxmem.simulation.asked.checks import find_going_on_value, find_passing_value
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.asked.routing import BALANCED, Routing, Rule
from fxmem.simulation.code.source_lines import checking_frame, is_stepping, optimizer_frame, program_place, user_frame

# --- upper bounds of results whose shapes depend on data: every element is picked, no two are equal -------------------
# A FakeTensor has no values to pick by. What a program allocates for such results is then at most what is computed
# here.


_MASKS = (torch.bool, torch.uint8)


def picks_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is `x[mask]`, whose result follows from no metadata."""
    return func is aten.index.Tensor and any(index is not None and index.dtype in _MASKS for index in args[1])


def bound_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, distinct: bool) -> tuple[Any, str] | None:
    """The largest result that an operator can have, and what is taken for granted; None for every other operator.

    `distinct`: also of `unique`, as if no two elements were equal; models loop over the classes that it finds.
    """
    bound = _BOUNDS.get(str(func)) or (_DISTINCT.get(str(func)) if distinct else None)
    return None if bound is None else bound(*args, **kwargs)


def _nonzero(tensor: torch.Tensor) -> tuple[Any, str]:
    places = torch.empty(tensor.dim(), tensor.numel(), dtype=torch.int64, device=tensor.device)
    return places.t(), "nonzero: every place"


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> tuple[Any, str]:
    count = torch.broadcast_tensors(tensor, mask)[0].numel()  # type: ignore[no-untyped-call]
    return tensor.new_empty(count), "masked_select: every element"


def _index(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> tuple[Any, str]:
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            places.append(index)
            continue
        places += torch.empty(index.dim(), index.numel(), dtype=torch.int64, device=index.device).t().unbind(1)
    return aten.index.Tensor(tensor, places), "x[mask]: every element"


def _unique(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, str]:
    classes = legal_values.find_bound(tensor)
    count, device = min(tensor.numel(), classes or tensor.numel()), tensor.device
    # On a card the result is as large as the input before it shrinks, and a storage does not shrink.
    values = torch.empty(tensor.numel() if device.type == "cuda" else count, dtype=tensor.dtype, device=device)
    values = values.resize_(count)
    inverse = torch.empty(tensor.shape, dtype=torch.int64, device=device)
    return (values, inverse, torch.empty(count, dtype=torch.int64, device=device)), "unique: no two elements equal"


def _unique_of_index(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, str]:
    values, no_inverse = torch.empty_like(tensor), torch.empty(0, dtype=torch.int64, device=tensor.device)
    return (values, no_inverse), "index_fill's gradient: no two indices equal"


def _unique_dim(tensor: torch.Tensor, dim: int, *_: Any, **__: Any) -> tuple[Any, str]:
    rows = torch.empty(tensor.shape[dim], dtype=torch.int64, device=tensor.device)
    return (torch.empty_like(tensor), rows, torch.empty_like(rows)), "unique: no two rows equal"


def _bincount(tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> tuple[Any, str]:
    count = max(legal_values.find_bound(tensor) or 1, minlength)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return torch.empty(count, dtype=dtype, device=tensor.device), f"bincount: {count} bins"


_BOUNDS: Final[dict[str, Callable[..., tuple[Any, str]]]] = {
    "aten.nonzero.default": _nonzero,
    "aten.masked_select.default": _masked_select,
    "aten.index.Tensor": _index,
    "torchvision.nms.default": lambda boxes, *_: (boxes.new_empty(len(boxes), dtype=torch.int64), "nms: every box"),
    "aten.bincount.default": _bincount,
    "aten.repeat_interleave.Tensor": lambda each, *_, **__: (torch.empty_like(each), "repeat_interleave: each once"),
    "aten._unique.default": _unique_of_index,
    "aten._coalesce.default": lambda x: (torch_wrappers.sparse_parts(x)[0].shape[1], "coalesce: no two places equal"),
    "aten._nested_tensor_from_mask_left_aligned.default": lambda *_: (
        False,
        "nested tensors of an encoder: every token, padding too",
    ),
}
_DISTINCT: Final[dict[str, Callable[..., tuple[Any, str]]]] = {
    **dict.fromkeys(("aten._unique2.default", "aten.unique_consecutive.default"), _unique),
    "aten.unique_dim.default": _unique_dim,
}


# --- what a model reads of its tensors in a real run ------------------------------------------------------------------
# Some models decide by their data: which experts run, how many boxes there are, when a loop ends. Their forward and
# loss run once on the CPU, on a copy with real values (`fxmem.simulation.step.fake_model`); what each operator
# reads whose result depends on values is kept. The fake run then finds these values where it comes to the same line.


_Place = tuple[Any, str, int]
"""Operator, file and line of the program."""
_HANGING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_SELECTIONS = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default})
_NO_KERNELS = frozenset({"prim", "prims", "profiler"})


class RealReads:
    """Values that a real run has read, by place, in order."""

    def __init__(self) -> None:
        self._found: dict[_Place, list[list[torch.Tensor]]] = {}
        self._next: collections.Counter[_Place] = collections.Counter()

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Keep what an operator of the real run reads."""
        self._found.setdefault(_place(func), []).append([each.detach().clone() for each in find_deciding(func, args)])

    def begin(self) -> None:
        """Another run of the same program begins."""
        self._next.clear()

    def give(self, func: Any, args: tuple[Any, ...]) -> None:
        """Give an operator's fakes the values that they had in the real run. None where it came here less often."""
        if not hangs_on_values(func, args):
            return
        place = _place(func)
        number, known = self._next[place], self._found.get(place, [])
        self._next[place] += 1
        fakes = list(find_deciding(func, args))
        if number >= len(known) or [t.shape for t in fakes] != [t.shape for t in known[number]]:
            return
        for fake, value in zip(fakes, known[number], strict=True):
            if isinstance(fake, torch_common.FakeTensor) and not known_values.is_known(fake):
                known_values.attach(fake, value)


def find_deciding(func: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors whose values decide: of a selection the mask, of other operators all."""
    return torch_common.iterate_tensors(args[1:] if func in _SELECTIONS else args)


def hangs_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator's result, or its shape, may follow from values."""
    if func is torch.ops.aten.index.Tensor:
        return picks_by_mask(func, args)
    return not _HANGING.isdisjoint(func.tags) if func.namespace == "aten" else func.namespace not in _NO_KERNELS


def _place(func: Any) -> _Place:
    frame = user_frame(sys._getframe(1))
    return (func, "", 0) if frame is None else (func, frame.f_code.co_filename, frame.f_lineno)


# --- `Values`: what a program is answered where it needs numbers that no kernel has computed --------------------------


aten = torch.ops.aten

_UNSCALE: Final[Any] = aten._amp_foreach_non_finite_check_and_unscale_.default
"""Writes in place and allocates nothing. All numbers are taken to be finite, so that `found_inf` stays what it was."""
_FRACTION: Final = "_fxmem_fraction"
"""The attribute in which a fake tensor carries what was made up for it, and its version then."""
_COMPARED: Final = (aten.equal.default, aten.allclose.default)
_FALLS: Final = 1e-4
"""By how much of the first one made-up fraction is smaller than the one before."""


class Values:
    """Answers for one program, in this order: known values, checks that pass, largest shapes, what is made up."""

    takes_all_distinct = False
    """Whether `unique` is taken to find no two elements equal."""

    def __init__(self, rule: Rule = BALANCED) -> None:
        self.routing = Routing(rule)
        """Which tokens go to which experts."""
        self.reads: RealReads | None = None
        """Values of a real run, if there was one."""
        self.bounded: dict[tuple[str, str], None] = {}
        """Shapes that depend on data and are counted at the largest they can be: what, and where."""
        self.has_bounded = False
        """Whether the last operator made one."""
        self.passed_checks = 0
        """Conditions without values that the program read only to raise an error."""
        self.made_up_scalars = 0
        """Numbers that the optimizer read from tensors without values; each was taken to be 1."""

    def begin(self) -> None:
        """Another run of the program begins."""
        if self.reads is not None:
            self.reads.begin()

    def run_instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose kernel need not be looked at; NotImplemented for every other."""
        return NotImplemented

    def answer(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: torch_common.FakeTensorMode
    ) -> Any:
        """The result of an operator that depends on values which a fake has not; NotImplemented where there is none.

        Args:
            func, args, kwargs: the operator and its arguments.
            fakes: the mode that it runs in.
        """
        known, result = known_values.recover(func, args, kwargs, fakes)
        if known:
            return result
        if func in _COMPARED and torch_common.is_same(*args[:2]):
            return True
        if func in _COMPARED or (func is torch_fakes.NUMBER_OF and args[0].dtype is torch.bool):
            passes = self._find_condition()
            if passes is not None:
                return passes
        with fakes:
            bound = bound_result(func, args, kwargs, distinct=self.takes_all_distinct)
        if bound is None:
            return self._make_up(func, args)
        result, what = bound
        self.has_bounded = True
        self._note_bound(what)
        return result

    def _find_condition(self) -> bool | None:
        """The value of a condition with which the program does not raise; None where it does more than check it."""
        frame = checking_frame(sys._getframe(1))
        passed = None if frame is None else find_passing_value(frame)
        self.passed_checks += passed is not None
        return passed

    def _note_bound(self, what: str) -> None:
        """Note that a shape that depends on data is counted at the largest it can be."""
        self.bounded[what, program_place(sys._getframe(1))] = None

    def _make_up(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A number without a value: the optimizer's own. Adafactor scales its step by a norm it reads; no allocation
        depends on it."""
        if func is not torch_fakes.NUMBER_OF or not is_stepping(sys._getframe(1)):
            return NotImplemented
        self.made_up_scalars += 1
        return 1.0 if args[0].dtype.is_floating_point else 1


class MadeUpValues(Values):
    """Answers of a program on the target: what nobody knows is made up and noted, so that the program goes on.

    Args:
        notes: of what is made up.
        rule: how tokens are shared out among experts.
    """

    takes_all_distinct = True

    def __init__(self, notes: MadeUpNotes, rule: Rule = BALANCED) -> None:
        super().__init__(rule)
        self._notes = notes
        self._fractions = 0
        """Made up so far."""
        self.maker: torch_fakes.Maker
        """Makes tensors of the mode the program runs in."""

    def run_instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose kernel need not be looked at; NotImplemented for every other."""
        if func is _UNSCALE:
            return None
        if func is aten._to_copy.default and (moved := self._move(args[0], kwargs)) is not None:
            known_values.follow(func, args, kwargs, moved)
            return moved
        return NotImplemented

    def _move(self, tensor: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor | None:
        """A real tensor on the card; None where it may be laid out anew.

        FakeTensorMode's own way there takes as long as several kernels.
        """
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
        if not plain or "memory_format" in settings or settings.get("device") is None:
            return None
        device, dtype = torch.device(settings["device"]), settings.get("dtype") or tensor.dtype
        if device.index is None:
            device = torch.device(device.type, 0 if device.type == "cuda" else None)
        return self.maker.empty(tuple(tensor.shape), tensor.stride(), dtype, device)

    def answer(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: torch_common.FakeTensorMode
    ) -> Any:
        """As that of `Values`, once what the user says is read here is known."""
        for each in find_deciding(func, args):
            if isinstance(each, torch_common.FakeTensor):
                self._notes.give(each)
        return super().answer(func, args, kwargs, fakes)

    def _note_bound(self, what: str) -> None:
        self._notes.note("shape", what)

    def _make_up(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A number, or an answer, that no kernel has computed.

        A fraction is a little smaller for each tensor, as a loss that falls, so that nothing takes two for equal and
        stops: LBFGS would. A tensor that nothing has written to meanwhile has the same each time.
        """
        if func in _COMPARED:
            if all(each.numel() == 1 for each in args[:2]):
                one, other = map(_find_number, args[:2])
                if one is not None and one == other:
                    return True
            self._notes.note("decided", f"{torch_common.op_name(func)}: not equal")
            return False
        if func is not torch_fakes.NUMBER_OF:
            return NotImplemented
        tensor = args[0]
        if (compared := legal_values.find_comparison(tensor)) is not None:
            return self._decide(compared)
        self._notes.note("read", str(tensor.dtype)[6:])
        if (number := legal_values.make_number(tensor)) is not None:
            return number
        if tensor.dtype is torch.bool:
            return False
        if not tensor.dtype.is_floating_point:
            return 0
        version = 0 if tensor.is_inference() else torch_autograd.version(tensor)
        if getattr(tensor, _FRACTION, (None, 0.0))[0] != version:
            setattr(tensor, _FRACTION, (version, self._make_fraction()))
        return float(getattr(tensor, _FRACTION)[1])

    def _make_fraction(self) -> float:
        self._fractions += 1
        return 1.0 / (1.0 + _FALLS * (self._fractions - 1))

    def _decide(self, compared: legal_values.Comparison) -> bool:
        """What a comparison comes to with the number that reading it would have given."""
        compare, number, is_fraction, other = compared
        what = f"{compare.__name__} {other!r}"
        if number is None:
            number = self._make_fraction() if is_fraction else 0
        passes, frame = compare(number, other), checking_frame(sys._getframe(1))
        if is_fraction and frame is not None:
            return self._notes.decide(what, passes, frame)
        self._notes.note("decided", what)
        return passes

    def _find_condition(self) -> bool | None:
        frame = optimizer_frame(sys._getframe(1))
        if frame is None:
            return super()._find_condition()
        going_on = find_going_on_value(frame)
        if going_on is not None:
            self._notes.note("decided", "a condition of the optimizer's own: it goes on")
        return going_on


def _find_number(tensor: torch.Tensor) -> float | None:
    """The number of a tensor of one element, where something is known of it."""
    known = known_values.find_value(tensor)
    return legal_values.make_number(tensor) if known is None else known.item()
