"""The library libnvidia-ml as a program's `pynvml` asks it: it says what NVML would say of the pretended card.

The functions are those of NVML's C interface (nvml.h) that monitors call; any other is one that this driver lacks.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.records.profile import Target
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.card.card_memory import CardMemory

DRIVER: Final = "580.65.06"
"""The first of CUDA 13.0."""
UUID: Final = "GPU-00000000-0000-0000-0000-000000000000"
_NAME: Final = "nvidia-ml"
_SUCCESS: Final = 0
_INSUFFICIENT_SIZE: Final = 7
_ZEROS: Final = (
    "PowerUsage Temperature FanSpeed ClockInfo MaxClockInfo PerformanceState EncoderUtilization DecoderUtilization"
)


def nvml_patches(memory: CardMemory, target: Target, notes: MadeUpNotes) -> torch_common.Patches:
    """Let `ctypes.CDLL` load the stand-in. Loading it is noted."""
    library = NvmlLibrary(memory, target)

    def make(original: Any) -> Any:
        class CDLL(original):  # type: ignore[misc]  # the class of libraries, which programs may derive from
            def __new__(cls, name: Any = None, *args: Any, **kwargs: Any) -> Any:
                if name is None or _NAME not in str(name):
                    return super().__new__(cls)
                notes.note("answered", "libnvidia-ml: of the pretended card")
                return library

        return CDLL

    yield torch_common.patch(ctypes, "CDLL", make)
    pynvml = sys.modules.get("pynvml")
    if hasattr(pynvml, "CDLL"):  # torch imports it where it is installed
        yield torch_common.patch(pynvml, "CDLL", make)
        for name, nothing in (("nvmlLib", None), ("_nvmlGetFunctionPointer_cache", {})):
            if hasattr(pynvml, name):  # what it keeps of a library, which is another's before and after
                yield torch_common.replace(pynvml, name, nothing)


class NvmlLibrary:
    """A loaded library, whose functions write to what they are given and return 0.

    Args:
        memory: the card's.
        target: the card.
    """

    def __init__(self, memory: CardMemory, target: Target) -> None:
        self._memory = memory
        major, minor = target.capability or (0, 0)
        texts = {"DeviceGetName": target.full_name or target.name, "DeviceGetUUID": UUID}
        texts |= {"SystemGetDriverVersion": DRIVER, "SystemGetNVMLVersion": DRIVER}
        functions: dict[str, Callable[..., Any]] = {
            **{name: _write_text(text) for name, text in texts.items()},
            **dict.fromkeys(("Init", "Init_v2", "InitWithFlags", "Shutdown"), _write()),
            **dict.fromkeys(("DeviceGetCount", "DeviceGetCount_v2"), _write(1)),
            **dict.fromkeys(
                [f"DeviceGetHandleBy{how}" for how in ("Index", "Index_v2", "UUID", "PciBusId_v2")], _write(1)
            ),
            "DeviceGetIndex": _write(0),
            "DeviceGetCudaComputeCapability": _write(major, minor),
            **dict.fromkeys(("DeviceGetMemoryInfo", "DeviceGetMemoryInfo_v2"), self._describe_memory),
            "DeviceGetUtilizationRates": _write_fields(gpu=0, memory=0),
            **{f"DeviceGet{name}": _write(0) for name in _ZEROS.split()},
            **{
                f"DeviceGet{kind}RunningProcesses{version}": list_processes
                for kind, list_processes in (("Compute", self._list_processes), ("Graphics", _list_nothing))
                for version in ("", "_v2", "_v3")
            },
        }
        vars(self).update({f"nvml{name}": function for name, function in functions.items()})

    def _describe_memory(self, device: Any, info: Any) -> int:
        used, total = self._memory.used_bytes(), self._memory.total_bytes
        return _write_fields(total=total, free=total - used, used=used)(device, info)

    def _list_processes(self, device: Any, count: Any, infos: Any) -> int:
        """This process alone, once it has a context. A caller without room for it is told how much it needs."""
        used, has_room = self._memory.used_bytes(), bool(infos) and _target(count).value > 0
        _write(int(used > 0))(count)
        if used and has_room:
            infos[0].pid, infos[0].usedGpuMemory = os.getpid(), used
        return _INSUFFICIENT_SIZE if used and not has_room else _SUCCESS


def _list_nothing(device: Any, count: Any, infos: Any) -> int:
    return _write(0)(count)


def _target(pointer: Any) -> Any:
    """What `byref` or `pointer` was made of."""
    return pointer._obj if hasattr(pointer, "_obj") else pointer.contents


def _write(*numbers: int) -> Callable[..., int]:
    """A function that writes numbers to its last arguments."""

    def call(*arguments: Any) -> int:
        for pointer, number in zip(arguments[len(arguments) - len(numbers) :], numbers, strict=True):
            place = _target(pointer)
            ctypes.memmove(ctypes.byref(place), number.to_bytes(ctypes.sizeof(place), "little"), ctypes.sizeof(place))
        return _SUCCESS

    return call


def _write_fields(**fields: int) -> Callable[..., int]:
    def call(device: Any, pointer: Any) -> int:
        for name, number in fields.items():
            setattr(_target(pointer), name, number)
        return _SUCCESS

    return call


def _write_text(text: str) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        buffer, size = arguments[-2:]
        buffer.value = text.encode()[: int(getattr(size, "value", size)) - 1]
        return _SUCCESS

    return call
