"""Pipelines of diffusers by name, in a shipped table: of what parts each is made, and the call of its card.

The table, in the JSON file beside this one, has the configurations of well-known pipelines, each part with the
source that it was read from and the parameter count that was published, which `tests/cli/test_hub_pipelines.py` holds
the built part to. Standard library only: a misspelt name is refused before torch is imported.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final, NamedTuple

from fxmem.simulation.stand_ins import hub_models

TABLE: Final = Path(__file__).with_name("hub_pipelines.json")
read_table: Final = functools.partial(hub_models.read_table, TABLE)


class Pipeline(NamedTuple):
    """A pipeline of the table."""

    name: str
    """`ORG/NAME`."""
    values: dict[str, Any]
    """Its entry."""
    parts: dict[str, dict[str, Any]]
    """Its components by name."""


def find(name: str) -> Pipeline | None:
    """The pipeline of a name, with or without an organisation; None where the table has none."""
    entries = read_table()["pipelines"]
    known = hub_models.name_aliases(entries).get(name.lower())
    if known is None:
        return None
    entry = entries[known]
    return Pipeline(known, entry, {each: find_part(part) for each, part in entry["components"].items()})


def find_part(name: str) -> dict[str, Any]:
    """A part of the table; one whose configuration is that of a language model has it of the table of these."""
    part: dict[str, Any] = read_table()["parts"][name]
    if isinstance(config := part.get("config"), str):
        return {**part, "config": hub_models.read_table()["models"][config]["config"]}
    return part


def list_names() -> list[str]:
    """The names of the table, in order."""
    entries = read_table()["pipelines"].items()
    return sorted((each for name, entry in entries for each in (name, *entry.get("also", ()))), key=str.lower)
