"""Verbs of the command line called by tests: in this process, on a report in a file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from fxmem.cli.output import check_output
from fxmem.cli.parser import Parser
from fxmem.memory import liveness
from fxmem.records.profile import Profile, Report


def report_of(profile: Profile, **peak: Any) -> Report:
    """What `fxmem analyze --json` writes of a profile, some fields of its peak as they are given."""
    return Report(**dict(profile), peak=liveness.timeline(profile).peak.model_copy(update=peak))


def saved(path: Path, profile: Profile, **peak: Any) -> str:
    """The name of the file that it was written to."""
    path.write_text(report_of(profile, **peak).model_dump_json(), encoding="utf-8")
    return str(path)


def called(verb: ModuleType, *arguments: str) -> tuple[int, str]:
    """Exit code and text for stdout."""
    options = Parser().add_arguments(verb.ARGUMENTS).parse_args(arguments)
    check_output(options)
    answer: tuple[int, str] = verb.run(options)
    return answer
