"""Records as text for a terminal, one module per kind of record, and a profile as HTML for a notebook.

A table is plain ASCII apart from the model's own names, so that it survives any pipe; colour repeats what words already say.
"""

from __future__ import annotations

from fxmem.reporting.notebook import html
from fxmem.reporting.step import table

__all__ = ["html", "table"]
