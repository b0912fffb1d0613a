"""What verbs write to stderr while they work."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from fxmem.records.units import printable


def say(message: str) -> None:
    """Write one line to stderr."""
    print(f"fxmem: {printable(message)}", file=sys.stderr, flush=True)


class Progress:
    """A context that reports on stderr what takes longer than a second.

    What the model's own code prints to stdout goes to stderr meanwhile.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._timer: threading.Timer | None = None
        self._redirected = contextlib.redirect_stdout(sys.stderr)

    def __enter__(self) -> Progress:
        self._redirected.__enter__()
        return self

    def __call__(self, message: str) -> None:
        """Report `message` in a second, unless something else has begun by then."""
        self._stop()
        if not self._quiet:
            self._timer = threading.Timer(1.0, lambda: say(f"{message} ..."))
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *raised: Any) -> None:
        self._stop()
        self._redirected.__exit__(*raised)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
