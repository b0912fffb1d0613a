"""Programs that are not trusted to end: run in a process of their own, under a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

_LAST_WORDS = 1.0
"""Seconds to wait for a process that was killed."""


class WorkerFailedError(Exception):
    """It took too long, ended in an error, or answered what cannot be read."""


def answer(name: str, command: Sequence[str], data: bytes, *, limit: float) -> bytes:
    """What a command answers on standard output to `data` on standard input.

    Args:
        name: what it is called in messages.
        command: program and arguments.
        data: its input.
        limit: seconds that it may take. Then it is killed, and with it whatever it has started: what is found by a
            program's name may be a script around the program.

    Raises:
        WorkerFailedError: it took longer, could not be started, or ended with another exit code than 0.
    """
    try:
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise WorkerFailedError(f"{name} could not be started: {error.strerror}") from error
    try:
        out, err = worker.communicate(data, timeout=limit)
    except BaseException as error:
        _kill(worker)
        if isinstance(error, subprocess.TimeoutExpired):
            raise WorkerFailedError(f"{name} took longer than {limit:g} s") from error
        raise
    if worker.returncode != 0:
        complaint = "".join(f": {line[:200]}" for line in err.decode(errors="replace").strip().splitlines()[-1:])
        raise WorkerFailedError(f"{name} failed with exit code {worker.returncode}{complaint}")
    return out


def _kill(worker: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()
    # Closed, not read to their end: what has left the group may hold them open.
    for pipe in (worker.stdin, worker.stdout, worker.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(timeout=_LAST_WORDS)
