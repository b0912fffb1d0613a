"""Where a program starts another one in its place, which runs there instead: `axolotl train`, `swift sft`.

`os.exec*` always does. A command that only starts Python, waits for it and ends, is known by its name.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from fxmem._torch import common as torch_common
from fxmem.errors import UsageError
from fxmem.simulation.processes.sandbox.network import command_words
from fxmem.simulation.program.command import Launch
from fxmem.simulation.program.launchers import find_launcher, find_started

_STARTERS: Final = ("llamafactory-cli", "llamafactory.cli", "swift", "swift.cli.main")
"""Commands and modules of LLaMA-Factory 0.9 and ms-swift 4.6."""


class HandedOver(BaseException):
    """What a program starts in its place."""

    def __init__(self, started: Launch) -> None:
        self.started = started


@contextlib.contextmanager
def handing_over(program: Launch) -> Iterator[None]:
    """Raise `HandedOver` where the program would start another in its place."""
    with torch_common.wrap(os, "execv", _replace), torch_common.wrap(os, "execve", _replace):
        if os.path.basename(program.program) not in _STARTERS:
            yield
            return
        with torch_common.wrap(subprocess.Popen, "__init__", _start):
            yield


def _replace(
    original: Callable[..., NoReturn], path: Any, words: Sequence[Any], environment: Mapping[Any, Any] | None = None
) -> NoReturn:
    _hand_over(words, environment)
    original(path, words, *([] if environment is None else [environment]))


def _start(original: Callable[..., None], process: Any, args: Any, *further: Any, **settings: Any) -> None:
    _hand_over(args, settings.get("env"))
    original(process, args, *further, **settings)


def _hand_over(args: Any, environment: Mapping[Any, Any] | None) -> None:
    """Raise `HandedOver` for a command line that is Python's or a launcher's; return for any other."""
    first, *words = command_words(args) or ("",)
    changed = {os.fsdecode(name): os.fsdecode(value) for name, value in (environment or {}).items()}
    variables = tuple((name, value) for name, value in changed.items() if os.environ.get(name) != value)
    started = Launch(first, tuple(words), environment=variables)
    if find_launcher(started) is not None:
        with contextlib.suppress(UsageError):  # as `python -c`
            raise HandedOver(find_started(started))
