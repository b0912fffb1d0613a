"""Ways to run a pipeline of diffusers with less of the card, as lines of the program that has it."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from fxmem.records.advice import Effect
from fxmem.records.profile import Profile
from fxmem.whatif.advice import statements
from fxmem.whatif.advice.statements import Edits
from fxmem.whatif.advice.variant import TABLES

_DENOISERS: Final = ("transformer", "transformer_2", "unet", "prior")
"""Components that run once a step, and have most of the weights."""
_COMPUTED: Final = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to set a pipeline up."""

    key: str
    title: str
    effect: Effect
    code: str
    """PIPE is the pipeline, which must have the component that is named after it; where PART is one, it is each of the
    denoisers, and DTYPE what that computes in. An argument instead, `quantization_config=`, is of what loads PART."""
    excludes: str = ""
    """As of `AnyChange`; "place" stands instead of what puts the pipeline on the card, all else after it."""


_WAYS: Final = [Setup(key, **row) for key, row in TABLES["pipelines"].items()]
_OF_WEIGHTS: Final = [Setup(key, **row) for key, row in TABLES["pipelines-of-weights"].items()]
_IMPORTED: Final = ("torch", "torchao.quantization", "diffusers")
_ARGUMENT: Final = "quantization_config="
_OF_PIPELINE: Final = _ARGUMENT + 'diffusers.PipelineQuantizationConfig(quant_mapping={{"{}": {}}})'


def list_ways(files: Iterable[str], profile: Profile) -> Iterator[tuple[Setup, Edits]]:
    """Yield the ways that can be written for all pipelines of a program's own files, each with its edits."""
    found = [each for file in files for each in statements.find_placed(file, "Pipeline")]
    if not found or not any("/diffusers/" in call.source.file for call in profile.calls if call.source):
        return
    parts = {part for call in profile.calls for part in call.module.split(".")}
    ways = [way for way in _WAYS if parts.issuperset(re.findall(r"PIPE\.(\w+)\.", way.code))]
    for part in filter(parts.__contains__, _DENOISERS):
        made = (output.dtype for node in profile.nodes if part in node.module.split(".") for output in node.outputs)
        dtypes = Counter(each for each in made if each in _COMPUTED)
        dtype = f"torch.{dtypes.most_common(1)[0][0]}" if dtypes else "torch.float32"
        for way in _OF_WEIGHTS:
            title, code = (each.replace("PART", part).replace("DTYPE", dtype) for each in (way.title, way.code))
            ways.append(dataclasses.replace(way, key=f"{way.key}:{part}", title=title, code=code, excludes=part))
    for way in ways:
        edits = [_edit(each, way) for each in found]
        if all(edits) and all(map(importlib.util.find_spec, re.findall(r"\((\w+)\)$", way.title))):
            is_written = "PIPE" not in way.code
            code = statements.write_statement(edits[0]) if is_written else way.code.replace("PIPE", found[0].name)
            lines = [f"import {name}" for name in _IMPORTED if f"{name}." in way.code]
            added = [(line, statements.add_import(each.file, line)) for each in found for line in lines]
            code = "\n".join(dict.fromkeys([*(line for line, edit in added if edit), code]))
            every = dict.fromkeys(each for some in (*edits, *(edit for _, edit in added)) for each in some)
            yield dataclasses.replace(way, code=code), tuple(every)


def _edit(placed: statements.Placed, way: Setup) -> Edits:
    code = way.code.replace("PIPE", placed.name)
    if code.startswith(_ARGUMENT):
        of_pipeline = _OF_PIPELINE.format(way.excludes, code.removeprefix(_ARGUMENT))
        return statements.load_with(placed, way.excludes, code, of_pipeline)
    return statements.place(placed, code) if way.excludes == "place" else statements.set_up(placed, code)
