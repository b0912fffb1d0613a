"""The schemas in `schemas/` are the ones the records give, are sound, and say yes to what fxmem writes and no to the
rest."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from fxmem.errors import UsageError
from fxmem.memory.liveness import timeline
from fxmem.records import schemas
from fxmem.records.profile import Report
from tests import ROOT
from tests.profiles import small_profile

COMMITTED = ROOT / "schemas"


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schemas.text(name)))


@pytest.mark.truth
def test_the_committed_files_are_the_generated_ones(tmp_path: Path) -> None:
    schemas.write(tmp_path)
    committed = {path.name: path.read_text(encoding="utf-8") for path in COMMITTED.iterdir()}
    generated = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert committed == generated, "run `make schemas`"


@pytest.mark.parametrize("name", schemas.RECORDS)
def test_a_schema_is_sound_and_names_itself(name: str) -> None:
    schema = json.loads(schemas.text(name))
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema["$id"] == f"urn:fxmem:schema:{name}:{schema['schema_version']}"


@pytest.mark.truth
@pytest.mark.parametrize("name", schemas.RECORDS)
def test_a_record_s_docstring_arrives_as_its_description(name: str) -> None:
    record = schemas.RECORDS[name]
    assert record.__doc__
    assert json.loads(schemas.text(name))["description"] == inspect.cleandoc(record.__doc__)


def test_the_fields_docstrings_arrive_as_descriptions() -> None:
    report = json.loads(schemas.text("report"))
    assert (
        report["properties"]["modules"]["description"]
        == "Class name of every module, by its path; the model itself is the empty path."
    )  # of a base
    assert report["$defs"]["Storage"]["properties"]["death"]["description"] == "Alive over `[birth, death)`."
    scratch = report["$defs"]["Node"]["properties"]["scratch_bytes"]  # of another record's type: beside the `$ref`
    assert scratch["description"] == "Peak of what lives only inside the node, workspace included."
    assert "description" not in report["properties"]["nodes"]


def test_what_is_written_satisfies_its_schema() -> None:
    profile = small_profile()
    line = timeline(profile)
    report = Report(**profile.model_dump(), peak=line.peak)
    for name, record in (("report", report), ("timeline", line), ("target", profile.target)):
        validator(name).validate(json.loads(record.model_dump_json()))


def test_unknown_fields_and_negative_bytes_are_refused() -> None:
    target = {"name": "h100", "device": "cuda", "memory_bytes": 1031}
    assert validator("target").is_valid(target)
    assert not validator("target").is_valid(target | {"memory": 1031})
    assert not validator("target").is_valid(target | {"memory_bytes": -1031})


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"expected one of advice, baseline, .*; got 'profile'"):
        schemas.text("profile")
