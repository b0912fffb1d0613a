"""Checkpointed regions in the drawn graph: what is framed, where the frame stands, and what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.errors import UsageError
from fxmem.hardware.op_classes import is_product
from fxmem.memory import liveness
from fxmem.records.plan import Plan, PlannedStep, Region, Result
from fxmem.records.profile import Node, Phase, Profile, RecomputedRegion, SourceLine
from fxmem.records.units import Application
from fxmem.show.graph import DrawingOptions, dot_source, hierarchy_data
from fxmem.show.graph.boxes import compose
from fxmem.show.graph.checkpoints import checkpoints, describe_effect, find_recomputed
from fxmem.show.graph.labels import box_words, frame_words
from fxmem.show.graph.picture import Frame, Picture
from tests.profiles import deep_profile
from tests.show.graph.test_graph import SVG, boxes_of, call, chain, drawn, step_of, svg_of, text_of, tooltip_of, totals

KIB, MIB = 1 << 10, 1 << 20


def region(
    first: int, last: int, *inner: Region, freed: int = 3 * KIB, flops: int | None = 5_000_000, **fields: Any
) -> Region:
    return Region(first_node=first, last_node=last, freed_bytes=freed, extra_flops=flops, regions=inner, **fields)


def plan_of(profile: Profile, *regions: Region, **fields: Any) -> Plan:
    peak = liveness.timeline(profile).peak
    defaults = {
        "fxmem_version": "0", "torch_version": "2.11.0", "model": profile.model, "inputs": profile.inputs,
        "step": profile.step, "target": profile.target, "strategy": "auto", "chosen": "flat",
        "application": Application.GRAPH, "budget_bytes": None, "regions": regions,
        "before": peak.model_copy(update={"requested_bytes": 8 * MIB, "allocated_bytes": None}),
        "after": peak.model_copy(update={"requested_bytes": 6 * MIB, "allocated_bytes": None}),
        "analysed": True, "forward_flops": 40_000_000, "extra_flops": 10_000_000,
    }  # fmt: skip
    return Plan(**{**defaults, **fields})


def pictured(profile: Profile, plan: Plan | None = None, **options: Any) -> Picture:
    return compose(profile, liveness.timeline(profile), DrawingOptions(**{"max_boxes": 400, "plan": plan, **options}))


def headings(drawing: Picture) -> list[tuple[str, str]]:
    return [(words.title, words.note) for words in frame_words(drawing)]


def around(drawing: Picture, box: int) -> list[Frame]:
    """Frames around a box, the innermost first."""
    found: list[Frame] = []
    frame = drawing.boxes[box].frame
    while frame is not None:
        found.append(drawing.frames[frame])
        frame = drawing.frames[frame].parent
    return found


# --- where a frame stands ---------------------------------------------------------------------------------------------


def test_a_region_that_is_a_module_is_framed_around_it() -> None:
    profile = deep_profile(3)
    drawing = pictured(profile, plan_of(profile, region(4, 8)), fold=False)
    assert headings(drawing) == [
        ("layers", "ModuleList, saved 36.0 KiB"),
        ("layers.0", "Block, saved 12.0 KiB"),
        ("checkpoint", "frees 3.00 KiB; runs 5.0 M FLOPs again"),
        ("layers.1", "Block, saved 12.0 KiB"),
        ("layers.2", "Block, saved 12.0 KiB"),
    ]
    assert [frame.parent for frame in drawing.frames] == [None, 0, 0, 2, 0]


def test_a_region_in_a_module_is_framed_inside_it() -> None:
    profile = deep_profile(2)
    drawing = pictured(profile, plan_of(profile, region(1, 3)), fold=False)
    assert [title for title, _ in headings(drawing)] == ["layers", "layers.0", "checkpoint", "layers.1"]
    framed = [[frame.checkpoint is not None for frame in around(drawing, box)] for box in range(4)]
    assert framed == [[False, False], [True, False, False], [True, False, False], [False, False]]


def test_modules_are_split_where_a_region_cuts_them() -> None:
    profile = deep_profile(3)
    drawing = pictured(profile, plan_of(profile, region(2, 9)), fold=False)
    assert [title for title, _ in headings(drawing)] == [
        "layers",
        "layers.0",
        "checkpoint",
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    # `norm` of the last block is alone in its part of it, and needs no frame there.
    assert [box.shown for box in drawing.boxes] == [(index,) for index in range(13)]
    assert [words.title for words in box_words(drawing)][8] == "layers.2"
    assert [len(around(drawing, box)) for box in range(12)] == [2, 2, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2]


def test_regions_within_a_region_are_framed_within_its_frame() -> None:
    profile = deep_profile(4)
    drawing = pictured(profile, plan_of(profile, region(0, 16, region(4, 8), region(9, 11))), fold=False)
    found = [
        (frame.checkpoint.first_node, frame.checkpoint.last_node, frame.parent)
        for frame in drawing.frames
        if frame.checkpoint is not None
    ]
    assert [(first, last) for first, last, _ in found] == [(0, 16), (4, 8), (9, 11)]
    assert drawing.frames[0].checkpoint is not None
    assert drawing.frames[0].parent is None


def test_views_are_not_drawn_as_one_across_the_border_of_a_region() -> None:
    nodes = [
        call("a", output_bytes=8),
        call("view", 0, view_of=0),
        call("transpose", 1, view_of=0),
        call("b", 2, output_bytes=8),
    ]
    profile = step_of(nodes)
    assert [box.shown for box in pictured(profile).boxes] == [(0,), (1, 2), (3,)]
    assert [box.shown for box in pictured(profile, plan_of(profile, region(0, 2))).boxes] == [(0,), (1,), (2,), (3,)]


def test_a_parameter_stands_with_the_call_that_reads_it_wherever_the_region_ends() -> None:
    weight = Node(name="weight", op="get_attr", target="weight", params_bytes=40)
    profile = step_of([weight, call("mul", 0, output_bytes=8), call("add", 1)])
    drawing = pictured(profile, plan_of(profile, region(0, 1), region(2, 3)))
    assert [(box.nodes, len(around(drawing, index))) for index, box in enumerate(drawing.boxes)] == [
        ((0, 1), 0),
        ((2,), 1),
    ]


@st.composite
def split(draw: st.DrawFn, first: int, last: int, levels: int) -> list[Region]:
    """Regions of `[first, last)` that lie apart, some with others in them."""
    found: list[Region] = []
    at = first
    while at < last:
        at += draw(st.integers(0, 3))
        end = at + draw(st.integers(1, 9))
        if end > last:
            break
        inner = draw(split(at, end, levels - 1)) if levels and draw(st.booleans()) else []
        found.append(region(at, end, *inner, freed=draw(st.sampled_from([5, 7]))))
        at = end
    return found


@pytest.mark.truth
@given(st.data(), st.booleans(), st.sampled_from([None, 1, 2]), st.sampled_from([1, 7, 400]))
def test_whatever_the_regions_frames_hold_what_they_should(
    data: st.DataObject, fold: bool, depth: int | None, max_boxes: int
) -> None:
    profile = deep_profile(6)
    plan = plan_of(profile, *data.draw(split(0, 24, 2)))
    plain, drawing = pictured(profile), pictured(profile, plan, fold=fold, depth=depth, max_boxes=max_boxes)
    assert totals(drawing.boxes) == totals(plain.boxes)
    assert all(edge.tail < edge.head for edge in drawing.edges)
    for index in range(len(drawing.frames)):
        inside = [
            box
            for box in range(len(drawing.boxes))
            if any(frame is drawing.frames[index] for frame in around(drawing, box))
        ]
        assert inside == list(range(inside[0], inside[-1] + 1))
    regions = sorted((each.first_node, each.last_node) for each in plan.all_regions())
    if not fold:
        # Every region is a frame around the boxes of its nodes, or is said of the one box that holds it.
        framed = [
            (each.checkpoint.first_node, each.checkpoint.last_node)
            for each in drawing.frames
            if each.checkpoint is not None
        ]
        said = [
            (each.first_node, each.last_node)
            for box in drawing.boxes
            for each, times in box.checkpoints
            for _ in range(times)
        ]
        assert sorted([*framed, *said]) == regions
        for box in range(len(drawing.boxes)):
            nodes = drawing.boxes[box].nodes
            mine = {
                (each.checkpoint.first_node, each.checkpoint.last_node)
                for each in around(drawing, box)
                if each.checkpoint is not None
            }
            hidden = {(each.first_node, each.last_node) for each, _ in drawing.boxes[box].checkpoints}
            assert mine | hidden >= {(a, b) for a, b in regions if a <= nodes[0] and nodes[-1] < b}
            assert all(a <= nodes[0] and nodes[-1] < b for a, b in mine)


# --- what a frame says ------------------------------------------------------------------------------------------------


def test_equal_regions_are_folded_and_counted() -> None:
    profile = deep_profile(8)
    drawing = pictured(profile, plan_of(profile, *(region(at, at + 4) for at in range(4, 28, 4))))
    assert headings(drawing)[2] == (
        "checkpoint x6: layers.1-6",
        "frees 3.00 KiB each, 18.0 KiB together; runs 5.0 M FLOPs again each",
    )
    assert [frame.alike for frame in drawing.frames] == [1, 1, 6, 1, 1]
    # The one that frees more stands alone.
    unequal = [*(region(at, at + 4) for at in range(4, 24, 4)), region(24, 28, freed=4 * KIB)]
    titles = [title for title, _ in headings(pictured(profile, plan_of(profile, *unequal)))]
    assert titles[2:5] == ["checkpoint x5: layers.1-5", "layers.1", "checkpoint"]


def test_a_frame_tells_the_region_in_full() -> None:
    profile = deep_profile(2)
    line = SourceLine(
        file="/home/user/env/lib/python3.12/site-packages/deep/model.py",
        line=7,
        function="forward",
        code="x = block(x)",
    )
    root = drawn(
        profile,
        plan=plan_of(
            profile, region(0, 4, source=line, random=False, modules=("layers.0",)), region(4, 8, freed=0, flops=None)
        ),
        fold=False,
    )
    first, second = (
        each for each in root.iter(f"{SVG}g") if each.get("class") == "frame checkpoint" and each.get("id")
    )
    assert (first.get("id"), second.get("id")) == ("checkpoint-layers_0_norm", "checkpoint-layers_1_norm")
    assert tooltip_of(first).splitlines() == [
        "checkpoint: layers.0: layers_0_norm to layers_0_add, 4 nodes",
        "frees 3.00 KiB (3,072 bytes) of what is saved for backward",
        "FLOPs run again: 5.0 M",
        "draws no random numbers",
        "deep/model.py:7: x = block(x)",
        "the figures inside are those of the step without the plan",
    ]
    assert "FLOPs run again: unknown" in tooltip_of(second)
    (heading,) = (
        each
        for each in root.iter(f"{SVG}g")
        if each.get("class") == "heading checkpoint" and "unknown" in text_of(each)
    )
    assert text_of(heading) == "checkpointfrees 0 B; runs an unknown number of FLOPs again"


def test_a_frame_tells_what_is_made_again_and_what_is_kept() -> None:
    profile = deep_profile(2)
    remade = region(
        0,
        4,
        remakes=(Result(operator="aten.relu.default", number=0), Result(operator="aten.relu.default", number=1)),
        within="layers.0",
    )
    root = drawn(profile, plan=plan_of(profile, remade, region(4, 8, keeps=(0, 2))), fold=False)
    first, second = (
        each for each in root.iter(f"{SVG}g") if each.get("class") == "frame checkpoint" and each.get("id")
    )
    assert (
        "recomputes 2 saved results of its operators, one by one; nothing of the program runs twice"
        in tooltip_of(first).splitlines()
    )
    assert "random number" not in tooltip_of(first)
    assert (
        "keeps the results of its products 0, 2 (counted from 0), which do not run again"
        in tooltip_of(second).splitlines()
    )
    says = [text_of(each) for each in root.iter(f"{SVG}g") if each.get("class") == "heading checkpoint"]
    assert any(text.endswith("; recomputes 2 saved results") for text in says)
    assert any(text.endswith("; keeps 2 results of products") for text in says)


def test_regions_in_a_box_are_said_there() -> None:
    profile = deep_profile(4)
    plan = plan_of(profile, region(0, 4, region(1, 3, flops=1_000_000)), region(4, 8), region(8, 10, freed=KIB))
    (box, *_) = box_words(pictured(profile, plan, depth=1))
    # Of nested ones only the outer frees anything while forward runs; all are run again.
    assert "recomputes 10 of 16 calls, frees 7.00 KiB" in box.lines
    assert "4 checkpoints inside: frees 7.00 KiB; runs 16.0 M FLOPs again" in box.tooltip
    one = plan_of(profile, region(0, 4))
    assert "recomputes 4 of 16 calls, frees 3.00 KiB" in box_words(pictured(profile, one, depth=1))[0].lines


def test_regions_folded_in_a_box_are_all_counted() -> None:
    profile = deep_profile(8)
    plan = plan_of(profile, *(region(at, at + 4) for at in range(0, 32, 4)))
    (box, *_) = box_words(pictured(profile, plan, depth=1))
    assert (box.lines[-1], box.again) == ("recomputes 32 of 32 calls, frees 24.0 KiB", 1.0)


def test_what_the_program_checkpoints_itself_is_framed_without_a_plan() -> None:
    profile = deep_profile(
        3, recomputed=(RecomputedRegion(first_node=0, last_node=8), RecomputedRegion(first_node=4, last_node=8))
    )
    drawing = pictured(profile, fold=False)
    framed = [words for words in frame_words(drawing) if words.checkpoint]
    assert [words.note for words in framed] == [
        "in the program itself; runs at most 1.0 M FLOPs again",
        "in the program itself; runs at most 524.3 K FLOPs again",
    ]
    assert "the program itself checkpoints it; the figures inside are as it runs" in framed[0].tooltip
    assert "without the plan" not in text_of(drawn(profile))
    (box, *_) = box_words(pictured(profile, depth=1))
    assert (box.lines[-1], box.again) == ("recomputes 8 of 12 calls", pytest.approx(2 / 3))
    assert "2 checkpoints inside: in the program itself; runs at most 1.6 M FLOPs again" in box.tooltip


def test_an_operator_without_a_formula_leaves_the_cost_unknown() -> None:
    profile = step_of(
        [call("f", forward_flops=None), call("g", 0)], recomputed=(RecomputedRegion(first_node=0, last_node=2),)
    )
    assert (
        describe_effect([(each, 1) for each in checkpoints(profile)])
        == "in the program itself; runs at most an unknown number of FLOPs again"
    )


def test_a_plan_and_the_programs_own_are_both_drawn_unless_they_cross() -> None:
    own = (RecomputedRegion(first_node=1, last_node=3), RecomputedRegion(first_node=5, last_node=9))
    profile = deep_profile(4, recomputed=own)
    plan = plan_of(profile, region(0, 4), region(6, 12))
    drawn = checkpoints(profile, plan)
    assert [(each.first_node, each.last_node, each.region is None, each.level) for each in drawn] == [
        (0, 4, False, 0), (1, 3, True, 1), (6, 12, False, 0),
    ]  # fmt: skip


def test_part_of_a_region_is_called_so() -> None:
    profile = deep_profile(4)
    drawing = pictured(profile, plan_of(profile, region(0, 8), region(8, 9)), focus="layers.1")
    assert headings(drawing) == [("part of a checkpoint", "frees 3.00 KiB; runs 5.0 M FLOPs again")]
    assert "only what is in layers.1 is drawn" in frame_words(drawing)[0].tooltip
    assert [words.title for words in box_words(drawing)] == ["norm", "linear", "act", "layers_1_add"]


def test_small_regions_share_boxes_when_they_are_too_many() -> None:
    profile = chain(*range(1, 1001))
    plan = plan_of(profile, *(region(at, at + 2) for at in range(1, 999, 2)))
    drawing = pictured(profile, plan, max_boxes=20)
    assert [box.kind for box in drawing.boxes] == ["input", *["group"] * (len(drawing.boxes) - 2), "call"]
    assert 5 < len(drawing.boxes) <= 20
    assert sum(times for box in drawing.boxes for _, times in box.checkpoints) == 499
    assert all(frame.checkpoint is None for frame in drawing.frames)
    assert totals(drawing.boxes)[1] == sum(range(1, 1001))


def test_large_regions_keep_their_frames_around_shared_boxes() -> None:
    profile = chain(*range(1, 1001))
    drawing = pictured(profile, plan_of(profile, region(1, 401), region(401, 801)), max_boxes=20)
    assert [title for title, _ in headings(drawing)] == ["checkpoint", "checkpoint"]
    assert [box.frame for box in drawing.boxes].count(0) == [box.frame for box in drawing.boxes].count(1) == 5
    assert len(drawing.boxes) <= 20


# --- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {},
            (
                "1 region of the traced graph (flat); peak 8.00 MiB -> 6.00 MiB (-25.0 %) requested; 10.0 M FLOPs run "
                "again, 25.0 % of the forward's"
            ),
        ),
        ({"analysed": False}, "peak 8.00 MiB -> 6.00 MiB (-25.0 %) requested, an estimate; 10.0 M FLOPs run again"),
        ({"extra_flops": None}, "requested; an unknown number of FLOPs run again"),
        ({"regions": ()}, "no checkpoints"),
    ],
)
def test_the_head_tells_the_plan(fields: dict[str, Any], said: str) -> None:
    profile = deep_profile(2)
    assert said in re.sub(
        " +", " ", text_of(drawn(profile, plan=plan_of(profile, region(0, 4), **fields))).replace(" | ", " ")
    )


def test_a_peak_in_the_allocators_blocks_is_told_where_both_are_known() -> None:
    profile = deep_profile(2)
    plan = plan_of(profile, region(0, 4))
    before, after = (
        peak.model_copy(update={"allocated_bytes": peak.requested_bytes + MIB}) for peak in (plan.before, plan.after)
    )
    text = text_of(drawn(profile, plan=plan.model_copy(update={"before": before, "after": after})))
    assert "peak 9.00 MiB -> 7.00 MiB (-22.2 %) allocated" in text.replace(" | ", " ")
    assert "8.00 MiB -> 6.00 MiB" in text_of(drawn(profile, plan=plan.model_copy(update={"before": before}))).replace(
        " | ", " "
    )


def test_the_legend_explains_dashed_frames_where_there_are_any() -> None:
    profile = deep_profile(2)
    said = text_of(drawn(profile, plan=plan_of(profile, region(0, 4)))).replace(" | ", " ")
    assert "Hatched: backward runs it again" in said
    assert "Dashed frame: a checkpointed region" in said
    assert "the step without the plan" in said
    assert not {"checkpoint", "Hatched"} & set(text_of(drawn(profile)).split())


# --- the step with the plan -------------------------------------------------------------------------------------------


def planned(profile: Profile, saved: Sequence[int], *regions: Region, node: str, **fields: Any) -> Plan:
    """A plan that was analysed: what each node keeps with it, and where the peak is."""
    step = PlannedStep(ticks=9, phases=(), moments=((0, 1), (4, 6 * MIB)), saved_bytes=tuple(saved))
    peak = liveness.timeline(profile).peak.model_copy(update={"requested_bytes": 6 * MIB, "node": node})
    return plan_of(profile, *regions, planned=step, after=peak, **fields)


def test_colours_and_peak_are_those_of_the_step_with_the_plan() -> None:
    """The second of two equal layers runs again and keeps nothing; the peak moves into the first."""
    profile = deep_profile(2)
    saved = [node.saved_bytes for node in profile.nodes]
    plan = planned(profile, [*saved[:4], *(0 for _ in saved[4:])], region(4, 8), node=profile.nodes[1].name)
    with_plan, without = (pictured(profile, plan, fold=False, before=before) for before in (False, True))
    assert [box.figures.saved for box in with_plan.boxes[:8]] == [*saved[:4], 0, 0, 0, 0]
    assert [box.figures.saved for box in without.boxes[:8]] == saved[:8]
    assert [index for index, box in enumerate(with_plan.boxes) if box.peak] == [1]
    assert [index for index, box in enumerate(without.boxes) if box.peak] != [1]
    assert [words.again for words in box_words(with_plan)][:8] == [0.0] * 4 + [1.0] * 4
    data = hierarchy_data(profile, liveness.timeline(profile), DrawingOptions(plan=plan))
    assert list(data["heats"]) == ["saved", "before", "params", "flops"]  # what is alive at that peak is not known
    sums = [sum(part["values"][at] for part in data["parts"] if "size" not in part) for at in (0, 1)]
    assert sums == [sum(saved[:4]), sum(saved)]
    assert "PEAK 6.00 MiB" in text_of(drawn(profile, plan=plan, fold=False))
    assert "are those of the step with the plan" in text_of(drawn(profile, plan=plan)).replace(" | ", " ")


def test_single_results_are_hatched_and_not_framed() -> None:
    """Of the first layer the second call runs again, of the second layer the third waits in the host's memory."""
    profile = deep_profile(2)
    names = [node.name for node in profile.nodes]
    calls = [(op.name, op.node) for op in profile.ops]
    sent = next(name for name, node in calls if node == 6)
    number = [name for name, node in calls[: [node for _, node in calls].index(6)]].count(sent)
    regions = (
        region(1, 2, nodes=(names[1],), remakes=(Result(operator="aten.a.default", number=0),)),
        region(6, 7, nodes=(names[6],), offloads=(Result(operator=sent, number=number),)),
    )
    drawing = pictured(profile, plan_of(profile, *regions, application=Application.OPERATORS), fold=False)
    assert not any(frame.checkpoint for frame in drawing.frames)
    assert [index for index, words in enumerate(box_words(drawing)) if words.again] == [1]
    folded = box_words(pictured(profile, plan_of(profile, *regions, application=Application.OPERATORS), depth=1))
    assert "recomputes 1 of 8 calls" in folded[0].lines
    root = drawn(profile, plan=plan_of(profile, *regions, application=Application.OPERATORS), depth=1)
    assert len([each for each in root.iter(f"{SVG}path") if each.get("class") == "again"]) == 2  # one is the key's


def test_layers_of_which_one_runs_again_are_not_one_box() -> None:
    profile = deep_profile(4)
    names = [node.name for node in profile.nodes]
    again = region(5, 6, nodes=(names[5],), remakes=(Result(operator="aten.a.default", number=0),))
    plan = plan_of(profile, again, application=Application.OPERATORS)
    assert len(pictured(profile).boxes) < len(pictured(profile, plan).boxes)


def test_products_whose_results_are_kept_do_not_run_again() -> None:
    profile = deep_profile(2)
    products = [op.node for op in profile.ops if op.phase is Phase.FORWARD and is_product(op.name)]
    everything = find_recomputed(profile, plan_of(profile, region(0, 8)))
    kept = find_recomputed(profile, plan_of(profile, region(0, 8, keeps=(0,))))
    assert everything - kept == set(products[:1])


# --- plans that are none for this step --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regions", "fields", "message"),
    [
        (
            [region(0, 4)],
            {"inputs": ()},
            "expected a plan for this step; it is for inputs none, not ",
        ),
        (
            [region(8, 10)],
            {},
            "expected a plan for this step; it is for another model than Deep, of more than its 9 nodes: plan it anew",
        ),
        (
            [region(0, 4), region(3, 6)],
            {},
            "expected a plan whose regions hold nodes and lie apart or within each other",
        ),
        (
            [region(0, 4, region(2, 5))],
            {},
            "expected a plan whose regions hold nodes and lie apart or within each other",
        ),
        ([region(3, 3)], {}, "expected a plan whose regions hold nodes"),
        ([region(-2, 3)], {}, "expected a plan for this step; it is for another model"),
    ],
)
def test_a_plan_that_does_not_belong_here_is_refused(
    regions: Sequence[Region], fields: dict[str, Any], message: str
) -> None:
    profile = deep_profile(2)
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        drawn(profile, plan=plan_of(profile, *regions, **fields))


# --- places and DOT --------------------------------------------------------------------------------------------------


def test_regions_are_drawn_around_their_boxes() -> None:
    profile = deep_profile(5)
    plan = plan_of(profile, region(2, 9), region(10, 18, region(12, 16)))
    root = ET.fromstring(svg_of(profile, plan=plan, fold=False))

    def place(part: ET.Element) -> tuple[float, float, float, float]:
        x, y, width, height = (
            float(part.findall(f"{SVG}rect")[-1].get(name, "nan")) for name in ("x", "y", "width", "height")
        )
        return x, y, x + width, y + height

    frames = {
        each.get("id"): place(each)
        for each in root.iter(f"{SVG}g")
        if each.get("class") == "frame checkpoint" and each.get("id")
    }
    boxes = [place(each) for each in boxes_of(root).values()]
    assert list(frames) == ["checkpoint-layers_0_act", "checkpoint-layers_2_act", "checkpoint-layers_3_norm"]
    for (left, top, right, bottom), (first, last) in zip(frames.values(), [(2, 9), (10, 18), (12, 16)], strict=True):
        inside = [
            index
            for index, (x0, y0, x1, y1) in enumerate(boxes)
            if left < x0 and x1 < right and top < y0 and y1 < bottom
        ]
        touched = [
            index
            for index, (x0, y0, x1, y1) in enumerate(boxes)
            if left < x1 and x0 < right and top < y1 and y0 < bottom
        ]
        assert inside == touched == list(range(first, last))


def test_the_dot_source_has_the_regions_as_clusters() -> None:
    profile = deep_profile(4)
    options = DrawingOptions(plan=plan_of(profile, region(2, 9), region(9, 11)), fold=False)
    source = dot_source(profile, liveness.timeline(profile), options)
    assert source.count("class=checkpoint") == 2
    assert source.count("graph [class=module") + 2 == source.count("subgraph cluster_")
    assert "checkpoint  frees 3.00 KiB; runs 5.0 M FLOPs again\\l" in source
    assert "Plan: 2 regions of the traced graph (flat); peak 8.00 MiB -> 6.00 MiB (-25.0 %)" in source
    dot = shutil.which("dot")
    if dot is not None:
        done = subprocess.run([dot, "-Tsvg"], input=source.encode(), capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        dashed = [
            each
            for each in ET.fromstring(done.stdout).iter(f"{SVG}path")
            if each.get("stroke-dasharray") and each.get("stroke") == "#00785a"
        ]
        assert len(dashed) == 2


@pytest.mark.parametrize(
    "name", ['"><script>alert(1)</script>', "a\n->b", "\x00\x1b[31m", "'; } digraph {"], ids=range(4)
)
def test_no_name_in_a_region_breaks_the_drawing(name: str) -> None:
    nodes = [call(f"{name}{i}", *([i - 1] if i else []), module=f"{name}.{i}", output_bytes=i) for i in range(6)]
    profile = step_of(nodes, modules={name: name})
    line = SourceLine(file=name, line=1, code=name)
    plan = plan_of(profile, region(0, 2, source=line, nodes=(name,), modules=(name,)), region(2, 5, source=line))
    root = drawn(profile, plan=plan, fold=False)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]*", each.get("id", "")) for each in root.iter())
    assert all(char.isprintable() or char == "\n" for char in "".join(root.itertext()))
    assert "\0" not in dot_source(profile, liveness.timeline(profile), DrawingOptions(plan=plan))
