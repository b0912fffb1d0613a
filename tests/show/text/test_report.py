"""The reports a person reads: goldens at two widths, the rules of the table, and names nobody should trust.

`FXMEM_UPDATE=1 pytest tests/show/text/test_report.py` writes the goldens anew; look at the difference before committing
it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from rich.cells import cell_len

from fxmem.hardware.context import give_room
from fxmem.memory.by_layer import Row, fold_small, module_rows, select_rows, step_rows, total_row
from fxmem.memory.figures import Figures, Flops
from fxmem.memory.liveness import timeline
from fxmem.records.profile import Kind, Node, Op, Phase, PhaseBytes, ProcessBytes, Profile, Step, Storage, TensorInfo
from fxmem.records.units import format_bytes, format_flops, percent, printable
from fxmem.show.facts import fits
from fxmem.show.html import notebook_html
from fxmem.show.text import table
from tests import ROOT
from tests.profiles import CPU, TINY_CARD, deep_profile, make_profile, small_profile

GOLDEN = ROOT / "tests" / "golden"
MIB = 1 << 20


def report(profile: Profile, **options: Any) -> str:
    return table(profile, timeline(profile), **options)


def call(name: str, module: str = "", **fields: Any) -> Node:
    """A call of a module, or of a function if there is no such module."""
    return Node(
        **{
            "name": name,
            "op": "call_module" if module else "call_function",
            "target": name,
            "module": module,
            "forward_flops": 0,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("name", "width"),
    [("small", 80), ("small", 160), ("deep", 80), ("deep", 160)],
)
def test_golden(name: str, width: int) -> None:
    text = report(small_profile() if name == "small" else deep_profile(6), width=width)
    path = GOLDEN / f"report_{name}_{width}.txt"
    if os.environ.get("FXMEM_UPDATE"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 79, 80, 100, 120, 133, 160, 240])
def test_no_line_is_longer_than_the_width(width: int) -> None:
    long = "averyveryverylongname" * 6
    nasty = make_profile(
        ticks=1,
        model=long,
        target=TINY_CARD,
        nodes=[
            call(
                long,
                f"層.{long}.注意機構注意機構注意機構注意機構注意機構",
                module_type=long,
                source={"file": f"/{long}/モデル.py", "line": 3, "code": long},
            ),
            call("f", forward_flops=None, outputs=(TensorInfo(shape=(123456,) * 8, dtype="float8_e4m3fnuz"),)),
        ],
        ops=[Op(name=f"custom.{long}", node=0, phase=Phase.FORWARD, begin=0, end=1)],
        storages=[
            Storage(
                nbytes=10**17,
                kind=Kind.OPTIMIZER_STATE,
                birth=0,
                death=1,
                node=0,
                name=long,
                shape=(123456,) * 8,
                dtype="float8_e4m3fnuz",
            )
        ],
    )
    for profile in (small_profile(), deep_profile(12), nasty, make_profile(ticks=0)):
        assert max(map(cell_len, report(profile, width=width).splitlines())) <= width


def test_wider_terminals_get_more_columns_and_lose_none() -> None:
    def headings(width: int) -> list[str]:
        line = next(line for line in report(small_profile(), width=width).splitlines() if line.startswith("Module"))
        return re.split(r"  +", line.strip())

    assert headings(80) == ["Module", "Params", "Output", "Saved", "At peak"]
    assert headings(160) == [
        *headings(80),
        "Fwd FLOPs",
        "Live",
        "Scratch",
        "Bwd FLOPs",
        "Output shape",
        "Dtype",
        "Calls",
    ]
    for narrow, wide in pairwise(headings(width) for width in range(60, 200, 5)):
        assert wide[: len(narrow)] == narrow


def test_buffers_have_a_column_where_they_are_a_hundredth_of_the_peak() -> None:
    def rows(buffers: int, width: int) -> list[list[str]]:
        plain = small_profile()
        conv = plain.nodes[1].model_copy(update={"params_bytes": 4 << 20, "buffers_bytes": buffers})
        profile = plain.model_copy(update={"nodes": (plain.nodes[0], conv, *plain.nodes[2:])})
        lines = report(profile, width=width).splitlines()
        return [re.split(r"  +", line.strip())[:3] for line in lines if re.match("Module|total", line)]

    heads = ["Module", "Params", "Output"], ["total", "4.00 MiB", "96.0 MiB"]
    assert rows(3 << 20, 80) == [["Module", "Params", "Buffers"], ["total", "1.00 MiB", "3.00 MiB"]]
    assert rows(3 << 20, 79) == rows(1 << 10, 80) == [*heads]


def test_total_is_the_sum_over_the_nodes_and_the_peak() -> None:
    for profile in (small_profile(), deep_profile(5)):
        line = timeline(profile)
        total = total_row([module_rows(profile, line)[0], *step_rows(profile, line)]).figures
        assert total.at_peak == line.peak.requested_bytes
        assert total.saved == profile.saved_bytes
        assert total.params == sum(node.params_bytes for node in profile.nodes)
        assert total.output == sum(node.output_bytes for node in profile.nodes)
        assert total.live == max(node.live_bytes.max for node in profile.nodes)
        assert total.scratch == max(node.scratch_bytes.max for node in profile.nodes)


def test_what_no_node_owns_stands_in_a_row_of_its_own() -> None:
    profile = make_profile(
        ticks=1, nodes=[call("f")], storages=[Storage(nbytes=7 * MIB, kind=Kind.BUFFER, birth=0, death=1)]
    )
    assert re.search(r"^buffer \(of no node\) +0 +0 +0 +7\.00 MiB$", report(profile, width=80), re.MULTILINE)


def test_optimizer_state_belongs_to_the_optimizer() -> None:
    nodes = [Node(name="optimizer", op="optimizer", target="SGD")]
    profile = make_profile(
        ticks=1, nodes=nodes, storages=[Storage(nbytes=7 * MIB, kind=Kind.OPTIMIZER_STATE, birth=0, death=1)]
    )
    assert re.search(r"^optimizer \(SGD\) +0 +0 +0 +7\.00 MiB$", report(profile, width=80), re.MULTILINE)


def rows(*nodes: Node, **fields: Any) -> list[Row]:
    profile = make_profile(ticks=0, nodes=nodes, **fields)
    return module_rows(profile, timeline(profile))


def titles(table: list[Row], depth: int) -> list[str]:
    return [row.title for row in table if row.depth == depth]


def test_equal_numbered_siblings_fold() -> None:
    layers = [
        call(f"l{i}", f"layers.{i}", saved_bytes=5, live_bytes=PhaseBytes(forward=10 + i, backward=None))
        for i in range(4)
    ]
    *_, folded = rows(*layers)
    assert (folded.title, folded.alike) == ("0-3 x4", 4)
    assert (folded.figures.saved, folded.figures.live) == (5, 13)
    assert [row.figures.saved for row in rows(*layers)] == [20, 20, 5]


def test_unequal_siblings_do_not_fold() -> None:
    def layer(i: int, **fields: Any) -> Node:
        return call(f"l{i}", f"layers.{i}", **fields)

    assert titles(rows(layer(0), layer(1, saved_bytes=1), layer(2), layer(3)), 2) == ["0", "1", "2-3 x2"]
    assert titles(rows(layer(0), layer(1, module_type="Linear")), 2) == ["0", "1"]
    assert titles(rows(layer(0), layer(2)), 2) == ["0", "2"]
    assert titles(rows(call("a", "q"), call("b", "k")), 1) == ["q", "k"]


def test_folded_blocks_keep_their_insides() -> None:
    nodes = [
        call(f"{i}{part}", f"{i}.{part}", live_bytes=PhaseBytes(forward=i, backward=None))
        for i in range(3)
        for part in "ab"
    ]
    _, *folded = rows(*nodes)
    assert [(row.depth, row.title, row.figures.live) for row in folded] == [(1, "0-2 x3", 2), (2, "a", 2), (2, "b", 2)]


def test_modules_that_only_hold_others_show_their_class() -> None:
    modules = {"": "Net", "stages": "ModuleList", "stages.0": "Stage", "stages.0.conv": "Conv2d"}
    shown = rows(call("c", "stages.0.conv", module_type="Conv2d"), modules=modules)
    assert [(row.label, row.type_name) for row in shown] == [
        ("Toy", "Net"),
        ("stages", "ModuleList"),
        ("0", "Stage"),
        ("conv", "Conv2d"),
    ]


def test_the_class_is_not_said_twice_of_the_model_itself() -> None:
    shown = rows(call("c", "conv"), modules={"": "Toy", "conv": "Conv2d"})
    assert [row.type_name for row in shown] == ["", "Conv2d"]


def test_equal_siblings_of_different_classes_do_not_fold() -> None:
    nodes = [call(f"l{i}", f"layers.{i}.norm", module_type="LayerNorm") for i in range(3)]
    modules = {"layers.0": "Local", "layers.1": "Global", "layers.2": "Global"}
    assert titles(rows(*nodes, modules=modules), 2) == ["0", "1-2 x2"]


def test_calls_of_one_name_share_a_row_beside_a_module_of_that_name() -> None:
    _, *shown = rows(call("f.relu"), call("relu", "relu"), call("g.relu"), call("relu_1", "relu"))
    assert [(row.kind, row.title) for row in shown] == [
        ("call", "relu, 2 calls"),
        ("module", "relu, 2 calls"),
    ]


def test_small_modules_side_by_side_are_one_row_with_all_that_is_in_them() -> None:
    """37 stands alone between larger ones; 11, 13 and what is in them, 17, are side by side."""
    sizes = {"a": 500, "b": 37, "c": 600, "d": 11, "e.f": 13, "e.g": 17, "h": 700}
    model = rows(*(call(name.replace(".", "_"), name, saved_bytes=nbytes) for name, nbytes in sizes.items()))
    folded = fold_small(model, 100)
    assert [row.title for row in folded] == ["Toy", "a", "b", "c", "2 more of less than 1 %", "h"]
    assert [row.figures.saved for row in folded[1:]] == [500, 37, 600, 11 + 13 + 17, 700]


def test_depth_limits_modules_and_shows_every_call() -> None:
    model = rows(call("c", "a.b.c", saved_bytes=100), call("f", saved_bytes=1))
    assert [row.label for row in select_rows(model, depth=None, worth=2)] == ["Toy", "a", "b", "c"]
    assert [row.label for row in select_rows(model, depth=1, worth=0)] == ["Toy", "a", "f"]
    assert [row.label for row in select_rows(model, depth=0, worth=0)] == ["Toy"]
    profile = small_profile()
    assert "conv (Conv2d)" in report(profile, width=80)
    assert "conv (Conv2d)" not in report(profile, width=80, depth=1)


def test_shapes_that_differ_between_calls() -> None:
    def shaped(name: str, *shape: int) -> Node:
        return call(name, "head", outputs=(TensorInfo(shape=shape, dtype="float32"),))

    assert rows(shaped("a", 2, 3), shaped("b", 2, 3))[1].shapes == ("2x3",)
    text = report(make_profile(ticks=0, nodes=[shaped("a", 2, 3), shaped("b")]), width=160)
    assert re.search(r"head, 2 calls .* varies +float32 +2$", text, re.MULTILINE)


def test_unknown_flops_are_never_zero() -> None:
    text = report(
        make_profile(
            ticks=0, nodes=[call("known", "known", forward_flops=10**9), call("odd", "odd", forward_flops=None)]
        ),
        width=100,
    )
    assert re.search(r"^  known .* 1\.0 G", text, re.MULTILINE)
    assert re.search(r"^  odd .* unknown", text, re.MULTILINE)
    assert re.search(r"^Toy .* >=1\.0 G", text, re.MULTILINE)
    assert "some calls have no formula" in text
    assert Figures(forward=Flops(3, 1)) + Figures(forward=Flops(4, 0)) == Figures(forward=Flops(7, 1))


def test_what_cannot_compute_has_no_unknown_flops() -> None:
    text = report(
        make_profile(
            ticks=0, nodes=[Node(name="x", op="placeholder", target="x"), Node(name="w", op="get_attr", target="w")]
        ),
        width=100,
    )
    assert "unknown" not in text
    assert "no formula" not in text


def test_inference_has_no_backward() -> None:
    step = Step(mode="infer", optimizer=None, loss=None, precision="bf16")
    text = report(make_profile(ticks=0, step=step), width=80)
    assert "infer; autocast: bf16" in text
    assert "optimizer" not in text
    assert "backward" not in text


def test_fits() -> None:
    profile = make_profile(ticks=1, storages=[Storage(nbytes=2 << 30, kind=Kind.SAVED, birth=0, death=1)])
    peak = timeline(profile).peak
    fitting, sentence = fits(profile, peak)
    assert (fitting, sentence) == (None, "not compared, because the memory of target cpu is not known")
    tight = profile.model_copy(update={"target": TINY_CARD})
    fitting, sentence = fits(tight, peak)
    assert fitting is False
    assert sentence.startswith(
        "does NOT fit: 2.00 GiB of 1.00 GiB on tiny, 200.0 %. Counted: requested bytes, without the allocator"
    )
    roomy = profile.model_copy(update={"target": give_room(TINY_CARD, 3 << 30)})
    assert fits(roomy, peak)[0] is True
    replayed = peak.model_copy(update={"fits": False, "reserved_bytes": 4 << 30, "shortage": "It runs out at op 3"})
    counted = (
        "Counted: what the allocator reserves; room: 3.00 GiB of 3.48 GiB: a CUDA context takes 495.0 MiB or more; "
        "other processes are not counted"
    )
    assert fits(roomy, replayed) == (
        False,
        f"does NOT fit: 4.00 GiB of 3.00 GiB on tiny, 133.3 %. It runs out at op 3. {counted}",
    )
    # More is reserved than there is only as long as nobody asks for it back.
    giving_back = replayed.model_copy(update={"fits": True, "shortage": ""})
    assert fits(roomy, giving_back) == (True, f"fits: 3.00 GiB of 3.00 GiB on tiny, 100.0 %. {counted}")
    exactly = profile.model_copy(update={"target": give_room(TINY_CARD, 2 << 30)})
    assert fits(exactly, peak)[0] is True


def test_byte_counts_of_the_allocator_appear_when_known() -> None:
    profile = small_profile()
    line = timeline(profile)
    assert "Reserved" not in table(profile, line)
    process = ProcessBytes(low=700 * MIB, high=800 * MIB, grounds="two cards")
    known = line.peak.model_copy(
        update={"allocated_bytes": 210 * MIB, "reserved_bytes": 260 * MIB, "process_bytes": process}
    )
    text = table(profile, line.model_copy(update={"peak": known}))
    assert re.search(r"^Allocated +210\.0 MiB \(220,200,960 bytes\)", text, re.MULTILINE)
    assert re.search(
        r"^Reserved +260\.0 MiB .*\n^Process +700\.0 MiB to 800\.0 MiB .*a range: two cards", text, re.MULTILINE
    )


def test_alike_tensors_are_counted_on_one_line() -> None:
    assert re.search(
        r"256\.0 KiB  layers\.0\.linear\.weight and 5 alike:\n +parameter, 256x256 float32\n",
        report(deep_profile(6), width=80),
    )
    assert "layers.0.linear.weight and 5 alike: parameter, 256x256 float32\n" in report(deep_profile(6), width=100)


def test_where_between_ops_and_before_them() -> None:
    nodes = [call("f")]
    ops = [Op(name="aten.f", node=0, phase=Phase.FORWARD, begin=1, end=2)]

    def where(tick: int) -> str:
        storages = [Storage(nbytes=5, kind=Kind.INPUT, birth=tick, death=tick + 1)]
        return re.search(
            r"^Where +(.*)$", report(make_profile(ticks=4, nodes=nodes, ops=ops, storages=storages)), re.MULTILINE
        ).group(1)  # type: ignore[union-attr]

    assert [where(tick) for tick in (0, 1, 3)] == ["before the first operator", "f, during aten.f", "f, after aten.f"]


def test_installed_files_are_named_from_their_package_on() -> None:
    source = {"file": "/opt/env/lib/python3.11/site-packages/timm/models/vit.py", "line": 7}
    storages = [Storage(nbytes=5, kind=Kind.INPUT, birth=0, death=1, node=0)]
    text = report(make_profile(ticks=1, nodes=[call("f", source=source)], storages=storages))
    assert "timm/models/vit.py:7" in text
    assert "site-packages" not in text


def test_empty_profile() -> None:
    empty = make_profile(ticks=0)
    assert "0 B (0 bytes) requested at once" in report(empty)
    assert "nothing is alive" in report(empty)
    assert Balanced.check(notebook_html(empty, timeline(empty)))


def test_colour_adds_nothing_but_colour() -> None:
    plain, colored = report(small_profile()), report(small_profile(), color=True)
    assert "\x1b[" not in plain
    assert "\x1b[" in colored
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


def test_output_is_ascii_where_the_names_are() -> None:
    assert report(small_profile(), width=160).isascii()
    assert report(deep_profile(6), width=80).isascii()


def hostile(text: str) -> Profile:
    """A profile with the text in every place a model can put one."""
    node = call(text, text, module_type=text, source={"file": text, "line": 1, "code": text})
    storage = Storage(nbytes=MIB, kind=Kind.SAVED, birth=0, death=1, op=0, node=0, name=text, shape=(1,), dtype=text)
    return make_profile(
        ticks=1,
        model=text,
        nodes=[node, Node(name=text, op="optimizer", target=text), call(text, forward_flops=None)],
        ops=[Op(name=text, node=0, phase=Phase.FORWARD, begin=0, end=1)],
        storages=[storage],
        modules={"": text + text, text: text},
        inputs=({"name": text, "shape": (1,), "dtype": text},),
        target=CPU.model_copy(update={"name": text, "full_name": text}),
        step=Step(mode="train", optimizer=text, loss=text, precision=None),
        torch_version=text,
        fxmem_version=text,
        assumptions=({"topic": text, "text": text},),
        unknowns=({"topic": text, "what": text},),
    )


class Balanced(HTMLParser):
    """Collects the tags of a fragment and insists that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @classmethod
    def check(cls, fragment: str) -> Balanced:
        parser = cls()
        parser.feed(fragment)
        parser.close()
        assert parser.open == []
        return parser


@pytest.mark.parametrize(
    "text",
    ['"><script>alert(1)</script>', "</style><img src=x onerror=alert(1)>", "a & b <b>'c'", "]]>--><svg onload=x>"],
)
def test_html_escapes_every_name(text: str) -> None:
    profile = hostile(text)
    parsed = Balanced.check(notebook_html(profile, timeline(profile)))
    assert not parsed.tags & {"script", "img"}
    assert not {name for name in parsed.attributes if name.startswith("on") or name == "src"}
    assert parsed.text.count(text) >= 10


def test_html_loads_nothing_and_carries_the_figures() -> None:
    profile = small_profile()
    fragment = notebook_html(profile, timeline(profile))
    assert not re.search(r"https?:|url\(|@import|<script", fragment)
    parsed = Balanced.check(fragment)
    for text in (
        "200.0 MiB (209,715,204 bytes)",
        "workspace",
        "Conv2d",
        "32.0 %",
        "custom::swish (2 times)",
        "/home/user/project/model.py:17",
    ):
        assert text in parsed.text
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([0-9.]+)%"', fragment)]
    assert len(widths) == 8
    assert sum(widths) == pytest.approx(100, abs=0.01)


@pytest.mark.truth
def test_html_of_a_large_model_leaves_out_its_deepest_levels() -> None:
    blocks = [call(f"m{i}{j}", f"m{i}.{j}.x", params_bytes=i * 100 + j) for i in range(30) for j in range(60)]
    profile = make_profile(ticks=0, nodes=blocks)
    fragment = notebook_html(profile, timeline(profile))
    assert fragment.count('class="row') < 1000
    assert Balanced.check(fragment)


def test_text_shows_what_a_terminal_would_obey() -> None:
    text = report(hostile("\x1b[31mred\x07\r\n\u202e[bold]x[/bold]:smile:"), width=160)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert r"\x1b[31mred\x07\r\n\u202e[bold]x[/bold]:smile:" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10188, "9.95 KiB"), (10240, "10.0 KiB"),
     (1023 * 1024, "1.00 MiB"), (999 * 1024, "999.0 KiB"), (84_942_979_072, "79.1 GiB"), (5 << 50, "5120.0 TiB"),
     (-3 * MIB, "-3.00 MiB")],
)  # fmt: skip
def test_format_bytes(nbytes: int | None, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "unknown"),
        (0, "0"),
        (999, "999"),
        (1000, "1.0 K"),
        (524_288, "524.3 K"),
        (999_949_999, "999.9 M"),
        (999_950_000, "1.0 G"),
        (3 * 10**12, "3.0 T"),
        (10**15, "1.0 P"),
    ],
)
def test_format_flops(count: int | None, text: str) -> None:
    assert format_flops(count) == text


def test_small_helpers() -> None:
    assert [percent(0, 10), percent(1, 10_000), percent(1, 3), percent(3, 0)] == ["0.0 %", "<0.1 %", "33.3 %", "0.0 %"]
    assert printable("é層 \t") == r"é層 \t"
    assert replace(Row("module", "3", calls=2), alike=4).title == "3 x4"
