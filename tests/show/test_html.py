"""The HTML page: whole, self-contained, its numbers the records', its parts joined, and no name able to break out of
its text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from fxmem.cli.verbs import graph as graph_verb
from fxmem.cli.verbs import report as report_verb
from fxmem.cli.verbs import show as show_verb
from fxmem.errors import FxmemError, UsageError
from fxmem.memory import liveness
from fxmem.records.plan import CurvePoint, Edit, Plan, Region
from fxmem.records.profile import Profile, SourceLine, Timeline
from fxmem.records.units import Application
from fxmem.show.graph import DrawingOptions, render
from fxmem.show.html import PageOptions, notebook_html, report, report_html
from fxmem.show.html.changes import _changed_lines, best_changes
from fxmem.show.html.page import link_data, script_json
from tests import ROOT
from tests.profiles import CPU, deep_profile, make_profile, profiles, small_profile
from tests.show.graph.test_graph import NAMES
from tests.show.test_plots import hostile, with_allocator
from tests.verbs import called, saved

MIB = 1 << 20
VOID = {"meta", "link", "input", "br", "img", "hr", "wbr"}


class Page(HTMLParser):
    """A page taken apart; fails on an element that is not closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.said: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
            self.said.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self._open, f"<{tag}/> closes itself only in SVG"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        # Newlines between elements are the template's, not the reader's.
        text = data if data.strip() else data.replace("\n", "")
        for tag in set(self._open):
            self.said[tag][-1] += text

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]


def page_of(profile: Profile, timeline: Timeline | None = None, **options: Any) -> str:
    page = PageOptions(**options)
    return report_html(profile, timeline or liveness.timeline(profile), page)


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="fxmem-data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def small_plan(profile: Profile, **fields: Any) -> Plan:
    """A plan that checkpoints the block: half the peak for a tenth of the forward's FLOPs."""
    before = liveness.timeline(profile).peak
    after = before.model_copy(
        update={
            "requested_bytes": before.requested_bytes // 2,
            "by_kind": {kind: n // 2 for kind, n in before.by_kind.items()},
        }
    )
    region = Region(
        first_node=1,
        last_node=3,
        modules=("block",),
        source=profile.nodes[1].source,
        freed_bytes=32 * MIB,
        extra_flops=300_000_000,
    )
    application = Application.MODULES
    point = CurvePoint(strategy="flat", application=application, regions=(region,), peak=after, extra_flops=300_000_000)
    same = {
        name: getattr(profile, name) for name in ("fxmem_version", "torch_version", "model", "inputs", "step", "target")
    }
    made: dict[str, Any] = {
        **same, "strategy": "auto", "chosen": "flat", "application": application, "budget_bytes": 120 * MIB,
        "regions": (region,), "before": before, "after": after, "analysed": True, "forward_flops": 3_000_000_000,
        "extra_flops": 300_000_000, "curve": (point,), **fields,
    }  # fmt: skip
    return Plan(**made)


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_its_references_arrive() -> None:
    profile = small_profile()
    page = Page(page_of(profile, plan=small_plan(profile)))
    assert len(set(page.ids)) == len(page.ids)
    links = [each["href"] for each in page.of("a")]
    assert {link[1:] for link in links} <= set(page.ids)
    assert [link for link in links if not link.startswith("#")] == []
    named = {name for _, attributes in page.elements for name in attributes.get("aria-labelledby", "").split()}
    assert named <= set(page.ids)
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(headings))
    assert page.of("html")[0]["lang"] == "en"
    assert "width=device-width" in str(page.of("meta"))
    assert len(page.of("main")) == len(page.of("header")) == len(page.of("footer")) == 1


def test_nothing_is_loaded() -> None:
    profile = small_profile()
    text = page_of(profile, plan=small_plan(profile))
    page = Page(text)
    assert [
        name
        for _, attributes in page.elements
        for name in attributes
        if name in ("src", "srcset", "action", "xlink:href") or name.startswith("on")
    ] == []
    assert [each for each in page.of("link") if each["href"] != "data:,"] == []
    # Two names of the SVG language, and a reference to an arrow of the drawing itself.
    addresses = set(re.findall(r"https?://[^\"' )<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#fxmem-arrow", "#live-arrow"}
    assert "@import" not in text


def test_the_policy_allows_this_script_and_no_request() -> None:
    text = page_of(small_profile())
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (script,) = scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policies = [
        each["content"] for each in Page(text).of("meta") if each.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert policies[0].startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ")
    assert not re.search(r"\beval\b|innerHTML|insertAdjacentHTML|document\.write|fetch\(|XMLHttpRequest", script)


def test_dark_and_paper_are_styled() -> None:
    style = Page(page_of(small_profile())).said["style"][0]
    assert "@media screen and (prefers-color-scheme: dark)" in style
    assert "@media print" in style


@settings(max_examples=25)
@given(profiles())
def test_any_profile_makes_a_page(profile: Profile) -> None:
    text = page_of(profile)
    assert len(set(Page(text).ids)) == len(Page(text).ids)
    assert len(data_of(text)["tick"]) == profile.ticks


def test_an_empty_profile_makes_a_page() -> None:
    text = page_of(make_profile(ticks=0))
    assert data_of(text)["tick"] == []
    assert Page(text).said["section"]


# --- what it says -----------------------------------------------------------------------------------------------------


def test_the_four_numbers() -> None:
    profile = small_profile()
    timeline = with_allocator(
        liveness.timeline(profile), allocated_bytes=201 * MIB, reserved_bytes=220 * MIB, fits=True
    )
    page = Page(page_of(profile, timeline))
    said = page.said["dl"][0]
    for words in (
        "Requested200.0 MiB209,715,204 bytes",
        "Allocated201.0 MiB210,763,776 bytes",
        "Reserved220.0 MiB230,686,720 bytes",
        "Processunknown",
    ):
        assert words in said
    assert "Fits: 220.0 MiB of 1.00 GiB on tiny, 21.5 %." in page.said["p"][0]
    summary = next(text for text in page.said["section"] if text.startswith("Peak"))
    assert "block.conv, during aten.convolution_backward.default" in summary
    assert "/home/user/project/model.py:17: x = self.conv(x)" in summary


def test_what_is_not_known_is_unknown() -> None:
    said = Page(page_of(small_profile(target=CPU))).said["dl"][0]
    assert said.count("unknown") == 3
    assert said.count("only a card has an allocator of this kind") == 2
    assert "CUDA" not in said


def test_a_step_that_does_not_fit() -> None:
    profile = small_profile()
    timeline = with_allocator(
        liveness.timeline(profile),
        allocated_bytes=2 << 30,
        reserved_bytes=2 << 30,
        fits=False,
        shortage="It runs out in backward",
    )
    page = Page(page_of(profile, timeline))
    assert "Does NOT fit: 2.00 GiB of 1.00 GiB on tiny, 200.0 %. It runs out in backward." in page.said["p"][0]


def test_every_node_is_a_row() -> None:
    profile = small_profile()
    text = page_of(profile)
    rows = re.findall(r'<tr id="n(\d+)".*?</tr>', text)
    assert rows == ["1", "0", "2", "3", "5", "4"]  # by what they brought of the peak
    (row,) = re.findall(r'<tr id="n1".*?</tr>', text)
    # Place, params, output, saved, scratch, live, at the peak, FLOPs forward and backward. Alive while it runs backward
    # is the peak, 200 MiB and the loss; of that the node brought y, its weight, the gradient of it and a workspace of
    # 64 MiB.
    assert re.findall(r'data-v="(\d*)"', row) == [
        "1",
        *(str(n) for n in (2 * MIB, 32 * MIB, 32 * MIB, 64 * MIB, 200 * MIB + 4, 100 * MIB, 3 * 10**9, 6 * 10**9)),
    ]
    assert "runs at the peak" in row
    assert "model.py:17<small>x = self.conv(x)</small>" in row
    (act,) = re.findall(r'<tr id="n2".*?</tr>', text)
    assert re.findall(r'data-v="(\d*)">([^<]*)', act)[-2:] == [("", "unknown"), ("", "unknown")]


def test_tables_can_be_sorted_and_searched() -> None:
    page = Page(page_of(small_profile()))
    assert [each["aria-sort"] for each in page.of("th") if "aria-sort" in each] == ["descending", "descending"]
    assert {each["data-sort"] for each in page.of("th") if "data-sort" in each} == {"number", "text"}
    assert [each["type"] for each in page.of("input")] == ["search", "search"]
    assert "6 of 6 nodes" in next(text for text in page.said["section"] if text.startswith("Nodes"))
    # What scrolls can be reached with the keyboard, and has a name.
    scrolling = [each for each in page.of("div") if each.get("tabindex") == "0"]
    assert len(scrolling) == 3
    assert all(each["role"] == "region" and each["aria-labelledby"] for each in scrolling)


def test_tensors_at_the_peak() -> None:
    section = next(
        text for text in Page(page_of(small_profile())).said["section"] if text.startswith("Tensors at the peak")
    )
    assert "64.0 MiB32.0 %64.0 MiB1workspaceno tensorblock.conv/home/user/project/model.py:17" in section
    assert "32.0 MiB16.0 %32.0 MiB1saved8x16x64x64 float32block.conv/home/user/project/model.py:17" in section
    assert "Not listed" not in section


def test_what_is_not_listed_is_said() -> None:
    profile = deep_profile(2)
    kinds = [node.model_copy(update={"source": None}) for node in profile.nodes]
    storages = [
        s.model_copy(update={"birth": 0, "death": profile.ticks, "nbytes": 1000 + i, "op": None})
        for i, s in enumerate(profile.storages * 20)
    ]
    many = make_profile(ticks=profile.ticks, nodes=kinds, storages=storages)
    groups = sorted((s.nbytes for s in storages), reverse=True)
    section = next(text for text in Page(page_of(many)).said["section"] if text.startswith("Tensors at the peak"))
    assert len(groups) > 200
    assert f"({sum(groups[200:]):,} bytes) in smaller rows" in section


def test_assumptions_and_unknowns() -> None:
    page = Page(page_of(small_profile()))
    assert [text for text in page.said["section"] if text.startswith("Assumptions")] == [
        "Assumptionsstep: steady state: the optimizer's state exists, gradients are set to None after each step, and "
        "the output lives until the step returns"
        "workspace: cuDNN chooses the plan its heuristic ranks first"
    ]
    assert "Unknownsflops: custom::swish (2 times)" in page.said["section"]
    assert "UnknownsNone." in Page(page_of(make_profile(ticks=0))).said["section"]


def test_a_plan_before_and_after() -> None:
    profile = small_profile()
    section = next(
        text for text in Page(page_of(profile, plan=small_plan(profile))).said["section"] if text.startswith("Plan")
    )
    assert "Peak requested200.0 MiB100.0 MiB-50.0 %-100.0 MiB" in section
    assert "auto: flat, 1 region of whole modules" in section
    assert "Forward FLOPs3.0 G3.3 G+10.0 %+300.0 M" in section
    assert "kept, 20.0 MiB to spare" in section
    assert "block232.0 MiB300.0 M/home/user/project/model.py:17" in section
    assert "2. flat, 1 region: 100.0 MiB, +10.0 % (chosen)" in section
    # The plan's budget is a line of the timeline, too.
    assert "budget: 120.0 MiB" in page_of(profile, plan=small_plan(profile))
    estimated = Page(page_of(profile, plan=small_plan(profile, analysed=False, extra_flops=None, curve=()))).said[
        "main"
    ][0]
    assert "an estimate from the report" in estimated
    assert "FLOPs unknown" in estimated


def test_without_a_graph_there_is_none() -> None:
    text = page_of(small_profile(), graph=False)
    assert 'fxmem-graph"' not in text
    assert "fxmem-graph-data" not in text
    assert [link["href"] for link in Page(text).of("a") if link["href"] == "#graph"] == []


# --- what joins its parts ---------------------------------------------------------------------------------------------


def test_a_moment_knows_its_operator_and_node() -> None:
    profile = small_profile()
    timeline = liveness.timeline(profile)
    data = link_data(profile, timeline, columns=1000)
    at = data["start"]
    assert data["tick"][at] == timeline.peak.tick
    assert data["live"][at] == timeline.peak.requested_bytes
    assert profile.nodes[data["node"][at]].name == timeline.peak.node == "block_conv"
    assert (data["names"][data["op"][at]], data["during"][at]) == ("aten.convolution_backward.default", 1)
    assert sum(values[at] for _, values in data["kinds"]) == pytest.approx(timeline.peak.requested_bytes / 1024, abs=1)
    assert (data["node"][0], data["op"][0]) == (-1, -1)
    # block_conv: a result, a workspace and its free; its backward, after three more events forward, two backward and
    # two frees, the same again.
    assert data["spans"][1] == [[1, 4], [11, 14]]


@pytest.mark.truth
def test_its_size_does_not_grow_with_the_step() -> None:
    long, short = (deep_profile(layers) for layers in (400, 200))
    sizes = [len(link_data(each, liveness.timeline(each), columns=50)["tick"]) for each in (long, short)]
    assert sizes == [100, 100]


def test_every_node_is_in_a_box_of_the_graph_folded_ones_too() -> None:
    profile = deep_profile(30)
    timeline = liveness.timeline(profile)
    drawing = render(profile, timeline, DrawingOptions(max_boxes=40))
    nodes = zip(drawing.boxes, profile.nodes, strict=True)
    assert None not in [box for box, node in nodes if node.op != "optimizer"]
    assert set(re.findall(r'<g id="([^"]+)" class="box', drawing.svg)) == set(drawing.boxes)
    # The peak's block stands alone; the others share their boxes.
    assert len(set(drawing.boxes)) < 20


def test_what_a_change_saves_is_what_its_code_does() -> None:
    """A plan's saving stands beside edits that are all of it, or the line that applies it; else beside no code."""
    profile = small_profile()

    def find_code(*files: str | None, analysed: bool = False) -> str:
        edits = [
            None if file is None else Edit(source=SourceLine(file=file, line=3, code="x = b(x)"), after="x = c(b, x)")
            for file in files
        ]
        regions = tuple(Region(first_node=1, last_node=3, freed_bytes=1, extra_flops=1, edit=each) for each in edits)
        plan = small_plan(profile, regions=regions, analysed=analysed)
        (change,) = best_changes(profile, liveness.timeline(profile), plan, None)
        return change.code if change.is_code else ""

    assert find_code("net.py") == "- x = b(x)  # net.py:3\n+ x = c(b, x)"
    assert find_code("net.py", None) == ""
    assert find_code("lib/site-packages/nets/net.py") == ""
    assert "load_plan" in find_code("net.py", None, analysed=True)


PATCH = """--- a/model.py
+++ b/model.py
@@ -5,4 +5,5 @@
 a
-    b
-    c
+    with d:
+        b
 e
+f
--- a/train.py
+++ b/train.py
@@ -1,2 +1,1 @@
-x
 y
"""


def test_a_patch_is_shown_by_the_lines_that_it_changes() -> None:
    shown = "# model.py:6\n-    b\n-    c\n+    with d:\n+        b\n# model.py:9\n+f\n# train.py:1\n-x"
    assert "\n".join(_changed_lines(PATCH)) == shown
    assert not [*_changed_lines("")]


def test_a_plan_is_framed_in_the_graph_and_its_frames_can_be_folded() -> None:
    profile = small_profile()
    timeline, plan = liveness.timeline(profile), small_plan(profile)
    page = Page(page_of(profile, plan=plan))
    data = json.loads(page.said["script"][1])
    ids = {attributes.get("id", "") for _, attributes in page.elements}
    drawing = render(profile, timeline, DrawingOptions(plan=plan))
    framed = re.findall(r'<g id="([^"]+)" class="[^"]*checkpoint', drawing.svg)
    assert framed
    assert set(framed) <= ids
    assert [part["head"] for part in data["parts"] if part.get("region")] == ["checkpoint"]


# --- the notebook -----------------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_drawing_beneath_the_table() -> None:
    profile = deep_profile(30)
    fragment = notebook_html(profile, liveness.timeline(profile))
    page = Page(fragment)
    assert page.said["summary"][-1] == "Graph"
    assert [each["class"] for each in page.of("svg") if "fxmem-graph" in each["class"]] == ["fxmem-graph"]
    assert any("x30" in text or "x29" in text for text in page.said["text"])
    # Another cell's drawing is in the same document.
    assert page.ids == []
    assert "url(#" not in fragment


@pytest.mark.parametrize(("limit", "least"), [("_MOST_NODES", 5), ("_MOST_CHARACTERS", 1000)])
def test_a_large_drawing_is_left_out_of_a_notebook(monkeypatch: pytest.MonkeyPatch, limit: str, least: int) -> None:
    profile = small_profile()
    assert "fxmem-graph" in notebook_html(profile, liveness.timeline(profile))
    monkeypatch.setattr(report, limit, least)
    assert "fxmem-graph" not in notebook_html(profile, liveness.timeline(profile))


# --- untrusted names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "</style><img src=x onerror=alert(1)>",
        "{{7*7}}${8*8}",
    ],
)
def test_names_are_text(name: str) -> None:
    profile = hostile(name)
    same = {field: getattr(profile, field) for field in ("model", "inputs", "step", "target")}
    text = page_of(
        profile, plan=small_plan(small_profile(), regions=(Region(first_node=0, last_node=1, modules=(name,)),), **same)
    )
    text.encode()
    page = Page(text)
    assert len(page.of("script")) == 3
    assert not page.of("img")
    assert [
        attribute for _, attributes in page.elements for attribute in attributes if attribute.startswith("on")
    ] == []
    assert len(set(page.ids)) == len(page.ids)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202e]", text)
    if name and name.isprintable():
        assert f"{name}: training step on cpu" in page.said["h1"]


def test_json_inside_a_script_cannot_end_it() -> None:
    value = {"</script>": ["<!--", "\u2028", "&amp;", "é"]}
    text = script_json(value)
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == value


# --- the verbs --------------------------------------------------------------------------------------------------------


def test_the_page_comes_with_the_answer_too(tmp_path: Path) -> None:
    report, page, out = saved(tmp_path / "r.json", small_profile()), tmp_path / "a.html", tmp_path / "r.html"
    code, text = called(show_verb, report, "-o", str(page))
    assert (code, called(report_verb, report, "-o", str(out))) == (0, (0, ""))
    assert text.startswith("Memory ")
    assert page.read_text() == out.read_text()
    with pytest.raises(UsageError, match="expected --html to name a file that ends in"):
        called(show_verb, report, "--html", report)


def test_report_of_a_report(tmp_path: Path) -> None:
    profile = small_profile()
    report, out = saved(tmp_path / "r.json", profile), tmp_path / "r.html"
    plan = tmp_path / "p.json"
    plan.write_text(small_plan(profile).model_dump_json(), encoding="utf-8")
    assert called(
        report_verb,
        report,
        "-o",
        str(out),
        "--plan",
        str(plan),
        "--budget",
        "50%",
        "--after",
        report,
    ) == (0, "")
    text = out.read_text(encoding="utf-8")
    assert "budget: 100.0 MiB" in text
    assert "with the plan: peak 200.0 MiB in backward" in text
    assert called(report_verb, report, "-o", str(out), "--max-boxes", "0") == (0, "")
    assert "Graph</h2>" not in out.read_text(encoding="utf-8")


def test_timeline_of_a_report(tmp_path: Path) -> None:
    report, out = saved(tmp_path / "r.json", small_profile()), tmp_path / "t.svg"
    assert called(graph_verb, report, "--by", "time", "-o", str(out), "--budget", "128MiB", "--width", "500") == (0, "")
    text = out.read_text(encoding="utf-8")
    assert 'viewBox="0 0 500 ' in text
    assert "budget 128.0 MiB" in text
    assert called(graph_verb, report, "-o", str(out), "--by", "module") == (0, "")
    assert "memory by module at the peak" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("verb", "arguments", "complaint"),
    [
        (report_verb, ["-o", "x.pdf"], "expected --output to name a file that ends in .html or .htm, got 'x.pdf'"),
        (report_verb, ["-o", "x.html", "--max-boxes", "-1"], "expected --max-boxes of at least 0, got -1"),
        (report_verb, ["-o", "x.html", "--budget", "much"], "expected a budget as bytes"),
        (
            report_verb,
            ["-o", "x.html", "--plan", "none.json"],
            "expected --plan to name a plan written by `fxmem plan --json`, got 'none.json': No such file",
        ),
        (
            report_verb,
            ["-o", "x.html", "--plan", "report.json"],
            "expected --plan to name a plan written by `fxmem plan --json`, got 'report.json', in which",
        ),
        (
            report_verb,
            ["-o", "x.html", "--plan", "other-plan.json"],
            "expected a plan for this step; it is for target cpu, not tiny: plan it anew",
        ),
        (
            report_verb,
            ["-o", "x.html", "--after", "other.json"],
            "expected --after to be a report of the same step, but the target of 'other.json' are others",
        ),
        (
            graph_verb,
            ["--by", "time", "-o", "x.dot"],
            "expected --output to name a file that ends in .svg or .png or .pdf, got 'x.dot'",
        ),
        (
            graph_verb,
            ["--by", "time", "-o", "x.svg", "--width", "10"],
            "expected --width of at least 280 pixels, got 10",
        ),
        (graph_verb, ["-o", "x.svg", "--by", "module", "--budget", "1GiB"], "expected --budget with --by time"),
        (graph_verb, ["-o", "x.svg", "--width", "500"], "expected --width with --by time or with --by module"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Any, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = small_profile()
    saved(tmp_path / "report.json", profile)
    saved(tmp_path / "other.json", small_profile(target=CPU))
    other = small_plan(profile, target=CPU).model_dump_json()
    (tmp_path / "other-plan.json").write_text(other, encoding="utf-8")
    with pytest.raises(FxmemError, match=re.escape(complaint)) as raised:
        called(verb, "report.json", *arguments)
    assert isinstance(raised.value, UsageError)
    assert not list(tmp_path.glob("x.*"))


def test_the_page_is_written_without_torch(tmp_path: Path) -> None:
    report = saved(tmp_path / "r.json", small_profile())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fxmem.cli.parser import Parser; from fxmem.cli.verbs import report as verb\n"
        "parser = Parser().add_arguments(verb.ARGUMENTS)\n"
        f"print(verb.run(parser.parse_args([{report!r}, '-o', 'r.html'])))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.fullmatch(r"fxmem: wrote r.html \(\d+ kB\)\n", done.stderr)
    assert done.stdout == "(0, '')\n"
    assert Page((tmp_path / "r.html").read_text(encoding="utf-8")).of("main")


def test_jinja_is_imported_only_when_a_page_is_written(tmp_path: Path) -> None:
    report = saved(tmp_path / "r.json", small_profile())
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from fxmem.__main__ import main\n"
        f"assert main(['show', {report!r}, '--by', 'line', '--width', '80']) == 0\n"
        f"assert main(['graph', {report!r}, '-o', 'g.svg']) == 0"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert re.fullmatch(r"fxmem: wrote g.svg \(\d+ kB\)\n", done.stderr)
