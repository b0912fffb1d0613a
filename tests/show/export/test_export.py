"""The exports as a whole: what there is, what names do to it, and the command."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given

from fxmem.cli.verbs import export as export_verb
from fxmem.errors import EnvironmentLacksError, UsageError
from fxmem.memory import liveness
from fxmem.memory.figures import bytes_at_peak
from fxmem.records.profile import Node, PhaseBytes, Profile, TensorInfo
from fxmem.show import export as exporting
from fxmem.show import graph as drawing
from fxmem.show.export import EXPORTERS, Exporter, export, register
from fxmem.show.svg import LIGHT
from tests import ROOT
from tests.profiles import deep_profile, make_profile, profiles, small_profile
from tests.show.graph.test_graph import NAMES
from tests.show.test_plots import hostile
from tests.verbs import called, saved

MIB = 1 << 20
FORMATS = tuple(EXPORTERS)


READERS: dict[str, Callable[[Any], Any]] = {
    "csv": lambda content: list(csv.DictReader(io.StringIO(content))),
    "graphml": lambda content: networkx.read_graphml(io.BytesIO(content.encode())),
    "memory-viz": pickle.loads,
    **dict.fromkeys(("model-explorer", "model-explorer-data", "perfetto", "speedscope"), json.loads),
}
"""How some formats are read; any other is taken as it stands."""


def exported(profile: Profile, to: str) -> Any:
    """What is written, read back."""
    content = export(profile, liveness.timeline(profile), to)
    return READERS[to](content) if to in READERS else content


def exported_text(to: str) -> str | bytes:
    """A small step, as it is written."""
    return export(small_profile(), liveness.timeline(small_profile()), to)


# --- all formats ------------------------------------------------------------------------------------------------------


def test_the_command_and_the_library_know_the_same_formats() -> None:
    assert export_verb.EXPORTERS is EXPORTERS
    assert {EXPORTERS.get(name).name for name in EXPORTERS} >= {"memory-viz", "perfetto", "csv", "graphml", "dot"}
    assert all(EXPORTERS.get(name).binary is isinstance(exported_text(name), bytes) for name in FORMATS)
    with pytest.raises(UsageError, match=r"expected format to be one of .*\bcsv, .*\bdot, .*; got 'excel'"):
        export(small_profile(), liveness.timeline(small_profile()), "excel")


def test_a_format_from_outside_is_written_like_any_other(tmp_path: Path) -> None:
    register("names", lambda profile, timeline, settings: " ".join(node.name for node in profile.nodes) + "\n")
    report = saved(tmp_path / "r.json", small_profile())
    assert called(export_verb, report, "--to", "names", "-o", "-")[1].startswith("x ")
    with pytest.raises(UsageError, match="expected a new name for a format, got 'names'"):
        register("names", lambda profile, timeline, settings: "")


@pytest.mark.parametrize("to", FORMATS)
def test_a_profile_of_nothing(to: str) -> None:
    assert exported(make_profile(ticks=0), to) is not None


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_no_name_breaks_a_format(to: str, name: str) -> None:
    assert exported(hostile(name), to) is not None
    content = export(hostile(name), liveness.timeline(hostile(name)), to)
    data = content if isinstance(content, bytes) else content.encode()  # a lone surrogate would raise
    if not isinstance(content, bytes):
        assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", data), "control characters are spelled out"


@given(profiles())
def test_any_profile_can_be_written(profile: Profile) -> None:
    for to in FORMATS:
        if to != "graphml":  # its own test is below: networkx is slow to begin
            assert exported(profile, to) is not None


@pytest.mark.parametrize("to", FORMATS)
def test_the_same_report_gives_the_same_file(to: str) -> None:
    profile, timeline = deep_profile(3), liveness.timeline(deep_profile(3))
    assert export(profile, timeline, to) == export(profile, timeline, to)


# --- csv --------------------------------------------------------------------------------------------------------------


def test_csv_has_every_field_of_a_node() -> None:
    columns = list(exported(small_profile(), "csv")[0])
    for field, info in Node.model_fields.items():
        parts = {"source": "source_", "outputs": "output_shapes", "saved": "saved_storages"}
        if info.annotation is PhaseBytes:
            quantity = field.removesuffix("_bytes")
            assert {f"{quantity}_forward_bytes", f"{quantity}_backward_bytes"} <= set(columns)
        else:
            assert any(column.startswith(parts.get(field, field)) for column in columns), field


def test_csv_of_a_step_one_can_add_up() -> None:
    x, conv, relu, *_, optimizer = exported(small_profile(), "csv")
    assert (x["name"], x["source_line"], x["scratch_backward_bytes"]) == ("x", "", "")
    assert (conv["source_line"], conv["inputs"], conv["output_shapes"], conv["saved_storages"]) == (
        "17",
        "0",
        "8x16x64x64",
        "3",
    )
    assert (conv["params_bytes"], conv["saved_bytes"], conv["forward_flops"]) == (
        str(2 * MIB),
        str(32 * MIB),
        "3000000000",
    )
    assert (relu["forward_flops"], relu["backward_flops"]) == ("", "")
    # At the peak the convolution's weight, result, weight's gradient and workspace are there, of 2, 32, 2 and 64 MiB.
    assert int(conv["peak_bytes"]) == (2 + 32 + 2 + 64) * MIB
    assert int(optimizer["peak_bytes"]) == 4 * MIB


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\uff1d"])
def test_csv_is_no_place_for_formulas(start: str) -> None:
    (row,) = exported(hostile(f"{start}HYPERLINK(1)"), "csv")
    assert {row["name"], row["target"], row["module"], row["source_code"]} == {f"'{start}HYPERLINK(1)"}
    assert exported(hostile(f"a{start}b"), "csv")[0]["name"] == f"a{start}b"


# --- graphml and dot --------------------------------------------------------------------------------------------------


def test_graphml_reads_back_into_networkx() -> None:
    profile = small_profile()
    graph = exported(profile, "graphml")
    assert isinstance(graph, networkx.DiGraph)
    assert set(graph.edges) == {
        (f"n{source}", f"n{index}") for index, node in enumerate(profile.nodes) for source in node.inputs
    }
    for index, (node, at_peak) in enumerate(
        zip(profile.nodes, bytes_at_peak(profile, liveness.timeline(profile)), strict=True)
    ):
        found = graph.nodes[f"n{index}"]
        assert (found["name"], found["op"], found["saved_bytes"], found["peak_bytes"]) == (
            node.name,
            node.op,
            node.saved_bytes,
            at_peak,
        )
        assert ("forward_flops" in found) == (node.forward_flops is not None)
    assert graph.nodes["n1"]["backward_flops"] == 6_000_000_000  # more than 32 bits
    assert graph.graph["requested_bytes"] == liveness.timeline(profile).peak.requested_bytes
    assert graph.graph["title"] == "PREDICTED training step of Small for tiny, by fxmem 0"


def test_graphml_tells_views_from_reads() -> None:
    call = {"op": "call_method", "target": "view"}
    nodes = [
        Node(name="a", **call),
        Node(name="b", inputs=(0,), view_of=0, **call),
        Node(name="c", inputs=(1,), view_of=0, **call),
        Node(name="d", **call),
    ]
    graph = exported(make_profile(ticks=1, nodes=nodes), "graphml")
    assert {(source, target): (data["relation"], data["views"]) for source, target, data in graph.edges(data=True)} == {
        ("n0", "n1"): ("reads", True),
        ("n1", "n2"): ("reads", False),
        ("n0", "n2"): ("views", True),
    }


def test_graphml_keeps_names_of_any_alphabet() -> None:
    content = export(hostile("日本語 & <b>"), liveness.timeline(hostile("日本語 & <b>")), "graphml")
    assert isinstance(content, str)
    assert content.isascii()
    assert networkx.parse_graphml(content).nodes["n0"]["name"] == "日本語 & <b>"


def test_dot_is_the_drawings() -> None:
    profile, timeline = small_profile(), liveness.timeline(small_profile())
    assert export(profile, timeline, "dot") == drawing.dot_source(profile, timeline)


# --- Model Explorer ---------------------------------------------------------------------------------------------------


def test_model_explorer_gets_a_collection_of_one_graph() -> None:
    collection = exported(deep_profile(2), "model-explorer")
    assert set(collection) == {"label", "graphs"}
    (graph,) = collection["graphs"]
    ids = [node["id"] for node in graph["nodes"]]
    assert len(set(ids)) == len(ids) == 9
    for node in graph["nodes"]:
        assert {"id", "label", "namespace", "attrs", "incomingEdges", "outputsMetadata"} <= set(node)
        assert all(
            set(edge) == {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"} for edge in node["incomingEdges"]
        )
        assert {edge["sourceNodeId"] for edge in node["incomingEdges"]} <= set(ids)
        assert all(isinstance(pair["key"], str) and isinstance(pair["value"], str) for pair in node["attrs"])
    norm, _, _, add, *_ = graph["nodes"]
    assert [(node["label"], node["namespace"]) for node in (norm, add)] == [("norm", "layers/0"), ("add", "layers/0")]
    assert norm["outputsMetadata"] == [{"id": "0", "attrs": [{"key": "tensor_shape", "value": "float32[4x256]"}]}]
    assert graph["groupNodeAttributes"]["layers/1"] == {"class": "Block"}


def test_model_explorer_marks_the_peak_links_views_and_says_what_is_unknown() -> None:
    nodes = exported(small_profile(), "model-explorer")["graphs"][0]["nodes"]
    styles = {node["id"]: node["style"] for node in nodes if "style" in node}
    assert [name for name, style in styles.items() if "borderColor" in style] == ["1"]
    # The darkest is the one that brought most of the peak.
    at_peak = bytes_at_peak(small_profile(), liveness.timeline(small_profile()))
    most = str(at_peak.index(max(at_peak)))
    assert styles[most]["backgroundColor"] == LIGHT.shades[-1].fill
    assert {name for name, style in styles.items() if "backgroundColor" in style} == {
        str(index) for index, nbytes in enumerate(at_peak) if nbytes
    }
    conv, relu = ({pair["key"]: pair["value"] for pair in node["attrs"]} for node in nodes[1:3])
    assert (conv["saved"], conv["FLOPs, forward"]) == ("32.0 MiB (33,554,432 bytes)", "3.0 G")
    assert relu["FLOPs, forward"] == "unknown"
    view = Node(name="v", op="call_method", target="view", view_of=0)
    (_, second) = exported(make_profile(ticks=1, nodes=[view, view]), "model-explorer")["graphs"][0]["nodes"]
    assert {"key": "view of", "value": {"type": "node_ids", "nodeIds": ["0"]}} in second["attrs"]


def test_model_explorer_data_belongs_to_that_graph() -> None:
    profile = small_profile()
    collection, data = exported(profile, "model-explorer"), exported(profile, "model-explorer-data")
    ((graph, numbers),) = data.items()
    assert [graph] == [each["id"] for each in collection["graphs"]]
    assert set(numbers["results"]) <= {node["id"] for node in collection["graphs"][0]["nodes"]}
    assert [stop["stop"] for stop in numbers["gradient"]] == [0, 1]
    # In this step everything alive at the peak belongs to a node.
    assert (
        sum(result["value"] for result in numbers["results"].values())
        == liveness.timeline(profile).peak.requested_bytes
    )


# --- markdown ---------------------------------------------------------------------------------------------------------


def cells_of(line: str) -> list[str]:
    """A row of a table, divided at the bars that are not escaped."""
    assert line.startswith("| ")
    assert line.endswith(" |")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1])]


def test_markdown_says_the_figures() -> None:
    text = exported(small_profile(), "markdown")
    assert text.startswith("### Predicted memory of `Small` on `tiny`\n")
    peak = liveness.timeline(small_profile()).peak.requested_bytes
    assert f"({peak:,} bytes) requested at once, in backward |" in text
    assert "| workspace | 64.0 MiB |" in text
    assert "| `block.conv` | 100.0 MiB |" in text
    assert "<details><summary>2 assumed</summary>" in text
    assert "- flops: custom::swish (2 times)" in text


def test_markdown_names_the_largest_and_sums_up_the_rest() -> None:
    profile = deep_profile(30)
    rows = [cells_of(line) for line in exported(profile, "markdown").splitlines() if line.startswith("| `layers.")]
    assert len(rows) == 15
    shown = sum(sorted(bytes_at_peak(profile, liveness.timeline(profile)), reverse=True)[:15])
    rest = sum(bytes_at_peak(profile, liveness.timeline(profile))) - shown
    assert f"more | {rest / MIB:.2f} MiB |" in exported(profile, "markdown")


@pytest.mark.parametrize("name", [*NAMES, "a|b", "`", "``c` |", "@someone #1 <img src=x>", "a\n\n# heading"])
def test_markdown_keeps_names_in_code(name: str) -> None:
    text = exported(hostile(name), "markdown")
    outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert not re.search(r"script|<img|@someone|# heading", outside)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        assert len({len(cells_of(line)) for line in table.splitlines()}) == 1


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_the_command_writes_what_the_library_gives(tmp_path: Path, to: str) -> None:
    report, out = saved(tmp_path / "r.json", small_profile()), tmp_path / "out"
    content = export(small_profile(), liveness.timeline(small_profile()), to)
    assert called(export_verb, report, "--to", to, "-o", str(out)) == (0, "")
    assert out.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    if isinstance(content, str):
        assert called(export_verb, report, "--to", to, "-o", "-") == (0, content)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "r.json"]


def test_bytes_are_not_for_stdout(tmp_path: Path) -> None:
    report = saved(tmp_path / "r.json", small_profile())
    with pytest.raises(UsageError, match="expected --output to name a file, got '-': memory-viz is no text"):
        called(export_verb, report, "--to", "memory-viz", "-o", "-")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["r.json", "--to", "csv", "-o", "no/where.csv"],
            "expected --output to name a file in a folder that exists, got 'no/where.csv'",
        ),
        (["r.json", "--to", "csv", "-o", "."], "expected --output to name a file, or - for stdout, got '.'"),
        (
            ["none.json", "--to", "csv", "-o", "x.csv"],
            "expected a report written by `fxmem analyze --json`, got 'none.json': No such file",
        ),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "r.json", small_profile())
    with pytest.raises(UsageError, match=re.escape(complaint)):
        called(export_verb, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_what_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.csv"
    out.write_text("old", encoding="utf-8")

    def fail(*_: object) -> str:
        raise EnvironmentLacksError("no")

    monkeypatch.setitem(EXPORTERS._registered, "csv", Exporter("csv", fail))
    with pytest.raises(EnvironmentLacksError):
        exporting.save(small_profile(), liveness.timeline(small_profile()), out, "csv")
    assert out.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_the_allocators_settings_are_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, out = saved(tmp_path / "r.json", small_profile()), tmp_path / "x.pickle"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    called(export_verb, report, "--to", "memory-viz", "-o", str(out))
    content = pickle.loads(out.read_bytes())
    assert content["allocator_settings"]["expandable_segments"] is True
    assert {segment["is_expandable"] for segment in content["segments"]} == {True}


def test_a_model_in_the_place_of_a_report(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(4, 3)\n", encoding="utf-8")
    arguments = (
        f"{tmp_path / 'toy.py'}:make",
        "--input",
        "2x4",
        "--target",
        "cpu",
        "--quiet",
        "--to",
        "csv",
        "-o",
        "-",
    )
    code, text = called(export_verb, *arguments)
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sum(int(row["params_bytes"]) for row in rows) == 4 * (4 * 3 + 3)


def test_reports_are_exported_without_torch(tmp_path: Path) -> None:
    report = saved(tmp_path / "r.json", small_profile())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fxmem.cli.parser import Parser; from fxmem.cli.verbs import export as verb\n"
        "parser = Parser().add_arguments(verb.ARGUMENTS)\n"
        f"print([verb.run(parser.parse_args([{report!r}, '--to', to, '-o', to])) for to in verb.EXPORTERS] == [(0, "
        f"'')] * {len(FORMATS)})"
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
    assert re.fullmatch(r"(fxmem: wrote \S+ \(\d+ (kB|bytes)\)\n)+", done.stderr)
    assert done.stdout == "True\n"
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", *FORMATS}


def test_outputs_on_another_device_are_said_in_csv() -> None:
    node = Node(name="a", op="call_function", target="f", outputs=(TensorInfo(shape=(), dtype="int64"),))
    (row,) = exported(make_profile(ticks=1, nodes=[node]), "csv")
    assert (row["output_shapes"], row["output_dtypes"], row["output_storages"]) == ("scalar", "int64", "none")
