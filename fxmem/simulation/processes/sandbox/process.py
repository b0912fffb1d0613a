"""Runs work in a process of its own, apart from the user's files."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import fcntl
import functools
import logging
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch

from fxmem.errors import EnvironmentLacksError
from fxmem.records.profile import ProgramFiles, ProgramNetwork
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.code.source_lines import is_own_file
from fxmem.simulation.processes.descendants import end_processes, find_descendants
from fxmem.simulation.processes.executor import current_backend
from fxmem.simulation.processes.fork import (
    Forked,
    answer_work,
    format_answer,
    may_run_backward,
    note_place,
    parse_answer,
    read_answer,
    settle_threads,
)
from fxmem.simulation.processes.sandbox.isolation import (
    Isolation,
    IsolationSettings,
    find_written,
    give_up_rights,
    was_refused,
)
from fxmem.simulation.processes.sandbox.landlock import refuse_writes
from fxmem.simulation.processes.sandbox.outside import make_received
from fxmem.simulation.processes.sandbox.overlay import enter_overlay
from fxmem.simulation.processes.sandbox.redirect import Redirect
from fxmem.simulation.processes.sandbox.written_files import REDIRECTED

if TYPE_CHECKING:
    from fxmem.simulation.processes.sandbox.outside import Outside
    from fxmem.simulation.processes.sandbox.overlay import Layers

# --- descriptors that the program's process was given, as by a shell's `7<>file` (Linux) ------------------------------


def find_descriptors(kept: Collection[int | None], *, writes: bool, sends: bool) -> dict[int, str]:
    """Those by which a program might write to a file, or to the network: the file's path, or none.

    Args:
        kept: others are fxmem's own; where output goes is left alone.
        writes, sends: what it may do for real.
    """
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if number in (1, 2, *kept):
                continue
            if stat.S_ISREG(status.st_mode) and not writes and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE:
                file = os.readlink(f"/proc/self/fd/{number}")
                if os.path.exists(file):  # else nobody sees what is in it
                    found[number] = file
            elif stat.S_ISSOCK(status.st_mode) and not sends:
                with socket.socket(fileno=os.dup(number)) as other:
                    if other.family in (socket.AF_INET, socket.AF_INET6):
                        found[number] = ""
    return found


def part_descriptors(files: Mapping[int, str], find_place: Callable[[str], str]) -> None:
    """Let these lead to the program's own copies of the files, and connections nowhere."""
    for number, file in files.items():
        flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
        try:
            other = os.open(find_place(file), flags)
            os.lseek(other, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        except OSError:
            other = os.open(os.devnull, os.O_RDWR)
        os.dup2(other, number)
        os.close(other)


# --- runs work in a process of its own, apart from the user's files ---------------------------------------------------


_NO_VIEW: Final = "no view"
"""The answer of a process that got no view of its own, before any work."""
_NO_BACKWARD: Final = "no backward"
"""The answer of a fork in which no backward would run."""
_PATIENCE: Final = 10.0
"""Seconds that a process has to end by itself once its work is done: a program's thread may wait for ever."""
_ASK: Final[int | None] = getattr(signal, "SIGRTMIN", None)
"""By which a process is asked where it is; None where there is no signal that programs do not use."""
_MOMENT: Final = 0.2
"""Seconds in which it says so."""
_INTERVAL: Final = 1.0
"""Seconds between looks at a process that works."""


class Apart(NamedTuple):
    """What work in another process has come to."""

    text: str
    files: ProgramFiles | None
    """What it wrote; None where it writes for real."""
    network: ProgramNetwork | None
    """What it could not send; None where it may."""


def run_apart(
    work: Callable[[Isolation], str], settings: IsolationSettings, folders: list[str], output: Path | None = None
) -> Apart:
    """Run work in another process; what it returns, what it wrote, and what it could not send.

    Where this process can be forked, nothing has to be imported again. On Linux the other one has a view of the file
    system of its own; where that is not to be had, Python's ways to files are redirected. It has a network of its own
    as well. On Linux all processes that it has started end with it, even where this process is killed.

    Args:
        work: called there; where this process cannot be forked, it is pickled.
        settings: what it may do for real.
        folders: the user's, whose temporary files are listed.
        output: the file to which all goes that it prints; None leaves it where it goes here.

    Raises:
        FxmemError: as the work raised it; AnalysisError where the process ended before the work did.
        KeyboardInterrupt: here, or in the work.
    """
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(make_received())
        isolation = Isolation(network=settings.network, received=None if settings.write else received.fileno())
        if sys.platform == "linux":
            from fxmem.simulation.processes.sandbox.outside import Outside
            from fxmem.simulation.processes.sandbox.overlay import Layers  # locks files as no Windows does

            layers = Layers()
            stack.callback(layers.close)
            outside = Outside(layers.remove)
            stack.callback(outside.close)
            isolation.outside = None if settings.network else outside.descriptor
            run = _Run(work, output, layers.folders[-1], layers, outside)
            if not settings.write:
                found = run(dataclasses.replace(isolation, in_overlay=True), [*folders, os.path.expanduser("~")])
                if _NO_VIEW not in found:
                    files = find_written(layers.written, settings, folders, received.fileno(), found["begun_ns"])
                    return Apart(found["text"], files, _network_of(found))
        else:
            temporary = tempfile.TemporaryDirectory(prefix=REDIRECTED, ignore_cleanup_errors=True)
            run = _Run(work, output, stack.enter_context(temporary))
        if settings.write:
            found = run(isolation)
            return Apart(found["text"], None, _network_of(found))
        isolation.redirect = Redirect(tempfile.mkdtemp(dir=run.folder))
        found = run(isolation)
        isolation.begun_ns = found["begun_ns"]
        return Apart(found["text"], isolation.find_written(settings, folders), _network_of(found))


def run_within(work: Callable[[Isolation], str], isolation: Isolation, output: Path | None = None) -> str:
    """Run work in a child of this process, which is apart from the user's files itself; what it returns.

    Args:
        work, output: as for `run_apart`.
        isolation: this process's own.

    Raises:
        As `run_apart`.
    """
    with tempfile.TemporaryDirectory() as folder:
        text: str = _Run(work, output, folder)(isolation)["text"]
    return text


@dataclasses.dataclass
class _Run:
    """Runs work in another process."""

    work: Callable[[Isolation], str]
    output: Path | None
    folder: str
    """For its answer."""
    layers: Layers | None = None
    outside: Outside | None = None

    def __call__(self, isolation: Isolation, tried: Sequence[str] = ()) -> dict[str, Any]:
        """What it answers. With a view of its own, it must be able to write to the folders that are `tried`."""
        answer = Path(self.folder, "answer")
        layers = self.layers if isolation.in_overlay else None
        upper = None if layers is None else layers.folders
        start = functools.partial(_work, self.work, isolation, answer, self.output, upper, tried)
        found: dict[str, Any] = {_NO_BACKWARD: True}
        if hasattr(os, "fork"):
            found = read_answer(answer, self._wait(Forked(start, is_left=self.outside is not None), answer, layers))
        if _NO_BACKWARD in found:
            answer.unlink(missing_ok=True)
            spawned = _Spawned(start, answer.parent, [each for each in (isolation.outside, isolation.received) if each])
            found = read_answer(answer, self._wait(spawned, answer, layers))
        answer.unlink(missing_ok=True)
        if isolation.redirect is not None:
            isolation.redirect.adopt(found["removed"], is_guarded=found["is_guarded"])
        return found

    def _wait(self, process: Forked | _Spawned, answer: Path, layers: Layers | None) -> int:
        if self.outside is not None:
            self.outside.watch(process.pid)
        return _wait(process, answer, layers)


def _network_of(found: Mapping[str, Any]) -> ProgramNetwork | None:
    if found.get("reach") is None:
        return None
    return ProgramNetwork(reach=found["reach"], was_refused=found["was_refused"])


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
    except KeyboardInterrupt as interrupt:
        # A terminal sends the signal to both; whoever sends it to this process alone means both.
        started |= find_descendants(process.pid)
        place = _find_place(process, answer)
        process.wait(_INTERVAL)
        note_place(interrupt, (parse_answer(answer) or {}).get("place") or place)
        process.signal(signal.SIGINT)
        process.wait(_PATIENCE)
        raise
    except BaseException as error:
        started |= find_descendants(process.pid)
        note_place(error, _find_place(process, answer))
        process.signal(signal.SIGTERM)
        process.wait(_INTERVAL)
        raise
    finally:
        process.kill()
        end_processes(started)
    return 0 if code is None else code


def _find_place(process: Forked | _Spawned, answer: Path) -> str:
    """The program's own line that it is at, whatever it waits for; empty where that is not known."""
    where = _where(answer)
    if _ASK is None or not isinstance(process, Forked) or not where.exists():
        return ""
    process.signal(_ASK)
    process.wait(_MOMENT)
    lines = re.findall(r'^  File "(.*)", line (\d+) in ', where.read_text(encoding="utf-8", errors="replace"), re.M)
    return next((f"{file}:{line}" for file, line in lines if is_own_file(file)), "")


def _where(answer: Path) -> Path:
    return answer.with_name("where")


class _Spawned:
    """A new Python that runs a function, pickled for it.

    Where processes cannot be forked; and where autograd's threads run in this one, after which no fork runs it.
    """

    def __init__(self, start: Callable[[], int], folder: Path, given: Sequence[int]) -> None:
        file = folder / "work"
        file.write_bytes(pickle.dumps(start))
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run_pickled; run_pickled({str(file)!r})"
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=given)
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
    work: Callable[[Isolation], str],
    isolation: Isolation,
    answer: Path,
    output: Path | None,
    layers: list[str] | None,
    tried: Sequence[str],
) -> int:
    """Do the work and write its answer; the exit code."""
    with open(answer, "wb") as stream, _where(answer).open("wb") as where:  # before the view, which has others there
        if not may_run_backward():
            stream.write(format_answer({_NO_BACKWARD: True}))
            return 0
        if output is not None:
            with output.open("wb") as file:  # all that this process prints, and those that it starts
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        try:
            _go_apart(isolation, layers, tried, (stream.fileno(), where.fileno()))
        except (OSError, AttributeError) as error:  # AttributeError: a C library without these calls
            stream.write(format_answer({_NO_VIEW: str(error)}))
            return 0
        if _ASK is not None:
            faulthandler.register(_ASK, where, all_threads=False)
            # Who ends a group of processes, as `timeout` does, ends this one before it is asked; any thread may get it.
            faulthandler.register(signal.SIGTERM, where, chain=True)
            os.register_at_fork(after_in_child=_leave_terminations)
        settle_threads(torch.get_num_threads())
        found = answer_work(lambda: work(isolation))
        if (redirect := isolation.redirect) is not None:
            found |= {"removed": redirect.removed, "is_guarded": redirect.is_guarded}
        found |= {
            "begun_ns": isolation.begun_ns,
            "reach": isolation.reach,
            "was_refused": isolation.reach == "none" and was_refused(),
        }
        stream.write(format_answer(found))
    with contextlib.ExitStack() as stack:  # for what the program does at its end, and its threads
        for patch in isolation.patches(MadeUpNotes()):
            stack.enter_context(patch)
        atexit._run_exitfuncs()
        logging.shutdown()
    return 0


def _leave_terminations() -> None:
    """Let what the program starts end as without us, where the program itself handles no SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        faulthandler.unregister(signal.SIGTERM)


def _go_apart(isolation: Isolation, layers: list[str] | None, tried: Sequence[str], ours: Sequence[int]) -> None:
    """Keep this process apart from the user's files and from the network. Raises OSError where it gets no view."""
    if isolation.has_begun:
        isolation.hold_network()  # of a rank, where the ranks' own process asks a cluster for the others
        return
    isolation.has_begun, given, redirect = True, dict[int, str](), isolation.redirect
    if sys.platform == "linux":
        kept = (*ours, isolation.outside, isolation.received)
        given = find_descriptors(kept, writes=layers is None and redirect is None, sends=isolation.network)
    if current_backend().is_here:
        isolation.hold_network()
    if layers is not None:
        enter_overlay(layers, [os.getcwd(), *tried], sends=isolation.network)
    elif isolation.reach == "none":
        give_up_rights()
    if redirect is not None:
        _guard(redirect)
    if given:
        part_descriptors(given, (lambda file: file) if redirect is None else redirect.place_to_change)
    if isolation.received is not None and os.utime in os.supports_fd:
        isolation.begun_ns = _wait_for_tick(isolation.received)


def _wait_for_tick(file: int) -> int:
    """The time of the next tick of the clock that files have, so that what is copied by now is older."""

    def touch() -> int:
        os.utime(file)
        return os.fstat(file).st_ctime_ns

    before = now = touch()
    for _ in range(50):  # a tick is 1 to 10 ms; a file system without such times has none
        if now != before:
            break
        time.sleep(0.001)
        now = touch()
    return now


def _guard(redirect: Redirect) -> None:
    """Refuse what is not redirected, where the system can; temporary files go where they may be written."""
    tempfile.tempdir = os.environ["TMPDIR"] = redirect.make_temporary()
    with contextlib.suppress(OSError, AttributeError):
        refuse_writes((redirect.folder, "/dev", "/proc", "/run"))
        redirect.is_guarded = True
