"""Looking a figure up by torch release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fxmem.errors import UsageError

__all__ = ["nearest"]

_Value = TypeVar("_Value")


def nearest(table: Mapping[tuple[int, int], _Value], torch_version: str) -> tuple[_Value, str]:
    """The entry of the release, else of the closest earlier one, else of the earliest; and whose it is, e.g. `2.11`.

    Raises:
        UsageError: the version does not begin with two numbers.
    """
    try:
        major, minor = (int(part) for part in torch_version.split(".")[:2])
    except ValueError:
        raise UsageError(f"expected a torch version such as 2.11.0, got {torch_version!r}") from None
    earlier = [release for release in table if release <= (major, minor)]
    release = max(earlier) if earlier else min(table)
    return table[release], ".".join(map(str, release))
