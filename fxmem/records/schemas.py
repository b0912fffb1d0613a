"""The JSON Schemas of what fxmem writes and reads, generated from the records (JSON Schema 2020-12).

A schema describes what is *accepted*: a field that has a default may be absent, an unknown field is refused. `$id`
is a name and no address: `urn:fxmem:schema:NAME:VERSION`. `schema_version` is the version of the format, the same as in
the documents.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from fxmem.errors import UsageError
from fxmem.records.advice import Advice
from fxmem.records.breakdown import LayerReport, LineReport
from fxmem.records.comparison import StepComparison
from fxmem.records.fits import Baseline, Fits, ServeSize
from fxmem.records.plan import CompilePlan, Plan
from fxmem.records.profile import SCHEMA_VERSION, Record, Report, Target, Timeline
from fxmem.records.shared import SharedVerdict
from fxmem.records.shortage import Explanation
from fxmem.records.validation import Measurement, ProgramVerdict, Verdict

RECORDS: Mapping[str, type[Record]] = MappingProxyType(
    {
        "advice": Advice,
        "baseline": Baseline,
        "comparison": StepComparison,
        "compile_plan": CompilePlan,
        "explanation": Explanation,
        "fits": Fits,
        "layers": LayerReport,
        "lines": LineReport,
        "measurement": Measurement,
        "plan": Plan,
        "program_verdict": ProgramVerdict,
        "report": Report,
        "serving": ServeSize,
        "shared_verdict": SharedVerdict,
        "target": Target,
        "timeline": Timeline,
        "verdict": Verdict,
    }
)
"""Name of a schema to the record it describes."""


class _Generator(GenerateJsonSchema):
    """pydantic's generator, with each field's docstring as its description and without titles of fields.

    pydantic's own `use_attribute_docstrings` reads and parses the source of each record when it is imported, which took
    a quarter of the time that importing the analysis takes beyond torch's own, and only a schema shows them.
    """

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def model_schema(self, schema: Any) -> Any:
        made = super().model_schema(schema)
        for kind in reversed(schema["cls"].__mro__):
            if issubclass(kind, BaseModel) and kind is not BaseModel:
                for field, docstring in _field_docstrings(kind).items():
                    made["properties"][field]["description"] = docstring
        return made


def _field_docstrings(kind: type) -> dict[str, str]:
    """The strings that follow the fields in a class's own body."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = ast.literal_eval(text.value)
            found[field.target.id] = inspect.cleandoc(value)
    return found


def describe(record: type[Record]) -> dict[str, Any]:
    """The schema of a record, each field's docstring as its description."""
    return record.model_json_schema(schema_generator=_Generator)


def text(name: str) -> str:
    """The schema called `name` as JSON, ending in a newline.

    Raises:
        UsageError: no schema has that name.
    """
    if name not in RECORDS:
        raise UsageError(f"schema: expected one of {', '.join(RECORDS)}; got {name!r}")
    field = RECORDS[name].model_fields.get("schema_version")
    version = SCHEMA_VERSION if field is None else field.default
    schema = {
        "$schema": _Generator.schema_dialect,
        "$id": f"urn:fxmem:schema:{name}:{version}",
        "schema_version": version,
        **describe(RECORDS[name]),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write(directory: Path) -> tuple[Path, ...]:
    """Write every schema to `directory`, created if missing, as `NAME.schema.json`; return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {name: directory / f"{name}.schema.json" for name in RECORDS}
    for name, path in paths.items():
        path.write_text(text(name), encoding="utf-8")
    return tuple(paths.values())
