"""Engines and converters of the drawn graph, there and not there, and the files that `fxmem graph` writes."""

from __future__ import annotations

import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed import drawings
from fxmem.errors import AnalysisError, EnvironmentLacksError, UsageError
from fxmem.memory import liveness
from fxmem.records.plan import Region
from fxmem.show import graph, svg
from tests.memory.test_report_reader import small_report
from tests.profiles import deep_profile, small_profile
from tests.show.graph.test_checkpoints import plan_of
from tests.show.graph.test_graph import SVG, boxes_of, report, run, svg_of

__all__ = ["report"]

PNG, PDF = b"\x89PNG\r\n\x1a\n", b"%PDF-"
PACKAGES = ("vl_convert",)


@pytest.fixture
def bare(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with no program on PATH, and none of the packages that can draw; the folder that PATH is."""
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", str(folder))
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    return folder


def package(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name, for this process and those it starts."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))


# --- nothing there ----------------------------------------------------------------------------------------------------


def test_a_bare_environment_draws_with_the_built_in_layout(
    tmp_path: Path, bare: Path, report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.svg"
    assert run("graph", report, "-o", str(out)) == 0
    assert capsys.readouterr() == ("", f"fxmem: wrote {out} ({out.stat().st_size // 1000} kB)\n")
    root = ET.fromstring(out.read_text(encoding="utf-8"))
    assert "node-block_conv" in boxes_of(root)
    assert run("graph", report, "-o", str(tmp_path / "out.dot")) == 0


def test_a_bare_environment_says_what_png_and_pdf_need(
    tmp_path: Path, bare: Path, report: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxmem.cli.verbs.graph.read_planned_step", lambda options: pytest.fail("the work was begun"))
    for form in ("png", "pdf"):
        assert run("graph", report, "-o", str(tmp_path / f"out.{form}")) == 3
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err == (
            f"fxmem: expected vl-convert to write .{form}, which is not here: pip install 'fxmem[image]'. "
            f"A .svg needs nothing\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


# --- PNG and PDF ------------------------------------------------------------------------------------------------------


CONVERTER = """
import json, pathlib, sys

def convert(svg, scale):
    pathlib.Path(__file__).with_name("given.json").write_text(json.dumps([sys.argv[1], scale, svg]))
    return {answer!r}

svg_to_png = svg_to_pdf = convert
"""


def test_the_converter_is_given_the_svg_and_how_sharp_to_be(
    tmp_path: Path, bare: Path, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(bare, "vl_convert", CONVERTER.format(answer=PNG + b"rest"), monkeypatch)
    out = tmp_path / "out.png"
    assert run("graph", report, "-o", str(out), "--depth", "1") == 0
    assert out.read_bytes() == PNG + b"rest"
    form, scale, given = json.loads((bare / "given.json").read_text(encoding="utf-8"))
    assert (form, scale) == ("png", 2.0)
    assert "node-block" in boxes_of(ET.fromstring(given))
    package(bare, "vl_convert", CONVERTER.format(answer=PDF), monkeypatch)
    assert run("graph", report, "-o", str(tmp_path / "out.pdf")) == 0
    assert json.loads((bare / "given.json").read_text(encoding="utf-8"))[:2] == ["pdf", 1.0]


def test_a_long_drawing_is_made_no_longer_than_a_png_can_be(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(bare, "vl_convert", CONVERTER.format(answer=PNG), monkeypatch)
    for height, scale in ((16000.0, 2.0), (64000.5, 0.5)):
        assert svg.convert("png", f'<svg viewBox="0 0 700 {height}"/>') == PNG
        assert json.loads((bare / "given.json").read_text(encoding="utf-8"))[1] == pytest.approx(scale, abs=1e-4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit('no image')", "expected a .png, but vl-convert failed with exit code 1: no image"),
        (
            "def svg_to_png(svg, scale):\n    raise RuntimeError('no root\\n\\nstack')\nsvg_to_pdf = svg_to_png",
            "expected a .png, but vl-convert failed with exit code 1: no root",
        ),
        (CONVERTER.format(answer=b"else"), "expected a .png, but vl-convert answered what is none"),
        ("import time\ntime.sleep(300)", "expected a .png, but vl-convert took longer than 0.5 s"),
    ],
)
def test_a_converter_that_fails_is_reported(
    bare: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    package(bare, "vl_convert", source, monkeypatch)
    if "sleep" in source:
        monkeypatch.setattr(svg, "TIME_LIMIT", 0.5)
    with pytest.raises(AnalysisError, match=f"^{re.escape(message)}; write .svg instead$"):
        svg.convert("png", "<svg/>")


def test_a_format_that_is_none_is_refused(bare: Path) -> None:
    form: Any = "gif"
    with pytest.raises(UsageError, match=r"^expected a format of png, pdf; got 'gif'$"):
        svg.convert(form, "<svg/>")
    with pytest.raises(EnvironmentLacksError):
        svg.require_image("png")


@pytest.mark.parametrize("form", ["png", "pdf"])
def test_the_converter_writes_the_format_where_it_is_here(form: Any) -> None:
    pytest.importorskip("vl_convert")
    profile = deep_profile(2)
    plan = plan_of(profile, Region(first_node=0, last_node=4, freed_bytes=5, extra_flops=7))
    data = svg.convert(form, graph.render(profile, liveness.timeline(profile), graph.DrawingOptions(plan=plan)).svg)
    assert data.startswith(PNG if form == "png" else PDF)
    assert len(data) > 5_000


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_graph_draws_a_report_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(small_report().model_dump_json().encode())))
    out = tmp_path / "out.svg"
    assert run("graph", "-", "-o", str(out)) == 0
    assert "node-block_conv" in boxes_of(ET.fromstring(out.read_text(encoding="utf-8")))


def test_graph_frames_the_regions_of_a_plan(tmp_path: Path, report: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = liveness.timeline(small_profile()).peak
    region = Region(first_node=1, last_node=3, freed_bytes=32 << 20, extra_flops=None)
    plan = plan_of(small_profile(), region, before=before)
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    out = tmp_path / "out.svg"
    assert run("graph", report, "--plan", str(tmp_path / "plan.json"), "-o", str(out)) == 0
    assert "frees 32.0 MiB; runs an unknown number of FLOPs again" in out.read_text(encoding="utf-8")
    (tmp_path / "none.json").write_text("{}", encoding="utf-8")
    for name, complaint in (
        ("nowhere.json", "No such file"),
        ("none.json", "in which fxmem_version is wrong: Field required"),
    ):
        assert run("graph", report, "--plan", str(tmp_path / name), "-o", str(out)) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert err.startswith("fxmem: expected --plan to name a plan written by `fxmem plan --json`, got ")
        assert complaint in err
    (tmp_path / "other.json").write_text(plan.model_copy(update={"inputs": ()}).to_json(), encoding="utf-8")
    assert run("graph", report, "--plan", str(tmp_path / "other.json"), "-o", str(out)) == 2
    assert "expected a plan for this step; it is for inputs none, not x" in capsys.readouterr().err
    higher = before.model_copy(update={"requested_bytes": before.requested_bytes + 1})
    (tmp_path / "other.json").write_text(plan.model_copy(update={"before": higher}).to_json(), encoding="utf-8")
    assert run("graph", report, "--plan", str(tmp_path / "other.json"), "-o", str(out)) == 2
    assert "give the options that `fxmem plan` had" in capsys.readouterr().err


# --- the benchmark's checks -------------------------------------------------------------------------------------------


def test_the_benchmark_sees_what_overlaps() -> None:
    profile = deep_profile(3)
    plan = plan_of(profile, Region(first_node=2, last_node=6))
    text = svg_of(profile, plan=plan, fold=False)
    assert list(drawings.complaints(ET.fromstring(text))) == []
    for part, field, by, complaint in (
        ("node-layers_0_linear", "y", -40.0, "boxes overlap: 1"),
        ("node-layers_0_linear", "width", 900.0, "frames cross: 0; boxes across a frame: 3"),
        ("checkpoint-layers_0_act", "height", 90.0, "frames cross: 1; boxes across a frame: 1"),
    ):
        root = ET.fromstring(text)
        (moved,) = (each.findall(f"{SVG}rect")[-1] for each in root.iter(f"{SVG}g") if each.get("id") == part)
        moved.set(field, str(float(moved.get(field, "nan")) + by))
        assert any(said.startswith(complaint) for said in drawings.complaints(root)), (
            part,
            list(drawings.complaints(root)),
        )
    root = ET.fromstring(text)
    heading = next(
        each.find(f"{SVG}rect") for each in root.iter(f"{SVG}g") if each.get("class") == "heading checkpoint"
    )
    assert heading is not None
    heading.set("y", str(float(heading.get("y", "nan")) + 60))
    assert list(drawings.complaints(root)) == ["a heading is under a box: 1"]
