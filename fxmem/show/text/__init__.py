"""Records as text for a terminal, one module per kind of record.

A table is plain ASCII apart from the model's own names, so that it survives any pipe; colour repeats what words already
say.
"""

from fxmem.show.text.answer import overview
from fxmem.show.text.report import table

__all__ = ["overview", "table"]
