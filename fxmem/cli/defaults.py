"""Defaults of options: an environment variable, else `[tool.fxmem]` in the nearest pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fxmem.errors import UsageError

_KEYS = ("target", "width", "keep_outputs")


def read_default(variable: str) -> str | None:
    """The user's default of an option, None if there is none.

    Raises:
        UsageError: a pyproject.toml that is none, or one with other keys.
    """
    if value := os.environ.get(variable):
        return value
    chosen = _read_table().get(variable.removeprefix("FXMEM_").lower())
    return None if chosen is None else str(chosen)


def _read_table() -> dict[str, Any]:
    here = Path.cwd()
    files = (each / "pyproject.toml" for each in (here, *here.parents))
    path = next((each for each in files if each.is_file()), None)
    if path is None or b"tool.fxmem" not in path.read_bytes():
        return {}
    import tomllib

    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
        table = tool.get("fxmem", {}) if isinstance(tool, dict) else {}
    except ValueError as error:
        raise UsageError(f"expected TOML in {str(path)!r}, got {error}") from error
    for key in table if isinstance(table, dict) else ["no table"]:
        if key not in _KEYS:
            raise UsageError(f"expected {' or '.join(_KEYS)} in [tool.fxmem] of {str(path)!r}, got {key!r}")
    return table
