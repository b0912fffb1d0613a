"""What `fxmem validate --share` writes: a verdict for others, of the fields of `SharedVerdict` alone."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from pydantic import ValidationError

import fxmem
from fxmem.cli.options import COMPILE, STEP, STEPS_OF_PROGRAM
from fxmem.cli.output import check_file
from fxmem.cli.specs.inputs import FactorySpec, TensorSpec, parse_input
from fxmem.errors import UsageError
from fxmem.hardware.catalogue import CATALOGUE
from fxmem.records import json_reader
from fxmem.records.parts import Record
from fxmem.records.shared import SharedMachine, SharedSettings, SharedVerdict, System
from fxmem.records.validation import ProgramVerdict, Verdict
from fxmem.simulation.stand_ins import hub_models

_ELSEWHERE = ("input", "batch", "quiet", "download")
"""Options of a step that its inputs say, or that move no byte."""
_TOLD = """
Share       The file holds figures, versions, and settings that fxmem knows; no code,
            path, host or user, no name of yours{left}. Nothing was sent. To give it
            to others: a pull request that puts it into benchmarks/published/shared
            of fxmem's repository, or an issue there with the file."""


def check_share(options: argparse.Namespace) -> None:
    """Refuse a file that cannot be written, or that is there and no other run of `--share` wrote."""
    check_file(options, "--share", options.share, (".json",))
    expected = "expected --share to name a new file, or one that --share wrote"
    if os.path.exists(options.share):
        json_reader.load(SharedVerdict, Path(options.share), expected)
    if options.json not in (None, "-") and os.path.abspath(options.json) == os.path.abspath(options.share):
        raise UsageError(f"{expected}, got {options.share!r} for --json, too")


def describe(shared: SharedVerdict) -> str:
    """What was written, and what its user may do with it, for stdout."""
    return _TOLD.format(left=f"; left out: {', '.join(shared.left_out)}" if shared.left_out else "")


def share(options: argparse.Namespace, verdict: Verdict | ProgramVerdict, inputs: Any) -> SharedVerdict:
    """The verdict for others; `inputs` are the arguments of the step, those with a keyword in a dict."""
    of_model = isinstance(verdict, Verdict)
    library = options.model.partition(":")[0] if of_model and _is_public(options.model) else None
    arguments = (*STEP, *COMPILE) if of_model else (*COMPILE, STEPS_OF_PROGRAM)
    names = {each.dest: each.names[0] for each in arguments if each.dest not in _ELSEWHERE}
    given = {dest: value for dest in names if (value := getattr(options, dest)) not in (None, [])}
    # The fields of the user's own model are of his code.
    hidden = ["settings"] if given.get("settings") and not library else []
    settings, refused = _admit(SharedSettings, {dest: value for dest, value in given.items() if dest not in hidden})
    machine = dict(verdict.measurement.machine)
    if options.snapshot is not None:  # the machine has the name of the file
        machine["name"] = verdict.target if verdict.target in CATALOGUE else ""
    shared_machine, unknown = _admit(SharedMachine, machine)
    made = any(isinstance(parse_input(each), FactorySpec) for each in options.input)
    values = {
        "fxmem_version": fxmem.__version__,
        "subject": "model" if of_model else "program",
        "model": options.model if library else None,
        "library_version": version({"hf": "transformers"}.get(library, library)) if library else None,
        "inputs": tuple(_tensors(inputs, named=library is not None)),
        "settings": settings,
        "system": platform.system() if platform.system() in get_args(System) else None,
        "machine": shared_machine,
        "from_snapshot": options.snapshot is not None,
        "peak_phase": getattr(verdict.measurement, "peak_phase", None),
        "comparisons": [each.comparisons for each in ((verdict,) if isinstance(verdict, Verdict) else verdict.rounds)],
        **{name: getattr(verdict, name) for name in ("judged", "tolerance", "within_tolerance")},
    }
    shared, others = _admit(SharedVerdict, values)
    left = (*(names[dest] for dest in (*hidden, *refused)), *["--input"] * made, *unknown, *others)
    return shared.model_copy(update={"left_out": left})


def _is_public(spec: str) -> bool:
    """Whether everybody has the model: of a collection, of fxmem's table, or a class of transformers."""
    collection, _, name = spec.partition(":")
    if collection != "hf" or os.path.isfile(os.path.join(name, "config.json")):
        return collection in ("torchvision", "timm")
    found = hub_models.find(name)
    return name.isidentifier() if found is None else found.name in hub_models.read_table()["models"]


_RecordT = TypeVar("_RecordT", bound=Record)


def _admit(kind: type[_RecordT], values: Mapping[str, Any]) -> tuple[_RecordT, list[str]]:
    """A record of the values that its fields take, and the names of the others."""
    try:
        return kind(**values), []
    except ValidationError as error:
        refused = {str(each["loc"][0]) for each in error.errors()}
    return kind(**{name: value for name, value in values.items() if name not in refused}), sorted(refused)


def _tensors(tree: Any, name: str | None = None, *, named: bool) -> Iterator[str]:
    """The tensors of nested arguments, as `--input` has them."""
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from _tensors(each, f"{name}.{key}" if name else str(key), named=named)
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from _tensors(each, name, named=named)
    elif isinstance(tree, torch.Tensor):
        yield str(TensorSpec(tuple(tree.shape), str(tree.dtype).removeprefix("torch."), name if named else None))
