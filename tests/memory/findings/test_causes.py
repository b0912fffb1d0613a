"""Each cause is found where it is, with its bytes, and nothing is found in its twin."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.memory import findings
from fxmem.memory.findings import CAUSES, Finding
from fxmem.records.profile import Profile, Report, Timeline
from fxmem.show.finding_facts import finding_facts
from fxmem.simulation.program import Launch, RecordedProgram, RunSettings, launch

PROGRAM = str(Path(__file__).with_name("causing.py"))
CASES = [*CAUSES, "kept-results-of-evaluation"]
OFF_PEAK = ("kept-results", "kept-results-of-evaluation")
"""What these hold is of later steps and batches."""


@functools.cache
def run(case: str, has: str) -> RecordedProgram:
    started = Launch(PROGRAM, (case.replace("-", "_"), has))
    return launch(started, catalogue.target("h100"), RunSettings(reads_epoch=True)).recorded


def find_line(code: str) -> int:
    lines = Path(PROGRAM).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip() == code]
    return number


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_found_and_its_twin_is_silent(case: str) -> None:
    causes = {each.cause for each in run(case, "on").findings}
    assert causes == {case.removesuffix("-of-evaluation")}
    assert run(case, "off").findings == ()


def find_less(case: str) -> int:
    return run(case, "on").peak.requested_bytes - run(case, "off").peak.requested_bytes


@pytest.mark.parametrize("case", [each for each in CASES if each not in OFF_PEAK and run(each, "on").findings[0].saved_bytes])
def test_what_was_tried_is_what_the_twin_has_less(case: str) -> None:
    """Within a tenth: what is freed early may leave its place to something else."""
    (found,) = run(case, "on").findings
    assert found.saved_bytes is not None
    if case == "unstepped-gradients":  # the twin saves no activations either
        assert found.saved_bytes < find_less(case)
    else:
        assert found.saved_bytes == pytest.approx(find_less(case), rel=0.1)


@pytest.mark.parametrize("case", ["broadcast-loss", "autocast-copies"])
def test_its_bytes_are_what_the_twin_has_less(case: str) -> None:
    assert run(case, "on").findings[0].nbytes == pytest.approx(find_less(case), rel=0.1)


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("unused-graph", 'net(torch.randn(4096, 256, device="cuda")).argmax(-1)'),
        ("kept-results", "kept.append(out.detach() if HAS else out.detach().cpu())"),
        ("kept-results-of-evaluation", "kept.append(out if HAS else out.cpu())"),
        ("whole-checkpoint", "x = checkpoint(net, x, use_reentrant=False)"),
        ("broadcast-loss", "F.mse_loss(predicted if HAS else predicted.squeeze(-1), y).backward()"),
    ],
)
def test_its_line_is_named(case: str, code: str) -> None:
    assert run(case, "on").findings[0].place.endswith(f"causing.py:{find_line(code)}")


def test_a_report_keeps_them_and_an_answer_says_them() -> None:
    recorded = run("broadcast-loss", "on")
    report = Report.model_validate_json(recorded.to_json())
    assert report.findings == recorded.findings
    (fact,) = finding_facts(recorded.profile, recorded.timeline)
    assert fact.label == "Found"
    assert "the loss is of 4096x1 against 4096, broadcast to 4096x4096" in fact.text
    assert "To do: inputs of one shape" in fact.text


def test_a_cause_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(profile: Profile, timeline: Timeline) -> list[Finding]:
        return [Finding(cause="own", text="all of it", nbytes=timeline.peak.requested_bytes, change="less")]

    monkeypatch.setattr(CAUSES, "_registered", dict(CAUSES._registered))
    findings.register("own", find)
    recorded = run("unused-graph", "off")
    assert [each.cause for each in findings.find(recorded.profile, recorded.timeline)] == ["own"]
    with pytest.raises(UsageError, match="expected a new name for a cause, got 'own'"):
        findings.register("own", find)
