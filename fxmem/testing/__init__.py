"""For test suites: `assert_peak_below`, and the pytest plugin that keeps peaks beside the tests.

Importing the package imports nothing else, because pytest loads the plugin in every test suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxmem.testing.peak_checks import assert_peak_below

__all__ = ["assert_peak_below"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fxmem.testing import peak_checks

        return getattr(peak_checks, name)
