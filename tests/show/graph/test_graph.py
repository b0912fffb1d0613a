"""The drawn graph: what is in it, that its numbers are the records', that no name breaks it, and that no engine is
needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from graphviz.quoting import quote
from hypothesis import given
from hypothesis import strategies as st

import fxmem.__main__
from fxmem.errors import UsageError
from fxmem.memory import liveness
from fxmem.records.profile import Kind, Node, Op, Phase, Profile, Storage, TensorInfo
from fxmem.records.units import exact_bytes, format_bytes
from fxmem.show.graph import DrawingOptions, Heat, dot_source, render
from fxmem.show.graph.boxes import compose
from fxmem.show.graph.dot import escape
from fxmem.show.graph.labels import HEATS, STEPS, box_words, frame_words, heat_step
from fxmem.show.graph.layout import SCREEN, GraphLayout, Rectangle, arrange
from fxmem.show.graph.picture import Box, Picture, heat_value
from fxmem.show.svg import DARK, LIGHT, Palette
from tests import ROOT
from tests.memory.test_report_reader import small_report
from tests.profiles import deep_profile, make_profile, profiles, small_profile

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"
EXAMPLE = ROOT / "examples" / "draw_resnet50.py"

# What a hostile model might call itself, or a wary one by accident.
NAMES = [
    '"><script>alert(1)</script>',
    'a\n->"b',
    "\x00\x1b[31m\x7f",
    "]]>&amp;&#60;",
    "\\N\\",
    "'; } digraph {",
    "\ud800\ufffe\u202e",
    "日本語" * 40,
    "",
]


def svg_of(profile: Profile, **options: Any) -> str:
    """The SVG; of at most 400 boxes unless the options give another number."""
    return render(profile, liveness.timeline(profile), DrawingOptions(**{"max_boxes": 400, **options})).svg


def drawn(profile: Profile, **options: Any) -> ET.Element:
    """The same, parsed."""
    return ET.fromstring(svg_of(profile, **options))


def pictured(profile: Profile, **options: Any) -> Picture:
    """What is drawn, without places."""
    return compose(profile, liveness.timeline(profile), DrawingOptions(**{"max_boxes": 400, **options}))


def boxes_of(root: ET.Element) -> dict[str, ET.Element]:
    """The boxes of an SVG by their ids."""
    found = [each for each in root.iter(f"{SVG}g") if "box" in each.get("class", "").split()]
    ids = {each.get("id", ""): each for each in found}
    assert len(ids) == len(found)
    return ids


def text_of(element: ET.Element) -> str:
    """What stands in an element, its tooltip left out."""
    return " | ".join("".join(each.itertext()) for each in element.iter(f"{SVG}text"))


def tooltip_of(element: ET.Element) -> str:
    return element.findtext(f"{SVG}title") or ""


def step_of(nodes: list[Node], **fields: Any) -> Profile:
    """A forward in which every node runs one operator of one tick; a storage of `7 + index` bytes comes with it and
    stays."""
    storages = [
        Storage(nbytes=7 + index, kind=Kind.SAVED, birth=index + 1, death=len(nodes) + 1, op=index, node=index)
        for index in range(len(nodes))
    ]
    ops = [
        Op(name="aten.f.default", node=index, phase=Phase.FORWARD, begin=index + 1, end=index + 2)
        for index in range(len(nodes))
    ]
    return make_profile(ticks=len(nodes) + 1, nodes=nodes, ops=ops, storages=storages, **fields)


def call(name: str, *inputs: int, **fields: Any) -> Node:
    return Node(
        **{
            "name": name,
            "op": "call_function",
            "target": f"torch.{name}",
            "inputs": inputs,
            "forward_flops": 0,
            "backward_flops": 0,
            **fields,
        }
    )


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_a_box_says_what_its_node_is_and_holds() -> None:
    boxes = boxes_of(drawn(small_profile()))
    assert list(boxes) == ["node-x", "node-block_conv", "node-block_act", "node-add", "node-loss", "node-optimizer"]
    assert text_of(boxes["node-x"]) == "x | input, 8x16x64x64 float32"
    assert text_of(boxes["node-block_conv"]) == (
        "conv | saved 32.0 MiB | Conv2d, 8x16x64x64 float32 | output 32.0 MiB, params 2.00 MiB, flops 3.0 G | PEAK "
        "200.0 MiB in backward"
    )
    tooltip = tooltip_of(boxes["node-block_conv"]).splitlines()
    assert tooltip[:3] == [
        "block_conv: call_module block.conv",
        "module block.conv (Conv2d)",
        "output 8x16x64x64 float32",
    ]
    assert f"saved for backward {exact_bytes(32 * MIB)}" in tooltip
    assert f"scratch {exact_bytes(64 * MIB)}" in tooltip
    assert "FLOPs 3.0 G forward, 6.0 G backward" in tooltip
    assert "/home/user/project/model.py:17: x = self.conv(x)" in tooltip
    assert "flops unknown" in text_of(boxes["node-block_act"])


def test_the_head_names_model_inputs_target_and_the_split_of_the_peak() -> None:
    root = drawn(small_profile())
    written = text_of(root)
    flowing = written.replace(" | ", " ")
    for part in (
        "Small: memory of one training step",
        "x 8x16x64x64 float32",
        "tiny (Tiny card, sm_90, 1.48 GiB)",
        "optimizer: AdamW",
        "requested at once, in backward",
    ):
        assert part in flowing
    peak = liveness.timeline(small_profile()).peak
    for kind, nbytes in peak.by_kind.items():
        assert f"{kind.value.replace('_', ' ')} | {format_bytes(nbytes)}" in written
    assert root.get("data-heat") == "saved"
    assert root.findtext(f"{SVG}title") == "Small: memory of one training step"


def test_the_head_says_that_a_step_does_not_fit() -> None:
    timeline = liveness.timeline(small_profile())
    peak = timeline.peak.model_copy(update={"fits": False, "room_bytes": MIB, "reserved_bytes": 2 * MIB})
    svg = render(small_profile(), timeline.model_copy(update={"peak": peak})).svg
    assert "does NOT fit" in svg


def test_frames_are_modules_with_the_sums_of_what_is_inside() -> None:
    root = drawn(small_profile())
    (frame,) = (each for each in root.iter(f"{SVG}g") if each.get("class") == "frame")
    (heading,) = (each for each in root.iter(f"{SVG}g") if each.get("class") == "heading")
    assert frame.get("id") == "module-block"
    assert text_of(heading) == "blockBlock, saved 64.0 MiB"
    assert f"parameters and buffers {exact_bytes(2 * MIB)}" in tooltip_of(frame)


def test_the_same_profile_makes_the_same_drawing() -> None:
    profile = deep_profile(5)
    assert svg_of(profile) == svg_of(profile)


def test_an_alias_says_whose_memory_it_is() -> None:
    tensor = (TensorInfo(shape=(2, 3), dtype="float32"),)
    nodes = [
        call("linear", output_bytes=24, outputs=tensor),
        call("relu_", 0, view_of=0, saved_bytes=24, outputs=tensor),
        call("t", 1, view_of=0, outputs=tensor),
        call("end", 2),
    ]
    profile = step_of(nodes)
    ops = (profile.ops[0], profile.ops[1].model_copy(update={"name": "aten.relu_.default"}), *profile.ops[2:])
    boxes = boxes_of(drawn(profile.model_copy(update={"ops": ops})))
    assert "in place on linear" in text_of(boxes["node-relu_"])
    assert text_of(boxes["node-t"]) == "t | 2x3 float32 | view of linear"
    assert ["alias" in box.get("class", "") for box in boxes.values()] == [False, False, True, False]


def test_views_in_a_row_share_a_box_unless_another_reads_between() -> None:
    nodes = [
        call("a", output_bytes=8),
        call("view", 0, view_of=0),
        call("transpose", 1, view_of=0),
        call("b", 2, output_bytes=8),
        call("cat", 1, 3),
    ]
    assert [box.shown for box in pictured(step_of(nodes[:4])).boxes] == [(0,), (1, 2), (3,)]
    assert [box.shown for box in pictured(step_of(nodes)).boxes] == [(0,), (1,), (2,), (3,), (4,)]
    assert [box.shown for box in pictured(step_of(nodes[:4]), fold=False).boxes] == [(0,), (1,), (2,), (3,)]


def test_parameters_are_counted_where_they_are_first_read() -> None:
    weight = Node(name="weight", op="get_attr", target="weight", params_bytes=40)
    drawing = pictured(step_of([weight, call("mul", 0, output_bytes=8), call("add", 0, 1)]))
    assert [(box.nodes, box.shown, box.figures.params) for box in drawing.boxes] == [
        ((0, 1), (1,), 40),
        ((2,), (2,), 0),
    ]
    assert "first to read weight" in box_words(drawing)[0].tooltip


def test_an_inference_step_draws_no_loss_and_no_optimizer() -> None:
    profile = small_profile()
    kept = [node for node in profile.nodes if node.op not in ("loss", "optimizer")]
    rows = [Node(name="loss", op="loss", target="loss"), Node(name="optimizer", op="optimizer", target="none")]
    step = profile.step.model_copy(update={"mode": "infer", "optimizer": None, "loss": None})
    changed = step_of(kept).model_copy(update={"nodes": (*kept, *rows), "step": step})
    assert [profile.nodes[box.nodes[0]].name for box in pictured(changed).boxes] == [
        "x",
        "block_conv",
        "block_act",
        "add",
    ]


# --- heat -------------------------------------------------------------------------------------------------------------

RECORDED: dict[Heat, Any] = {
    "saved": lambda node: node.saved_bytes,
    "output": lambda node: node.output_bytes,
    "params": lambda node: node.params_bytes,
    # An input computes nothing, so that nothing of it is unknown.
    "flops": lambda node: (
        0
        if node.op == "placeholder"
        else None
        if node.forward_flops is None
        else node.forward_flops + (node.backward_flops or 0)
    ),
    "live": lambda node: node.live_bytes.max,
    "scratch": lambda node: node.scratch_bytes.max,
}


@pytest.mark.parametrize("heat", get_args(Heat))
@pytest.mark.parametrize("profile", [small_profile(), deep_profile(3)], ids=["small", "deep"])
def test_heat_is_the_number_of_the_record(profile: Profile, heat: Heat) -> None:
    drawing = pictured(profile, heat=heat, fold=False)
    values = [heat_value(heat, box.figures) for box in drawing.boxes]
    assert values == [RECORDED[heat](profile.nodes[box.shown[0]]) for box in drawing.boxes]
    largest = max(value or 0 for value in values)
    assert [words.heat for words in box_words(drawing)] == [heat_step(value, largest) for value in values]
    for element, value in zip(boxes_of(drawn(profile, heat=heat, fold=False)).values(), values, strict=True):
        if value and heat != "flops":
            assert f"{heat} {format_bytes(value)}" in text_of(element)


def test_each_shade_stands_for_half_of_the_next() -> None:
    assert [heat_step(value, 1024) for value in (None, 0, 1, 16, 17, 32, 33, 512, 513, 1024)] == [
        None,
        0,
        1,
        1,
        2,
        2,
        3,
        6,
        7,
        7,
    ]
    assert set(HEATS) == set(get_args(Heat))


def test_an_unknown_number_of_flops_has_no_shade() -> None:
    box = boxes_of(drawn(small_profile(), heat="flops"))["node-block_act"]
    assert "hu" in box.get("class", "").split()
    assert "flops unknown" in text_of(box)


def luminance(color: str) -> float:
    """Relative luminance, WCAG 2.1."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("palette", "rising"), [(LIGHT, False), (DARK, True)], ids=["light", "dark"])
def test_colours_read_in_grey_and_carry_their_text(palette: Palette, rising: bool) -> None:
    assert len(palette.shades) == STEPS + 1
    greys = [luminance(shade.fill) for shade in palette.shades]
    assert all((after > before) is rising for before, after in pairwise(greys))
    assert all(contrast(shade.fill, shade.text) >= 4.5 for shade in palette.shades)
    assert all(contrast(palette.page, color) >= 4.5 for color in (palette.text, palette.muted))
    assert all(contrast(palette.panel, color) >= 4.5 for color in (palette.text, palette.muted, palette.checkpoint))
    assert contrast(palette.page, palette.peak) >= 3


# --- the peak ---------------------------------------------------------------------------------------------------------


def peaks(root: ET.Element) -> list[str]:
    return [name for name, box in boxes_of(root).items() if "peak" in box.get("class", "").split()]


def test_the_peak_is_marked_by_a_border_and_in_words() -> None:
    root = drawn(small_profile())
    assert peaks(root) == ["node-block_conv"]
    assert [name for name, box in boxes_of(root).items() if "PEAK" in text_of(box)] == ["node-block_conv"]
    (style,) = (each.text or "" for each in root.iter(f"{SVG}style"))
    assert ".peak .shape{stroke-width:4}" in style


def test_a_peak_inside_a_collapsed_module_is_named() -> None:
    box = boxes_of(drawn(small_profile(), depth=1))["node-block"]
    assert "PEAK 200.0 MiB in backward at conv" in text_of(box)
    assert "PEAK 200.0 MiB in backward at block.conv" in tooltip_of(box)
    assert peaks(drawn(small_profile(), depth=1)) == ["node-block"]


def test_a_peak_before_the_first_operator_marks_nothing() -> None:
    profile = make_profile(
        ticks=1, storages=[Storage(nbytes=5, kind=Kind.PARAMETER, birth=0, death=1)], nodes=[call("f")]
    )
    assert peaks(drawn(profile)) == []


# --- folding and depth ------------------------------------------------------------------------------------------------


def totals(boxes: tuple[Box, ...]) -> tuple[int, ...]:
    sums = ("params", "output", "saved")
    counted = [sum(getattr(box.figures, name) * box.times for box in boxes) for name in sums]
    return (
        *counted,
        *(sum(getattr(box.figures, way).known * box.times for box in boxes) for way in ("forward", "backward")),
    )


def recorded(profile: Profile) -> tuple[int, ...]:
    rows = [
        (n.params_bytes, n.output_bytes, n.saved_bytes, n.forward_flops or 0, n.backward_flops or 0)
        for n in profile.nodes
    ]
    return tuple(map(sum, zip(*rows, strict=True)))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("depth", [None, 1, 2, 3])
@pytest.mark.parametrize("max_boxes", [1, 10, 400])
@pytest.mark.parametrize("layers", [1, 2, 9])
def test_folding_and_collapsing_keep_the_sums(fold: bool, depth: int | None, max_boxes: int, layers: int) -> None:
    profile = deep_profile(layers)
    drawing = pictured(profile, fold=fold, depth=depth, max_boxes=max_boxes)
    assert totals(drawing.boxes) == recorded(profile)
    assert sum(len(box.nodes) * box.times for box in drawing.boxes) == len(profile.nodes)
    assert max(box.figures.live for box in drawing.boxes) == max(node.live_bytes.max for node in profile.nodes)


@pytest.mark.truth
@given(profiles(), st.booleans(), st.sampled_from([None, 1, 2]))
def test_any_profile_is_drawn_well_formed_with_its_sums(profile: Profile, fold: bool, depth: int | None) -> None:
    assert totals(pictured(profile, fold=fold, depth=depth).boxes) == recorded(profile)
    assert boxes_of(drawn(profile, fold=fold, depth=depth))


def test_a_run_of_equal_blocks_is_drawn_once_and_split_where_it_holds_the_peak() -> None:
    drawing = pictured(deep_profile(32))
    # The peak is when the gradient of the last block's add is there beside everything saved.
    assert [frame.alike for frame in drawing.frames if frame.alike > 1] == [31]
    assert [(words.title, words.note) for words in frame_words(drawing)][1:] == [
        ("layers.0-30", "Block, x31, saved 12.0 KiB each, 372.0 KiB together"),
        ("layers.31", "Block, saved 12.0 KiB"),
    ]
    assert [box.times for box in drawing.boxes] == [31] * 4 + [1] * 5
    assert [box.peak for box in drawing.boxes].index(True) == 7


def chain(*sizes: int) -> Profile:
    """An input, and modules `0`, `1`, ... one after another, the output of each of as many bytes as said."""
    modules = [
        Node(
            name=f"_{i}",
            op="call_module",
            target=f"{i}",
            module=f"{i}",
            module_type="Linear",
            inputs=(i,),
            output_bytes=nbytes,
        )
        for i, nbytes in enumerate(sizes)
    ]
    return step_of([Node(name="x", op="placeholder", target="x"), *modules])


def test_calls_that_alternate_are_folded_too() -> None:
    drawing = pictured(chain(*[5, 7] * 6, 11))
    assert [(box.times, box.figures.output) for box in drawing.boxes] == [(1, 0), (6, 5), (6, 7), (1, 11)]
    assert [words.title for words in frame_words(drawing)] == ["0-11"]


def test_a_short_run_of_single_calls_is_not_worth_folding() -> None:
    assert [box.times for box in pictured(chain(5, 7, 5, 7, 11)).boxes] == [1] * 6
    assert [box.times for box in pictured(chain(5, 5, 5, 5, 11)).boxes] == [1] * 6
    assert [box.times for box in pictured(chain(5, 5, 5, 5, 5, 11)).boxes] == [1, 5, 1]


def blocks(*wirings: tuple[int, int, int]) -> Profile:
    """An input, blocks `layers.0`, ... of three calls, and an end. Each call reads the one so many calls before it."""
    nodes = [Node(name="x", op="placeholder", target="x")]
    for layer, wiring in enumerate(wirings):
        for name, back in zip("fgh", wiring, strict=True):
            nodes.append(call(name, len(nodes) - back, module=f"layers.{layer}", module_type="Block"))
    return step_of([*nodes, call("end", len(nodes) - 1)])


def test_blocks_wired_differently_are_not_equal() -> None:
    assert [box.times for box in pictured(blocks((1, 1, 1), (1, 1, 1), (1, 1, 1))).boxes] == [1, 3, 3, 3, 1]
    # In the last block h reads f, not g.
    assert [box.times for box in pictured(blocks((1, 1, 1), (1, 1, 1), (1, 1, 2))).boxes] == [1, 2, 2, 2, 1, 1, 1, 1]


def test_what_one_repeat_reads_of_another_is_no_line_inside() -> None:
    chained = pictured(blocks(*[(1, 1, 1)] * 4))
    assert [(edge.tail, edge.head, edge.kind) for edge in chained.edges] == [
        (0, 1, "data"),
        (1, 2, "data"),
        (2, 3, "data"),
        (3, 4, "data"),
    ]
    # h reads the f of the block before, five calls back, or what stands before the first block; no line joins the f and
    # the h of one block.
    skipping = pictured(blocks((1, 1, 1), *[(1, 1, 5)] * 4))
    assert [box.times for box in skipping.boxes] == [1, 1, 1, 1, 4, 4, 4, 1]
    assert [(edge.tail, edge.head) for edge in skipping.edges] == [
        (0, 1),
        (1, 2),
        (1, 6),
        (2, 3),
        (3, 4),
        (4, 5),
        (6, 7),
    ]


def test_the_heaviest_are_opened_up_to_the_number_of_boxes() -> None:
    profile = deep_profile(40)
    counts = {most: len(pictured(profile, fold=False, max_boxes=most).boxes) for most in (1, 5, 20, 60, 400)}
    # All 40 blocks weigh the same; the loss is beside them. With one box there are still two that are no parts of
    # another.
    assert counts == {1: 2, 5: 4, 20: 14, 60: 59, 400: 161}
    assert len(pictured(profile, depth=1, fold=False).boxes) == 2


def test_different_siblings_share_boxes_when_they_are_too_many() -> None:
    drawing = pictured(chain(*range(1, 1001)), max_boxes=20)
    # The input and the last call, at which the peak is, stand alone.
    assert [box.kind for box in drawing.boxes] == ["input", *["group"] * (len(drawing.boxes) - 2), "call"]
    assert [box_words(drawing)[index].title for index in (1, -2)] == ["0-199", "960-998"]
    assert totals(drawing.boxes)[1] == sum(range(1, 1001))


def test_a_module_called_twice_is_two_visits() -> None:
    inside = {"module": "shared", "module_type": "Shared"}
    profile = step_of(
        [call("f", **inside), call("g", 0, **inside), call("h", 1), call("f_1", 2, **inside), call("g_1", 3, **inside)]
    )
    assert [words.id for words in frame_words(pictured(profile))] == ["module-shared", "module-shared--2"]


# --- focus ------------------------------------------------------------------------------------------------------------


def test_focus_draws_one_module_and_names_what_it_reads_outside() -> None:
    boxes = boxes_of(drawn(small_profile(), focus="block"))
    assert list(boxes) == ["node-block_conv", "node-block_act"]
    assert "reads x" in text_of(boxes["node-block_conv"])
    assert list(boxes_of(drawn(small_profile(), focus="peak"))) == list(boxes)


def test_focus_on_a_peak_outside_the_model_leaves_it_whole() -> None:
    profile = make_profile(
        ticks=1, storages=[Storage(nbytes=5, kind=Kind.PARAMETER, birth=0, death=1)], nodes=[call("f")]
    )
    assert list(boxes_of(drawn(profile, focus="peak"))) == ["node-f"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"focus": "blocks"}, "expected focus to be a module that runs, or peak; got 'blocks', did you mean block?"),
        ({"depth": 0}, "expected a depth of at least 1, got 0"),
        ({"max_boxes": 0}, "expected max_boxes of at least 1, got 0"),
        ({"heat": "age"}, "expected heat to be one of saved, output, params, flops, live, scratch; got 'age'"),
    ],
)
def test_an_option_that_cannot_be_understood_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        drawn(small_profile(), **options)


# --- lines ------------------------------------------------------------------------------------------------------------


def fan(readers: int) -> Picture:
    return pictured(
        step_of([call("source"), *(call(f"reader{i}x", 0, output_bytes=i) for i in range(readers))]), fold=False
    )


def test_up_to_six_readers_get_lines_and_more_name_what_they_read() -> None:
    assert [(edge.tail, edge.head, edge.kind) for edge in fan(6).edges] == [(0, i, "data") for i in range(1, 7)]
    drawing = fan(7)
    assert [(edge.tail, edge.head) for edge in drawing.edges if edge.kind == "data"] == [(0, 1)]
    assert [box.references for box in drawing.boxes] == [(), ()] + [(0,)] * 6
    assert box_words(drawing)[2].lines[-1] == "reads source"
    # What has no line left is held in its place all the same.
    assert {edge.head for edge in drawing.edges} == set(range(1, 8))


def test_a_line_over_many_ranks_is_a_name_instead() -> None:
    nodes = [call("f", output_bytes=1), *(call(f"f_{i}", i - 1, output_bytes=i + 1) for i in range(1, 200))]
    near, far = ([*nodes[:-1], call("last", 198, start)] for start in (49, 48))
    assert pictured(step_of(near), fold=False).boxes[-1].references == ()
    assert pictured(step_of(far), fold=False).boxes[-1].references == (48,)


# --- names ------------------------------------------------------------------------------------------------------------


def hostile(name: str) -> Profile:
    tensor = (TensorInfo(shape=(1,), dtype=name),)
    nodes = [
        Node(name=name, op="placeholder", target=name, outputs=tensor),
        Node(
            name=f"{name}1",
            op="call_module",
            target=name,
            module=f"{name}.{name}",
            module_type=name,
            inputs=(0,),
            outputs=tensor,
            saved_bytes=3,
        ),
        call(f"{name}2", 1, module=name, module_type=name, view_of=1, target=name),
        call(f"{name}3", 2, module=name, module_type=name, output_bytes=5),
    ]
    profile = step_of(nodes, model=name, modules={"": name, name: name})
    return profile


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_name_breaks_the_svg(name: str) -> None:
    root = drawn(hostile(name))
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
        "svg",
        "title",
        "desc",
        "style",
        "defs",
        "marker",
        "path",
        "rect",
        "g",
        "text",
        "tspan",
    }
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]*", each.get("id", "")) for each in root.iter())
    assert all(char.isprintable() or char == "\n" for char in "".join(root.itertext()))
    assert len(boxes_of(root)) == 4


TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.]+|->|[{}\[\]=;]|\s+')


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_no_name_breaks_the_dot_source(name: str) -> None:
    profile = hostile(name)
    source = dot_source(profile, liveness.timeline(profile))
    assert TOKENS.sub("", source) == ""
    bare = TOKENS.findall(source)
    assert Counter(bare)["->"] == 3
    assert Counter(bare)["{"] == Counter(bare)["}"]
    assert bare.count("digraph") == 1
    assert "\0" not in source


def test_a_dot_string_shows_as_its_text() -> None:
    assert quote(escape('a "b" \\N &amp;')) == '"a \\"b\\" \\\\N &amp;amp;"'
    assert quote(escape("one\ntwo\n")) == '"one\\ltwo\\l"'
    assert quote(escape('<b> \\"')) == '"<b> \\\\\\""'
    assert quote(escape("<b>")) == '"<b>"'


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_graphviz_reads_back_every_name(name: str) -> None:
    dot = shutil.which("dot")
    if dot is None:
        pytest.skip("`dot` is not on PATH")
    profile = hostile(name)
    done = subprocess.run(
        [dot, "-Tsvg"], input=dot_source(profile, liveness.timeline(profile)).encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    ids = [each.get("id") for each in ET.fromstring(done.stdout).iter(f"{SVG}g")]
    assert set(boxes_of(drawn(profile))) <= set(ids)


def test_the_dot_source_says_what_the_svg_says() -> None:
    profile = deep_profile(3)
    source = dot_source(profile, liveness.timeline(profile), DrawingOptions(max_boxes=400))
    for words in box_words(pictured(profile)):
        assert f'id="{words.id}"' in source
        assert words.title in source
        assert words.figure in source
    assert "PEAK" in source
    assert source.count("subgraph cluster_") == len(pictured(profile).frames)


# --- layouts ----------------------------------------------------------------------------------------------------------


def inside(inner: Rectangle, outer: Rectangle) -> bool:
    across = outer.x <= inner.x and inner.x + inner.width <= outer.x + outer.width
    return across and outer.y <= inner.y and inner.y + inner.height <= outer.y + outer.height


def overlap(one: Rectangle, other: Rectangle) -> bool:
    across = one.x < other.x + other.width and other.x < one.x + one.width
    return across and one.y < other.y + other.height and other.y < one.y + one.height


def check_places(drawing: Picture) -> GraphLayout:
    """Nothing overlaps, and all is inside what is around it."""
    layout = arrange(drawing, box_words(drawing), frame_words(drawing))
    for box, place in zip(drawing.boxes, layout.boxes, strict=True):
        assert box.frame is None or inside(place, layout.frames[box.frame])
    for frame, place in zip(drawing.frames, layout.frames, strict=True):
        assert frame.parent is None or inside(place, layout.frames[frame.parent])
    assert all(inside(place, Rectangle(0, 0, layout.width, layout.height)) for place in layout.boxes)
    by_left = sorted(layout.boxes, key=lambda place: place.x)
    for index, one in enumerate(by_left):
        for other in by_left[index + 1 :]:
            if other.x >= one.x + one.width:
                break
            assert not overlap(one, other)
    siblings: dict[int | None, list[Rectangle]] = {}
    for frame, place in zip(drawing.frames, layout.frames, strict=True):
        siblings.setdefault(frame.parent, []).append(place)
    for box, place in zip(drawing.boxes, layout.boxes, strict=True):
        siblings.setdefault(box.frame, []).append(place)
    for places in siblings.values():
        for index, one in enumerate(places[:60]):
            assert not any(overlap(one, other) for other in places[:index])
    return layout


@pytest.mark.truth
def test_three_thousand_boxes_are_drawn_and_none_overlap() -> None:
    profile = deep_profile(750)
    assert len(check_places(pictured(profile, fold=False, max_boxes=5000)).boxes) == 3001
    assert len(boxes_of(drawn(profile, fold=False, max_boxes=5000))) == 3001


@given(profiles(), st.sampled_from([3, 25, 400]))
def test_nothing_overlaps_in_any_profile(profile: Profile, max_boxes: int) -> None:
    check_places(pictured(profile, max_boxes=max_boxes))


def test_a_long_model_goes_on_in_further_columns_to_fit_the_screen() -> None:
    layout = check_places(pictured(deep_profile(6), fold=False))
    assert len(layout.boxes) == 25
    assert min(SCREEN[0] / layout.width, SCREEN[1] / layout.height) > 0.9
    assert len({place.x for place in layout.boxes}) > 1


def test_what_reads_the_same_stands_side_by_side() -> None:
    drawing = pictured(step_of([call("a"), call("b", 0), call("c", 0), call("d", 1, 2)]), fold=False)
    a, b, c, d = check_places(drawing).boxes
    assert b.y == c.y
    assert b.x + b.width < c.x
    assert a.y < b.y < d.y


# --- the overview -----------------------------------------------------------------------------------------------------


def uneven(*sizes: int) -> Profile:
    """An input and modules of one call each, whose results of so many MiB are saved."""
    nodes = [
        Node(
            name=f"m{index}", op="call_module", target=f"m{index}", module=f"m{index}", module_type="Linear",
            inputs=(index,), output_bytes=size * MIB, saved_bytes=size * MIB,
        )
        for index, size in enumerate(sizes)
    ]  # fmt: skip
    return step_of([Node(name="x", op="placeholder", target="x"), *nodes])


def test_small_operators_in_a_row_share_one_box() -> None:
    sizes = [900, 1, 2, 1, 800, *(50 + index for index in range(24))]
    drawing = pictured(uneven(*sizes), max_boxes=25)
    titles = [words.title for words in box_words(drawing)]
    assert titles[:4] == ["x", "m0", "3 small operators", "m4"]
    assert len(titles) <= 25
    small = drawing.boxes[2]
    assert (small.gathered, small.figures.saved) == (3, 4 * MIB)
    assert totals(drawing.boxes) == recorded(drawing.profile)


def test_what_is_small_together_with_much_else_is_not_hidden() -> None:
    """A hundred layers of 1 % each are no small operators: together they are all there is."""
    drawing = pictured(uneven(*(100 + index for index in range(100))), max_boxes=25)
    assert len(drawing.boxes) <= 25
    assert all(not box.gathered for box in drawing.boxes)


def test_a_run_of_equal_layers_is_one_box_with_the_sum() -> None:
    drawing = pictured(deep_profile(32), max_boxes=25)
    (run,) = (index for index, box in enumerate(drawing.boxes) if box.alike == 31)
    words = box_words(drawing)[run]
    assert (words.title, words.figure) == ("layers.0-30 x31", "saved 372.0 KiB")
    assert (words.heat, words.share) == (STEPS, 1.0)
    assert any(line.startswith("each saved 12.0 KiB") for line in words.lines)
    assert not any(frame.alike > 1 for frame in drawing.frames)


@pytest.mark.parametrize("max_boxes", [5, 12, 25, 100])
def test_an_overview_has_at_most_so_many_boxes_and_loses_nothing(max_boxes: int) -> None:
    profile = uneven(*(7 * index % 50 + 1 for index in range(300)))
    drawing = pictured(profile, max_boxes=max_boxes)
    assert max_boxes // 3 <= len(drawing.boxes) <= max_boxes
    assert totals(drawing.boxes) == recorded(profile)
    assert [box.peak for box in drawing.boxes].count(True) == 1


def test_bars_are_as_long_as_the_bytes() -> None:
    boxes = list(boxes_of(drawn(uneven(100, 50, 25))).values())
    bars = [next((each for each in box if each.get("class") == "amount"), None) for box in boxes]
    wide = [0.0 if bar is None else float(re.findall(r"h([\d.]+)", bar.get("d", ""))[0]) for bar in bars]
    assert wide[0] == 0.0
    assert wide[1] / wide[2] == pytest.approx(2, rel=0.01)
    assert wide[1] / wide[3] == pytest.approx(4, rel=0.01)


def test_the_document_scales_with_its_window() -> None:
    root = drawn(deep_profile(3))
    assert root.get("width") is None
    assert root.get("height") is None
    assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.get("viewBox", ""))
    style = next(root.iter(f"{SVG}style")).text or ""
    assert f"svg.fxmem-graph{{background:{DARK.page}}}" in style


def test_lines_that_pass_each_other_run_in_different_lanes() -> None:
    profile = step_of([call("a"), call("b", 0), call("c", 1, 0), call("d", 2, 1), call("e", 3, 0), call("f", 4, 2)])
    drawing = pictured(profile, fold=False)
    layout = arrange(drawing, box_words(drawing), frame_words(drawing))
    skips = [
        (edge.tail, edge.head, max(x for x, _ in line.points))
        for edge, line in zip(drawing.edges, layout.lines, strict=True)
        if line and edge.head - edge.tail > 1
    ]
    assert len(skips) == 4
    for tail, head, lane in skips:
        assert all(
            other_lane != lane or head < other or other_head < tail
            for other, other_head, other_lane in skips
            if (other, other_head) != (tail, head)
        )
    assert all(x < layout.width for line in layout.lines if line for x, _ in line.points)


# --- style ------------------------------------------------------------------------------------------------------------


def test_every_rule_is_bound_to_the_drawing_and_dark_is_a_choice_of_the_reader() -> None:
    (style,) = (each.text or "" for each in drawn(small_profile()).iter(f"{SVG}style"))
    light, dark = style.split("@media screen and (prefers-color-scheme:dark){")
    assert dark.endswith("}}")
    for rules in (light, dark[:-1]):
        selectors = [selector for group in re.findall(r"([^{}]+)\{[^{}]*\}", rules) for selector in group.split(",")]
        assert len(selectors) > 20
        assert all(selector.startswith((".fxmem-graph ", "svg.fxmem-graph")) for selector in selectors)
    assert LIGHT.page in light
    assert DARK.page in dark


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = svg_of(small_profile())
    assert re.findall(r"https?://[^\"' <]+", text) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#fxmem-arrow"}


# --- command line and library -----------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path: Path) -> str:
    path = tmp_path / "report.json"
    path.write_text(small_report().model_dump_json(), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> int:
    return fxmem.__main__.main(list(arguments))


def test_graph_draws_a_report(tmp_path: Path, report: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.svg"
    assert (
        run(
            "graph",
            report,
            "-o",
            str(out),
            "--heat",
            "output",
            "--depth",
            "1",
            "--no-fold",
            "--max-boxes",
            "9",
        )
        == 0
    )
    printed, told = capsys.readouterr()
    assert printed == ""
    assert re.fullmatch(rf"fxmem: wrote {re.escape(str(out))} \(\d+ kB\)\n", told)
    root = ET.fromstring(out.read_text(encoding="utf-8"))
    assert root.get("data-heat") == "output"
    assert "node-block" in boxes_of(root)


def test_graph_writes_dot_source(tmp_path: Path, report: str) -> None:
    out = tmp_path / "out.dot"
    assert run("graph", report, "-o", str(out), "--focus", "block") == 0
    assert out.read_text(encoding="utf-8").startswith("digraph fxmem {")
    assert "node-add" not in out.read_text(encoding="utf-8")


def test_show_draws_beside_the_table(tmp_path: Path, report: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.svg"
    assert run("show", report, "--svg", str(out)) == 0
    assert "Small" in capsys.readouterr().out
    assert peaks(ET.fromstring(out.read_text(encoding="utf-8"))) == ["node-block_conv"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["-o", "out.gif"],
            2,
            "expected --output to name a file that ends in .svg or .png or .pdf or .dot, got 'out.gif'",
        ),
        (
            ["-o", "nowhere/out.svg"],
            2,
            "expected --output to name a file in a folder that exists, got 'nowhere/out.svg'",
        ),
        (
            ["-o", "out.svg", "--heat", "age"],
            2,
            "expected --heat to be one of saved, output, params, flops, live, scratch; got 'age'",
        ),
        (
            ["-o", "out.svg", "--focus", "blck"],
            2,
            "expected focus to be a module that runs, or peak; got 'blck', did you mean block?",
        ),
        ([], 2, "the following arguments are required: -o/--output"),
    ],
)
def test_what_graph_cannot_do_is_said_in_one_line(
    tmp_path: Path,
    report: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("graph", report, *arguments) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"fxmem: {message}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


def test_a_report_that_is_not_there_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("graph", "nowhere.json", "-o", str(tmp_path / "out.svg")) == 2
    assert (
        "expected a report written by `fxmem analyze --json`, got 'nowhere.json': No such file"
        in capsys.readouterr().err
    )


def test_svg_of_show_ends_in_svg(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", report, "--svg", "out.html") == 2
    assert "expected --svg to name a file that ends in .svg or .png or .pdf, got 'out.html'" in capsys.readouterr().err


def test_a_model_is_drawn_from_the_command_line_and_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())\n",
        encoding="utf-8",
    )
    step = ("own.py:build", "--input", "2x3", "--target", "cpu", "--quiet")
    assert run("graph", *step, "-o", "graph.svg") == 0
    assert run("analyze", *step, "--svg", "analyze.svg") == 0
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
    fxmem.analyze(model, torch.empty(2, 3), target="cpu").save_svg("library.svg")
    drawings = [
        boxes_of(ET.fromstring(Path(name).read_text(encoding="utf-8")))
        for name in ("graph.svg", "analyze.svg", "library.svg")
    ]
    assert list(drawings[0]) == ["node-input_1", "node-_0", "node-_1", "node-output", "node-loss", "node-optimizer"]
    # A ReLU keeps its result: 2 x 5 numbers of 4 bytes.
    assert all("saved 40 B" in text_of(boxes["node-_1"]) for boxes in drawings)
