"""Values that the user gives for what a program reads of the card: `--value train.py:41=0.5`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fxmem.errors import UsageError, one_line
from fxmem.records.profile import ProgramRun
from fxmem.simulation.asked.made_up import given_note

_EXPECTED = "expected --value FILE:LINE=VALUE with a number, a list, true, false, FILE.npy or FILE.pt"


def read_given(words: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read values by line, as `Made up` names it. Raises UsageError."""
    found: dict[str, torch.Tensor] = {}
    for word in words:
        parts = re.fullmatch(r"(?:\./)?(.+?:\d+)=(.+)", word)
        if parts is None:
            raise UsageError(f"{_EXPECTED}; got {word!r}")
        try:
            found[parts[1]] = _read(parts[2])
        except Exception as error:  # whatever json, numpy, torch and the system say of it
            raise UsageError(f"{_EXPECTED}; got {word!r}: {one_line(error)}") from error
    return found


def _read(text: str) -> torch.Tensor:
    suffix = Path(text).suffix
    if suffix == ".npy":
        value = torch.from_numpy(np.load(text, allow_pickle=False))
    elif suffix == ".pt":
        value = torch.load(text, map_location="cpu", weights_only=True)
    else:
        value = torch.tensor(json.loads({"True": "true", "False": "false"}.get(text, text)))
    if not isinstance(value, torch.Tensor) or not value.numel():
        raise ValueError("it holds no numbers")
    return value.detach()


def find_unread(given: Mapping[str, torch.Tensor], run: ProgramRun | None) -> Iterator[str]:
    """The lines at which none of the values was read."""
    read = {each.what for each in (run.made_up if run else ())}
    return (place for place in given if given_note(place) not in read)
