"""What a program finds in `torch.cuda` and `torch.accelerator` besides what every step finds there: seeds, generators,
types of tensors by which old programs name the card (`torch.cuda.FloatTensor`, `x.type(torch.cuda.LongTensor)`), and
the memory of the pretended card.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem.errors import AnalysisError
from fxmem.simulation.card.card_memory import BlockEvent, CardMemory, memory_answers
from fxmem.simulation.card.card_thread import CardThread
from fxmem.simulation.card.device_border import Border, check_card
from fxmem.simulation.code.source_lines import user_frame


class _NoGraph:
    """CUDA graphs replay what was captured; nothing is captured here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AnalysisError(
            "expected a program without CUDA graphs; it makes a torch.cuda.CUDAGraph, whose capture needs a card. Run "
            "it with the capture switched off."
        )


_GENERATOR: Final[Any] = torch.Generator


class _AnyGenerator(type(_GENERATOR)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)


class _CardGenerator(_GENERATOR):  # type: ignore[misc]
    """A generator of the card: the host's, whose state looks as a card's, and is nothing else.

    That is a seed and an offset of 8 bytes each, on the host (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp).
    """

    device = torch.device("cuda", 0)

    def get_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def clone_state(self) -> _CardGenerator:
        return _CardGenerator("cpu")

    def graphsafe_get_state(self) -> _CardGenerator:
        return self

    def set_state(self, new_state: Any) -> _CardGenerator:
        return self

    graphsafe_set_state = set_offset = set_state

    def get_offset(self) -> int:
        return 0


class _Generator(_GENERATOR, metaclass=_AnyGenerator):  # type: ignore[misc]
    """`torch.Generator`, whose class none is of."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return (_CardGenerator if torch.device(device).type == "cuda" else _GENERATOR)("cpu")


_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, f"{name}Tensor").dtype
    for name in "Float Double Half BFloat16 Byte Char Short Int Long Bool".split()
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


class CardTensorType(type):
    """A type of tensors on the card, by their dtype: made of sizes, or of data."""

    dtype: torch.dtype

    def __call__(cls, *arguments: Any, device: Any = None) -> torch.Tensor:
        """Make a tensor as torch's own type does."""
        first = arguments[0] if arguments else ()
        if isinstance(first, torch.Tensor):
            return first.to("cuda", cls.dtype)
        if isinstance(first, (int, torch.Size)) or not arguments:
            return torch.empty(first if isinstance(first, torch.Size) else arguments, dtype=cls.dtype, device="cuda")
        return torch.tensor(first, dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is cls.dtype


TENSOR_TYPES: Final = {
    f"{name}Tensor": CardTensorType(f"{name}Tensor", (), {"dtype": dtype, "is_cuda": True})
    for name, dtype in _DTYPES.items()
}
"""By their names in `torch.cuda`."""


def convert(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """`Tensor.type`: the name of a tensor's type, or the tensor as one of a dtype, or of a type on the card."""
    if dtype is None:
        where = "torch.cuda" if tensor.is_cuda else "torch"
        return f"{where}.{_NAMES.get(tensor.dtype, '')}Tensor"
    if isinstance(dtype, str):
        where, _, name = dtype.rpartition(".")
        wanted: Any = TENSOR_TYPES.get(name) if where == "torch.cuda" else _DTYPES.get(name.removesuffix("Tensor"))
        if where in ("torch", "torch.cuda") and wanted is not None:
            return convert(tensor, wanted) if where == "torch.cuda" else tensor.to("cpu", wanted)
    if isinstance(dtype, CardTensorType):
        return tensor.to("cuda", dtype.dtype, non_blocking=non_blocking)
    return torch.Tensor.type(tensor, dtype, non_blocking)


def stand_ins(
    memory: CardMemory, border: Border, capability: tuple[int, int], thread: CardThread
) -> torch_common.Patches:
    """The patches that put everything in place, for `contextlib.ExitStack`."""
    cuda, history = torch.cuda, MemoryHistory(memory)
    answers = {**memory_answers(memory), "host_memory_stats": border.host.pinned.counts}

    def initialize() -> None:
        thread.require()
        memory.initialize()

    places: tuple[tuple[Any, dict[str, Any]], ...] = (
        (cuda, {**answers, **_quiet(capability), **TENSOR_TYPES, **dict.fromkeys(("init", "_lazy_init"), initialize)}),
        (cuda.memory, {**answers, "_record_memory_history": history.record}),
        (cuda.memory, {"_snapshot": history.snapshot, "_dump_snapshot": history.dump}),
        (cuda.random, dict.fromkeys(("manual_seed", "manual_seed_all"), _nothing)),
        (cuda.nvtx, {**dict.fromkeys(("range_push", "range_pop", "mark"), _nothing), "range": _nullcontext}),
        (cuda, {"memory_snapshot": lambda *_, **__: history.snapshot()["segments"]}),
        (torch.accelerator, {**answers, **_accelerator(), "get_memory_info": answers["mem_get_info"]}),
        (torch, {"Generator": _Generator}),
    )
    for owner, found in places:
        for name, answer in found.items():
            if hasattr(owner, name):  # in this torch
                yield torch_common.replace(owner, name, answer)
    yield torch_common.wrap(torch, "get_device_module", _find_device_module)

    def checked(original: Callable[..., Any], device: Any = None) -> Any:
        check_card(device, border.cards)
        return original(device)

    for name in ("set_device", "get_device_properties", "_exchange_device", "_maybe_exchange_device"):
        yield torch_common.wrap(cuda, name, checked)
    default = _DefaultTensorType()
    yield torch_common.wrap(torch, "set_default_tensor_type", default.set)
    yield torch_common.wrap(torch.Tensor, "__new__", default.make)
    yield torch_common.wrap(torch.Tensor, "as_subclass", torch_programs.alias_as)
    yield torch_common.wrap(torch.Tensor, "_make_subclass", torch_programs.make_subclass)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _nullcontext(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _quiet(capability: tuple[int, int]) -> dict[str, Any]:
    """By name in `torch.cuda`, what reaches for the driver and changes no byte."""
    silent = "_lazy_call manual_seed manual_seed_all seed seed_all ipc_collect set_sync_debug_mode _sleep".split()
    return {
        **dict.fromkeys(silent, _nothing),
        "CUDAGraph": _NoGraph,
        "is_initialized": lambda: True,
        "default_generators": (_CardGenerator("cpu"),),
        **dict.fromkeys(("initial_seed", "get_sync_debug_mode"), lambda: 0),
        "get_arch_list": lambda: ["sm_{}{}".format(*capability)],
        "can_device_access_peer": lambda *_: False,
        "is_tf32_supported": lambda: capability >= (8, 0),
        **dict.fromkeys(("utilization", "power_draw", "temperature", "clock_rate", "memory_usage"), lambda *_: 0),
        "list_gpu_processes": lambda *_, **__: "",
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=_nothing, cudaProfilerStop=_nothing),
    }


def _accelerator() -> dict[str, Any]:
    """By name in `torch.accelerator`."""
    device = torch.device("cuda")
    return {
        **dict.fromkeys(("set_device_index", "set_device_idx"), _nothing),
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: device,
        "device_count": lambda: 1,
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
        "device_index": _nullcontext,
    }


class _DefaultTensorType:
    """The old way to make tensors on the card by default, `torch.Tensor(...)` among them."""

    def __init__(self) -> None:
        self._on_card: CardTensorType | None = None

    def set(self, original: Callable[..., Any], kind: Any) -> None:
        """`torch.set_default_tensor_type`."""
        where, _, name = kind.rpartition(".") if isinstance(kind, str) else ("", "", "")
        found = TENSOR_TYPES.get(name) if where == "torch.cuda" else kind
        self._on_card = found if isinstance(found, CardTensorType) else None
        if self._on_card is None:
            torch.set_default_device("cpu")
            original(kind)
            return
        torch.set_default_dtype(self._on_card.dtype)
        torch.set_default_device("cuda")

    def make(self, original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        """`torch.Tensor(...)`, of sizes or of data; of a subclass the same as an alias of that class, as
        `legacy_tensor_generic_ctor_new` (torch/csrc/utils/tensor_new.cpp) makes it, but under modes."""
        is_data = len(args) == 1 and isinstance(args[0], torch.Tensor)
        if cls is not torch.Tensor:
            return (args[0] if is_data else torch.Tensor(*args, **kwargs)).as_subclass(cls)
        if self._on_card is None or kwargs or any(isinstance(each, torch.Tensor) for each in args):
            return original(cls, *args, **kwargs)
        return self._on_card(*args)


def _find_device_module(original: Callable[..., Any], device: Any = None) -> Any:
    return torch.cuda if device is None or torch.device(device).type == "cuda" else original(device)


# --- the history of a pretended card's memory, as `torch.cuda.memory._record_memory_history` keeps it, and its snapshot
# Format: the `Snapshot` of `torch.cuda.memory._snapshot` (torch 2.11), which pytorch.org/memory_viz and `fxmem
# validate --snapshot` read. Frames are the program's own; events have no time, since nothing was run.


_MOST_FRAMES = 64
Frames = list[dict[str, str | int]]


class MemoryHistory:
    """What a program's card allocates and frees while the program has it recorded.

    Args:
        memory: the card's.
    """

    def __init__(self, memory: CardMemory) -> None:
        self._memory = memory

    def record(self, enabled: Any = "all", *_: Any, max_entries: int = sys.maxsize, **__: Any) -> None:
        """`_record_memory_history`: from now on, or no longer for None."""
        self._memory.record_blocks(max_entries, None if enabled is None else _list_frames)

    def snapshot(self, *_: Any, **__: Any) -> dict[str, Any]:
        """`_snapshot`: the state now, and the history."""
        self._memory.ask_cudnn()
        blocks = self._memory.blocks
        places, events = (blocks.places, blocks.events) if blocks else ({}, ())
        return {
            "segments": [each.describe([], lambda at: places.get(at, [])) for each in self._memory.segments()],
            "device_traces": [[each for event in events for each in _describe(event)]],
            "allocator_settings": {"PREDICTED": "by fxmem; no GPU was used"},
            "external_annotations": [],
        }

    def dump(self, filename: Any = "dump_snapshot.pickle", *_: Any, **__: Any) -> None:
        """`_dump_snapshot`."""
        with open(filename, "wb") as file:
            pickle.dump(self.snapshot(), file, protocol=4)


def _describe(event: BlockEvent) -> Iterator[dict[str, Any]]:
    found = {"addr": event.address, "size": event.nbytes, "stream": event.stream, "frames": event.place, "time_us": 0}
    for action in ("free_requested", "free_completed") if event.action == "free" else (event.action,):
        yield {"action": action, **found}


def _list_frames() -> Frames:
    """The program's own frames, the innermost first."""
    frames: Frames = []
    frame = user_frame(sys._getframe(1))
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = user_frame(frame.f_back)
    return frames
