"""What others sent in is read as rows of the published figures: predicted anew, or as it was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import __main__ as runner
from benchmarks.published.prediction import predict
from benchmarks.published.results import Row, format_page
from benchmarks.published.shared import SHARED, read_shared
from fxmem.errors import UsageError
from tests.benchmarks import on_measured_release

Content = dict[str, Any]
FILE = SHARED / "torchvision-resnet18-x86-2026-11-30.json"
CASES = list(read_shared())


def write(folder: Path, change: Callable[[Content], object], name: str = "sent.json") -> None:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def on_card(content: Content) -> Content:
    content["machine"] = {
        **{"device": "cuda", "name": "NVIDIA H200", "torch_version": "2.10.1+cu128", "capability": [9, 0]},
        **{"memory_bytes": 150 << 30, "allocator_settings": "expandable_segments:True"},
    }
    quantities = (("allocated", 1000, 990), ("reserved", 3000, 2000), ("process", 5000, 5000))
    content["comparisons"] = [
        [
            {"quantity": name, "predicted_bytes": mine, "measured_bytes": theirs, "error": mine / theirs - 1}
            for name, mine, theirs in quantities
        ]
    ] * 2
    content["judged"] = "allocated"
    return content


@on_measured_release
@pytest.mark.truth
@pytest.mark.parametrize("case", [each for each in CASES if each.step], ids=lambda case: case.name)
def test_what_was_sent_in_is_predicted_anew(case: Any) -> None:
    row = Row.of(case, predict(case))
    assert not row.refusal
    assert row.predicted == case.recorded


def test_the_file_of_a_real_run_is_a_row_of_its_own_grade() -> None:
    case = next(each for each in CASES if FILE.stem in each.name)
    assert (case.grade, case.statistic, case.target, case.figure) == ("S", "requested", "cpu", 206053736)
    assert case.settings["words"][:3] == ("torchvision:resnet18", "--input", "2x3x64x64:float32")
    assert case.note.startswith("workspaces of the CPU's libraries are set aside; in the file beside it, requested: ")


def test_a_card_s_figures_are_rows_of_its_own_memory_and_release(tmp_path: Path) -> None:
    write(tmp_path, on_card)
    cases = list(read_shared(tmp_path))
    assert [(each.statistic, each.figure, each.recorded) for each in cases] == [
        ("allocated", 990, 1000),
        ("reserved", 2000, 3000),
    ] * 2
    assert [each.name.rpartition(": ")[2] for each in cases] == ["step=1", "step=1", "step=2", "step=2"]
    assert cases[0].environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    place = cases[0].place
    assert (place.name, place.torch, place.memory_bytes) == ("h200", "2.10.1", 150 << 30)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content.pop("model"), "the model is its sender's own"),
        (lambda content: content.update(left_out=["--loss"]), "its sender's --loss stayed where they are"),
        (lambda content: (on_card(content), content["machine"].update(name="NVIDIA X1")), "not in the catalogue"),
    ],
)
def test_what_cannot_be_predicted_stands_as_it_was_recorded(
    tmp_path: Path, change: Callable[[Content], object], why: str
) -> None:
    write(tmp_path, change)
    case = next(read_shared(tmp_path))
    assert why in case.not_run
    row = Row.of_recorded(case)
    assert row.predicted is not None
    assert row.predicted == case.recorded
    assert row.error_percent == 100 * (row.predicted / case.nbytes - 1)
    page = format_page([row], [], {"date": "today"})
    assert f"| as above | {case.figure:,} B | {row.predicted:,} B |" in page.replace("step=1", "as above")
    assert "| S | " in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(model="os:system"), "model is wrong"),
        (lambda content: content.update(model="timm:../../x"), "model is wrong"),
        (lambda content: content.update(model="hf:/etc/config.json"), "model is wrong"),
        (lambda content: content.update(inputs=["evil.py:batch"]), "inputs.0 is wrong"),
        (lambda content: content["settings"].update(optimizer="evil.mod:Own"), "settings.optimizer is wrong"),
        (lambda content: content["settings"].update(optimizer="evil.py:Own"), "settings.optimizer is wrong"),
        (lambda content: content["settings"].update(loss="evil:own"), "settings.loss is wrong"),
        (lambda content: content["settings"].update(parallelize="evil.py:f"), "settings.parallelize is wrong"),
        (lambda content: content["settings"].update(settings=["weights=/srv/x"]), "settings.settings.0 is wrong"),
        (lambda content: content["machine"].update(name="a|b`<script>"), "machine.name is wrong"),
        (lambda content: content["machine"].update(host="mine"), "machine.host is wrong"),
        (lambda content: content["machine"].update(torch_version="2.11.0+acme"), "machine.torch_version is wrong"),
        (lambda content: (on_card(content), content["machine"].update(torch_version="1.4")), "torch_version is wrong"),
        (lambda content: content.update(judged="allocated"), "nothing of it is judged"),
        (lambda content: content.update(comparisons=[]), "comparisons is wrong"),
        (lambda content: content["comparisons"][0][0].update(measured_bytes=0), "comparisons.0.0.measured_bytes"),
        (lambda content: content.update({"path\x1b[31m": 1}), "is wrong: Extra inputs"),
    ],
)
def test_a_hostile_file_gives_one_line_and_nothing_is_predicted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Content], object],
    message: str,
) -> None:
    write(tmp_path, change)
    monkeypatch.setattr(runner, "read_shared", lambda: read_shared(tmp_path))
    monkeypatch.setattr(runner, "predict", lambda case: pytest.fail("a case was predicted"))
    assert runner.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("published: expected a file that fxmem validate --share wrote")
    assert message in err
    assert err.rstrip("\n").isprintable()


def test_what_is_no_json_or_has_a_name_for_a_shell_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[")
    with pytest.raises(UsageError, match="no JSON"):
        list(read_shared(tmp_path))
    (tmp_path / "a.json").unlink()
    write(tmp_path, lambda content: None, "a|b.json")
    with pytest.raises(UsageError, match="under a plain name"):
        list(read_shared(tmp_path))
