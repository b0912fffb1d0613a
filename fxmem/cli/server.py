"""`fxmem serve`: the page of a step, live on this machine alone, with the settings to change.

Starlette answers, uvicorn listens on 127.0.0.1. Each analysis runs in a process of its own, so that a saved file is
read anew and nothing of it stays; its page is kept in memory by settings and by the state of the files.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from fxmem.errors import AnalysisError, FxmemError, UsageError
from fxmem.hardware import catalogue
from fxmem.memory.budget import parse_budget

# What a reader may change of a step in the live page, checked.


_SHAPE = re.compile(r"(?P<name>(?:[A-Za-z_][\w.]*:)?)(?P<dims>\d+(?:x\d+)*)(?P<dtype>(?::\w+)?)")
_MOST = 1 << 20
_LONGEST = 100
PRECISIONS = ("fp32", "bf16", "fp16")
FIELDS = ("batch", "sequence", "precision", "target", "budget")


@dataclass(frozen=True)
class StepChoice:
    """The settings of a step that the page changes; None or empty: as on the command line."""

    batch: int | None = None
    sequence: int | None = None
    precision: str = ""
    target: str = ""
    budget: str = ""


def read_choice(query: Mapping[str, str]) -> StepChoice:
    """Read the settings from an address.

    Raises:
        UsageError: one is unknown, too long or cannot be understood.
    """
    for name, value in query.items():
        if name not in FIELDS or len(value) > _LONGEST:
            raise UsageError(f"expected settings of {', '.join(FIELDS)}, got {name[:_LONGEST]!r}")
    precision, target, budget = (query.get(name, "") for name in FIELDS[2:])
    if precision and precision not in PRECISIONS:
        raise UsageError(f"expected a precision of {', '.join(PRECISIONS)}, got {precision!r}")
    if target and target not in catalogue.names():
        raise UsageError(f"expected a card of the catalogue, got {target!r}")
    if budget:
        parse_budget(budget)
    return StepChoice(_number(query, "batch"), _number(query, "sequence"), precision, target, budget)


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,7}", text) or not 1 <= int(text) <= _MOST:
        raise UsageError(f"expected a {name} of 1 to {_MOST:,}, got {text!r}")
    return int(text)


def change_options(options: argparse.Namespace, choice: StepChoice) -> dict[str, Any]:
    """The options of the command line with what the reader chose, as plain JSON."""
    changed = {name: value for name, value in vars(options).items() if name not in ("run", "parser")}
    changed["input"] = [change_shape(spec, choice.batch, choice.sequence) for spec in options.input]
    if choice.batch is not None and not options.input:
        changed["batch"] = choice.batch
    for name in ("precision", "target", "budget"):
        if getattr(choice, name):
            changed[name] = getattr(choice, name)
    if choice.precision == PRECISIONS[0]:
        changed["precision"] = None
    return changed


def change_shape(spec: str, batch: int | None, sequence: int | None) -> str:
    """An input's spec with another first dimension and, where it has two, another second one."""
    found = _SHAPE.fullmatch(spec)
    if found is None:
        return spec
    dims = found["dims"].split("x")
    if batch is not None:
        dims[0] = str(batch)
    if sequence is not None and len(dims) == 2:
        dims[1] = str(sequence)
    return f"{found['name']}{'x'.join(dims)}{found['dtype']}"


def find_sizes(specs: Sequence[str], batch: int | None, default_batch: int) -> tuple[int | None, int | None]:
    """The batch and the sequence that the sliders begin at; None for one that cannot be changed."""
    shapes = [found["dims"].split("x") for found in map(_SHAPE.fullmatch, specs) if found is not None]
    if not specs:
        return batch or default_batch, None
    sequence = next((int(dims[1]) for dims in shapes if len(dims) == 2), None)
    return (int(shapes[0][0]) if shapes else None), sequence


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


# One analysis in a process of its own: options as JSON on stdin, the page on stdout.


TIME_LIMIT = 600.0
"""Seconds that an analysis may take."""
_PROGRAM = "from fxmem.cli.server import main; main()"


def write_page(options: Mapping[str, Any]) -> str:
    """The page of a step, analysed in another process.

    Raises:
        AnalysisError: it failed, or took too long; with the line that it ended with.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=json.dumps(options).encode(), capture_output=True,
            timeout=TIME_LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise AnalysisError(f"the analysis took longer than {TIME_LIMIT:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise AnalysisError(lines[-1][:2000] if lines else f"the analysis ended with code {done.returncode}")
    return done.stdout.decode()


def main() -> None:
    """Analyse the step whose options stand on stdin, and write its page to stdout."""
    from fxmem.cli.step import read_budget, read_step
    from fxmem.memory.allocator import read_settings
    from fxmem.show.html import PageOptions, report_html

    options = argparse.Namespace(**json.load(sys.stdin))
    page, sys.stdout = sys.stdout, sys.stderr  # what a model prints is no part of the page
    try:
        budget = read_budget(options)
        report, timeline = read_step(options)
    except FxmemError as error:
        sys.exit(str(error))
    nbytes = None if budget is None else budget.resolve(timeline.peak.counted_bytes).nbytes
    page.write(report_html(report, timeline, PageOptions(budget_bytes=nbytes, settings=read_settings(os.environ))))
