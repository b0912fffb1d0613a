"""The plots: their numbers are the records', the peak survives any number of ticks, no name breaks them, and no text
lies on another."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.hardware.context import give_room
from fxmem.memory import liveness
from fxmem.memory.allocator import Levels
from fxmem.memory.by_layer import parts_at_peak
from fxmem.memory.figures import bytes_at_peak
from fxmem.memory.forecast import forecast
from fxmem.memory.liveness import Sample, samples, shorten_step
from fxmem.records.parts import EvaluationPass, Growth, HostUse
from fxmem.records.plan import PlannedStep
from fxmem.records.profile import (
    Kind,
    Node,
    Peak,
    Phase,
    PhaseSpan,
    Profile,
    ProgramRun,
    Round,
    SourceLine,
    Storage,
    Timeline,
)
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.plots import CurveDot, PlottedStep, StepAfter, curve_svg, icicle_svg, run_svg, timeline_svg
from fxmem.show.plots.xy_plot import LEFT, SIZE, STYLE, byte_steps, spread
from fxmem.show.svg import DARK, KINDS, LIGHT, Palette, text_width
from tests.profiles import deep_profile, make_profile, profiles, small_profile
from tests.show.graph.test_graph import NAMES, call, step_of

MIB, GIB = 1 << 20, 1 << 30
SVG = "{http://www.w3.org/2000/svg}"


def timeline_plot(profile: Profile, timeline: Timeline, *, levels: Levels | None = None, **options: Any) -> str:
    return timeline_svg(PlottedStep(profile, timeline, levels), **options)


def plotted(profile: Profile, **options: Any) -> ET.Element:
    return ET.fromstring(timeline_plot(profile, liveness.timeline(profile), **options))


def words(root: ET.Element) -> list[str]:
    return ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]


def titles(root: ET.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}title")]


def classed(root: ET.Element, name: str) -> list[ET.Element]:
    return [each for each in root.iter() if name in each.get("class", "").split()]


def boxes_of_text(root: ET.Element) -> list[tuple[float, float, float, float, str]]:
    """Left, top, right and bottom of every line of text, with the line."""
    found = []
    for each in root.iter(f"{SVG}text"):
        classes, line = each.get("class", "").split(), "".join(each.itertext())
        size = 15.0 if "title" in classes else SIZE
        width = text_width(line, size, bold="strong" in classes or "title" in classes)
        x, y = float(each.get("x", "")), float(each.get("y", ""))
        left = x - (width if "end" in classes else width / 2 if "middle" in classes else 0.0)
        found.append((left, y - 0.8 * size, left + width, y + 0.2 * size, line))
    return found


def with_allocator(timeline: Timeline, **numbers: Any) -> Timeline:
    return timeline.model_copy(update={"peak": timeline.peak.model_copy(update=numbers)})


def hostile(name: str) -> Profile:
    """A profile in which everything that may be the model's own is this name."""
    line = SourceLine(file=name, line=1, function=name, code=name)
    node = Node(name=name, op="call_function", target=name, module=name, module_type=name, source=line)
    storages = [
        Storage(nbytes=5, kind=Kind.SAVED, birth=0, death=3, node=0, name=name, dtype=name),
        Storage(nbytes=2, kind=Kind.INPUT, birth=1, death=2),
    ]
    return make_profile(ticks=3, nodes=[node], storages=storages, model=name, modules={"": name, name: name})


# --- which ticks are drawn --------------------------------------------------------------------------------------------


def test_few_ticks_are_all_drawn() -> None:
    assert samples([4, 7, 7], 2) == [Sample(0, 0, 1), Sample(1, 1, 2), Sample(2, 2, 3)]
    assert samples([], 10) == []


def test_of_many_ticks_the_lowest_and_the_highest_of_each_column() -> None:
    #                    0  1  2  3  4 | 5  6  7  8  9
    assert samples([5, 1, 9, 2, 9, 7, 3, 8, 3, 4], 2) == [
        Sample(1, 0, 2.5),
        Sample(2, 2.5, 5),
        Sample(6, 5, 7.5),
        Sample(7, 7.5, 10),
    ]


@given(st.lists(st.integers(0, 9), max_size=90), st.integers(1, 12))
def test_no_extreme_is_lost_and_the_ranges_cover_all(live: list[int], columns: int) -> None:
    taken = samples(live, columns)
    assert len(taken) <= 2 * columns
    assert [sample.begin for sample in taken[1:]] == [sample.end for sample in taken[:-1]]
    if live:
        assert (taken[0].begin, taken[-1].end) == (0, len(live))
        heights = [live[sample.tick] for sample in taken]
        assert (min(heights), max(heights)) == (min(live), max(live))
        assert live.index(max(live)) in [sample.tick for sample in taken]  # the tick that is the timeline's peak


def test_two_hundred_thousand_ticks_fit_and_keep_their_peak() -> None:
    ticks = 200_000
    by_kind = {
        kind: tuple((tick * (7 + 2 * index)) % 1009 * MIB for tick in range(ticks)) for index, kind in enumerate(Kind)
    }
    live = [sum(at) for at in zip(*by_kind.values(), strict=True)]
    spike = 123_457
    live[spike] += 40_000 * MIB
    by_kind[Kind.SAVED] = tuple(
        nbytes + 40_000 * MIB * (tick == spike) for tick, nbytes in enumerate(by_kind[Kind.SAVED])
    )
    peak = Peak(
        requested_bytes=live[spike],
        phase=Phase.FORWARD,
        tick=spike,
        by_kind={kind: series[spike] for kind, series in by_kind.items()},
    )
    svg = timeline_plot(
        make_profile(ticks=ticks), Timeline(live_bytes=tuple(live), by_kind=by_kind, peak=peak, alive=())
    )
    assert len(svg) < 300_000
    root = ET.fromstring(svg)
    (panel,) = classed(root, "panel")
    (total,) = classed(root, "total")
    highest = min(float(y) for y in re.findall(r"V([0-9.]+)", total.get("d", "")))
    # The scale reaches 5 % above the highest number that is drawn, which is the peak.
    assert highest == pytest.approx(
        float(panel.get("data-top", "")) + float(panel.get("data-height", "")) * (1 - 1 / 1.05), abs=0.11
    )


# --- the timeline -----------------------------------------------------------------------------------------------------


def test_the_timeline_says_what_the_records_say() -> None:
    profile = small_profile()
    timeline = with_allocator(liveness.timeline(profile), allocated_bytes=210 * MIB, reserved_bytes=230 * MIB)
    root = ET.fromstring(timeline_plot(profile, timeline, budget_bytes=150 * MIB))
    said = words(root)
    assert "peak 200.0 MiB in backward: block.conv" in said
    assert {"forward", "backward", "optimizer"} <= set(said)
    assert "order of allocations and frees (ticks; not seconds)" in said
    # By a pencil: y and grad_y are saved and temporary, out is the output, x the input, and a weight with its gradient
    # and AdamW's state.
    for line in (
        "saved 32.0 MiB, 16.0 %",
        "temporary 32.0 MiB, 16.0 %",
        "output 32.0 MiB, 16.0 %",
        "input 32.0 MiB, 16.0 %",
        "workspace 64.0 MiB, 32.0 %",
    ):
        assert line in said
    for line in (
        "parameter 2.00 MiB, 1.0 %",
        "optimizer state 4.00 MiB, 2.0 %",
        "gradient 2.00 MiB, 1.0 %",
        "budget 150.0 MiB",
    ):
        assert line in said
    assert {
        "allocated 210.0 MiB",
        "reserved 230.0 MiB",
        "room 1.00 GiB, above the scale",
    } <= set(said)
    # The room is four times the highest number: named at the edge, not drawn to scale.
    assert {"allocated", "reserved", "budget", "↑ room"} <= set(said)
    assert len([line for line in classed(root, "limit") if "M62 " in line.get("d", "")]) == 1
    assert f"budget: 150.0 MiB ({150 * MIB:,} bytes)" in titles(root)


def test_lines_stand_at_their_heights() -> None:
    profile = small_profile()
    timeline = with_allocator(liveness.timeline(profile), allocated_bytes=210 * MIB, reserved_bytes=400 * MIB)
    root = ET.fromstring(timeline_plot(profile, timeline, budget_bytes=100 * MIB, height=420.0))
    (panel,) = classed(root, "panel")
    bottom = float(panel.get("data-top", "")) + 420.0
    # 420 pixels are 400 MiB and 5 %: one pixel a MiB.
    level = [
        (each.get("class", ""), re.match(r"M62 ([0-9.]+)h", each.get("d", ""))) for each in panel.iter(f"{SVG}path")
    ]
    heights = {kind: bottom - float(found[1]) for kind, found in level if found and kind != "grid"}
    assert heights == pytest.approx({"held allocated": 210, "held reserved": 400, "limit": 100}, abs=0.2)
    (dot,) = classed(root, "dot")
    assert bottom - float(dot.get("cy", "")) == pytest.approx(200, abs=0.2)


def test_the_allocators_bytes_are_lines_over_the_step() -> None:
    """By tick 1, 3 and 2 MiB handed out of 4 held; the labels stand where the lines end."""
    storages = [
        Storage(nbytes=MIB, kind=Kind.SAVED, birth=birth, death=death) for birth, death in ((0, 3), (1, 3), (1, 2))
    ]
    profile = make_profile(ticks=3, storages=storages)
    timeline = with_allocator(liveness.timeline(profile), allocated_bytes=3 * MIB, reserved_bytes=4 * MIB)
    levels = Levels((MIB, 3 * MIB, 2 * MIB), (4 * MIB,) * 3)
    root = ET.fromstring(timeline_plot(profile, timeline, levels=levels, height=420.0, width=134.0 + 300.0))
    (panel,) = classed(root, "panel")
    bottom = float(panel.get("data-top", "")) + 420.0
    # 420 pixels are 4 MiB and 5 %; 300 are three ticks.
    allocated, reserved = (
        next(each for each in panel.iter(f"{SVG}path") if each.get("class") == f"held {word}")
        for word in ("allocated", "reserved")
    )
    assert [float(number) for number in re.findall(r"[0-9.]+", allocated.get("d", ""))] == pytest.approx(
        [62, bottom - 100, 162, bottom - 300, 262, bottom - 200, 362], abs=0.2
    )
    assert [float(number) for number in re.findall(r"[0-9.]+", reserved.get("d", ""))] == pytest.approx(
        [62, bottom - 400, 362], abs=0.2
    )


def test_a_card_within_reach_is_drawn_to_scale() -> None:
    profile = small_profile()
    target = give_room(profile.target, 256 * MIB)
    said = words(plotted(profile.model_copy(update={"target": target})))
    assert "room" in said
    assert "room 256.0 MiB" in said


def test_a_cache_many_times_what_is_alive_is_named_above_the_plot() -> None:
    """As where a program's evaluation reserves what its step does not."""
    profile = small_profile()
    timeline = liveness.timeline(profile)
    alive = timeline.peak.requested_bytes
    for times, above in ((4, False), (5, True)):
        held = timeline.peak.model_copy(update={"allocated_bytes": alive, "reserved_bytes": times * alive})
        said = words(ET.fromstring(timeline_plot(profile, timeline.model_copy(update={"peak": held}))))
        assert ("↑ reserved" in said) == above
        assert any(each.startswith("reserved ") and each.endswith("above the scale") for each in said) == above


def test_what_is_not_known_is_not_drawn() -> None:
    profile = deep_profile(2)
    target = profile.target.model_copy(update={"memory_bytes": None})
    said = words(plotted(profile.model_copy(update={"target": target})))
    assert not {"allocated", "reserved", "room", "budget"} & set(said)
    assert not [line for line in said if "unknown" in line]


def test_the_step_with_a_plan_is_a_line_over_it_phase_by_phase() -> None:
    """Without a plan forward has 2 of 4 ticks, with it 6 of 8: both begin backward at the same place."""
    storages = [Storage(nbytes=4 * MIB, kind=Kind.SAVED, birth=0, death=4)]
    spans = [
        [PhaseSpan(phase=phase, begin=begin, end=end, first_op=0, last_op=0) for phase, begin, end in each]
        for each in (
            [(Phase.FORWARD, 0, 2), (Phase.BACKWARD, 2, 4)],
            [(Phase.FORWARD, 0, 6), (Phase.BACKWARD, 6, 8)],
        )
    ]
    profile = make_profile(ticks=4, storages=storages, phases=spans[0])
    after = PlannedStep(ticks=8, phases=spans[1], moments=((0, MIB), (6, 2 * MIB)))
    peak = liveness.timeline(profile).peak.model_copy(update={"requested_bytes": 2 * MIB})
    root = plotted(profile, after=StepAfter(after, peak), width=134.0 + 400.0, height=420.0)
    (panel,) = classed(root, "panel")
    bottom = float(panel.get("data-top", "")) + 420.0
    (line,) = [each for each in root.iter(f"{SVG}path") if each.get("class") == "after" and "V" in each.get("d", "")]
    # 420 pixels are 4 MiB and 5 %; half of the 400 are forward.
    assert [float(number) for number in re.findall(r"[0-9.]+", line.get("d", ""))] == pytest.approx(
        [62, bottom, 62, bottom - 100, 262, bottom - 200, 462], abs=0.2
    )
    assert {"with the plan: peak 2.00 MiB in forward", "with the plan 4.00 MiB → 2.00 MiB"} <= set(words(root))
    other = StepAfter(after.model_copy(update={"phases": ()}), peak, "other.json")
    (line,) = [
        each
        for each in plotted(profile, after=other, width=534.0).iter(f"{SVG}path")
        if each.get("class") == "after" and "V" in each.get("d", "")
    ]
    assert "H362" in line.get("d", "")  # tick 6 of 8, where the phases are others


def test_an_empty_step() -> None:
    assert "no memory events: nothing to draw" in words(plotted(make_profile(ticks=0)))
    icicle = icicle_svg(make_profile(ticks=0), liveness.timeline(make_profile(ticks=0)))
    assert "nothing is alive at the peak" in words(ET.fromstring(icicle))


@given(profiles(), st.sampled_from([280.0, 366.0, 960.0]))
def test_any_profile_can_be_plotted(profile: Profile, width: float) -> None:
    timeline = liveness.timeline(profile)
    for svg in (
        timeline_plot(profile, timeline, width=width, budget_bytes=7),
        icicle_svg(profile, timeline, width=width),
    ):
        root = ET.fromstring(svg)
        assert root.get("width") is None
        assert float(root.get("viewBox", "").split()[2]) == width
        assert "nan" not in svg


# --- legibility -------------------------------------------------------------------------------------------------------


@pytest.mark.truth
@pytest.mark.parametrize("width", [280.0, 366.0, 720.0, 960.0, 1150.0])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "profile",
    [small_profile(), deep_profile(40), small_profile(model="a_very_long_name." * 12)],
    ids=["small", "deep", "long"],
)
def test_no_text_is_clipped_and_none_lies_on_another(profile: Profile, width: float, after: bool) -> None:
    timeline = with_allocator(
        liveness.timeline(profile),
        allocated_bytes=liveness.timeline(profile).peak.requested_bytes + 512,
        reserved_bytes=220 * MIB,
    )
    other = StepAfter(shorten_step(profile, profile), timeline.peak) if after else None
    options = {"width": width, "budget_bytes": timeline.peak.requested_bytes - 1}
    dots = [CurveDot(0.05 * index, (10 - index) * GIB, f"plan {index}", index == 3) for index in range(8)]
    for svg in (
        timeline_plot(profile, timeline, after=other, **options),
        icicle_svg(profile, timeline, width=width),
        curve_svg(dots, **options),
    ):
        root = ET.fromstring(svg)
        boxes = boxes_of_text(root)
        assert [line for left, _, right, _, line in boxes if left < 0 or right > width + 0.5] == []
        assert [
            line for _, top, _, bottom, line in boxes if top < 0 or bottom > float(root.get("viewBox", "").split()[3])
        ] == []
        over = [
            (a[4], b[4])
            for a, b in combinations(boxes, 2)
            if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
        ]
        assert over == []


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_are_kept_apart(places: list[float]) -> None:
    found = spread(places, [10.0] * len(places), 0.0, 100.0)
    ordered = [found[index] for index in sorted(range(len(places)), key=lambda index: places[index])]
    assert all(b - a >= 10.0 - 1e-6 for a, b in pairwise(ordered))
    assert min(found) >= 5.0 - 1e-6
    assert max(found) <= 95.0 + 1e-6


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([70.0, 20.0], [10.0, 10.0], 0.0, 100.0) == [70.0, 20.0]
    assert spread([50.0, 52.0], [10.0, 10.0], 0.0, 100.0) == [50.0, 60.0]


@pytest.mark.parametrize(
    ("highest", "labels"),
    [
        (0, ["0"]),
        (3, ["0", "1 B", "2 B", "3 B"]),
        (5 * MIB, ["0", "1 MiB", "2 MiB", "3 MiB", "4 MiB", "5 MiB"]),
        (900 * MIB, ["0", "200 MiB", "400 MiB", "600 MiB", "800 MiB"]),
        (int(1.1 * GIB), ["0", "0.2 GiB", "0.4 GiB", "0.6 GiB", "0.8 GiB", "1 GiB"]),
        (80 * GIB, ["0", "20 GiB", "40 GiB", "60 GiB", "80 GiB"]),
    ],
)
def test_the_scale_has_round_numbers(highest: int, labels: list[str]) -> None:
    assert [label for _, label in byte_steps(highest)] == labels


def luminance(color: str) -> float:
    """WCAG 2.1, relative luminance."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_words_and_lines_stand_out(theme: Palette) -> None:
    for color in (theme.text, theme.muted, theme.limit, theme.accent, theme.good, theme.link):
        assert contrast(theme.page, color) >= 4.5
    assert contrast(theme.page, theme.line) >= 3.0


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert set(KINDS) == set(Kind)
    assert len(set(KINDS.values())) == len(Kind)


def test_every_rule_of_the_style_is_bound_to_the_plot() -> None:
    dark = "@media screen and (prefers-color-scheme:dark){"
    assert STYLE.css.count(dark) == 1
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", STYLE.css.replace(dark, ""))
    assert len(rules) > 40
    assert [
        selector
        for rule in rules
        for selector in rule.split(",")
        if not selector.startswith((".fxmem-plot ", "svg.fxmem-plot"))
    ] == []


# --- untrusted names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text(name: str) -> None:
    profile = hostile(name)
    timeline = liveness.timeline(profile)
    for svg in (timeline_plot(profile, timeline), icicle_svg(profile, timeline), curve_svg([CurveDot(0.1, 5, name)])):
        svg.encode()
        root = ET.fromstring(svg)
        assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
            "svg",
            "title",
            "desc",
            "style",
            "rect",
            "g",
            "path",
            "text",
            "circle",
        }
        assert not {
            attribute
            for each in root.iter()
            for attribute in each.attrib
            if attribute.startswith("on") or "href" in attribute
        }
    if name.isprintable() and name:
        assert name in (ET.fromstring(icicle_svg(profile, timeline)).findtext(f"{SVG}title") or "")


def test_ids_are_stable_and_of_the_name_given() -> None:
    profile = small_profile()
    timeline = liveness.timeline(profile)
    assert timeline_plot(profile, timeline) == timeline_plot(profile, timeline)
    for svg in (
        timeline_plot(profile, timeline, name="mine"),
        icicle_svg(profile, timeline, name="mine"),
        curve_svg([], name="mine"),
    ):
        ids = [each.get("id", "mine") for each in ET.fromstring(svg).iter()]
        assert all(each.startswith("mine") for each in ids)
        assert len({each for each in ids if each != "mine"}) == len([each for each in ids if each != "mine"])


def test_a_plan_that_saves_flops_is_plotted_left_of_none() -> None:
    svg = curve_svg([CurveDot(0.0, 100, "as it is"), CurveDot(-0.25, 90, "planned"), CurveDot(0.5, 50, "more")])
    assert "planned: 90 B, -25.0 %" in svg
    saving, same, more = (float(dot.get("cx", "")) for dot in ET.fromstring(svg).iter(f"{SVG}circle"))
    assert LEFT <= saving < same < more


# --- memory by module -------------------------------------------------------------------------------------------------


def cells(svg: str) -> list[tuple[str, float, float, float]]:
    """First line of the tooltip, left, top and width of every cell."""
    found = []
    for each in classed(ET.fromstring(svg), "cell"):
        box = classed(each, "box")[0]
        left, top, width = (float(box.get(key, "")) for key in ("x", "y", "width"))
        found.append(((each.findtext(f"{SVG}title") or "").partition("\n")[0], left, top, width))
    return found


def test_cells_are_as_wide_as_what_they_hold() -> None:
    profile = small_profile()
    # 1000 pixels for 200 MiB and 4 bytes, 5 pixels a MiB, less the gap of 1; and the margins of 12.
    found = {
        title.partition(":")[0]: width
        for title, _, _, width in cells(icicle_svg(profile, liveness.timeline(profile), width=1024.0))
    }
    # block.conv: y, its weight, gradient and AdamW's state for it, and the workspace, 104 MiB; block.act brought
    # grad_y, add the output, x is the input.
    assert found["Small"] == pytest.approx(1000 - 1)
    assert found["block"] == pytest.approx(680 - 1, abs=0.1)
    assert found["block.conv conv"] == pytest.approx(520 - 1, abs=0.1)
    assert found["block.act act"] == pytest.approx(160 - 1, abs=0.1)
    assert found["x"] == pytest.approx(160 - 1, abs=0.1)
    assert "optimizer" not in found


def test_many_narrow_siblings_are_drawn_together() -> None:
    profile = step_of([call(f"f{index}", module=f"m{index}", module_type="Block") for index in range(2000)])
    svg = icicle_svg(profile, liveness.timeline(profile))
    assert len(svg) < 90_000
    together = [title for title, *_ in cells(svg) if "…" in title]
    assert len(together) > 3
    row = [(left, width) for title, left, top, width in cells(svg) if "…" in title]
    assert all(b[0] >= a[0] + a[1] for a, b in pairwise(row))


def test_equal_layers_are_one_cell_with_the_sum() -> None:
    profile = deep_profile(32)
    found = [title for title, *_ in cells(icicle_svg(profile, liveness.timeline(profile)))]
    (run,) = (title for title in found if " x" in title)
    # Each keeps three results of 4 KiB and its add's, and has a weight of 256 KiB.
    assert "layers.0-30 x31: " in run
    assert exact_bytes(31 * (262144 + 4 * 4096)) in run
    assert sum("norm" in title for title in found) == 2


def test_the_optimizers_state_and_temporaries_are_the_weights() -> None:
    shapes = {"a": (4, 2), "b": (4, 2), "c": (3,)}
    nodes = [call(name, module=name, module_type="Linear") for name in shapes]
    nodes.append(Node(name="optimizer", op="optimizer", target="Adam"))
    step = step_of(nodes)
    kinds = ((Kind.PARAMETER, "weight", 32), (Kind.OPTIMIZER_STATE, "weight.exp_avg", 64))
    own = [
        Storage(
            nbytes=nbytes, kind=kind, birth=0, death=5, name=f"{name}.{what}", shape=shape,
            node=place if kind is Kind.PARAMETER else None,
        )
        for place, (name, shape) in enumerate(shapes.items())
        for kind, what, nbytes in kinds
    ]  # fmt: skip
    made = [
        Storage(nbytes=1000 + place, kind=Kind.TEMPORARY, birth=place + 1, death=5, op=3, node=3, shape=shape)
        for place, shape in enumerate([(4, 2), (4, 2), (3,), (9,)])
    ]
    profile = step.model_copy(update={"storages": (*step.storages[:3], *own, *made)})
    parts = {part.label: part.nbytes for part in parts_at_peak(profile, liveness.timeline(profile)).children}
    # What each call keeps, its weight and state, and the temporary of the weight's shape; one is for no weight.
    assert parts == {"a": 7 + 96 + 1000, "b": 8 + 96 + 1001, "c": 9 + 96 + 1002, "optimizer": 1003}


@given(profiles())
def test_no_byte_at_the_peak_is_without_a_part(profile: Profile) -> None:
    timeline = liveness.timeline(profile)
    root = parts_at_peak(profile, timeline)
    assert root.nbytes == timeline.peak.requested_bytes
    assert {kind: nbytes for kind, nbytes in root.by_kind.items() if nbytes} == timeline.peak.by_kind
    assert sum(bytes_at_peak(profile, timeline)) <= timeline.peak.requested_bytes


# --- plans compared ---------------------------------------------------------------------------------------------------


def test_the_curve_joins_what_no_other_plan_beats() -> None:
    dots = [
        CurveDot(0.0, 400, "no plan"),
        CurveDot(0.1, 200, "flat", chosen=True),
        CurveDot(0.2, 300, "worse"),
        CurveDot(None, 100, "hooks"),
    ]
    root = ET.fromstring(curve_svg(dots, budget_bytes=250, width=326.0, height=420.0, measure="allocated bytes"))
    said = words(root)
    assert {
        "1. no plan: 400 B, +0.0 %",
        "2. flat: 200 B, +10.0 % (chosen)",
        "3. worse: 300 B, +20.0 %",
        "4. hooks: 100 B, cost unknown",
    } <= set(said)
    assert {"Peak of the step, allocated bytes", "budget"} <= set(said)
    # One pixel a byte, from y = 36 + 420 up; 200 pixels for 21 %. The worse plan is no step of the stairs.
    (front,) = classed(root, "after")
    assert front.get("d") == "M62 56H157.2V256"
    assert len(list(root.iter(f"{SVG}circle"))) == 3


def test_a_curve_of_nothing() -> None:
    assert "Peak, and FLOPs run again" in words(ET.fromstring(curve_svg([])))


def test_of_many_plans_the_chosen_one_keeps_its_number() -> None:
    dots: list[tuple[float | None, int, str, bool]] = [
        (index / 1000, 1000 - index, "plan", index == 501) for index in range(900)
    ]
    root = ET.fromstring(curve_svg(dots))
    (chosen,) = [each for each in classed(root, "strong") if each.text and each.text.isdecimal()]
    assert chosen.text == "502"
    assert "and 876 more" in words(root)


def run_of(rounds: Sequence[Round], **fields: Any) -> Profile:
    """The small step as a round of a program."""
    program = ProgramRun(**{"ending": "ran to its end", "rounds": rounds, "shown": len(rounds), **fields})
    step = small_profile()
    target = step.target.model_copy(update={"memory_bytes": 2048 * MIB})
    return step.model_copy(
        update={"target": target, "step": step.step.model_copy(update={"program": program, "mode": "train"})}
    )


def taken(requested: int, reserved: int, kept: int, **fields: Any) -> Round:
    return Round(
        requested_bytes=requested * MIB,
        allocated_bytes=requested * MIB,
        reserved_bytes=reserved * MIB,
        retained_bytes=kept * MIB,
        phase=Phase.BACKWARD,
        place="train.py:7",
        operators=3,
        **fields,
    )


def line_of(root: ET.Element, classes: str) -> list[float]:
    """The coordinates of the first line with these classes."""
    line = next(each for each in root.iter(f"{SVG}path") if each.get("class") == classes)
    return [float(number) for number in re.findall(r"[0-9.]+", line.get("d", ""))]


def test_a_run_is_one_axis_of_set_up_steps_evaluation_and_host() -> None:
    """Four stretches of 100 pixels; 170 pixels are 84 MiB and 5 %, about 2 pixels a MiB."""
    host = HostUse(
        peak_bytes=40 * MIB,
        by_round=(30 * MIB, 20 * MIB, 20 * MIB),
        peak_round=0,
        place="train.py:2",
        process_bytes=None,
    )
    evaluation = EvaluationPass(place="train.py:9", batches=50, ran=2, requested_bytes=60 * MIB, end_bytes=70 * MIB)
    profile = run_of(
        [taken(50, 80, 10), taken(60, 84, 10)], setup=taken(25, 30, 5), host=host, evaluations=(evaluation,)
    )
    assert profile.step.program is not None
    root = ET.fromstring(run_svg(profile, profile.step.program, width=62.0 + 84.0 + 400.0))
    way = line_of(root, "after")
    bottom = float(re.findall(r"[0-9.]+", classed(root, "axis")[0].get("d", ""))[1])
    heights = [bottom - nbytes * 170 / (84 * 1.05) for nbytes in (25, 50, 60, 70, 70)]
    assert way[0::2] == pytest.approx([62, 162, 262, 362, 462], abs=0.2)
    assert way[1::2] == pytest.approx(heights, abs=0.2)
    said = words(root)
    assert {"set-up", "1", "2", "evaluation", "reserved", "requested", "kept", "host", "step"} <= set(said)
    tips = titles(root)
    assert (
        "step 2: 60.0 MiB requested, 60.0 MiB allocated, 84.0 MiB reserved, peak at train.py:7; plotted above" in tips
    )
    assert "evaluation at train.py:9, all 50 batches: 70.0 MiB requested" in tips
    assert "the host's peak: 40.0 MiB at train.py:2" in tips


@pytest.mark.parametrize("width", [280.0, 390.0, 960.0])
def test_a_programs_whole_run_is_below_its_step(width: float) -> None:
    profile = run_of([taken(50, 80, 10), *(taken(60, 100, 10) for _ in range(99))])
    assert "The whole run: most bytes in each step" in words(plotted(profile, width=width))
    assert not any("whole run" in each for each in words(plotted(small_profile(), width=width)))
    boxes = boxes_of_text(ET.fromstring(run_svg(profile, profile.step.program, width=width)))
    assert all(left >= 0 and right <= width for left, _, right, _, _ in boxes)


# --- a run that grows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [280.0, 366.0, 720.0])
@pytest.mark.parametrize("until", [None, 40])
def test_a_run_that_grows_is_drawn_as_far_as_it_goes(until: int | None, width: float) -> None:
    grown = Growth(
        holder="losses",
        nbytes=MIB,
        tensors=1,
        shape=(),
        dtype="float32",
        since=1,
        until=until,
        is_endless=until is None,
    )
    rounds = [taken(number, number, number) for number in range(10, 26)]
    profile = run_of(rounds, steady=False, growth_bytes=MIB, grown=(grown,))
    ahead = forecast(profile)
    assert ahead is not None
    assert ahead.is_full is (until is None)
    root = ET.fromstring(run_svg(profile, profile.step.program, width=width))
    step, nbytes = ahead.points[-1]
    end = f"Out of memory at about step {step:,}" if until is None else f"{format_bytes(nbytes)} from step 40 on"
    assert f"{end}" in words(root)
    said = [each for each in titles(root) if each.startswith("step ")]
    assert (len(said), said[0][:26], said[-1][:27]) == (16, "step 1: 10.0 MiB requested", "step 16: 25.0 MiB requested")
    boxes = boxes_of_text(root)
    assert all(left >= 0 and right <= width for left, _, right, _, _ in boxes)
    for one, other in combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1], (one, other)
