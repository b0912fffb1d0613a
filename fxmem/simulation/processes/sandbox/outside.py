"""A process beside the program's that stays outside its view: it connects downloads, and clears up after a kill.

The program's processes have a network of their own, in which nothing is. What Python's libraries of HTTP read, they ask
this one for: it looks names up and opens connections, which it hands over. Where fxmem is ended by a signal that cannot
be handled, it ends what the program has started and removes the folders that nobody will.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from fxmem.simulation.processes.descendants import end_tree, find_begin
from fxmem.simulation.processes.fork import Forked

_INTERVAL: Final = 0.5
"""Seconds between looks at whether fxmem is there."""
_LONGEST: Final = 1 << 20
"""Bytes of a message."""


class Outside:
    """The process, seen from fxmem's (Linux).

    Args:
        clear: called there where fxmem was killed, once the program is over.
    """

    def __init__(self, clear: Callable[[], None]) -> None:
        self._socket, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asked:
            self._process = Forked(functools.partial(_serve, asked, os.getpid(), clear), is_left=True)
        self.descriptor = self._socket.fileno()
        """Of the socket by which it is asked; the program's processes have it, too."""

    def watch(self, process: int) -> None:
        """Let it end this process where fxmem is killed, with all that it has started."""
        self._socket.send(json.dumps(["watch", process]).encode())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._socket.close()


def look_up(outside: int, *words: Any) -> list[tuple[Any, ...]]:
    """As `socket.getaddrinfo`, outside.

    Raises:
        OSError: as it does; the network is unreachable where nobody answers.
    """
    found, _ = _ask(outside, "look up", *words)
    return [(*each[:-1], tuple(each[-1])) for each in found]


def connect(outside: int, family: int, address: tuple[Any, ...], seconds: float | None) -> int:
    """The descriptor of a TCP connection that was opened outside. Raises as `look_up`."""
    _, descriptors = _ask(outside, "connect", family, address, seconds)
    return descriptors[0]


def _ask(outside: int, *words: Any) -> tuple[Any, list[int]]:
    ours, its = socket.socketpair()
    with ours:
        with its, socket.socket(fileno=os.dup(outside)) as asked:
            socket.send_fds(asked, [json.dumps(words).encode()], [its.fileno()])
        text, descriptors = b"", list[int]()
        while not text.endswith(b"\n"):
            more, given, _, _ = socket.recv_fds(ours, _LONGEST, 1)
            if not more:
                raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
            text, descriptors = text + more, descriptors + given
    kind, found = json.loads(text)
    if kind is not None:
        raise (socket.gaierror if kind == socket.gaierror.__name__ else OSError)(*found)
    return found, descriptors


# --- there ------------------------------------------------------------------------------------------------------------


def _serve(asked: socket.socket, parent: int, clear: Callable[[], None]) -> int:
    """Answer until fxmem's process is over, which ends this one where it can."""
    os.setsid()  # a terminal's signals, and those to a group, are not for this one
    watched: dict[int, str] = {}
    while os.getppid() == parent:
        if not select.select([asked], [], [], _INTERVAL)[0]:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            message, descriptors, _, _ = socket.recv_fds(asked, _LONGEST, 1)
            if not message:
                break
            words = json.loads(message)
            if words[0] == "watch":
                watched[words[1]] = find_begin(words[1])
            else:
                threading.Thread(target=_answer, args=(descriptors[0], words), daemon=True).start()
    for process, begun in watched.items():
        end_tree(process, begun)
    clear()
    return 0


def _answer(descriptor: int, words: list[Any]) -> None:
    """Do what is asked for."""
    given: Iterable[int] = ()
    with socket.socket(fileno=descriptor) as reply, contextlib.ExitStack() as stack:
        try:
            answer: list[Any] = [None, None]
            if words[0] == "look up":
                answer[1] = socket.getaddrinfo(*words[1:])
            else:
                family, address, seconds = words[1:]
                connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.settimeout(seconds)
                connection.connect(tuple(address))
                connection.setblocking(True)
                given = [connection.fileno()]
        except OSError as error:
            answer = [type(error).__name__, [error.errno or errno.ETIMEDOUT, error.strerror or str(error)]]
        with contextlib.suppress(OSError):
            socket.send_fds(reply, [json.dumps(answer).encode() + b"\n"], list(given))
