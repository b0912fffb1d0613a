"""What a program would send, and what it downloads.

Its processes reach nothing by themselves, where the system allows that. Here is what it is told: that a push, a post,
a tracker of Python's libraries has succeeded; and a way out for what these libraries read, by the process `outside`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import http.client
import io
import os
import shlex
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
import urllib.response
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from typing import Any, Final

from fxmem._torch import common as torch_common
from fxmem._torch.modules import PatchesOf, patch_when_imported
from fxmem.simulation.asked.made_up import MadeUpNotes
from fxmem.simulation.code.source_lines import find_holders
from fxmem.simulation.processes.sandbox import outside as outside_process

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS", "CONNECT", "PROPFIND"})
_ASKS: Final = ("/paths-info/", "/info/lfs/objects/batch")
"""Parts of addresses that are posted to in order to download (huggingface_hub, git lfs)."""
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_ASKED: Final = ("family", "type", "proto", "flags")
"""What `socket.getaddrinfo` is asked for."""
_OFFLINE: Final = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "COMET_START_ONLINE": "0"}
_PUSHES: Final = (
    *("git push", "dvc push", "wandb sync", "hf upload", "hf upload-large-folder", "docker push", "twine upload"),
    *("huggingface-cli upload", "huggingface-cli upload-large-folder"),
)
"""Commands that send, whatever else they say."""
_COPIES: Final = frozenset(("aws s3 cp", "aws s3 mv", "aws s3 sync", "gsutil cp", "gsutil rsync", "gcloud storage cp"))
_COPIERS: Final = frozenset(("azcopy", "rclone", "rsync", "s3cmd", "s5cmd", "scp"))
"""Tools that copy: they send where the last of their words alone names another machine."""
_HUB_CHANGES: Final = (
    *("create_repo", "delete_repo", "move_repo", "update_repo_settings", "super_squash_history"),
    *("create_commit", "upload_file", "upload_folder", "upload_large_folder", "delete_file", "delete_folder"),
    *("create_branch", "delete_branch", "create_tag", "delete_tag", "create_pull_request", "create_discussion"),
)
_OBJECT_READS: Final = ("Get", "Head", "List", "Describe")
_Call = Callable[..., Any]
"""What another function stands for."""


def network_patches(notes: MadeUpNotes, outside: int | None, *, refuses_all: bool) -> torch_common.Patches:
    """Patches of what sends. It gets an answer of success, empty where possible; an unknown library gets an error.

    Args:
        notes: told what is not sent.
        outside: the socket of the process that connects downloads; None where this one can.
        refuses_all: whether the system refuses connections to this machine as well.
    """
    gate, patch = _Gate(notes), torch_common.wrap
    yield torch_common.set_environment(_OFFLINE)
    if outside is not None:
        door = _Door(outside, refuses_all=refuses_all)
        yield patch(socket, "getaddrinfo", door.look_up)
        yield patch(socket.socket, "connect", door.connect)
        yield patch(asyncio.BaseEventLoop, "getaddrinfo", door.look_up_later)
    yield patch(http.client.HTTPConnection, "connect", _while_reading)
    yield patch(http.client.HTTPConnection, "putrequest", gate.put_request)
    yield patch(urllib.request.OpenerDirector, "open", gate.open_address)
    yield patch(subprocess.Popen, "__init__", gate.start_process)
    yield patch(os, "system", gate.call_shell)
    of_httpx: PatchesOf = lambda module: [  # noqa: E731
        patch(module.Client, "send", gate.send_by_httpx),
        patch(module.AsyncClient, "send", gate.send_later_by_httpx),
    ]
    libraries: dict[str, PatchesOf] = {
        "requests.sessions": lambda module: [patch(module.Session, "send", gate.send_by_requests)],
        "urllib3.connection": lambda module: [patch(module.HTTPConnection, "_new_conn", _while_reading)],
        **dict.fromkeys(("httpx", "httpx2"), of_httpx),
        "aiohttp.client": lambda module: [patch(module.ClientSession, "_request", gate.request_by_aiohttp)],
        "botocore.client": lambda module: [patch(module.BaseClient, "_make_api_call", gate.call_by_botocore)],
        # Its downloads in Rust find no network.
        "huggingface_hub.constants": lambda module: [torch_common.replace(module, "HF_HUB_DISABLE_XET", True)],
        "huggingface_hub.hf_api": gate.patch_hub,
        "wandb": lambda module: [patch(module, "init", gate.begin_wandb)],
    }
    yield patch_when_imported(libraries)


_is_reading: contextvars.ContextVar[bool] = contextvars.ContextVar("is_reading", default=False)
"""Whether a library of HTTP runs that connects, which posts nothing."""


def _while_reading(original: _Call, *args: Any, **kwargs: Any) -> Any:
    """A function that connects for HTTP; what is sent by the connection is looked at by itself."""
    token = _is_reading.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _is_reading.reset(token)


async def _while_awaited(original: _Call, *args: Any, **kwargs: Any) -> Any:
    """As `_while_reading`, in an event loop."""
    token = _is_reading.set(True)
    try:
        return await original(*args, **kwargs)
    finally:
        _is_reading.reset(token)


class _Door:
    """The way out. Each function is run in the place of the `original` one.

    Args:
        outside: the socket of the process that is asked.
        refuses_all: whether connections to this machine go that way, too.
    """

    def __init__(self, outside: int, *, refuses_all: bool) -> None:
        self._outside = outside
        self._refuses_all = refuses_all

    def look_up(self, original: _Call, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        """`socket.getaddrinfo`."""
        name = host.decode() if isinstance(host, bytes) else host
        if name and name == socket.gethostname():  # a network of its own has this machine at one address alone
            name = "localhost"
        if not _is_reading.get():
            return original(name, port, *args, **kwargs)
        given = dict(zip(_ASKED, args, strict=False)) | kwargs
        return outside_process.look_up(self._outside, name, port, *map(int, (given.get(each, 0) for each in _ASKED)))

    async def look_up_later(self, original: _Call, loop: Any, host: Any, port: Any, **kwargs: Any) -> Any:
        """As `look_up`, in an event loop, whose threads do not know what is read."""
        return (
            socket.getaddrinfo(host, port, **kwargs)
            if _is_reading.get()
            else await original(loop, host, port, **kwargs)
        )

    def connect(self, original: _Call, connection: socket.socket, address: Any) -> None:
        """`socket.socket.connect`. Servers of this machine are reached, the program's own first."""
        is_near = isinstance(address, tuple) and str(address[0]) in _LOCAL
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if not is_tcp or not (_is_reading.get() or (is_near and self._refuses_all)):
            original(connection, address)
            return
        seconds = connection.gettimeout()
        if is_near and not self._refuses_all:
            connection.settimeout(seconds or None)  # an event loop would be told later that it is refused
            try:
                original(connection, address)
            except ConnectionRefusedError:
                pass
            else:
                return
            finally:
                connection.settimeout(seconds)
        opened = outside_process.connect(self._outside, connection.family, address, seconds or None)
        os.dup2(opened, connection.fileno())
        os.close(opened)
        connection.settimeout(seconds)


class _Gate:
    """Decides what is sent, and notes what is not. Each function is run in the place of the `original` one."""

    def __init__(self, notes: MadeUpNotes) -> None:
        self._notes = notes

    def _is_held(self, method: str, address: str) -> bool:
        """Whether a request is not sent; it is noted."""
        host = urllib.parse.urlsplit(address).hostname or ""
        if method.upper() in _READS or host in _LOCAL or any(each in address for each in _ASKS):
            return False
        self._notes.note("sent", f"{method.upper()} {urllib.parse.urlsplit(address)._replace(query='').geturl()}")
        return True

    def _require_unheld(self, method: str, address: str) -> None:
        """Refuse a request that is not sent, where there is no answer to make up."""
        if self._is_held(method, address):
            raise ConnectionRefusedError(f"fxmem sends nothing that a prediction has made: {method} {address}")

    # --- the standard library -----------------------------------------------------------------------------------------

    def put_request(self, original: _Call, connection: Any, method: str, url: str, *args: Any, **kwargs: Any) -> None:
        """`http.client`, below libraries that are not known here."""
        self._require_unheld(method, url if "://" in url else f"http://{connection.host}{url}")
        original(connection, method, url, *args, **kwargs)

    def open_address(
        self, original: _Call, opener: Any, fullurl: Any, data: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """`urllib.request.urlopen`."""
        is_request = isinstance(fullurl, urllib.request.Request)
        address = fullurl.full_url if is_request else fullurl
        method = fullurl.get_method() if is_request and data is None else "GET" if data is None else "POST"
        if address.startswith("http") and self._is_held(method, address):
            return urllib.response.addinfourl(io.BytesIO(b"{}"), Message(), address, 200)
        return _while_reading(original, opener, fullurl, data, *args, **kwargs)  # FTP as well

    def start_process(self, original: _Call, process: Any, args: Any, *further: Any, **settings: Any) -> None:
        """`subprocess`: a tool that sends is not started, and has succeeded."""
        if self._is_held_command(args):
            args, settings["shell"] = [sys.executable, "-S", "-c", ""], False
        original(process, args, *further, **settings)

    def call_shell(self, original: _Call, command: Any) -> int:
        """`os.system`."""
        return 0 if self._is_held_command(command) else original(command)

    def _is_held_command(self, args: Any) -> bool:
        if not sends(args):
            return False
        self._notes.note("sent", " ".join(command_words(args)[:3]))
        return True

    # --- libraries ----------------------------------------------------------------------------------------------------

    def send_by_requests(self, original: _Call, session: Any, request: Any, **kwargs: Any) -> Any:
        """`requests`."""
        if not self._is_held(request.method, request.url):
            return original(session, request, **kwargs)
        answer = sys.modules["requests.models"].Response()
        answer.status_code, answer.url, answer.request = 200, request.url, request
        answer.raw = io.BytesIO(b"{}")
        return answer

    def send_by_httpx(self, original: _Call, client: Any, request: Any, **kwargs: Any) -> Any:
        """`httpx`, with which huggingface_hub works since 1.0."""
        held = self._is_held(request.method, str(request.url))
        return _answer_of_httpx(request) if held else _while_reading(original, client, request, **kwargs)

    async def send_later_by_httpx(self, original: _Call, client: Any, request: Any, **kwargs: Any) -> Any:
        """As `send_by_httpx`, in an event loop."""
        if self._is_held(request.method, str(request.url)):
            return _answer_of_httpx(request)
        return await _while_awaited(original, client, request, **kwargs)

    async def request_by_aiohttp(self, original: _Call, session: Any, method: str, url: Any, **kwargs: Any) -> Any:
        """`aiohttp`, which has no answer to make up."""
        self._require_unheld(method, str(url))
        return await _while_awaited(original, session, method, url, **kwargs)

    def call_by_botocore(self, original: _Call, client: Any, operation: str, parameters: Mapping[str, Any]) -> Any:
        """`boto3`: what is stored has been stored."""
        if operation.startswith(_OBJECT_READS):
            return original(client, operation, parameters)
        where = "/".join(str(parameters[key]) for key in ("Bucket", "Key") if key in parameters)
        self._notes.note("sent", f"{operation} {where}".strip())
        return {"ETag": '""', "UploadId": "0", "ResponseMetadata": {"HTTPStatusCode": 200}}

    def begin_wandb(self, original: _Call, *args: Any, **kwargs: Any) -> Any:
        """`wandb`: a program that asks for the online mode gets the offline one."""
        if kwargs.get("mode") != "disabled":
            self._notes.note("sent", "wandb.init: offline")
            kwargs["mode"] = "offline"
        return original(*args, **kwargs)

    def patch_hub(self, module: Any) -> torch_common.Patches:
        """`huggingface_hub`: `push_to_hub` of all that is built on it."""
        changed = [name for name in _HUB_CHANGES if hasattr(module.HfApi, name)]
        functions = {id(getattr(module, name)): name for name in changed if hasattr(module, name)}
        holders = find_holders(getattr(module, name) for name in functions.values())
        for name in changed:
            yield torch_common.wrap(module.HfApi, name, functools.partial(self._change_hub, module, name))
        api = module.HfApi()
        for holder, alias, function in holders:
            yield torch_common.replace(holder, alias, getattr(api, functions[id(function)]))

    def _change_hub(
        self, module: Any, name: str, original: Any, api: Any, repo_id: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        repo = str(kwargs.get("repo_id") or repo_id)
        self._notes.note("sent", f"{name} {repo}".strip())
        address = f"{getattr(module, 'ENDPOINT', 'https://huggingface.co')}/{repo}"
        made: Any = None
        if name == "create_repo":
            made = module.RepoUrl(address)
        elif name in ("create_commit", "upload_file", "upload_folder"):
            made = module.CommitInfo(address, str(kwargs.get("commit_message", "")), "", "0" * 40)
        if not kwargs.get("run_as_future"):
            return made
        later: concurrent.futures.Future[Any] = concurrent.futures.Future()
        later.set_result(made)
        return later


def _answer_of_httpx(request: Any) -> Any:
    return sys.modules[type(request).__module__.partition(".")[0]].Response(200, json={}, request=request)


def sends(args: Any) -> bool:
    """Whether a command, as text for a shell or as words, is clearly there to send something away."""
    commands = _shell_commands(args) if isinstance(args, str) else [command_words(args)]
    return any(map(_pushes, commands))


def _pushes(words: Sequence[str]) -> bool:
    name, *further = [os.path.basename(words[0]), *words[1:]] if words else [""]
    plain = [each for each in further if not each.startswith("-")]
    begins = [" ".join([name, *plain[:count]]) for count in range(3)]
    if any(each in _PUSHES for each in begins):
        return True
    copies = name in _COPIERS or any(each in _COPIES for each in begins)
    return copies and len(plain) > 1 and [":" in each for each in plain[-2:]] == [False, True]


def _shell_commands(text: str) -> list[list[str]]:
    """The commands of a line for a shell, in words; none where it is no plain line."""
    found: list[list[str]] = [[]]
    line = shlex.shlex(text, posix=True, punctuation_chars=True)
    line.whitespace_split, line.commenters = True, ""
    with contextlib.suppress(ValueError):
        for word in line:
            if set(word) <= set("();<>|&"):
                found.append([])
            else:
                found[-1].append(word)
        return found
    return []


def command_words(args: Any) -> Sequence[str]:
    """A command line in words; none where it is no plain command."""
    try:
        return shlex.split(args) if isinstance(args, str) else [os.fsdecode(each) for each in args]
    except (TypeError, ValueError):
        return ()
