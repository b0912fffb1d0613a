"""The page in a real browser, at two sizes, light and dark; and the pure functions of its script.

Playwright drives the system's Chromium and downloads none of its own. Without one of both these tests are skipped and
say so; the pure functions are checked by node, where there is one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings

from fxmem.memory import liveness
from fxmem.records.advice import Advice, Suggestion
from fxmem.records.profile import Profile
from fxmem.show.graph import DrawingOptions, hierarchy_data
from fxmem.show.graph.boxes import compose
from fxmem.show.graph.labels import box_words, frame_words, heat_step
from fxmem.show.graph.layout import SCREEN, arrange, heading_width
from tests import ROOT
from tests.profiles import deep_profile, profiles, small_profile
from tests.show.test_html import page_of
from tests.show.test_plots import run_of, taken

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCRIPT = ROOT / "fxmem" / "show" / "html" / "graph.js"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")

with_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH: the page was not opened in a browser")
with_node = pytest.mark.skipif(NODE is None, reason="no node on PATH: the script's functions were not run")

SCREENS = [(width, height, scheme) for width, height in ((1440, 900), (390, 844)) for scheme in ("light", "dark")]
"""Sizes of the window in pixels, and whether the screen is light or dark."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `make venv` does it")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(params=SCREENS)
def page(browser: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page with a plan, a run and three changes, opened at this size, light or dark; without an error to its end."""
    width, height, scheme = request.param
    profile = run_of([taken(50, 80, 10), taken(60, 84, 10)])
    deep = deep_profile(12).model_copy(update={"step": profile.step})
    path = tmp_path / "page.html"
    path.write_text(page_of(deep, advice=advice(deep)), encoding="utf-8")
    errors: list[str] = []
    opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text))
    opened.goto(path.as_uri())
    opened.wait_for_selector("#graph-box .box.folds")
    yield opened
    assert errors == []
    opened.close()


def advice(profile: Profile) -> Advice:
    """Three changes, the first with more lines than its place has."""
    before = liveness.timeline(profile).peak
    suggestions = tuple(
        Suggestion(key=f"k{n}", title=f"change {n}", effect="none", code="a = 1\n" * n, peak=before, saved_bytes=size)
        for n, size in ((9, 900), (2, 800), (1, 700))
    )
    heading = profile.heading()
    suggestions = tuple(
        each.model_copy(update={"saved_bytes": before.requested_bytes * each.saved_bytes // 2000})
        for each in suggestions
    )
    return Advice(**heading, before=before, before_flops=1, suggestions=suggestions)


@pytest.mark.truth
@with_browser
def test_verdict_timeline_and_changes_are_on_the_first_screen(page: Page) -> None:
    assert page.viewport_size is not None
    height, width = page.viewport_size["height"], page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = [page.locator(".verdict"), page.locator("#plot"), *page.locator("article pre").all()]
    assert len(shown) == 5
    for each in shown:
        box = each.bounding_box()
        assert box is not None
        assert box["height"] > 0
        assert box["y"] + box["height"] <= height, each
    header = page.locator("details", has_text="What was analysed")
    assert not header.locator("table").is_visible()
    header.locator("summary").click()
    assert header.locator("table").is_visible()
    assert page.locator("h1").inner_text() == "Deep on tiny"
    assert page.locator("#run-wide, #run-narrow").locator("visible=true").count() == 1


@pytest.mark.truth
@with_browser
def test_colours_follow_the_screen(page: Page) -> None:
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    for what, dark in (("backgroundColor", is_dark), ("color", not is_dark)):
        color = page.evaluate(f"getComputedStyle(document.body).{what}")
        assert (sum(map(int, re.findall(r"\d+", color))) < 150) is dark


@pytest.mark.truth
@with_browser
def test_the_graph_zooms_folds_and_finds(page: Page) -> None:
    graph = page.locator("#graph-box")
    graph.scroll_into_view_if_needed()
    boxes, svg = graph.locator(".box"), graph.locator("svg").last

    def view() -> str | None:
        return svg.get_attribute("viewBox")

    first, fitted = boxes.count(), view()
    assert graph.locator(".box.peak").count() == 1
    assert not page.locator("#minimap").is_visible()
    page.click("#zoom-in")
    zoomed = view()
    assert page.locator("#minimap").is_visible()
    graph.focus()
    page.keyboard.press("ArrowRight")
    assert len({fitted, zoomed, view()}) == 3
    page.click("#zoom-fit")
    assert view() == fitted
    run = graph.locator(".box.folds", has_text=" x").first
    part = run.get_attribute("id")
    run.click()
    opened = boxes.count()
    assert opened > first
    page.locator(f'[id="{part}"]').click()
    assert boxes.count() == first
    page.locator(f'[id="{part}"]').focus()
    page.keyboard.press("Enter")
    assert boxes.count() == opened
    page.click("#fold-again")
    assert boxes.count() == first
    names = [each.partition(":")[0] for each in page.locator("#heat option").all_inner_texts()]
    assert names == ["saved", "params", "at peak", "flops"]
    page.select_option("#heat", index=1)
    assert any("params" in each for each in graph.locator(".box .end").all_text_contents())
    page.fill("#find", "gelu")
    assert re.fullmatch(r"\d+ found, in \d+ boxes", page.locator("#find-status").inner_text())
    page.keyboard.press("Enter")
    assert any("act" in each for each in graph.locator(".box.found").all_text_contents())
    assert page.evaluate("document.documentElement.scrollWidth") <= (page.viewport_size or {}).get("width", 0)


@pytest.mark.truth
@with_browser
def test_timeline_modules_and_table_point_at_one_another(page: Page) -> None:
    assert page.locator("#readout").inner_text() == ""
    page.locator("#plot").hover(position={"x": 150, "y": 80})
    assert page.locator("#readout").inner_text().startswith("Tick ")
    assert page.locator("tr.linked").count() == 1
    cell = page.locator("figure .cell:visible", has_text=" x").first
    cell.scroll_into_view_if_needed()
    before = cell.locator(".box").bounding_box()
    cell.click()
    after = cell.locator(".box").bounding_box()
    assert before is not None
    assert after is not None
    assert after["width"] > before["width"]
    assert page.input_value("#search").startswith("module:")
    rows = page.locator("#rows tr:visible")
    sizes = [int(each.locator("td").nth(8).get_attribute("data-v") or 0) for each in rows.all()]
    assert sizes == sorted(sizes, reverse=True)
    page.locator("#nodes ~ .scroll th button", has_text="#").click()
    places = [int(each.locator("td").first.inner_text()) for each in rows.all()]
    assert places == sorted(places, reverse=True)


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
