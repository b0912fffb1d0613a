"""Findings for code scanning: each at its line, relative to the folder it is written in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxmem.memory import liveness
from fxmem.memory.allocator import DEFAULT_SETTINGS
from fxmem.records.findings import Finding
from fxmem.show.export.formats import sarif
from tests.profiles import small_profile


def test_a_finding_is_a_result_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [
        Finding(cause="kept-results", text="a keeps more", place=f"{tmp_path}/my code.py:7", nbytes=13, change="no"),
        Finding(cause="kept-results", text="b keeps more", place="torch/nn.py:2", nbytes=11, change="no"),
        Finding(cause="own-cause", text="somewhere", nbytes=5, change="no"),
    ]
    monkeypatch.setattr(sarif, "find", lambda profile, timeline: found)
    profile = small_profile()
    text = sarif.write(profile, liveness.timeline(profile), DEFAULT_SETTINGS)
    document = json.loads(text)
    (run,) = document["runs"]
    assert document["version"] == "2.1.0"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["kept-results", "own-cause"]
    places = [[each["physicalLocation"] for each in result.get("locations", ())] for result in run["results"]]
    assert places == [
        [{"artifactLocation": {"uri": "my%20code.py"}, "region": {"startLine": 7}}],
        [{"artifactLocation": {"uri": "torch/nn.py"}, "region": {"startLine": 2}}],
        [],
    ]
    assert [result["ruleId"] for result in run["results"]] == ["kept-results", "kept-results", "own-cause"]
    assert "13 B at the peak" in run["results"][0]["message"]["text"]
