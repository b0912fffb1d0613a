"""What the build of the documentation does beside Markdown: the generated page, and two checks that fail it.

mkdocs calls the functions named `on_*`. A warning fails the build, which is strict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

from fxmem.cli.reference import reference

PUBLIC = ("fxmem", "fxmem.errors", "fxmem.testing")
"""Modules whose public names must have a docstring, beside every module of `fxmem.records`."""
LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
"""Tags that load a file when a page is opened, and name one on another host."""

log = get_plugin_logger("fxmem")


def on_files(files: Files, config: Any) -> Files:
    """Add the command line, made from the parsers, and the skill, which lies where the tools of coding agents look."""
    files.append(File("skills/fxmem/SKILL.md", ".", config.site_dir, config.use_directory_urls))
    files.append(File.generated(config, "reference/command-line.md", content=reference()))
    return files


def on_post_build(config: Any) -> None:
    """Warn of public names without a docstring, and of pages that load something from the network."""
    for name in undocumented():
        log.warning("%s has no docstring", name)
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for url in LOADED.findall(page.read_text(encoding="utf-8")):
            log.warning("%s loads %s", page.relative_to(config.site_dir), url)


def undocumented() -> Iterator[str]:
    """Yield the path of each public name that has no docstring."""
    package = griffe.load("fxmem", search_paths=["."], resolve_aliases=True)
    records = package["records"]
    for module in [*map(package.modules_collection.__getitem__, PUBLIC), *records.modules.values()]:
        for member in public_members(module):
            yield from without_docstring(member)


def public_members(module: Any) -> Iterator[Any]:
    """Yield what a module offers: the names of its `__all__`, and what it defines without an underscore."""
    for name, member in module.members.items():
        if name in (module.exports or ()) or not (name.startswith("_") or member.is_alias):
            yield member.final_target if member.is_alias else member


def without_docstring(member: Any) -> Iterator[str]:
    """Yield the path of a class or function that has no docstring, and those of a class's public methods.

    A field needs one only where its name and type do not say it all, which no program can judge.
    """
    if (member.is_class or member.is_function) and not member.has_docstring:
        yield member.path
    if member.is_class:
        for name, inner in member.members.items():
            if not name.startswith("_") and name != "model_config" and not inner.is_alias:
                yield from without_docstring(inner)
