"""For test suites and training loops: peaks held against a budget, a baseline, or a card.

`assert_peak_below`, `assert_steady`; the pytest plugin that keeps peaks beside the tests; `guard` and
callbacks, which refuse a training run that cannot fit, or print what is predicted beside what it measures.

Importing the package imports nothing else, because pytest loads the plugin in every test suite.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxmem.testing.callbacks import guard, lightning_callback, trainer_callback
    from fxmem.testing.peak_checks import assert_peak_below, assert_steady

__all__ = ["assert_peak_below", "assert_steady", "guard", "lightning_callback", "trainer_callback"]

_HOMES = {
    **dict.fromkeys(("assert_peak_below", "assert_steady"), "peak_checks"),
    **dict.fromkeys(("guard", "lightning_callback", "trainer_callback"), "callbacks"),
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
