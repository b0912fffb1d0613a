"""Plug-ins of one kind by name: a folder's modules, other packages' entry points, and what is registered at run time.

A module of the folder is named for its plug-in (`memory_viz.py` gives `memory-viz`); its docstring's first line says
what the plug-in is. Names and briefs are read from the files, so that `--help` imports no plug-in. A plug-in is
imported when it is first used, and registered then: by itself, or else as the name that all of the folder have for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fxmem.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Plugin = TypeVar("Plugin")


class Registry(Generic[Plugin]):
    """Plug-ins of one kind. Iterating over it gives their names; `in` asks for one.

    Args:
        kind: what messages call a plug-in.
        package: full name of fxmem's own package of them.
        group: the group of entry points in which other packages name theirs; loading such an entry point has to
            register the plug-in.
        own: what the plug-in is called in a module of fxmem's own that does not register it.
    """

    def __init__(self, kind: str, package: str, group: str, own: str = "") -> None:
        self.kind, self.package, self.group, self._own = kind, package, group, own
        self.add: Callable[[str, Any], None] = self.register
        """Registers what such a module has."""
        self._registered: dict[str, Plugin] = {}

    @cached_property
    def briefs(self) -> dict[str, str]:
        """By name, what each of fxmem's own plug-ins is, in a few words."""
        folder = Path(__file__).parents[1].joinpath(*self.package.split(".")[1:])
        return {path.stem.replace("_", "-"): _first_line(path) for path in sorted(folder.glob("[a-z]*.py"))}

    def register(self, name: str, plugin: Plugin) -> None:
        """Add a plug-in.

        Raises:
            UsageError: another one has this name.
        """
        # One of our own may not be imported yet, and so not registered.
        is_our_own = name in self.briefs and self._module(name) not in sys.modules
        if is_our_own or name in self._registered:
            raise UsageError(f"expected a new name for a {self.kind}, got {name!r}, which another one has")
        self._registered[name] = plugin

    def get(self, name: str) -> Plugin:
        """The plug-in of this name, imported if need be.

        Raises:
            UsageError: there is none.
        """
        if name not in self._registered:
            if name in self.briefs:
                module = import_module(self._module(name))
                if name not in self._registered:
                    self.add(name, getattr(module, self._own))
            elif name in self._entry_points:
                self._entry_points[name].load()
        if name not in self._registered:
            got = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise UsageError(f"expected {self.kind} to be one of {', '.join(self)}; got {got}")
        return self._registered[name]

    def __contains__(self, name: object) -> bool:
        return name in self.briefs or name in self._registered or name in self._entry_points

    def __iter__(self) -> Iterator[str]:
        """Names: fxmem's own first, then the others."""
        yield from self.briefs
        yield from sorted({*self._registered, *self._entry_points} - set(self.briefs))

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in _read_entry_points().select(group=self.group)}

    def _module(self, name: str) -> str:
        return f"{self.package}.{name.replace('-', '_')}"


@cache
def _read_entry_points() -> Any:  # what has `select`: another class in Python 3.11 than later
    """What every installed package declares: slow to read, so that all registries share it."""
    from importlib.metadata import entry_points

    return entry_points()


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return to_brief(file.readline().strip().strip('"'))


def to_brief(line: str) -> str:
    """The first line of a docstring as a part of a sentence; `JSON` and its like stay as they are."""
    return (line if line[1:2].isupper() else line[:1].lower() + line[1:]).rstrip(".")


STRATEGIES: Registry[Any] = Registry("strategy", "fxmem.planning.regions.strategies", "fxmem.planners")
"""How regions are chosen. `fxmem.planning` says what is registered, the command line only names them."""
EXPORTERS: Registry[Any] = Registry("format", "fxmem.show.export.formats", "fxmem.exporters", "write")
"""Formats of other tools, likewise; `fxmem.show.export` says what is registered."""
CAUSES: Registry[Any] = Registry("cause", "fxmem.memory.findings.causes", "fxmem.findings", "find")
"""What may be wrong with a step, likewise; `fxmem.memory.findings` says what is registered."""
PACKAGES: Registry[Any] = Registry("package", "fxmem.simulation.kernels.packages", "fxmem.packages", "PACKAGE")
"""Kernels of other packages, likewise; `fxmem.simulation.kernels.packages` says what is registered."""
LISTENERS: Registry[Any] = Registry("listener", "fxmem.simulation.run.listeners", "fxmem.listeners")
"""What is told of a program's rounds, likewise; `fxmem.simulation.run.listeners` says what is registered."""
VIEWS: Registry[Any] = Registry("view", "fxmem.show.html.views", "fxmem.views", "view")
"""How a notebook shows a record: functions from the record to a fragment of HTML, by the name of its class
(`compile-plan` would show `CompilePlan`)."""


def print_record(record: Any) -> str | None:
    """The text of a record, as the command line prints it; None for one that it does not print."""
    text: str | None = import_module("fxmem.show.text.printed").write(record)
    return text


class Viewed:
    """A record that a notebook shows by its view."""

    def _repr_html_(self) -> str:
        html: str = VIEWS.get(re.sub(r"\B[A-Z]", r"-\g<0>", type(self).__name__).lower())(self)
        return html
