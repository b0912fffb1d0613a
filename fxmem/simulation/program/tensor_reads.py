"""What Python gets where a program looks into a tensor on the pretended card: numbers, lists, arrays.

Each is run in the place of a torch method where the program calls it, for FakeTensors; real tensors get torch's own.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

import fxmem
from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.records.profile import MadeUpKind
from fxmem.simulation.asked import known_values, legal_values
from fxmem.simulation.asked.made_up import MadeUpNotes, made_up_number
from fxmem.simulation.card.device_border import Border, check_card
from fxmem.simulation.code.source_lines import exact_types_place
from fxmem.simulation.recording.residents import OF_ARRAY
from fxmem.simulation.stand_ins.checkpoints import reduce_tensor
from fxmem.simulation.stand_ins.cuda import convert

Tensor = torch.Tensor


class TensorReads:
    """Answers for the tensors of one program.

    Args:
        border: what crosses to the host.
        notes: of what is made up.
        device: the target's; `cuda` for a card.
    """

    def __init__(self, border: Border, notes: MadeUpNotes, device: torch.device) -> None:
        self._border = border
        self._notes = notes
        self._shares = device.type == "cpu"
        answers: dict[Any, Callable[..., Any]] = {
            Tensor.share_memory_: lambda tensor: tensor,
            Tensor.item: self._item,
            Tensor.numpy: lambda tensor, *, force=False: self._array(tensor),
            Tensor.__array__: self._array,
            Tensor.__bool__: self._truth,
            Tensor.__float__: lambda tensor: float(self._item(tensor)),
            Tensor.__int__: lambda tensor: int(self._item(tensor)),
            Tensor.__index__: self._as_index,
            Tensor.__format__: self._format,
            Tensor.__reduce_ex__: reduce_tensor,
        }
        # Hashed by value: torch makes these objects anew at each look.
        self._answers = {function: _of_fakes(function, answer) for function, answer in answers.items()}
        reads: dict[Any, str] = {
            Tensor.item: "",
            Tensor.numpy: "numpy",
            Tensor.__array__: "numpy",
            Tensor.tolist: "tolist",
        }
        numbers = Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__
        for function, how in {**reads, **dict.fromkeys(numbers, "")}.items():
            self._answers[function] = self._of_copies(function, self._answers.get(function, function), how)
        self._answers[torch_programs.SET_DATA] = torch_programs.set_data
        if device.type == "cuda":
            self._answers |= {**_ON_CARD, Tensor.cuda: self._move, Tensor.pin_memory: self._pin}

    def _move(
        self, tensor: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> Tensor:
        """`Tensor.cuda`."""
        check_card(device, self._border.cards)
        return tensor.to("cuda", non_blocking=non_blocking, memory_format=memory_format)

    def _pin(self, tensor: Tensor, *_: Any) -> Tensor:
        """`Tensor.pin_memory`: a copy in pinned memory, which is counted."""
        if tensor.is_cuda:
            return tensor
        copied = self._border.host.copy_stand_in(tensor)
        pinned = tensor.detach().clone() if copied is None else copied
        self._border.host.note_pinned(pinned)
        return pinned

    def patch(self) -> AbstractContextManager[None]:
        """`FakeTensor.tolist`, which would read number by number."""

        def tolist(_: Any, tensor: Tensor) -> Any:
            self._notes.give(tensor)
            return self._host(tensor, "tolist").tolist() if tensor.dim() else self._item(tensor)

        return torch_common.wrap(torch_common.FakeTensor, "tolist", tolist)

    def replacement(self, function: Any) -> Callable[..., Any] | None:
        """What to run instead of a torch function; None for every other."""
        try:
            return self._answers.get(function)
        except TypeError:  # not hashable
            return None

    def _number(self, tensor: Any) -> tuple[Any, bool]:
        """The number of a tensor of one element, and whether it is known."""
        self._notes.reads += 1
        known = known_values.find_value(tensor)
        if known is not None:
            return known.item(), True
        return tensor.item(), tensor.constant is not None

    def _item(self, tensor: Tensor) -> Any:
        number, is_known = self._number(tensor)
        if is_known:
            return number
        exact = exact_types_place(sys._getframe(1))
        if not exact:
            return made_up_number(number, self._notes)
        self._notes.note("read", f"exact, as {exact} compares types: decisions by it are not seen")
        return number

    def _as_index(self, tensor: Tensor) -> int:
        number, is_known = self._number(tensor)
        if not is_known:
            self._notes.note("decided", "a size or an index")
        return int(number)

    def _of_copies(self, function: Any, run: Callable[..., Any], how: str) -> Callable[..., Any]:
        """`run`, which notes that a tensor of the host is read whose numbers are made up."""

        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, torch_common.FakeTensor):
                self._notes.give(tensor)
            elif how:
                self._border.host.fill([tensor])  # who has an array of it may write to that
            result = run(tensor, *args, **kwargs)
            if isinstance(tensor, torch_common.FakeTensor) or not (origin := self._notes.find_copy(tensor)):
                return result
            if _is_printing():
                return result
            kind: MadeUpKind = "decided" if function in (Tensor.__bool__, Tensor.__index__) else "read"
            words = {Tensor.__bool__: "truth of a tensor", Tensor.__index__: "a size or an index"}
            self._notes.note(kind, words.get(function, how or str(tensor.dtype)[6:]), origin)
            is_item = function == Tensor.item and not exact_types_place(sys._getframe(1))
            return made_up_number(result, self._notes, origin) if is_item else result

        return read

    def _truth(self, tensor: Tensor) -> bool:
        self._notes.reads += 1
        known = known_values.find_value(tensor)
        if known is not None:
            return bool(known)
        before = self._notes.total
        value = bool(tensor)
        is_listed = legal_values.find_comparison(tensor) is not None
        if self._notes.total > before and not is_listed:  # not one that is known to hold
            self._notes.note("decided", "truth of a tensor")
        return value

    def _host(self, tensor: Tensor, how: str) -> Tensor:
        self._notes.reads += 1
        if not known_values.is_known(tensor):
            self._notes.note("read", how)
        return self._border.to_host(tensor)

    def _array(self, tensor: Tensor, dtype: Any = None) -> Any:
        host = self._host(tensor, "numpy")
        with torch_common.no_modes(), torch_common.pause_observers():
            array: Any = host.numpy()
        if self._shares:
            setattr(array.base, OF_ARRAY, tensor)  # a real array lies in it, and keeps it
        return array if dtype is None else array.astype(dtype)

    def _format(self, tensor: Tensor, spec: str) -> str:
        if tensor.dim() or tensor.is_complex():
            return repr(tensor)
        number, _ = self._number(tensor)
        return format(number, spec)


def _is_printing() -> bool:
    """Whether a tensor is written out, for which torch looks at some of its numbers."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCHS):
        if frame.f_code.co_filename == _PRINTER:
            return True
        frame = frame.f_back
    return False


_TORCHS: Final = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(fxmem.__file__) + os.sep
_PRINTER: Final = os.path.join(os.path.dirname(torch.__file__), "_tensor_str.py")


def _of_fakes(function: Any, answer: Callable[..., Any]) -> Callable[..., Any]:
    """`answer` for a FakeTensor, `function` for any other."""

    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return (answer if isinstance(tensor, torch_common.FakeTensor) else function)(tensor, *args, **kwargs)

    return run


_ON_CARD: Final[dict[Any, Callable[..., Any]]] = {
    Tensor.type: convert,
    Tensor.is_pinned: lambda tensor, *_, **__: False,
}
"""What reaches for the driver."""
