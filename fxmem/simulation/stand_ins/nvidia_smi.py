"""`nvidia-smi` as a program may start it: it says what the tool would say of the pretended card."""

from __future__ import annotations

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
from fxmem.simulation.stand_ins.nvml import DRIVER, UUID

_NAME: Final = "nvidia-smi"
_UNKNOWN: Final = "[N/A]"
_MIB: Final = 1 << 20


def nvidia_smi_patches(memory: CardMemory, target: Target, notes: MadeUpNotes) -> torch_common.Patches:
    """Let `subprocess` start a process that prints the answer. Each answer is noted."""

    def start(original: Callable[..., None], process: Any, args: Any, *further: Any, **settings: Any) -> None:
        words = command_words(args)
        if words and os.path.basename(words[0]) == _NAME:
            notes.note("answered", f"{_NAME}: of the pretended card")
            said = _answer(words[1:], target, memory)
            args = [sys.executable, "-S", "-c", "import sys; sys.stdout.write(sys.argv[1])", said]
            settings["shell"] = False
        original(process, args, *further, **settings)

    def which(original: Callable[..., Any], cmd: Any, *args: Any, **kwargs: Any) -> Any:
        return original(cmd, *args, **kwargs) or (_NAME if cmd == _NAME else None)

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
        return f"{_NAME}, as fxmem predicts: no card was used\nGPU 0: {name}, {used}MiB / {total}MiB\n"
    keys = [key.strip() for key in asked.split(",")]
    row = [values.get(key, _UNKNOWN) for key in keys]
    if "nounits" in form:
        row = [value.removesuffix(" MiB") for value in row]
    lines = [row] if "noheader" in form else [keys, row]
    return "".join(", ".join(line) + "\n" for line in lines)
