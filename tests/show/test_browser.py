"""The page in a real browser, at two sizes, light and dark; and the pure functions of its script.

What drives the browser is its own `--dump-dom`: a page around two frames of the tested page does what a reader would,
and writes down what it saw. No driver has to be installed. Without a Chromium these tests are skipped and say so; the
pure functions are then checked by node, where there is one.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from fxmem.memory import liveness
from fxmem.records.profile import Profile
from fxmem.show.graph import DrawingOptions, hierarchy_data
from fxmem.show.graph.composition import compose
from fxmem.show.graph.labels import box_words, frame_words, heat_step
from fxmem.show.graph.layout import SCREEN, arrange, heading_width
from tests import ROOT
from tests.profiles import deep_profile, profiles, small_profile
from tests.show.test_html import page_of

SCRIPT = ROOT / "fxmem" / "show" / "html" / "graph.js"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")

with_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH: the page was not opened in a browser")
with_node = pytest.mark.skipif(NODE is None, reason="no node on PATH: the script's functions were not run")

_DRIVER = """
const seen = {}, wait = (ms) => new Promise((done) => setTimeout(done, ms));
const drive = async (frame) => {
  const page = frame.contentDocument, window = frame.contentWindow, $ = (id) => page.getElementById(id), said = {};
  window.addEventListener("error", (event) => { said.error = event.message; });
  const svg = () => page.querySelector("#graph-box svg"), view = () => svg().getAttribute("viewBox");
  const boxes = () => page.querySelectorAll("#graph-box .box").length;
  const part = (selector) => [...page.querySelectorAll("#graph-box " + selector)];
  const click = (element) => element.dispatchEvent(new window.MouseEvent("click", { bubbles: true }));
  const part2 = (selector) =>
    [...page.querySelectorAll("figure " + selector)].filter((each) => each.getClientRects().length);
  said.wide = [page.documentElement.scrollWidth, window.innerWidth];
  said.paper = window.getComputedStyle(page.body).backgroundColor;
  said.ink = window.getComputedStyle(page.body).color;
  said.first = boxes();
  said.peaks = part(".box.peak").length;
  const bounds = svg().getBoundingClientRect();
  said.inside = part(".box").every((box) => {
    const at = box.getBoundingClientRect();
    return at.top >= bounds.top - 1 && at.bottom <= bounds.bottom + 1 && at.left >= bounds.left - 1 &&
      at.right <= bounds.right + 1;
  });
  said.mapBefore = $("minimap").getBoundingClientRect().width < 50;
  const views = [view()];
  $("zoom-in").click(); views.push(view());
  const wheel = (ctrlKey) => svg().dispatchEvent(new window.WheelEvent("wheel",
    { deltaY: -200, ctrlKey, clientX: bounds.left + 50, clientY: bounds.top + 50, bubbles: true, cancelable: true }));
  const press = (element, key) =>
    element.dispatchEvent(new window.KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  wheel(true); views.push(view());
  said.mapAfter = $("minimap").getBoundingClientRect().width < 50;
  wheel(false);
  said.plainWheel = view() === views[2];
  press($("graph-box"), "ArrowRight"); views.push(view());
  $("zoom-fit").click();
  said.views = new Set(views).size;
  said.fitted = view() === views[0];
  const run = part(".box.folds").find((box) => box.textContent.includes(" x"));
  const id = run.id;
  click(run);
  said.opened = boxes();
  click($(id));
  said.folded = boxes();
  $(id).focus();
  press($(id), "Enter");
  said.byKey = boxes();
  said.focus = page.activeElement.id === id;
  $("fold-again").click();
  said.again = boxes();
  const figures = () => part(".box .end").map((each) => each.textContent).join();
  const before = figures();
  said.heats = [...$("heat").options].map((each) => each.textContent.split(":")[0]);
  $("heat").value = "1";
  $("heat").dispatchEvent(new window.Event("change"));
  said.heat = figures() !== before && figures().includes("params");
  $("find").value = "gelu";
  $("find").dispatchEvent(new window.Event("input"));
  said.found = [part(".box.found").length, $("find-status").textContent];
  press($("find"), "Enter");
  said.revealed = part(".box.found").map((each) => each.textContent).some((words) => words.includes("act"));
  const cell = part2(".cell").find((each) => each.textContent.includes(" x"));
  const wide = (each) => Math.round(each.querySelector(".box").getBoundingClientRect().width);
  const all = wide(part2(".cell")[0]);
  said.cell = [wide(cell) < all];
  click(cell);
  said.cell.push(wide(cell) === all, $("search").value.startsWith("module:"));
  click(cell);
  said.cell.push(wide(cell) < all, $("search").value === "");
  said.linked = part(".linked").length;
  said.wideAfter = [page.documentElement.scrollWidth, window.innerWidth];
  return said;
};
(async () => {
  for (const frame of document.querySelectorAll("iframe")) {
    // The empty document that a frame begins with is complete, too: wait for what the page's script has drawn.
    const drawn = () => frame.contentDocument.querySelector("#graph-box .box.folds");
    for (let tries = 0; tries < 50 && !(frame.contentDocument.readyState === "complete" && drawn()); tries++)
      await wait(100);
    try { seen[frame.id] = await drive(frame); }
    catch (error) { seen[frame.id] = { error: String(error && error.stack) }; }
  }
  document.body.dataset.seen = JSON.stringify(seen);
})();
"""


def in_browser(folder: Path, page: str, scheme: str) -> dict[str, Any]:
    """What a reader sees and does in the page, by the size of the window."""
    frames = "".join(
        f'<iframe id="{width}x{height}" width="{width}" height="{height}" srcdoc="{html.escape(page)}"'
        ' style="border:0"></iframe>'
        for width, height in ((1400, 900), (390, 844))
    )
    path = folder / f"{scheme}.html"
    path.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><body>{frames}<script>{_DRIVER}</script></body>", encoding="utf-8"
    )
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", *dark,
        "--window-size=1500,2000", "--virtual-time-budget=8000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r'<body data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


@pytest.mark.truth
@with_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_graph_zooms_folds_and_finds_in_a_browser(tmp_path: Path, scheme: str) -> None:
    profile = deep_profile(12)
    seen = in_browser(tmp_path, page_of(profile), scheme)
    assert list(seen) == ["1400x900", "390x844"]
    for size, said in seen.items():
        assert "error" not in said, (size, said)
        for wide in ("wide", "wideAfter"):
            content, window = said[wide]
            assert content <= window, f"{size}: the page is {content} px wide"
        assert (sum(map(int, re.findall(r"\d+", said["paper"]))) < 150) is (scheme == "dark")
        assert (sum(map(int, re.findall(r"\d+", said["ink"]))) < 150) is (scheme == "light")
        assert said["inside"], size
        assert said["peaks"] == 1
        assert (said["views"], said["fitted"], said["plainWheel"]) == (4, True, True)
        assert (said["mapBefore"], said["mapAfter"]) == (True, False)
        assert said["opened"] > said["first"] == said["folded"] == said["again"]
        assert (said["byKey"], said["focus"]) == (said["opened"], True)
        assert said["heats"] == ["saved", "params", "at peak", "flops"]
        assert said["heat"]
        assert said["found"][0] > 0
        assert re.fullmatch(r"\d+ found, in \d+ boxes", said["found"][1])
        assert said["revealed"]
        assert said["cell"] == [True] * 5, (size, said["cell"])
        assert said["linked"] == 1


# --- the script's functions, by node ----------------------------------------------------------------------------------


def by_node(program: str, given: object) -> Any:
    """What a program answers to `given`, with the script as `G`."""
    source = (
        f"const G = require({json.dumps(str(SCRIPT))}); "
        "const given = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        f"process.stdout.write(JSON.stringify({program}))"
    )
    done = subprocess.run(
        [str(NODE), "-e", source], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def arranged(profile: Profile, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the page's script is asked to arrange, and what the drawing's layout makes of the same."""
    drawing = compose(profile, liveness.timeline(profile), DrawingOptions(**options))
    words, headings = box_words(drawing), frame_words(drawing)
    layout = arrange(drawing, words, headings)
    asked = {
        "boxes": [
            {"w": each.width, "h": each.height, "frame": -1 if box.frame is None else box.frame}
            for each, box in zip(words, drawing.boxes, strict=True)
        ],
        "frames": [
            {"least": heading_width(each), "parent": -1 if frame.parent is None else frame.parent}
            for each, frame in zip(headings, drawing.frames, strict=True)
        ],
        "lines": [[edge.tail, edge.head, edge.kind] for edge in drawing.edges],
    }
    places = [[place.x, place.y, place.width, place.height] for place in (*layout.boxes, *layout.frames)]
    lines = [None if line is None else [list(point) for point in line.points] for line in layout.lines]
    return asked, {"size": [layout.width, layout.height], "places": places, "lines": lines}


@with_node
@settings(max_examples=1, suppress_health_check=[HealthCheck.too_slow])
@given(profiles(), profiles(), profiles())
def test_the_page_lays_out_as_the_drawing_does(one: Profile, two: Profile, three: Profile) -> None:
    cases = [arranged(profile, max_boxes=400) for profile in (one, two, three, small_profile())]
    cases += [arranged(deep_profile(layers), fold=False, max_boxes=most) for layers, most in ((9, 25), (40, 400))]
    answers = by_node(
        "given[0].map((each) => G.arrange(each.boxes, each.frames, each.lines, given[1])).map((each) => "
        "({size: [each.width, each.height], places: [...each.boxes, ...each.frames], "
        "lines: each.lines.map((line) => line && line.points)}))",
        [[asked for asked, _ in cases], SCREEN],
    )
    for (_, layout), answer in zip(cases, answers, strict=True):
        assert answer["size"] == pytest.approx(layout["size"])
        assert [number for place in answer["places"] for number in place] == pytest.approx(
            [number for place in layout["places"] for number in place]
        )
        assert [[number for point in line or () for number in point] for line in answer["lines"]] == [
            pytest.approx([number for point in line or () for number in point]) for line in layout["lines"]
        ]


@with_node
def test_the_script_shades_writes_and_zooms() -> None:
    values = [0, 1, 16, 17, 32, 33, 512, 513, 1024]
    answers = by_node(
        "{shades: given.map((each) => G.shade(each, 1024)), bytes: [1023, 1024, 1536, 5e9].map(G.bytes), "
        "figures: [G.figure('flops', 3.2e9), G.figure('time', 0.00123), G.figure('peak', 2048), "
        "G.figure('flops', null)], "
        "zoom: G.zoom([0, 0, 100, 50], 2, [20, 10]), whole: G.whole(976, 476, 0.5)}",
        values,
    )
    assert answers["shades"] == [heat_step(value, 1024) for value in values]
    assert answers["bytes"] == ["1023 B", "1.00 KiB", "1.50 KiB", "4.66 GiB"]
    assert answers["figures"] == ["flops 3.20 G", "1.23 ms", "at peak 2.00 KiB", "flops unknown"]
    assert answers["zoom"] == [10, 5, 50, 25]
    assert answers["whole"] == [-12, -12, 1000, 500]


@with_node
def test_folding_and_finding_are_functions_of_the_data() -> None:
    profile = deep_profile(12)
    data = hierarchy_data(profile, liveness.timeline(profile), DrawingOptions())
    answers = by_node(
        "[[], given.parts.flatMap((part, index) => part.open ? [index] : []), given.parts.map((_, index) => index)]"
        ".map((open) => G.visible(given.parts, new Set(open))).map((seen) => "
        "({boxes: seen.boxes.length, lines: G.edges(given.parts, given.lines, seen).length}))"
        ".concat([G.matches(given.parts, 'gelu'), G.matches(given.parts, ' ')])",
        data,
    )
    folded, first, all_open, gelu, none = answers
    assert folded["boxes"] < first["boxes"] < all_open["boxes"] == sum(not part.get("size") for part in data["parts"])
    assert all(each["lines"] >= each["boxes"] - 1 for each in (folded, first, all_open))
    assert gelu
    assert none == []


# --- the data ---------------------------------------------------------------------------------------------------------


def test_the_hierarchy_has_every_node_and_every_byte() -> None:
    profile = deep_profile(12)
    timeline = liveness.timeline(profile)
    data = hierarchy_data(profile, timeline, DrawingOptions())
    assert len(data["home"]) == len(profile.nodes)
    leaves = {index for index, part in enumerate(data["parts"]) if not part.get("size")}
    assert set(data["home"]) <= leaves | {-1}
    saved = [part["values"][list(data["heats"]).index("saved")] for part in data["parts"]]
    assert sum(saved[leaf] for leaf in leaves) == sum(node.saved_bytes for node in profile.nodes)
    for index, part in enumerate(data["parts"]):
        inner = [leaf for leaf in leaves if index < leaf <= index + part.get("size", 0)]
        assert not inner or saved[index] == sum(saved[leaf] for leaf in inner)
    assert sum("mark" in data["parts"][leaf] for leaf in leaves) == 1


def test_a_page_grows_little_by_what_can_be_opened() -> None:
    profile = deep_profile(200)
    data = hierarchy_data(profile, liveness.timeline(profile), DrawingOptions(fold=False))
    assert len(json.dumps(data, separators=(",", ":"))) < 300 * len(profile.nodes)
