"""Read what others' `fxmem validate --share` wrote, and what is in the folder `shared`, as cases of the tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.releases import check_release
from fxmem.records import json_reader
from fxmem.records.profile import Target
from fxmem.records.shared import SharedVerdict
from fxmem.records.units import to_words
from fxmem.records.validation import ComparedQuantity, Quantity

from .tables import UNITS, Case

SHARED = Path(__file__).with_name("shared")
EXPECTED = "expected a file that fxmem validate --share wrote"
STEP = "shared.step_of_words"
"""The function of `steps` that builds a step of words of the command line."""
_STATISTICS = {
    Quantity.REQUESTED: "requested",
    Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH: "requested",
    Quantity.ALLOCATED: "allocated",
    Quantity.RESERVED: "reserved",
}


def read_shared(folder: Path = SHARED) -> Iterator[Case]:
    """Read the cases of every file, in order of their names.

    Raises:
        UsageError: a file that is none of these, or has no name of letters, digits, `.`, `_` and `-`.
    """
    for path in sorted(folder.glob("*.json")):
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*", path.name, re.ASCII) is None:
            raise UsageError(f"{EXPECTED} under a plain name, got {path.name!r}")
        yield from cases_of(json_reader.load(SharedVerdict, path, EXPECTED), path)


def cases_of(shared: SharedVerdict, path: Path) -> Iterator[Case]:
    """Read the cases of one file: what is judged, and on a card what its allocator reserves, step by step."""
    machine = shared.machine
    card = _card(shared, path)
    not_run = _why_not(shared, card)
    for number, compared in enumerate(shared.comparisons, 1):
        by_quantity = {each.quantity: each for each in compared}
        if shared.judged not in _STATISTICS or shared.judged not in by_quantity:
            raise UsageError(f"{EXPECTED}, got {str(path)!r}, in which comparisons is wrong: nothing of it is judged")
        for quantity in dict.fromkeys((shared.judged, Quantity.RESERVED)):
            if quantity not in by_quantity:
                continue
            figure, statistic = by_quantity[quantity], _STATISTICS[quantity]
            table = f"{shared.model or f'a {shared.subject} of its sender'}, {path.stem}, {statistic}"
            yield Case(
                table=table,
                name=table if len(shared.comparisons) == 1 else f"{table}: step={number}",
                source=f"{path.parent.name}/{path.name}, by fxmem {shared.fxmem_version}",
                card=machine.name,
                target=card.name if card else machine.device,
                memory_gib=None if card is None or card.memory_bytes is None else card.memory_bytes / UNITS["GiB"],
                torch=machine.torch_version or "not named",
                release=card.torch or None if card else None,
                statistic=statistic,
                grade="S",
                figure=figure.measured_bytes,
                unit="B",
                step="" if not_run else STEP,
                settings={} if not_run else {"words": words_of(shared)},
                less=None,
                digits=None,
                note=_note(quantity, by_quantity),
                cause="",
                not_run=not_run,
                environment={"PYTORCH_ALLOC_CONF": machine.allocator_settings} if machine.allocator_settings else {},
                bound=None,
                sample=False,
                recorded=figure.predicted_bytes,
            )


def words_of(shared: SharedVerdict) -> tuple[str, ...]:
    """The words behind `fxmem validate` that ask for the step of a public model."""
    words = [shared.model or ""]
    for text in shared.inputs:
        words += ["--input", text]
    for name, value in shared.settings:
        option = "--set" if name == "settings" else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            is_flag = name in ("inference_mode", "channels_last")
            words += [option] if value else [] if is_flag else [f"--no-{option[2:]}"]
        else:
            for each in value if isinstance(value, tuple) else () if value is None else (value,):
                words += [option, str(each)]
    return tuple(words)


def _card(shared: SharedVerdict, path: Path) -> Target | None:
    """What the prediction is for; None for a card that is not in the catalogue."""
    machine = shared.machine
    try:
        found = catalogue.target("cpu" if machine.device == "cpu" else machine.name)
    except UsageError:
        return None
    if machine.device == "cpu" or machine.capability not in (None, found.capability):
        return found if machine.device == "cpu" else None
    release = re.match(r"\d+\.\d+(\.\d+)?", machine.torch_version or "")
    if release is not None:
        try:
            found = found.model_copy(update={"torch": check_release(release[0])})
        except UsageError as error:
            raise UsageError(f"{EXPECTED}, got {str(path)!r}, in which torch_version is wrong: {error}") from error
    return found.model_copy(update={"memory_bytes": machine.memory_bytes or found.memory_bytes})


def _why_not(shared: SharedVerdict, card: Target | None) -> str:
    """Why a step cannot be predicted anew; empty where it can."""
    if shared.model is None:
        return f"the {shared.subject} is its sender's own, and is compared as it was recorded"
    if shared.left_out:
        return f"its sender's {', '.join(shared.left_out)} stayed where they are; compared as it was recorded"
    return "" if card else "its card is not in the catalogue; compared as it was recorded"


def _note(quantity: Quantity, by_quantity: Mapping[Any, ComparedQuantity]) -> str:
    """What else was measured, in words."""
    others = [each for name, each in by_quantity.items() if name is not quantity]
    beside = "; ".join(
        f"{to_words(each.quantity)}: {each.measured_bytes:,} B measured, {each.predicted_bytes:,} B predicted"
        for each in others
    )
    aside = "workspaces of the CPU's libraries are set aside; " * ("without" in quantity)
    return f"{aside}in the file beside it, {beside}" if others else aside
