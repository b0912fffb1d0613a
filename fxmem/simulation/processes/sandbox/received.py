"""What a program's processes receive by HTTP: lengths and digests, by which a file is known to be a download."""

from __future__ import annotations

import functools
import hashlib
import http.client
import os
import struct
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import IO, Any, Final

from fxmem._torch import common as torch_common
from fxmem._torch.imports import PatchesOf, patch_when_imported

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
