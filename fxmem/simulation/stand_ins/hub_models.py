"""Models of the Hugging Face hub by name: the `config.json` of the local cache, else of a shipped table.

A name is `ORG/NAME`, or NAME alone. The cache is huggingface_hub's own folder, in its layout
`models--ORG--NAME/snapshots/COMMIT/config.json`, where `refs/main` has the commit. The table, `hub_models.json` beside
this file, has the configurations of well-known models as they were on a day, each with the source that it was read
from and the parameter count that was published, which `tests/cli/test_hub_models.py` holds the built model to. Nothing
here touches the network but `download`. Standard library only: a misspelt name is refused before torch is imported.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fxmem.errors import EnvironmentLacksError, UsageError, closest, one_line

TABLE: Final = Path(__file__).with_name("hub_models.json")

_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")
_FOLDER = "models--"


class HubConfig(NamedTuple):
    """The configuration that a name stands for."""

    name: str
    """`ORG/NAME`."""
    path: Path | None
    """Its `config.json` in the local cache; None: it is of the table."""
    values: dict[str, Any]
    """The fields of the table; empty for a file, which is read where it is needed."""
    origin: str
    """Where it is from, for a note."""


def is_name(text: str) -> bool:
    """Whether `text` has the form of a model's name on the hub."""
    return _NAME.fullmatch(text) is not None and not text.endswith(".json") and ".." not in text


def find(name: str) -> HubConfig | None:
    """The configuration of a model, from the local cache or else from the table; None if neither has it."""
    if not is_name(name):
        return None
    known = _aliases().get(name.lower())
    # One without an organisation may stand for any organisation's in the cache.
    others = [] if "/" in name else [each for each in _list_cached() if each.rpartition("/")[2].lower() == name.lower()]
    for each in dict.fromkeys(filter(None, (name, known, *others))):
        path = _cached(each)
        if path is not None:
            return HubConfig(each, path, {}, f"the Hugging Face cache, commit {path.parent.name[:12]}")
    return find_in_table(name)


def find_in_table(name: str) -> HubConfig | None:
    """The configuration of a model from the table; None if it has none."""
    known, table = _aliases().get(name.lower()), read_table()
    if known is None:
        return None
    return HubConfig(known, None, table["models"][known]["config"], f"fxmem's table of {table['as_of']}")


def find_weights(name: str) -> tuple[int, str] | None:
    """How many parameters a model of the table has, and their dtype; None where only a rounded number is known."""
    entry = read_table()["models"].get(_aliases().get(name.lower(), ""), {})
    counted, config = entry.get("parameters"), entry.get("config", {})
    if not isinstance(counted, int) or (found := find(name)) is None or found.path is not None:
        return None
    dtype = config.get("dtype") or config.get("text_config", {}).get("dtype") or "float32"
    return counted - sum(entry.get("stored besides", {}).values()), dtype


def list_names() -> list[str]:
    """The names of the table and of the local cache, in order."""
    names = {each for name, entry in read_table()["models"].items() for each in (name, *entry.get("also", ()))}
    names |= {name for name in _list_cached() if _cached(name) is not None}
    return sorted(names, key=str.lower)


def name_error(name: str) -> UsageError:
    """No configuration of a name."""
    names = list_names()
    near = closest(name, names if "/" in name else [each.rpartition("/")[2] for each in names])
    fetch = "--download fetches its config.json, and nothing else, from the hub; or say hf: and the path of one"
    return UsageError(f"no configuration of hf:{name} is at hand{near}; {fetch}")


def download(name: str) -> None:
    """Fetch the `config.json` of a model into the local cache, by huggingface_hub.

    Raises:
        UsageError: the hub has no such model, or does not give it to this user.
        EnvironmentLacksError: huggingface_hub is not installed, or the hub is out of reach.
    """
    found = find(name)
    name = found.name if found is not None else name
    if not is_name(name):
        raise UsageError(f"expected --download with hf:ORG/NAME, got hf:{name}")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise EnvironmentLacksError("--download needs huggingface_hub: pip install huggingface_hub") from error
    try:
        hub.hf_hub_download(name, "config.json", cache_dir=cache_folder())
    except errors.LocalEntryNotFoundError as error:
        raise EnvironmentLacksError(f"the hub is out of reach for {name}'s config.json: {one_line(error)}") from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:  # a gated one is one of the first
        near = closest(name, list_names())
        raise UsageError(f"the hub gives no config.json of {name}: {one_line(error)}{near}") from error
    except Exception as error:
        raise EnvironmentLacksError(f"{name}'s config.json could not be fetched: {one_line(error)}") from error


# --- the table --------------------------------------------------------------------------------------------------------


@functools.cache
def read_table(path: Path = TABLE) -> dict[str, Any]:
    """A shipped table, as its file has it."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


@functools.cache
def _aliases() -> dict[str, str]:
    return name_aliases(read_table()["models"])


def name_aliases(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A table's own name of each name, in lower case, with and without an organisation."""
    found: dict[str, str] = {}
    for name, entry in entries.items():
        for each in (name, *entry.get("also", ())):
            found[each.lower()] = name
            found.setdefault(each.rpartition("/")[2].lower(), name)
    return found


# --- the local cache --------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of huggingface_hub's cache, as its environment variables say."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface")
    return Path(os.path.expanduser(home)) / "hub"


def _cached(name: str) -> Path | None:
    """The `config.json` of a model in the cache: of the commit that is its main branch, else the newest."""
    folder = cache_folder() / (_FOLDER + name.replace("/", "--"))
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    path = folder / "snapshots" / commit / "config.json"
    try:
        if re.fullmatch(r"\w+", commit) and path.is_file():
            return path
        others = [each for each in (folder / "snapshots").glob("*/config.json") if each.is_file()]
        return max(others, key=lambda each: each.stat().st_mtime, default=None)
    except OSError:
        return None


def _list_cached() -> Iterator[str]:
    try:
        folders = sorted(each.name for each in cache_folder().iterdir())
    except OSError:
        return
    yield from (each.removeprefix(_FOLDER).replace("--", "/", 1) for each in folders if each.startswith(_FOLDER))
