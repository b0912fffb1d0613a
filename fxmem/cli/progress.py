"""What verbs write to stderr while they work."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from fxmem.records.units import printable


def say(message: str) -> None:
    """Write one line to stderr."""
    print(f"fxmem: {printable(message)}", file=sys.stderr, flush=True)


class Progress:
    """A context that reports on stderr what takes longer than a second.

    On a terminal that is one line, which says for how long already; it is erased at the end. Elsewhere each stage has
    a line of its own. What the model's own code prints to stdout goes to stderr meanwhile.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._timer: threading.Timer | None = None
        self._message, self._found = "", 0
        self._begun = time.monotonic()
        self._around = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        self._begun = time.monotonic()
        if not self._quiet:
            self._around.enter_context(StatusLine(self._describe))
        self._around.enter_context(contextlib.redirect_stdout(sys.stderr))
        return self

    def __call__(self, message: str) -> None:
        """Report `message` in a second, unless something else has begun by then."""
        self._stop()
        self._message = message
        if not self._quiet and not sys.stderr.isatty():
            self._timer = threading.Timer(_PATIENCE, lambda: say(f"{message} ..."))
            self._timer.daemon = True
            self._timer.start()

    def found(self, result: str) -> None:
        """Write a result as soon as there is one, a line of its own."""
        self._stop()
        self._found += 1
        self._message = f"{self._found} found, going on"
        if not self._quiet:
            say(result)

    def __exit__(self, *raised: Any) -> None:
        self._stop()
        self._around.close()

    def _describe(self) -> str:
        seconds = time.monotonic() - self._begun
        if seconds < _PATIENCE or not self._message:
            raise LookupError("nothing takes long yet")
        return f"{seconds:.0f} s: {self._message}"

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_ERASE: Final = "\r\x1b[K"
"""To the line's begin, and erase it (ECMA-48: EL)."""
_SECONDS: Final = 0.5
_PATIENCE: Final = 1.0
"""Seconds of work before anything is said of it."""


class StatusLine:
    """A context whose last line on a terminal says how far the work is.

    The line is erased before anything else is written to stderr, and at the end. Without a terminal nothing is written.

    Args:
        describe: says so in words; called from another thread. What it raises is taken for nothing to say.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._terminal: TextIO = sys.stderr
        self._stream = _Erasing(self._terminal)

    def __enter__(self) -> StatusLine:
        if self._terminal.isatty():
            sys.stderr = self._stream
            self._thread.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        if sys.stderr is self._stream:
            self._over.set()
            self._thread.join()
            self._stream.erase()
            sys.stderr = self._terminal

    def _repeat(self) -> None:
        while not self._over.wait(_SECONDS):
            with contextlib.suppress(Exception):
                self._stream.show(f"fxmem: {printable(self._describe())}")


class _Erasing:
    """A terminal whose last line is not the program's, but ours."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._lock = threading.RLock()
        self._is_shown = False
        self._at_begin = True
        """Whether what the program wrote ended its line."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    def write(self, text: str) -> int:
        """Write what the program writes."""
        with self._lock:
            self.erase()
            self._at_begin = text.endswith("\n") if text else self._at_begin
            return self._terminal.write(text)

    def show(self, line: str) -> None:
        """Write the line, unless the program is in the midst of one of its own."""
        with self._lock:
            if self._at_begin:
                self._is_shown = True
                self._terminal.write(_ERASE + line[: _columns(self._terminal) - 1])
                self._terminal.flush()

    def erase(self) -> None:
        """Erase the line, if it is there."""
        with self._lock:
            if self._is_shown:
                self._is_shown = False
                self._terminal.write(_ERASE)
                self._terminal.flush()


def _columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
