"""The page, live, with settings to change; on this machine alone.

Serve the page of a step on 127.0.0.1, with batch, sequence, precision, card and budget to change; it is analysed anew
when the model's file is saved. Needs pip install 'fxmem[serve]'.

    fxmem serve torchvision:resnet50 --target rtx4090
"""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fxmem.cli.options import ANALYSIS, DEFAULT_BATCH
from fxmem.cli.parser import argument, number
from fxmem.errors import EnvironmentLacksError, UsageError

if TYPE_CHECKING:
    from fxmem.cli.server.app import PageKeeper

ADDRESS = "127.0.0.1"

ARGUMENTS = (
    *ANALYSIS,
    argument("--budget BYTES|8GiB|60%", help="drawn as a line; a share is of the step's peak"),
    number("--port", "the port; 0: any that is free", default=0),
)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem serve` until it is interrupted; return the exit code and the text for stdout."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise EnvironmentLacksError("expected starlette and uvicorn: pip install 'fxmem[serve]'")
    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"expected --port of 0 to 65535, got {options.port}")
    import uvicorn

    from fxmem.cli.server.app import make_app

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, options.port))
            listener.listen()  # whoever reads the address may come at once
        except OSError as error:
            raise UsageError(f"expected --port to be free, got {options.port}: {error.strerror}") from error
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        hosts = (f"{ADDRESS}:{port}", f"localhost:{port}")
        app = make_app(make_keeper(options), write_live_page(options), token, hosts)
        print(f"http://{ADDRESS}:{port}/{token}/  (Ctrl-C ends it)", file=sys.stderr, flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
        uvicorn.Server(config).run(sockets=[listener])
    return 0, ""


def make_keeper(options: argparse.Namespace) -> PageKeeper:
    """The pages of the step that the options describe."""
    from fxmem.cli.server.app import PageKeeper
    from fxmem.cli.server.choice import change_options
    from fxmem.cli.server.worker import write_page

    return PageKeeper(lambda choice: write_page(change_options(options, choice)), lambda: watched_files(options))


def watched_files(options: argparse.Namespace) -> Iterator[Path]:
    """The Python files beside those that the options name."""
    for each in (options.model, *options.input, options.loss or "", options.optimizer or ""):
        path = Path(each.rpartition(":")[0])
        if path.suffix == ".py" and path.is_file():
            yield from path.parent.glob("*.py")


def write_live_page(options: argparse.Namespace) -> str:
    """The page around that of the step."""
    from fxmem.cli.server.choice import PRECISIONS, find_sizes
    from fxmem.hardware import catalogue
    from fxmem.show.html import live_html

    batch, sequence = find_sizes(options.input, options.batch, DEFAULT_BATCH)
    sizes = {"batch": batch, "sequence": sequence}
    cards = list(catalogue.names())
    return live_html(
        options.model,
        [(name, size) for name, size in sizes.items() if size is not None],
        [
            ("precision", options.precision or PRECISIONS[0], PRECISIONS),
            ("target", options.target, cards if options.target in cards else [options.target, *cards]),
        ],
        options.budget or "",
    )
