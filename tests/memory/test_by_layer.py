"""Layers: a pencil's figures, torch's own counts, and what the forms of output say."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

import fxmem
from fxmem.cli.verbs import show as verb
from fxmem.hardware.op_classes import MAC_OPS, UNKNOWN_MAC_OPS
from fxmem.hardware.operators import OPERATORS
from fxmem.memory.by_layer import by_layer
from fxmem.memory.report_reader import load_report
from fxmem.records.breakdown import Layer, LayerReport
from fxmem.records.profile import Kind
from fxmem.show.text import by_layer as layer_reporting
from tests.profiles import Log, deep_profile, small_profile
from tests.show.text.test_report import hostile
from tests.verbs import called, saved


class Net(nn.Module):
    """A convolution, twice the same linear layer, tied weights, a layer nobody calls, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.linear.weight
        self.unused = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x = self.linear(torch.relu(self.linear(x)))
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return self.norm(self.tied(x) + x)


@pytest.fixture(scope="module")
def net() -> LayerReport:
    return by_layer(fxmem.analyze(Net, torch.empty(2, 3, 4, 4, device="meta"), target="cpu"))


def at(report: LayerReport, path: str, name: str | None = None) -> Layer:
    """The row of a module, or of a function's calls in it."""
    (row,) = (
        row
        for row in report.layers
        if row.path == path and (row.kind == "module" if name is None else row.name == name and row.kind == "call")
    )
    return row


def test_by_pencil(net: LayerReport) -> None:
    conv, linear, tied, norm = (at(net, name) for name in ("conv", "linear", "tied", "norm"))
    # 8 filters of 3 x 3 x 3 and a bias each; 2 images of 4 x 4 pixels.
    assert (conv.params, conv.macs, conv.output_shape, conv.output_bytes) == (
        8 * 27 + 8,
        2 * 16 * 8 * 27,
        (2, 8, 4, 4),
        2 * 8 * 16 * 4,
    )
    # 2 x 16 tokens through 8 x 8, twice. The first time the bias is added by an operator of its own, because the input
    # is transposed.
    assert (linear.params, linear.calls, linear.macs, linear.forward_flops) == (
        72,
        2,
        2 * 32 * 64,
        4 * 32 * 64 + 32 * 8,
    )
    assert (tied.params, tied.params_bytes, tied.macs) == (0, 0, 32 * 64)
    assert (norm.params, norm.macs) == (16, 0)
    assert norm.forward_flops > 0
    # Attention: scores and values, 16 x 16 x 8 each, for 2 sequences.
    attention = at(net, "", "scaled_dot_product_attention")
    assert (attention.params, attention.macs) == (0, 2 * 2 * 16 * 16 * 8)
    unused = at(net, "unused")
    assert (unused.params, unused.calls, unused.forward_flops, unused.output_shape) == (5 * 7 + 7, 0, 0, None)
    assert net.layers[-1] is unused


def test_the_first_row_is_the_sum(net: LayerReport) -> None:
    model, total = Net(), net.total
    assert (total.path, total.depth, total.type) == ("", 0, "Net")
    assert total.params == sum(
        parameter.numel() for parameter in model.parameters()
    )  # torch counts a shared one once, too
    assert net.trained_params == total.params - 42
    below = net.layers[1:]
    for field in ("params", "params_bytes", "macs", "forward_flops", "backward_flops", "output_bytes", "saved_bytes"):
        assert getattr(total, field) == sum(getattr(row, field) for row in below), field


def test_a_containers_figures_are_its_childrens() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.BatchNorm1d(4))

    report = by_layer(fxmem.analyze(build, torch.empty(3, 4, device="meta"), target="cpu"))
    assert [(row.path, row.depth, row.type) for row in report.layers] == [
        ("", 0, "Sequential"), ("0", 1, "Sequential"), ("0.0", 2, "Linear"), ("0.1", 2, "ReLU"),
        ("1", 1, "BatchNorm1d"),
    ]  # fmt: skip
    inner, linear, relu = report.layers[1:4]
    assert inner.saved_bytes == linear.saved_bytes + relu.saved_bytes > 0
    assert inner.forward_flops == linear.forward_flops + relu.forward_flops
    # running_mean and running_var, four each; the count of batches, which is an int64.
    assert at(report, "1").buffers_bytes == 2 * 4 * 4 + 8


def test_weights_of_a_recurrent_layer_share_a_buffer_and_count_all_the_same() -> None:
    report = by_layer(
        fxmem.analyze(
            lambda: nn.LSTM(8, 16, num_layers=2), torch.empty(5, 3, 8, device="meta"), target="h100", mode="infer"
        )
    )
    assert report.total.params == sum(parameter.numel() for parameter in nn.LSTM(8, 16, num_layers=2).parameters())
    assert (report.total.macs, report.total.macs_unknown) == (0, 1)
    assert report.total.forward_flops > 0
    assert "at least 0 (not counted: 1 operator whose number is unknown)" in layer_reporting.table(report)
    assert report.trained_params is None


def test_mac_operators_are_those_of_torchs_own_registry_and_more() -> None:
    # Newer releases register flex_attention beside ATen's operators.
    registered = {
        str(packet).removeprefix("aten.")
        for packet in flop_registry
        if str(packet).startswith("aten.") and not str(packet).endswith("_backward")
    }
    assert registered <= MAC_OPS
    names = MAC_OPS | UNKNOWN_MAC_OPS
    assert [name for name in names if not hasattr(torch.ops.aten, name)] == []
    assert not any(OPERATORS[name].uncounted for name in names)


def test_macs_are_half_of_what_torchs_counter_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.zeros(2, 3, 4, 4)
    with FlopCounterMode(display=False) as counter:
        Net()(x)
    report = by_layer(fxmem.analyze(Net, x, target="cpu", mode="infer"))
    assert 2 * report.total.macs == counter.get_total_flops()


def test_parameters_of_any_dtype_count_once() -> None:
    log = Log(modules={"": "Toy", "a": "Linear"})
    log.node("a", target="a", module="a", module_type="Linear")
    for name, dtype, nbytes, shape in (
        ("a.weight", "bfloat16", 64, (4, 8)),
        ("a.scale", "float8_e4m3fn", 4, (4,)),
        ("a.odd", "int4", 12, (24,)),
    ):
        log.resident(nbytes, Kind.PARAMETER, name=name, node=0, shape=shape, dtype=dtype)
    assert by_layer(log.profile()).total.params == 32 + 4 + 24


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_equal_siblings_fold_in_tables_and_stand_one_by_one_in_csv() -> None:
    report = by_layer(deep_profile(6))
    text = layer_reporting.table(report, width=100)
    assert re.search(r"^    0-5 x6 \(Block\) ", text, re.MULTILINE)
    assert text.count("linear (Linear)") == 1
    assert text.startswith("Most kept   layers.0-5.norm (LayerNorm): 4.00 KiB each\n")
    rows = list(csv.DictReader(io.StringIO(layer_reporting.csv_text(report))))
    assert [row["path"] for row in rows if row["type"] == "Linear"] == [f"layers.{i}.linear" for i in range(6)]
    (first,) = (row for row in rows if row["path"] == "layers.0.linear")
    assert (first["params"], first["params_bytes"], first["output_shape"], first["forward_flops"]) == (
        "65536",
        "262144",
        "4x256",
        "524288",
    )
    assert list(first) == list(Layer.model_fields)


def test_unknown_is_never_zero() -> None:
    report = by_layer(small_profile())
    text = layer_reporting.table(report, width=80)
    assert re.search(r"act \(Swish\) +8x16x64x64 +0 +0 +unknown ", text)
    assert re.search(r"^Small .* >=3\.0 G", text, re.MULTILINE)
    assert "at least 3,000,000,000 (not counted: 1 node without a formula) in forward" in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_tables_are_no_wider_than_asked(width: int) -> None:
    for profile in (small_profile(), deep_profile(6)):
        text = layer_reporting.table(by_layer(profile), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert ("Bwd FLOPs" in text) is (width >= 100)
    assert "\x1b[" in layer_reporting.table(by_layer(small_profile()), width=width, color=True)


def test_depth_limits_every_form() -> None:
    report = by_layer(small_profile())
    assert "conv (Conv2d)" in layer_reporting.table(report)
    assert "Conv2d" not in layer_reporting.table(report, depth=1)
    assert "Conv2d" not in layer_reporting.markdown(report, depth=1)
    assert [row["path"] for row in csv.DictReader(io.StringIO(layer_reporting.csv_text(report, depth=1)))] == [
        "",
        "block",
        "",
    ]


def test_markdown_is_a_table(net: LayerReport) -> None:
    lines = layer_reporting.markdown(net).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + len(
        [row for row in net.layers if row.kind == "module" or row.output_bytes or row.saved_bytes or row.forward_flops]
    )
    assert f"- MACs: {6912 + 4096 + 2048 + 8192:,}" in lines


@pytest.mark.parametrize("text", ["a|b`c`<b>*d*", "\x1b[31mred\x07", 'line\nbreak,"quoted"'])
def test_names_are_text(text: str) -> None:
    report = by_layer(hostile(text))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", layer_reporting.table(report))
    table = [line for line in layer_reporting.markdown(report).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert not any(re.search(r"(?<!\\)[<`*]", line.replace("&nbsp;", "")) for line in table)
    assert len({len(row) for row in csv.reader(io.StringIO(layer_reporting.csv_text(report)))}) == 1


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\uff1d"])
def test_csv_is_no_place_for_formulas(start: str) -> None:
    rows = csv.reader(io.StringIO(layer_reporting.csv_text(by_layer(hostile(f"{start}HYPERLINK(1)")))))
    cells = [cell for row in rows for cell in row]
    assert not [cell for cell in cells if cell.startswith(start)]
    assert f"'{start}HYPERLINK(1)" in cells


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A report in a file."""
    return saved(tmp_path / "report.json", small_profile())


def test_every_form(path: str) -> None:
    report = by_layer(load_report(Path(path)))
    assert called(verb, path, "--by", "layer", "--width", "80") == (0, layer_reporting.table(report, width=80))
    assert called(verb, path, "--by", "layer", "--format", "md") == (0, layer_reporting.markdown(report))
    assert called(verb, path, "--by", "layer", "--format", "csv", "--depth", "1") == (
        0,
        layer_reporting.csv_text(report, depth=1),
    )
    assert LayerReport.model_validate_json(called(verb, path, "--by", "layer", "--format", "json")[1]) == report


def test_json_beside_another_form(path: str, tmp_path: Path) -> None:
    _, text = called(verb, path, "--by", "layer", "--format", "csv", "--json", str(tmp_path / "layers.json"))
    assert text.startswith("path,name,type,")
    assert LayerReport.model_validate_json((tmp_path / "layers.json").read_text()).total.name == "Small"
