"""The application of `fxmem serve`: three answers, behind a token, for this machine's browser alone."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from fxmem.cli.server.choice import FIELDS, StepChoice, read_choice
from fxmem.errors import FxmemError

_KEPT = 32
"""Pages kept in memory."""
_WAITING = 8
"""Requests that wait for a page, at most: each keeps one of the server's forty threads."""
_MOST_FILES = 500

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}


class PageKeeper:
    """Pages by settings and by the state of the files; one analysis at a time.

    Args:
        write: makes the page of the given settings.
        watched: the files whose change makes every page old.
    """

    def __init__(self, write: Callable[[StepChoice], str], watched: Callable[[], Iterable[Path]]) -> None:
        self._write = write
        self._watched = watched
        self._pages: OrderedDict[tuple[str, StepChoice], str] = OrderedDict()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_WAITING)

    def stamp(self) -> str:
        """Another text whenever a watched file was saved."""
        state = hashlib.sha256()
        for path in sorted(self._watched())[:_MOST_FILES]:
            try:
                found = path.stat()
            except OSError:
                continue
            state.update(f"{path}:{found.st_mtime_ns}:{found.st_size};".encode(errors="replace"))
        return state.hexdigest()[:16]

    def page(self, choice: StepChoice) -> str:
        """The page of these settings, kept or made now.

        Raises:
            FxmemError: it cannot be made, or too many wait for theirs.
        """
        if not self._places.acquire(blocking=False):
            raise FxmemError(f"expected at most {_WAITING} pages to be made at a time; ask again when one is there")
        try:
            return self._kept_or_made(choice)
        finally:
            self._places.release()

    def _kept_or_made(self, choice: StepChoice) -> str:
        with self._lock:
            key = (self.stamp(), choice)
            if key in self._pages:
                self._pages.move_to_end(key)
                return self._pages[key]
            made = self._pages[key] = self._write(choice)
            while len(self._pages) > _KEPT:
                self._pages.popitem(last=False)
            return made


def make_app(keeper: PageKeeper, live_page: str, token: str, hosts: Iterable[str]) -> _App:
    """The application, with what guards it.

    Args:
        keeper: makes and keeps the pages.
        live_page: the page around them, as HTML.
        token: the first part of every address.
        hosts: names and ports that a request may be for.
    """

    def is_known(request: Request) -> bool:
        return hmac.compare_digest(request.path_params["token"].encode(), token.encode())

    def live(request: Request) -> Response:
        return HTMLResponse(live_page, headers=HEADERS) if is_known(request) else _refuse(404)

    def stamp(request: Request) -> Response:
        return PlainTextResponse(keeper.stamp(), headers=HEADERS) if is_known(request) else _refuse(404)

    def report(request: Request) -> Response:
        if not is_known(request):
            return _refuse(404)
        names = [name for name, _ in request.query_params.multi_items()]
        try:
            if len(names) > len(FIELDS) or len(set(names)) < len(names):
                return _refuse(400)
            return HTMLResponse(keeper.page(read_choice(dict(request.query_params))), headers=HEADERS)
        except FxmemError as error:
            return PlainTextResponse(str(error), status_code=422, headers=HEADERS)

    routes = [
        Route("/{token}/", live, methods=["GET"]),
        Route("/{token}/stamp", stamp, methods=["GET"]),
        Route("/{token}/report", report, methods=["GET"]),
    ]
    return _guard(Starlette(routes=routes), frozenset(hosts))


def _guard(app: _App, hosts: frozenset[str]) -> _App:
    """Answer only requests of this machine's browser that no other site has made."""

    async def guarded(scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"expected http, got {scope['type']}")
        code = _refusal(scope["method"], list(scope["headers"]), hosts)
        await (app if code is None else _refuse(code))(scope, receive, send)

    return guarded


def _refusal(method: str, headers: list[tuple[bytes, bytes]], hosts: frozenset[str]) -> int | None:
    """The status of a request that is not answered; None for one that is."""
    if method not in ("GET", "HEAD"):
        return 405
    named: Mapping[str, list[str]] = {
        name: [value.decode("latin-1") for key, value in headers if key.lower() == name.encode()]
        for name in ("host", "origin", "sec-fetch-site")
    }
    if len(named["host"]) != 1 or named["host"][0] not in hosts:
        return 421
    if any(origin != f"http://{named['host'][0]}" for origin in named["origin"]):
        return 403
    if any(site not in ("same-origin", "none") for site in named["sec-fetch-site"]):
        return 403
    return None


def _refuse(code: int) -> Response:
    return PlainTextResponse("refused\n", status_code=code, headers=HEADERS)
