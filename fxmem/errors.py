"""The errors fxmem raises on purpose. Each carries the exit code the command line returns for it.

A message says what was expected, what came, where (the user's own line when there is one) and what to do next.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final


class FxmemError(Exception):
    """Base of all deliberate errors. `exit_code` is what `fxmem` exits with."""

    exit_code = 1


class AnalysisError(FxmemError):
    """The model or program raised, or does something no run without data can follow (exit 1)."""

    exit_code = 1


class NoKernelError(AnalysisError, RuntimeError):
    """No kernel of the card's runs a call (exit 1). A program may catch torch's `RuntimeError` and try another way."""


class UsageError(FxmemError):
    """An option, spec, model, target, unit or file that cannot be understood (exit 2)."""

    exit_code = 2


class EnvironmentLacksError(FxmemError):
    """Something the request needs is not installed or not present: an extra, an engine, a GPU (exit 3)."""

    exit_code = 3


class ExceededError(FxmemError):
    """A budget or a tolerance was exceeded (exit 4)."""

    exit_code = 4


class PlanWarning(UserWarning):
    """A checkpoint plan frees less than it promised: the program is not the one it was made for."""


# --- text of messages ---------------------------------------------------------------------------------------------


def closest(name: str, names: Iterable[str], *, otherwise: str = "") -> str:
    """`; closest: a, b, c`, at most three of `names` that look like `name` in any case; `otherwise` if none does."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.55)
    return f"; closest: {', '.join(by_lower[match] for match in found)}" if found else otherwise


def unknown_name(expected: str, got: str, names: Iterable[str]) -> UsageError:
    """The error for a name that is not among `names`, with the closest of them."""
    return UsageError(f"expected {expected}, got {got!r}{closest(got, names)}")


def unknown_optimizer(got: str, names: Sequence[str]) -> UsageError:
    """The error for a name that is not among `names`, with the closest of them, else all, and what else there is."""
    near = closest(got, names, otherwise=f"; there are {', '.join(sorted(names))}")
    others = "; or another package's: torchao:AdamW8bit, bitsandbytes:Lion, pkg.mod:factory"
    return UsageError(f"expected an optimizer of torch.optim, got {got!r}{near}{others}")


_BROUGHT: Final = re.compile(r"Caught (\w+) (in [^\n]+)\.\nOriginal Traceback")
"""How torch begins an error that it brings from elsewhere (its `ExceptionWrapper`)."""


def one_line(error: BaseException) -> str:
    """`ValueError: its text`, in one line of at most 400 characters; of one that torch brings from a worker of a data
    loader, or from another thread, the text that it had there."""
    text, name = str(error), type(error).__name__
    if (brought := _BROUGHT.match(text)) is not None:
        lines = re.split(rf"^(?:\w+\.)*{brought[1]}: ", text, flags=re.M)
        text = f"{lines[-1]} ({brought[2]})"
    text = " ".join(text.split())
    line = f"{name}: {text}" if text else name
    return line if len(line) <= 400 else line[:397] + "..."


def linked_errors(error: BaseException) -> Iterator[BaseException]:
    """`error` and everything it was raised from or while handling, outermost first."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            pending += [link.__context__, link.__cause__]


def forget_frames(error: BaseException) -> None:
    """Let go of what an error leads to: one that a variable of its own frames has would keep the program's alive."""
    for each in list(linked_errors(error)):
        each.__traceback__ = None
