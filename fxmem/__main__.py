"""The command line. Nothing here imports torch until a command needs it.

Exit codes: 0 ok; 1 the analysis failed, or does not know; 2 usage; 3 something lacks here; 4 the answer is no, as it
does not fit or a budget or tolerance was exceeded; as in a shell, 130 interrupted, 143 terminated and 141 stdout closed
by its reader. Results go to stdout and are written last, all at once; progress, warnings, errors (one line each) and
what the model itself prints go to stderr.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from fxmem.cli.given_program import give_program
from fxmem.cli.output import check_output
from fxmem.cli.own_options import check_own_options, without_separator
from fxmem.cli.verbs import build_parser
from fxmem.errors import AnalysisError, FxmemError, linked_errors, one_line
from fxmem.records.units import format_bytes, printable

_SHORTAGE = re.compile(
    r"failed to map segment|can(no|')t allocate memory|std::bad_alloc|can't start new thread", re.IGNORECASE
)
"""What the loader of libraries, libc, torch's CPU allocator, C++ and Python say where no memory is left."""
_SIGPIPE = 128 + 13
"""Windows has no such signal, but a reader of stdout may leave there, too."""


class _TerminatedError(BaseException):
    """SIGTERM came. Like KeyboardInterrupt no `Exception`: what a model's code catches should not be this."""


def run_process() -> NoReturn:
    """Run the command of this process, and end the process.

    Handlers of `atexit` run and streams are flushed. That the interpreter takes apart every module of torch is left
    out: a quarter of a short command's CPU time, and a sixth of its memory. Where a thread is left that has to be
    waited for, the process ends as any other does.
    """
    code = main()
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    if others:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, full or closed: said before, if ever
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        with _unwind_on_sigterm():
            return _run(arguments)
    except BrokenPipeError:
        _discard_stdout()
        return _SIGPIPE
    except KeyboardInterrupt as error:
        return _fail(_with_notes("interrupted", error), 128 + signal.SIGINT, debug)
    except _TerminatedError as error:
        return _fail(_with_notes("terminated", error), 128 + signal.SIGTERM, debug)
    except SystemExit as error:
        return _fail(f"the model's own code called sys.exit({error.code!r}) while it ran", 1, debug)
    except Exception as error:
        return _fail(*_explain(error, debug), debug)


def _with_notes(what: str, error: BaseException) -> str:
    """What ended the command, and where the program was that it ran."""
    return "; ".join([what, *getattr(error, "__notes__", ())])


def _explain(error: Exception, debug: bool) -> tuple[str, int]:
    """The line and the exit code of what ended the command."""
    if shortages := [each for each in linked_errors(error) if _is_host_shortage(each)]:
        got = str(error) if isinstance(error, AnalysisError) else one_line(shortages[-1])
        return f"expected more memory than this process may take{_host_limits()}, got {got}", 3
    if isinstance(error, FxmemError):
        return str(error), error.exit_code
    advice = "" if debug else "; run it again with --debug to see where"
    return f"fxmem itself failed, please report it: {type(error).__name__}: {error}{advice}", 1


def _is_host_shortage(error: BaseException) -> bool:
    """Whether this machine, not the card, had no memory left."""
    if isinstance(error, FxmemError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None


def _host_limits() -> str:
    """The limits of this process's memory that are set, in parentheses; empty where none is."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    kinds = {"RLIMIT_AS (ulimit -v)": resource.RLIMIT_AS, "RLIMIT_DATA (ulimit -d)": resource.RLIMIT_DATA}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    found = [f"{name} is {format_bytes(n)}" for name, n in soft.items() if n != resource.RLIM_INFINITY]
    return f" ({', '.join(found)})" if found else ""


@contextlib.contextmanager
def _unwind_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack as SIGINT does.

    So half-written files are removed and child processes end."""

    process = os.getpid()

    def end(number: int, frame: object) -> NoReturn:
        if os.getpid() != process:  # forked by the program that is run: it ends as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise _TerminatedError

    # Only the main thread may ask for signals, and a handler that a caller has set stays.
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: Sequence[str]) -> int:
    try:
        options = _parse(arguments)
    except SystemExit as leaving:  # --help and --version
        _write_result("")
        return int(leaving.code or 0)
    check_output(options)
    code, text = options.run(options)
    _write_result(text)
    return int(code)


def _fail(message: str, code: int, debug: bool) -> int:
    """Report the exception that is being handled, in one line, after its traceback with `--debug`."""
    if debug:
        traceback.print_exc()
    print(f"fxmem: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser, _ = build_parser()
    arguments = give_program(arguments, parser)
    options, rest = parser.parse_known_args(without_separator(arguments) or ["--help"])
    if rest:
        options.parser.refuse(rest)
    check_own_options(options, arguments)
    # One word says it from here on, in the commands that are shown next, too.
    given = ((key, getattr(options, key.replace("-", "_"), None)) for key in ("torch", "in-use", "os"))
    options.beside = "".join(f",{key}={value}" for key, value in given if value is not None)
    options.torch = options.in_use = options.os = None
    if options.beside and hasattr(options, "target"):
        options.target += options.beside
    return options


# --- stdout -----------------------------------------------------------------------------------------------------------


def _write_result(text: str) -> None:
    """Write to stdout and flush, so that what goes wrong there goes wrong here. Characters it cannot encode are spelled
    out."""
    if sys.stdout is None:
        raise FxmemError("expected a stdout to write the result to, but it is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        if text:
            sys.stdout.write(text.rstrip("\n").encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise FxmemError(f"expected a stdout that can be written, got {error.strerror}") from error


def _discard_stdout() -> None:
    """Send what is still in stdout's buffer nowhere: the interpreter would write it when it ends, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run_process()
