"""What `print` shows of a record."""

from __future__ import annotations

import pytest

from fxmem.records.profile import Profile, Versioned
from fxmem.show.text import plan, printed
from tests.profiles import small_profile
from tests.show.test_html import small_plan


def kinds(record: type[Versioned]) -> set[str]:
    """Names of the records that are written to a file of their own, without profiles."""
    return {each.__name__ for each in record.__subclasses__() if not issubclass(each, Profile)}


def test_a_record_is_printed_as_by_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = small_plan(small_profile())
    assert str(found) == plan.table(found, width=80)
    assert repr(found).startswith("Plan(")


def test_each_record_that_the_command_line_prints_has_its_text() -> None:
    assert kinds(Versioned) == set(printed.TABLES)
