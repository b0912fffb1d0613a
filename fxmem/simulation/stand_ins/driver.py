"""The card's driver as a program asks it: NVML, and the command `nvidia-smi`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem.records.profile import Target
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.card.card_memory import CardMemory
from fxmem.simulation.processes.sandbox.network import command_words

# --- the library libnvidia-ml as a program's `pynvml` asks it ---------------------------------------------------------
# The functions are those of NVML's C interface (nvml.h) that monitors call; any other is one that this driver lacks.


DRIVER: Final = "580.65.06"
"""The first of CUDA 13.0."""
UUID: Final = "GPU-00000000-0000-0000-0000-000000000000"
_LIBRARY: Final = "nvidia-ml"
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
                if name is None or _LIBRARY not in str(name):
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


def _target(pointer: Any) -> Any:
    """What `byref` or `pointer` was made of."""
    return pointer._obj if hasattr(pointer, "_obj") else pointer.contents


def _list_nothing(device: Any, count: Any, infos: Any) -> int:
    return _write(0)(count)


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


# --- `nvidia-smi` as a program may start it ---------------------------------------------------------------------------


_COMMAND: Final = "nvidia-smi"
_UNKNOWN: Final = "[N/A]"
_MIB: Final = 1 << 20


def nvidia_smi_patches(memory: CardMemory, target: Target, notes: MadeUpNotes) -> torch_common.Patches:
    """Let `subprocess` start a process that prints the answer. Each answer is noted."""

    def start(original: Callable[..., None], process: Any, args: Any, *further: Any, **settings: Any) -> None:
        words = command_words(args)
        if words and os.path.basename(words[0]) == _COMMAND:
            notes.note("answered", f"{_COMMAND}: of the pretended card")
            said = _answer(words[1:], target, memory)
            args = [sys.executable, "-S", "-c", "import sys; sys.stdout.write(sys.argv[1])", said]
            settings["shell"] = False
        original(process, args, *further, **settings)

    def which(original: Callable[..., Any], cmd: Any, *args: Any, **kwargs: Any) -> Any:
        return original(cmd, *args, **kwargs) or (_COMMAND if cmd == _COMMAND else None)

    yield torch_common.wrap(subprocess.Popen, "__init__", start)
    yield torch_common.wrap(shutil, "which", which)


def _answer(options: Sequence[str], target: Target, memory: CardMemory) -> str:
    name, total = target.full_name or target.name, (target.memory_bytes or 0) // _MIB
    used = memory.used_bytes() // _MIB
    if {"-L", "--list-gpus"} & set(options):
        return f"GPU 0: {name} (UUID: {UUID})\n"
    values = {
        **dict.fromkeys(("name", "gpu_name"), name),
        **dict.fromkeys(("uuid", "gpu_uuid"), UUID),
        "count": "1",
        "index": "0",
        "driver_version": DRIVER,
        "compute_cap": "{}.{}".format(*target.capability or (0, 0)),
        "memory.total": f"{total} MiB",
        "memory.used": f"{used} MiB",
        "memory.free": f"{total - used} MiB",
    }
    settings = {key.lstrip("-"): value for key, _, value in (option.partition("=") for option in options)}
    asked, form = settings.get("query-gpu"), settings.get("format", "").replace(" ", "").split(",")
    if asked is None:
        return f"{_COMMAND}, as fxmem predicts: no card was used\nGPU 0: {name}, {used}MiB / {total}MiB\n"
    keys = [key.strip() for key in asked.split(",")]
    row = [values.get(key, _UNKNOWN) for key in keys]
    if "nounits" in form:
        row = [value.removesuffix(" MiB") for value in row]
    lines = [row] if "noheader" in form else [keys, row]
    return "".join(", ".join(line) + "\n" for line in lines)
