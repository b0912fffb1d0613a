"""Which operators run on the pretended card, and what comes back to the host.

The host is real: data sets, tokenizers, samplers, seeds and every tensor on the CPU have their values. On the card are
FakeTensors. An operator is the card's if one of its tensors is fake, or if it is told to make one there. A tensor that
comes back has its known values (`fxmem.simulation.asked.known_values`), else such as are legal where they are read
(`fxmem.simulation.asked.legal_values`).

Large floating-point tensors that a module makes in its `__init__` are fake on the host as well: a model is built there
before it moves to the card, and one larger than this machine's memory could not be.

Where the target is the CPU, all but integers are fake, so that indices and labels decide as in a real run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import types
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch import modules as torch_modules
from fxmem._torch import programs as torch_programs
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.profile import Kind, Phase
from fxmem.simulation.asked import known_values, legal_values
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.card.card_memory import CardMemory
from fxmem.simulation.card.card_thread import CardThread
from fxmem.simulation.card.host_ledger import HostLedger, make_zeros
from fxmem.simulation.code.source_lines import variables
from fxmem.simulation.recording.observe.event_log import StepLog
from fxmem.simulation.recording.observe.op_recorder import OpRecorder, Run

aten = torch.ops.aten

_RANDOM_INTEGERS: Final = ("randint", "randperm", "arange")
_REGISTER: Final = torch.nn.Module.register_parameter
_MADE_FROM_NOTHING: Final = frozenset(
    "empty empty_strided rand randn zeros ones full normal new_empty new_zeros new_ones".split()
)


class Border:
    """What decides where an operator runs: on the host, or on the target by what the recorder does with it.

    Args:
        memory: the card's; None where the target is the CPU.
        notes: of what is made up.
    """

    log: StepLog
    """Of the program."""

    def __init__(self, memory: CardMemory | None, notes: MadeUpNotes) -> None:
        self._memory = memory
        self._notes = notes
        self.host = HostLedger()
        self.cards = 1
        """How many the machine has."""
        self.loading = False
        """Whether a data loader is at work: what it does is the host's, on whichever target."""
        self.making_buffers = False
        """Whether compiled code makes a buffer of its own, which is the target's, of whatever kind."""

    def is_targets(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator runs on fakes."""
        for kind in types:
            if issubclass(kind, torch_common.FakeTensor):
                return True
        if self.loading:
            return False
        on_card = self._memory is not None
        return self._is_made_on_card(func, args, kwargs) if on_card else self._is_made_on_cpu(func, args, kwargs)

    def _is_made_on_card(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return True
        if torch_common.op_name(func) not in _MADE_FROM_NOTHING:
            return False
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return bool(dtype.is_floating_point) and _count(args) > known_values.LIMIT and _is_building_a_module()

    def _is_made_on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.making_buffers:
            return True
        if torch_common.op_name(func).startswith(_RANDOM_INTEGERS):
            return False
        dtype = kwargs.get("dtype")
        if dtype is not None:
            return bool(dtype.is_floating_point or dtype.is_complex)
        tensors = list(torch_common.iterate_tensors(args))
        return not tensors or any(tensor.is_floating_point() for tensor in tensors)

    def run(
        self,
        recorder: OpRecorder,
        run: Run,
        func: Any,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: types.FrameType,
    ) -> Any:
        """Run an operator where it belongs."""
        if func is torch_fakes.DEVICE_OF:
            return run(func, types, args, kwargs, caller)
        if any(map(torch_wrappers.is_wrapper_type, types)):
            return NotImplemented  # it takes itself apart; what it then calls comes here
        if (device := kwargs.get("device")) is not None:
            check_card(device, self.cards)
        if not self.is_targets(func, types, args, kwargs):
            if torch_common.is_composite(func):
                with recorder:  # under inference_mode `x.to("cuda")` comes whole, and says where by position
                    return torch_common.decompose(func, *args, **kwargs)
            return self._run_on_host(func, args, kwargs)
        if func is aten.copy_.default and not isinstance(args[0], torch_common.FakeTensor):
            self._write_to_host(args[1], args[0])
            log = self.log
            log.reads.note(str(func), (args, kwargs), None, log.tick, outside=log.phase is Phase.OPTIMIZER)
            return args[0]
        if any(map(torch_programs.is_host_subclass, args)):
            args = tuple(
                each.as_subclass(torch.Tensor) if torch_programs.is_host_subclass(each) else each for each in args
            )
        if self._memory is not None and _is_all_on_host(args, kwargs):
            with contextlib.suppress(*torch_common.DATA_DEPENDENT):
                return self._bring_back(func(*args, **kwargs), args)
        log = self.log
        first = len(log.storages)
        try:
            with torch_programs.plain_within(types, (args, kwargs)):
                result = run(func, types, args, kwargs, caller)
            if self._memory is not None:
                self._memory.run_operator()
        except torch.cuda.OutOfMemoryError:
            log.discard(first)
            raise
        if result is NotImplemented:
            return result
        if func is aten._to_copy.default and not isinstance(args[0], torch_common.FakeTensor):
            log.rename(result, "", Kind.INPUT)
            # The zeros that a large tensor came off the card with are no mask.
            if result.numel() <= legal_values.MOST or not self._notes.find_copy(args[0]):
                known_values.give_from_host(result, args[0])
        return self._bring_back(result, args)

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator for real. Where the CPU is the target, what it allocates counts: integers are real there."""
        pins = bool(kwargs.get("pin_memory"))
        if pins:
            kwargs = {**kwargs, "pin_memory": False}
        log, begin = self.log, self.log.tick
        if torch_common.is_mutable(func):
            self.host.fill(torch_common.list_written(func, args, kwargs), resizes=func is aten.resize_.default)
        casts = func is aten._to_copy.default and torch.device(kwargs.get("device") or "cpu").type == "cpu"
        copied = self.host.copy_stand_in(args[0], kwargs.get("dtype")) if casts else None
        result = func(*args, **kwargs) if copied is None else copied
        self._notes.follow_copies(args, result)
        if pins:
            self.host.note_pinned(result)
        if self._memory is not None:
            self.host.note_made(args, result, log.node)
        elif not self.loading:
            log.note_tensors(result)
            if log.tick > begin:
                log.note_op(str(func), begin, 0, given=(args, kwargs))
        return result

    def to_host(self, fake: torch.Tensor) -> torch.Tensor:
        """The real tensor that the program gets when it looks at a fake one: its known values, else legal ones."""
        known = known_values.find_value(fake)
        with torch_common.no_modes(), torch_common.pause_observers():
            return legal_values.make(fake) if known is None else known.clone()

    def _write_to_host(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """`real.copy_(fake)`."""
        self._notes.give(fake)
        self.host.fill([real])
        with torch_common.no_modes(), torch_common.pause_observers(), torch.no_grad():
            real.detach().copy_(self.to_host(fake).expand(real.shape))
        if not known_values.is_known(fake):
            self._notes.mark_copy(real)

    def _bring_back(self, result: Any, args: tuple[Any, ...]) -> Any:
        """Make real what an operator on the card returned on the host: `x.cpu()`."""
        if isinstance(result, (list, tuple)):
            if not any(_is_fake_on("cpu", each) for each in result):
                return result
            return type(result)(self._bring_back(each, args) for each in result)
        if not _is_fake_on("cpu", result):
            return result
        if not any(_is_fake_on("cuda", each) for each in torch_common.iterate_tensors(args)):
            if self._memory is not None:
                self.host.note_pretended(result)
            return result
        self._notes.give(result)
        known = known_values.find_value(result)
        is_zeros = known is None and result.numel() > legal_values.MOST
        with torch_common.no_modes(), torch_common.pause_observers():
            real = make_zeros(result)
            if not is_zeros:
                real.copy_(legal_values.make(result) if known is None else known)
        if known is None:
            self._notes.mark_copy(real)
        self.host.note_from_card(real, self.log.node, is_zeros=is_zeros)
        return real


_DeviceError: Final[Any] = getattr(torch, "AcceleratorError", RuntimeError)  # since torch 2.8


def check_card(device: Any, cards: int) -> None:
    """Raise what CUDA raises for a card that the machine has not."""
    index = device if isinstance(device, int) else -1 if device is None else torch.device(device).index
    if index is not None and index >= cards:
        has = "1 card" if cards == 1 else f"{cards} cards"
        raise _DeviceError(
            f"CUDA error: invalid device ordinal ({device} on a pretended machine with {has}; fxmem run --ranks N "
            "gives each of N ranks its own)"
        )


class CardMode(torch_common.FakeMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode that runs what has nothing to do with the card for real.

    Being one matters: torch asks for one on the stack before it initialises CUDA.
    """

    def __init__(self, border: Border, thread: CardThread) -> None:
        super().__init__()
        self._border = border
        self._require_thread = thread.require
        self._inside = 0
        """Fake kernels at work, and places in fxmem that entered the mode again: all that these make is fake, on
        whatever device."""

    def __enter__(self) -> Any:
        self._inside += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._require_thread()
        if any(map(torch_wrappers.is_wrapper_type, types)):
            return NotImplemented
        if self._inside <= 1 and not self._border.is_targets(func, types, args, kwargs):
            return func(*args, **kwargs)
        self._inside += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside -= 1


def _is_fake_on(device_type: str, value: Any) -> bool:
    return isinstance(value, torch_common.FakeTensor) and value.fake_device.type == device_type


def _is_all_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator takes tensors of the host alone, makes its results there, and asks no fake for a value."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return False
    return all(tensor.device.type == "cpu" for tensor in torch_common.iterate_tensors((args, kwargs)))


def _is_building_a_module() -> bool:
    """Whether a module's `__init__` runs, and torch itself says what its parameters become: accelerate's
    `init_empty_weights` makes them anew by their class."""
    if torch.nn.Module.register_parameter is not _REGISTER:
        return False
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(variables(frame).get("self"), torch.nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _count(args: tuple[Any, ...]) -> int:
    """How many elements a factory of this size makes."""
    size = next((each for each in args if isinstance(each, (list, tuple))), None)
    return 0 if size is None else math.prod(map(int, size))


def move_to_card(value: Any) -> Any:
    """Nested values with their tensors on the card; those that are there already as they are."""
    return torch_common.tree_map_only(
        torch.Tensor, lambda tensor: tensor if tensor.is_cuda else tensor.to("cuda"), value
    )


def has_fake_inside(value: Any) -> bool:
    """Whether there is a fake in nested values, the tensors of modules among them included."""
    modules = [each for each in torch_common.tree_iter(value) if isinstance(each, torch.nn.Module)]
    tensors = itertools.chain(torch_common.iterate_tensors(value), *map(torch_modules.all_tensors, modules))
    return any(isinstance(each, torch_common.FakeTensor) for each in tensors)
