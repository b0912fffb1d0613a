"""Reports read back from JSON: what was written comes back, anything else is refused in one line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxmem.errors import UsageError
from fxmem.memory import liveness, report_reader
from fxmem.memory.report_reader import load_report
from fxmem.records.profile import Report
from tests.profiles import small_profile

MIB = 1 << 20


def small_report(**peak: Any) -> Report:
    """A report whose peak carries the allocator's figures too, as one for a card does."""
    profile = small_profile()
    line = liveness.timeline(profile)
    return Report(
        **dict(profile), peak=line.peak.model_copy(update={"allocated_bytes": 210 * MIB, "fits": True, **peak})
    )


def written(path: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """`small_report` in a file, after `change` has had its way with the JSON."""
    content = json.loads(small_report().model_dump_json())
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as refusal:
        report_reader.timeline(load_report(path))
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    report = load_report(written(tmp_path / "r.json"))
    assert report == small_report()


def test_the_timeline_keeps_the_figures_of_the_allocator() -> None:
    report = small_report()
    line = report_reader.timeline(report)
    assert line.peak == report.peak
    assert line.live_bytes == liveness.live_bytes(report)


def test_a_dash_is_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(small_report().model_dump_json().encode())))
    assert load_report(Path("-")) == small_report()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_part_of_a_report_is_refused(tmp_path: Path, share: float) -> None:
    text = written(tmp_path / "r.json").read_bytes()
    cut = tmp_path / "cut.json"
    cut.write_bytes(text[: int(share * len(text))])
    assert ("which is empty" if share == 0 else "which is no JSON, or only a part of one: ") in refused(cut)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"PK\x03\x04", b"Model       Small\n", b"[" * 100_000])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.json").write_bytes(content)
    assert "no JSON" in refused(tmp_path / "r.json")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "No such file or directory" in refused(tmp_path / "nothing.json")
    assert "Is a directory" in refused(tmp_path)


def test_what_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "r.json")
    monkeypatch.setenv("FXMEM_MAX_FILE_BYTES", "1000")
    assert "of at most 1000 bytes" in refused(path)


@pytest.mark.parametrize("others", [{}, {"invented": 1}], ids=["the same fields", "other fields"])
def test_another_version_is_named_whatever_else_differs(tmp_path: Path, others: dict[str, int]) -> None:
    path = written(tmp_path / "r.json", lambda content: content.update(schema_version="27", **others))
    assert "expected a report of schema version '1', got version '27'" in refused(path)


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda report: report.pop("nodes"), "nodes is wrong: Field required"),
    (lambda report: report.pop("peak"), "peak is wrong: Field required"),
    (lambda report: report.update(invented=1), "invented is wrong: Extra inputs"),
    (
        lambda report: report["storages"][0].update(nbytes=-1),
        "storages.0.nbytes is wrong: Input should be greater than or equal to 0",
    ),
    (lambda report: report["ops"][0].update(node=99), "ops[0].node is 99, but there are 6 nodes"),
    # Nobody may be made to allocate a list as long as a number in a file says.
    (lambda report: report.update(ticks=10**15), "which says 1000000000000000 ticks of 13 storages"),
    (
        lambda report: report["peak"].update(requested_bytes=1),
        "peak.requested_bytes is not what follows from its storages",
    ),
    (lambda report: report["peak"].update(tick=1), "peak.tick is not what follows"),
    (lambda report: report["peak"]["by_kind"].update(saved=1), "peak.by_kind is not what follows"),
]


@pytest.mark.parametrize(("change", "complaint"), CHANGES)
def test_a_report_that_is_wrong_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    assert complaint in refused(written(tmp_path / "r.json", change))
