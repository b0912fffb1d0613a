"""Tests of what runs side by side have two cores, where others have one (`tests/conftest.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def two_cores() -> Iterator[None]:
    """An analysis has two cores inside, and runs side by side what it can."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOKY_MAX_CPU_COUNT", "2")
        yield
