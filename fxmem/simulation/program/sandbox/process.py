"""Runs work in a process of its own, apart from the user's files."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from fxmem.errors import EnvironmentLacksError
from fxmem.records.profile import ProgramFiles
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.descendants import end_processes, find_descendants
from fxmem.simulation.fork import (
    Forked,
    answer_work,
    format_answer,
    may_run_backward,
    read_answer,
    settle_threads,
)
from fxmem.simulation.program.sandbox.isolation import Isolation, IsolationSettings, find_written
from fxmem.simulation.program.sandbox.landlock import refuse_writes
from fxmem.simulation.program.sandbox.overlay import enter_overlay
from fxmem.simulation.program.sandbox.redirect import Redirect
from fxmem.simulation.program.sandbox.written_files import REDIRECTED, download_folders

if TYPE_CHECKING:
    from fxmem.simulation.program.sandbox.layers import Layers

_NO_VIEW: Final = "no view"
"""The answer of a process that got no view of its own, before any work."""
_NO_BACKWARD: Final = "no backward"
"""The answer of a fork in which no backward would run."""
_PATIENCE: Final = 10.0
"""Seconds that a process has to end by itself once its work is done: a program's thread may wait for ever."""
_INTERVAL: Final = 1.0
"""Seconds between looks at a process that works."""


def run_apart(
    work: Callable[[Isolation], str], settings: IsolationSettings, folders: list[str], output: Path | None = None
) -> tuple[str, ProgramFiles | None]:
    """Run work in another process; what it returns, and what it wrote, which is None where it writes for real.

    Where this process can be forked, nothing has to be imported again. On Linux the other one has a view of the file
    system of its own; where that is not to be had, Python's ways to files are redirected. On Linux all processes that
    it has started end with it.

    Args:
        work: called there; where this process cannot be forked, it is pickled.
        settings: what it may do for real.
        folders: the user's, whose temporary files are listed.
        output: the file to which all goes that it prints; None leaves it where it goes here.

    Raises:
        FxmemError: as the work raised it; AnalysisError where the process ended before the work did.
        KeyboardInterrupt: here, or in the work.
    """
    if settings.write:
        return _run(work, Isolation(network=settings.network), output)["text"], None
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            from fxmem.simulation.program.sandbox.layers import Layers  # locks files as no Windows does

            layers = Layers()
            stack.callback(layers.close)
            found = _run(work, Isolation(in_overlay=True, network=settings.network), output, layers)
            if _NO_VIEW not in found:
                return found["text"], find_written(layers.written, settings, folders)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=REDIRECTED, ignore_cleanup_errors=True))
        isolation = Isolation(Redirect(folder), network=settings.network)
        return _run(work, isolation, output)["text"], isolation.find_written(settings, folders)


def run_within(work: Callable[[Isolation], str], isolation: Isolation, output: Path | None = None) -> str:
    """Run work in a child of this process, which is apart from the user's files itself; what it returns.

    Args:
        work, output: as for `run_apart`.
        isolation: this process's own.

    Raises:
        As `run_apart`.
    """
    text: str = _run(work, isolation, output)["text"]
    return text


def _run(
    work: Callable[[Isolation], str], isolation: Isolation, output: Path | None, layers: Layers | None = None
) -> dict[str, Any]:
    """Run work in another process; what it answers."""
    with tempfile.TemporaryDirectory(prefix="fxmem-answer-") as folder:
        answer = Path(folder, "answer")
        upper = None if layers is None else layers.folders
        start = functools.partial(_work, work, isolation, answer, output, upper)
        found: dict[str, Any] = {_NO_BACKWARD: True}
        if hasattr(os, "fork"):
            found = read_answer(answer, _wait(Forked(start), answer, layers))
        if _NO_BACKWARD in found:
            answer.unlink(missing_ok=True)
            found = read_answer(answer, _wait(_Spawned(start, answer.parent), answer, layers))
    if isolation.redirect is not None:
        isolation.redirect.adopt(found["removed"], is_guarded=found["is_guarded"])
    return found


# --- the other process, seen from here --------------------------------------------------------------------------------


def _wait(process: Forked | _Spawned, answer: Path, layers: Layers | None) -> int:
    """Wait until it is over; its exit code, negative for a signal. It is ended where this process is, and with it what
    it has started."""
    answered_at: float | None = None
    started: dict[int, str] = {}
    try:
        while (code := process.wait(_INTERVAL)) is None:
            started |= find_descendants(process.pid)  # they are nobody's once it is over
            if layers is not None and layers.are_full:
                raise EnvironmentLacksError(
                    f"expected room for what the program writes: it is kept apart in {layers.folders[0]} and has taken "
                    "half of what was free there. Free some, or let the program write its own files (--write)"
                )
            if answered_at is None and answer.exists() and answer.stat().st_size:
                answered_at = time.monotonic()
            if answered_at is not None and time.monotonic() - answered_at > _PATIENCE:
                break
    except KeyboardInterrupt:
        # A terminal sends the signal to both; whoever sends it to this process alone means both.
        process.wait(_INTERVAL)
        process.signal(signal.SIGINT)
        process.wait(_PATIENCE)
        raise
    except BaseException:
        process.signal(signal.SIGTERM)
        process.wait(_INTERVAL)
        raise
    finally:
        process.kill()
        end_processes(started)
    return 0 if code is None else code


class _Spawned:
    """A new Python that runs a function, pickled for it.

    Where processes cannot be forked; and where autograd's threads run in this one, after which no fork runs it.
    """

    def __init__(self, start: Callable[[], int], folder: Path) -> None:
        file = folder / "work"
        file.write_bytes(pickle.dumps(start))
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run_pickled; run_pickled({str(file)!r})"
        self._process = subprocess.Popen([sys.executable, "-c", code])
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Its exit code as soon as it is over; None after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        self._process.send_signal(number if hasattr(os, "fork") else signal.SIGTERM)

    def kill(self) -> None:
        """End it, if it is still there."""
        self._process.kill()
        self._process.wait()


# --- in the other process ---------------------------------------------------------------------------------------------


def run_pickled(file: str) -> NoReturn:
    """Run the function that `_Spawned` has pickled, where possible in a fork of one thread."""
    start: Callable[[], int] = pickle.loads(Path(file).read_bytes())
    if not hasattr(os, "fork"):
        sys.exit(start())
    forked = Forked(start)
    while (code := forked.wait(_INTERVAL)) is None:
        pass
    if code < 0:  # as the fork ended, so that who waits for this process can say by what
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _work(
    work: Callable[[Isolation], str], isolation: Isolation, answer: Path, output: Path | None, layers: list[str] | None
) -> int:
    """Do the work and write its answer; the exit code."""
    with open(answer, "wb") as stream:  # before the view, which has another file there
        if not may_run_backward():
            stream.write(format_answer({_NO_BACKWARD: True}))
            return 0
        if output is not None:
            with output.open("wb") as file:  # all that this process prints, and those that it starts
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        if layers is not None:
            try:
                enter_overlay(layers)
            except (OSError, AttributeError) as error:  # AttributeError: a C library without these calls
                stream.write(format_answer({_NO_VIEW: str(error)}))
                return 0
        elif (redirect := isolation.redirect) is not None and not redirect.has_begun:
            _guard(redirect)
        settle_threads(torch.get_num_threads())
        found = answer_work(lambda: work(isolation))
        if (redirect := isolation.redirect) is not None:
            found |= {"removed": redirect.removed, "is_guarded": redirect.is_guarded}
        stream.write(format_answer(found))
    with contextlib.ExitStack() as stack:  # for what the program does at its end, and its threads
        for patch in isolation.patches(MadeUpNotes()):
            stack.enter_context(patch)
        atexit._run_exitfuncs()
        logging.shutdown()
    return 0


def _guard(redirect: Redirect) -> None:
    """Refuse what is not redirected, where the system can; temporary files go where they may be written."""
    tempfile.tempdir = os.environ["TMPDIR"] = redirect.make_temporary()
    with contextlib.suppress(OSError, AttributeError):
        refuse_writes((redirect.folder, "/dev", "/proc", "/run", *download_folders()))
        redirect.is_guarded = True
