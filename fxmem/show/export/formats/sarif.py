"""Findings for code scanning: SARIF 2.1.0.

Of the standard (OASIS, "Static Analysis Results Interchange Format 2.1.0"): a run, a rule for each cause that was
found, and a result for each finding at its line. A place below the working directory is relative to it, as GitHub wants
it.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote

from fxmem.memory.allocator import AllocatorSettings
from fxmem.memory.findings import Finding, find
from fxmem.records.profile import Profile, Timeline
from fxmem.records.registry import CAUSES
from fxmem.records.units import printable
from fxmem.show.plan_facts import describe


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """What is probably not meant, each at its line."""
    found = find(profile, timeline)
    rules = [
        {"id": cause, "shortDescription": {"text": CAUSES.briefs.get(cause, cause)}}
        for cause in dict.fromkeys(each.cause for each in found)
    ]
    driver = {"name": "fxmem", "version": profile.fxmem_version, "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_describe(each) for each in found]}
    return json.dumps({"version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _describe(finding: Finding) -> dict[str, Any]:
    message = {"text": printable(describe(finding))}
    result: dict[str, Any] = {"ruleId": finding.cause, "level": "warning", "message": message}
    file, _, line = finding.place.rpartition(":")
    if file and line.isdecimal():
        uri = os.path.relpath(file) if os.path.isabs(file) and file.startswith(f"{os.getcwd()}{os.sep}") else file
        place = {"artifactLocation": {"uri": quote(uri)}, "region": {"startLine": int(line)}}
        result["locations"] = [{"physicalLocation": place}]
    return result
