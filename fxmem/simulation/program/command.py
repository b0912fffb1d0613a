"""A program on the command line, and what a notebook means there."""

from __future__ import annotations

import dataclasses
import json
import linecache
from collections.abc import Iterator
from typing import Final

from fxmem.errors import UsageError
from fxmem.hardware.links import PER_MACHINE


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program on the command line: `python train.py --batch-size 64`, or `python -m pkg.train`."""

    program: str
    """A file, a module's name, or a launcher: `torchrun`, `accelerate`, `python`."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    ranks: int | None = None
    """How many ranks there are, of which it runs as one; None for one process alone."""
    rank: int | None = None
    """Which of them; None for one of each class of equal ranks, of which the largest is shown."""
    per_machine: int = PER_MACHINE
    """How many ranks a machine has."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that its launcher sets."""
    launcher: str = ""
    """What its launcher starts besides it, in words; empty for nothing."""
    typed: str = ""
    """The command line with its launcher; empty where there is none."""

    @property
    def command(self) -> str:
        """As it was typed."""
        return self.typed or " ".join([*(["-m"] if self.is_module else []), self.program, *self.arguments])

    @property
    def is_notebook(self) -> bool:
        """Whether it is a Jupyter notebook."""
        return not self.is_module and self.program.endswith(".ipynb")


def notebook_cells(file: str) -> Iterator[tuple[str, str]]:
    """Name and Python text of each code cell; lines that are IPython's (`%time`, `!pip`) are left out.

    Raises:
        UsageError: no notebook.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            cells = json.load(stream)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"expected a Jupyter notebook in {file}, got something else: {error}") from error
    for number, source in enumerate(sources, 1):
        if source.lstrip().startswith("%%") and not source.lstrip().startswith(_PYTHON_CELLS):
            continue
        lines = [_blank(line) for line in source.splitlines(keepends=True)]
        name = f"{file}[{number}]"
        linecache.cache[name] = len(source), None, lines, name
        yield name, "".join(lines)


_PYTHON_CELLS: Final = ("%%time", "%%timeit", "%%capture")


def _blank(line: str) -> str:
    """A line, or `pass` in its place where it is IPython's."""
    indented = line.lstrip()
    return line if not indented.startswith(("%", "!")) else line[: len(line) - len(indented)] + "pass\n"
