"""A process beside the program's that stays outside its view: it connects downloads, and clears up after a kill.

The program's processes have a network of their own, in which nothing is. What Python's libraries of HTTP read, they ask
this one for: it looks names up and opens connections, which it hands over. Where fxmem is ended by a signal that cannot
be handled, it ends what the program has started and removes the folders that nobody will.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import http.client
import json
import os
import select
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import IO, Any, Final

from fxmem._torch import common as torch_common
from fxmem._torch.modules import PatchesOf, patch_when_imported
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


# --- what a program's processes receive by HTTP -----------------------------------------------------------------------
# Lengths and digests, by which a file is known to be a download.


_RECORD: Final = struct.Struct("<Q32s")
_Call = Callable[..., Any]


def make_received() -> IO[bytes]:
    """A file without a name, for the length and the digest of each body that is received as a whole.

    Processes that are forked meanwhile have it, too.
    """
    return tempfile.TemporaryFile("ab+", buffering=0)


def read_received(descriptor: int) -> frozenset[tuple[int, bytes]]:
    """All that is in such a file."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    os.lseek(descriptor, 0, os.SEEK_SET)
    found = os.read(descriptor, size)
    return frozenset(_RECORD.iter_unpack(found[: len(found) // _RECORD.size * _RECORD.size]))


def digest_file(place: str) -> bytes:
    """The digest of a file."""
    with open(place, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def received_patches(descriptor: int) -> torch_common.Patches:
    """Patches of Python's libraries of HTTP, which note what they receive in such a file."""
    log, patch = _Log(descriptor), torch_common.wrap
    for name in ("read", "read1", "readinto", "readline"):
        yield patch(http.client.HTTPResponse, name, log.read)
    of_httpx: PatchesOf = lambda module: [  # noqa: E731
        patch(module.Response, "iter_bytes", log.iterate),
        patch(module.Response, "aiter_bytes", log.iterate_later),
    ]
    libraries: dict[str, PatchesOf] = {
        "requests.models": lambda module: [patch(module.Response, "iter_content", log.iterate)],
        **dict.fromkeys(("httpx", "httpx2"), of_httpx),
        "aiohttp.streams": lambda module: [
            patch(module.StreamReader, "feed_data", log.feed),
            patch(module.StreamReader, "feed_eof", log.end),
        ],
    }
    yield patch_when_imported(libraries)


class _Log:
    """Notes bodies; each function is run in the place of the `original` one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._bodies: weakref.WeakKeyDictionary[Any, _Body] = weakref.WeakKeyDictionary()
        self._streams: dict[int, _Body] = {}
        """By number of the object, which cannot be referred to weakly, until it ends."""

    def read(self, original: _Call, response: Any, *args: Any, **kwargs: Any) -> Any:
        """`http.client`'s responses, one function of which may call another."""
        body = self._bodies.setdefault(response, _Body(self._descriptor))
        with torch_common.replace(body, "is_within", True):
            found = original(response, *args, **kwargs)
        if not body.is_within:
            body.add(memoryview(args[0])[:found] if isinstance(found, int) else found)
            if response.isclosed():
                body.close(response.headers)
        return found

    def iterate(self, original: _Call, response: Any, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        """What requests and httpx have decoded."""
        body = _Body(self._descriptor)
        for part in original(response, *args, **kwargs):
            body.add(part)
            yield part
        body.close(response.headers)

    async def iterate_later(self, original: _Call, response: Any, *args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        """As `iterate`, in an event loop."""
        body = _Body(self._descriptor)
        async for part in original(response, *args, **kwargs):
            body.add(part)
            yield part
        body.close(response.headers)

    def feed(self, original: _Call, stream: Any, data: Any, *args: Any) -> Any:
        """`aiohttp`, of whatever it has decoded."""
        self._streams.setdefault(id(stream), _Body(self._descriptor)).add(data)
        return original(stream, data, *args)

    def end(self, original: _Call, stream: Any) -> None:
        """As `feed`, at its end."""
        if body := self._streams.pop(id(stream), None):
            body.close({})
        original(stream)


class _Body:
    """What has come of one response."""

    def __init__(self, descriptor: int) -> None:
        self._note = functools.partial(os.write, descriptor)
        self._digest, self._nbytes = hashlib.sha256(), 0
        self.is_within = False
        """Whether a function runs that reads it."""

    def add(self, part: Any) -> None:
        """More of it has come."""
        self._digest.update(part)
        self._nbytes += len(part)

    def close(self, headers: Any) -> None:
        """All of it has come. The Hugging Face hub writes down the commit that a header has."""
        if self._nbytes:
            self._note(_RECORD.pack(self._nbytes, self._digest.digest()))
        if commit := (headers.get("x-repo-commit") or "").encode():
            self._note(_RECORD.pack(len(commit), hashlib.sha256(commit).digest()))
        self._digest, self._nbytes = hashlib.sha256(), 0
