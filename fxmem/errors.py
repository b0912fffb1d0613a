"""The errors fxmem raises on purpose. Each carries the exit code the command line returns for it.

A message says what was expected, what came, where (the user's own line when there is one) and what to do next.
"""

from __future__ import annotations

__all__ = ["AnalysisError", "EnvironmentLacksError", "ExceededError", "FxmemError", "UsageError"]


class FxmemError(Exception):
    """Base of all deliberate errors. `exit_code` is what `fxmem` exits with."""

    exit_code = 1


class AnalysisError(FxmemError):
    """The model raised, or does something no run without data can follow (exit 1)."""

    exit_code = 1


class UsageError(FxmemError):
    """An option, spec, model, target, unit or file that cannot be understood (exit 2)."""

    exit_code = 2


class EnvironmentLacksError(FxmemError):
    """Something the request needs is not installed or not present: an extra, an engine, a GPU (exit 3)."""

    exit_code = 3


class ExceededError(FxmemError):
    """A budget or a tolerance was exceeded (exit 4)."""

    exit_code = 4
