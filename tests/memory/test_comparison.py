"""Two steps side by side: what is matched with what, sums that must hold, and what is said."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import nn

import fxmem
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import compare as verb
from fxmem.errors import UsageError
from fxmem.memory import liveness
from fxmem.memory.budget import parse_growth
from fxmem.memory.comparison import compare
from fxmem.memory.report_reader import load_report
from fxmem.records.comparison import QuantityChange, StepComparison
from fxmem.records.profile import Kind, Phase, Profile
from fxmem.show.text import comparison as comparison_reporting
from tests.profiles import deep_profile, make_profile, profiles, small_profile
from tests.show.text.test_report import call, hostile
from tests.verbs import report_of

MIB = 1 << 20


def profile_of(*modules: tuple[str, str, int], functions: tuple[str, ...] = ()) -> Profile:
    """A model that calls modules (path, class, saved bytes) one after another, then functions of its own."""
    nodes = [call(path.replace(".", "_"), path, module_type=kind, saved_bytes=saved) for path, kind, saved in modules]
    nodes += [call(f"{name}_{index}", op="call_function", target=name) for index, name in enumerate(functions)]
    return make_profile(ticks=0, nodes=nodes, modules={"": "Toy", **{path: kind for path, kind, _ in modules}})


def matches(comparison: StepComparison) -> list[tuple[str | None, str | None]]:
    """Nodes by name, before and after."""
    return [(node.before_node, node.after_node) for node in comparison.nodes]


# --- sums -------------------------------------------------------------------------------------------------------------


@given(profiles(), profiles())
def test_every_node_is_in_one_row(a: Profile, b: Profile) -> None:
    comparison = compare(a, b)
    for before, profile in ((True, a), (False, b)):
        names = [node.before_node if before else node.after_node for node in comparison.nodes]
        assert sorted(name for name in names if name is not None) == sorted(node.name for node in profile.nodes)
        side = "before" if before else "after"
        assert getattr(comparison.requested_bytes, side) == liveness.timeline(profile).peak.requested_bytes
        assert sum(getattr(change, side) for change in comparison.by_kind.values()) == getattr(
            comparison.requested_bytes, side
        )
        assert sum(getattr(node.at_peak, side) for node in comparison.nodes) == getattr(
            comparison.modules[0].at_peak, side
        )
        assert (
            sum(getattr(node.saved, side) for node in comparison.nodes)
            == getattr(comparison.modules[0].saved, side)
            == profile.saved_bytes
        )
        phases = [getattr(change, side) for change in comparison.phases.values()]
        assert max(phase for phase in phases if phase is not None) <= getattr(comparison.requested_bytes, side)


@pytest.mark.truth
@given(profiles())
def test_nothing_grew_from_a_step_to_itself(profile: Profile) -> None:
    comparison = compare(profile, profile)
    assert all(row.largest == 0 for row in (*comparison.modules, *comparison.nodes))
    assert all(one == other for one, other in matches(comparison))
    assert "No module and no node changed by a byte." in comparison_reporting.table(comparison)


def test_a_module_is_the_sum_of_what_is_below_it() -> None:
    comparison = compare(deep_profile(3), deep_profile(5))
    by_path = {row.after_path: row for row in comparison.modules}
    for field in ("at_peak", "saved", "params", "output", "forward_flops", "backward_flops"):
        layers = [getattr(by_path[f"layers.{i}"], field) for i in range(5)]
        whole = getattr(by_path["layers"], field)
        assert (whole.before, whole.after) == (
            sum(each.before for each in layers),
            sum(each.after for each in layers),
        ), field
    # Two more blocks, each with a weight of 256 KiB and three activations of 4 KiB kept.
    assert comparison.params_bytes == QuantityChange(before=3 * 262144, after=5 * 262144)
    assert comparison.saved_bytes == QuantityChange(before=9 * 4096, after=15 * 4096)
    assert comparison.forward_flops.delta == 2 * 524288


def test_flops_of_which_none_is_known_are_unknown_and_not_0() -> None:
    known = deep_profile(3)
    nodes = tuple(node.model_copy(update={"forward_flops": None}) for node in known.nodes)
    comparison = compare(known, known.model_copy(update={"nodes": nodes}))
    assert (comparison.forward_flops.before or 0) > 0
    assert comparison.forward_flops.after is None
    assert comparison.modules[0].forward_flops.after is None


# --- matching ---------------------------------------------------------------------------------------------------------


def test_a_layer_inserted_into_a_sequence_is_one_addition() -> None:
    before = profile_of(("net.0", "Conv2d", 10), ("net.1", "ReLU", 20), ("net.2", "Conv2d", 30), ("net.3", "ReLU", 40))
    after = profile_of(
        ("net.0", "Conv2d", 10),
        ("net.1", "BatchNorm2d", 7),
        ("net.2", "ReLU", 20),
        ("net.3", "Conv2d", 30),
        ("net.4", "ReLU", 40),
    )
    comparison = compare(before, after)
    assert matches(comparison) == [
        ("net_0", "net_0"),
        (None, "net_1"),
        ("net_1", "net_2"),
        ("net_2", "net_3"),
        ("net_3", "net_4"),
    ]
    assert [node.saved.delta for node in comparison.nodes] == [0, 7, 0, 0, 0]
    back = compare(after, before)
    assert matches(back)[-1] == ("net_1", None)
    assert [node.saved.delta for node in back.nodes] == [0, 0, 0, 0, -7]


def test_layers_with_other_weights_are_matched_by_their_place() -> None:
    """Of three blocks the middle one became wider: no block was added or removed, though the first two are now
    unlike."""

    def build(*widths: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths))

    x = torch.empty(2, 8, device="meta")
    before, after = (
        fxmem.analyze(lambda widths=widths: build(*widths), x, target="cpu") for widths in ((16, 16, 32), (16, 32, 32))
    )
    comparison = fxmem.memory.comparison.compare(before, after)
    assert all(row.before_path == row.after_path for row in comparison.modules)
    assert [row.after_path for row in comparison.modules if row.params.delta and row.after_path] == ["1", "1.0", "1.1"]
    # 16 more units: 8 x 16 weights and 16 biases in, 16 x 8 out.
    assert comparison.params_bytes.delta == 4 * (8 * 16 + 16 + 16 * 8)


def test_a_block_taken_out_of_the_middle_is_known_by_its_weights() -> None:
    def build(*widths: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths))

    x = torch.empty(2, 8, device="meta")
    before, after = (
        fxmem.analyze(lambda widths=widths: build(*widths), x, target="cpu")
        for widths in ((16, 24, 32, 40), (16, 32, 40))
    )
    top = [(row.before_path, row.after_path) for row in compare(before, after).modules if row.depth == 1]
    assert top == [("0", "0"), ("2", "1"), ("3", "2"), ("1", None)]


def test_a_layer_of_another_class_under_the_same_number() -> None:
    before = profile_of(("0", "Linear", 1), ("1", "ReLU", 2), ("2", "Linear", 3))
    comparison = compare(before, profile_of(("0", "Linear", 1), ("1", "GELU", 5), ("2", "Linear", 3)))
    assert [(row.before_type, row.after_type, row.saved.delta) for row in comparison.modules[1:]] == [
        ("Linear", "Linear", 0),
        ("ReLU", "GELU", 3),
        ("Linear",) * 2 + (0,),
    ]
    assert matches(comparison) == [("0", "0"), ("1", "1"), ("2", "2")]


def test_a_module_under_another_name() -> None:
    comparison = compare(
        profile_of(("body", "Linear", 1), ("fc", "Head", 2)), profile_of(("body", "Linear", 1), ("head", "Head", 2))
    )
    assert [(row.before_path, row.after_path) for row in comparison.modules[1:]] == [("body", "body"), ("fc", "head")]


def test_calls_of_a_function_match_in_order_and_by_shape() -> None:
    comparison = compare(
        profile_of(functions=("torch.relu", "torch.relu", "torch.cat")),
        profile_of(functions=("torch.relu", "torch.cat", "torch.relu")),
    )
    assert sorted(matches(comparison)) == [
        ("torch.cat_2", "torch.cat_1"),
        ("torch.relu_0", "torch.relu_0"),
        ("torch.relu_1", "torch.relu_2"),
    ]

    def shaped(*widths: int) -> Profile:
        return make_profile(
            ticks=0,
            nodes=[
                call(
                    f"relu_{width}",
                    op="call_function",
                    target="relu",
                    outputs=({"shape": (width,), "dtype": "float32"},),
                )
                for width in widths
            ],
        )

    more = compare(shaped(1, 3), shaped(1, 2, 3))
    assert matches(more) == [("relu_1", "relu_1"), (None, "relu_2"), ("relu_3", "relu_3")]
    assert matches(compare(shaped(1, 2, 3), shaped(4)))[0] == ("relu_1", "relu_4")


def test_loss_and_optimizer_match_whatever_they_are() -> None:
    x = torch.empty(2, 8, device="meta")
    adam, sgd = (
        fxmem.analyze(lambda: nn.Linear(8, 8), x, optimizer=optimizer, target="cpu") for optimizer in ("adam", "sgd")
    )
    comparison = compare(adam, sgd)
    assert ("optimizer", "optimizer") in matches(comparison)
    # Two averages of 72 numbers for each parameter; the step's counters are on the CPU as well, which is the target
    # here.
    assert comparison.by_kind[Kind.OPTIMIZER_STATE] == QuantityChange(before=2 * 72 * 4 + 2 * 4, after=0)
    assert comparison.by_kind[Kind.PARAMETER].delta == 0


def test_inference_has_one_phase() -> None:
    x = torch.empty(2, 8, device="meta")
    training, inference = (
        fxmem.analyze(lambda: nn.Linear(8, 8), x, mode=mode, target="cpu") for mode in ("train", "infer")
    )
    comparison = compare(training, inference)
    assert comparison.phases[Phase.BACKWARD].after is None
    assert comparison.phases[Phase.BACKWARD].delta is None
    assert re.search(r"^Most in backward +[\d.]+ \w+ +none$", comparison_reporting.table(comparison), re.MULTILINE)


# --- what is shown ----------------------------------------------------------------------------------------------------


def grown() -> StepComparison:
    """Four blocks to seven, with the allocator's counts on one side."""
    return compare(report_of(deep_profile(4), allocated_bytes=3 * MIB), report_of(deep_profile(7)))


def test_text() -> None:
    text = comparison_reporting.table(grown(), width=80)
    # A block's weight takes 256 KiB and its activations 16, and the last gradient 4.
    assert re.search(r"^Peak requested +1\.07 MiB +1\.86 MiB +\+816\.0 KiB +\+74\.7 %$", text, re.MULTILINE)
    assert re.search(r"^Peak allocated +3\.00 MiB +unknown$", text, re.MULTILINE)
    assert text.startswith("Change      +816.0 KiB, +74.7 %: 1.07 MiB -> 1.86 MiB requested\nMost        layers.")
    assert "Peak reserved" not in text
    assert re.search(r"^    \+ 4-5 x2 \(Block\) ", text, re.MULTILINE)
    assert "+ before a name: added. xN: N equal siblings" in " ".join(text.split())
    assert re.search(r"^\+ layers\.4\.linear x3 4x256 +at peak +260\.0 KiB +\+260\.0 KiB$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 100, 130, 200])
def test_text_is_no_wider_than_asked(width: int) -> None:
    for comparison in (grown(), compare(small_profile(), deep_profile(3))):
        text = comparison_reporting.table(comparison, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.isascii()


def test_what_differs_in_the_heads_is_shown_twice() -> None:
    small = small_profile()
    other = small.model_copy(update={"step": small.step.model_copy(update={"precision": "bf16", "optimizer": "SGD"})})
    text = comparison_reporting.table(compare(small, other), width=120)
    assert "optimizer: AdamW -> SGD; autocast: off -> bf16" in text
    assert text.count("tiny (") == 1


def test_small_changes_are_left_out_and_it_is_said() -> None:
    many = [("a", "Linear", 1_000_000), ("b", "Linear", 5)]
    before = report_of(profile_of(*many))
    comparison = compare(before, report_of(profile_of(("a", "Linear", 2_000_000), ("b", "Linear", 6))))
    comparison = comparison.model_copy(update={"requested_bytes": QuantityChange(before=10_000_000, after=11_000_000)})
    text = comparison_reporting.table(comparison)
    assert re.search(r"^  a \(Linear\)", text, re.MULTILINE)
    assert not re.search(r"^  b \(Linear\)", text, re.MULTILINE)
    assert "below 1 % of the peak are not shown" in " ".join(text.split())
    assert re.search(r"^  b \(Linear\) +\+1 B", comparison_reporting.table(comparison, depth=1), re.MULTILINE)
    assert "2 more changed" not in text
    assert "1 more changed" in comparison_reporting.table(comparison, top=1)


def test_many_small_changes_alike_are_not_small() -> None:
    before, after = (
        report_of(profile_of(*((f"h.{i}", "Block", 60_000) for i in range(count)), ("end", "Head", 60_000)))
        for count in (2, 12)
    )
    comparison = compare(before, after).model_copy(
        update={"requested_bytes": QuantityChange(before=10_000_000, after=20_000_000)}
    )
    text = comparison_reporting.table(comparison)
    assert re.search(r"^    \+ 2-11 x10 \(Block\) +\+58\.6 KiB", text, re.MULTILINE)
    assert re.search(r"^\+ h\.2 x10 +saved +58\.6 KiB +\+58\.6 KiB$", text, re.MULTILINE)
    # One such block by itself is 0.3 % of the peak.
    one = compare(
        before, report_of(profile_of(*((f"h.{i}", "Block", 60_000) for i in range(3)), ("end", "Head", 60_000)))
    )
    one = one.model_copy(update={"requested_bytes": comparison.requested_bytes})
    assert "(Block)" not in comparison_reporting.table(one)


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (100, 150, "+50.0 %"),
        (100, 999, "+899.0 %"),
        (100, 1000, "x10"),
        (1_000_000, 999_999, "<0.1 %"),
        (100, 0, "-100.0 %"),
    ],
)
def test_shares(before: int, after: int, share: str) -> None:
    comparison = grown().model_copy(update={"requested_bytes": QuantityChange(before=before, after=after)})
    assert re.search(rf"^Peak requested .* {re.escape(share)}$", comparison_reporting.table(comparison), re.MULTILINE)


@pytest.mark.parametrize("text", ["\x1b[31mred\x07", "[bold]x[/bold]\r\n"])
def test_names_are_text(text: str) -> None:
    comparison = compare(small_profile(), hostile(text))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", comparison_reporting.table(comparison))


# --- the verb ---------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and text for stdout."""
    parser = Parser(prog="fxmem compare").add_arguments(verb.ARGUMENTS)
    parser.set_defaults(parser=parser)
    return verb.run(parser.parse_args(arguments))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, str]:
    """Two reports in files."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, layers in zip(paths, (4, 6), strict=True):
        path.write_text(report_of(deep_profile(layers)).model_dump_json())
    return str(paths[0]), str(paths[1])


WIDE = """
import torch


class Wide(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width = width

    def forward(self, x):
        wide = x.repeat(1, self.width)
        return wide.sin().sum()
"""


def test_lines_and_verdicts_of_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "wide.py"
    file.write_text(WIDE)
    given = f"{file}:Wide", "--input", "4096x8", "--mode", "infer", "--target", "6GB", "--quiet", "--width", "80"
    text = run(*given, "--with", "set=width=65536")[1]
    line = next(number for number, code in enumerate(WIDE.splitlines(), 1) if "repeat" in code)
    assert f"wide.py:{line}+8.00GiB:wide=x.repeat(1,self.width)" in "".join(text.split())
    assert re.search(r"^Memory +fits: .* of 5.43 GiB on 6GB.*\n +-> does NOT fit: ", text, re.MULTILINE)
    comparison = StepComparison.model_validate_json(run(*given[:-2], "--json", "-", "--with", "set=width=4")[1])
    assert (comparison.before.fits, comparison.after.fits) == (True, True)


def test_two_reports(saved: tuple[str, str], tmp_path: Path) -> None:
    expected = compare(*(load_report(Path(name)) for name in saved))
    assert run(*saved, "--width", "80") == (0, comparison_reporting.table(expected, width=80))
    assert StepComparison.model_validate_json(run(*saved, "--json", "-")[1]) == expected
    assert run(*saved, "--width", "80", "--top", "1", "--depth", "1")[1] == comparison_reporting.table(
        expected, width=80, top=1, depth=1
    )


@pytest.mark.parametrize(
    ("most", "fails"), [("0", True), ("0%", True), ("3%", True), ("1KiB", True), ("95%", False), ("1GiB", False)]
)
def test_a_peak_that_grew_by_more_fails(
    saved: tuple[str, str], most: str, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*saved, "--fail-over", most)[0] == (4 if fails else 0)
    said = capsys.readouterr().err
    assert bool(re.fullmatch(rf"fxmem: the peak grew by .* \(.* %\), more than {most}\n", said)) == fails
    assert run(*saved[::-1], "--fail-over", most)[0] == 0  # it shrank
    assert run(saved[0], saved[0], "--fail-over", "0")[0] == 0


@pytest.mark.parametrize(
    ("short", "most", "code", "said"),
    [
        ("second", "0", 4, "the peak grew by at least 1.00 KiB (100.0 %), more than 0"),
        ("second", "2KiB", 1, "not known whether the peak grew by more than 2KiB: the second step ran out of memory"),
        ("first", "0", 1, "not known whether the peak grew by more than 0: the first step ran out of memory"),
        ("first", "2KiB", 0, ""),
    ],
)
def test_growth_beyond_a_step_that_ran_out_is_not_known(
    short: str, most: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    peak = liveness.timeline(small_profile()).peak
    before, after = (
        peak.model_copy(update={"requested_bytes": nbytes, "allocated_bytes": nbytes, "at_least": short == name})
        for name, nbytes in (("first", 1024), ("second", 2048))
    )
    assert verb._judge(before, after, parse_growth(most, "--fail-over"), most) == code
    assert said in capsys.readouterr().err


OWN = """
import torch


def build(width=8, norm=False):
    layers = [torch.nn.Linear(8, width), torch.nn.Linear(width, 8)]
    return torch.nn.Sequential(*layers[:1], *([torch.nn.LayerNorm(width)] if norm else []), *layers[1:])
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A model in a file."""
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:build"


def compared(*arguments: str) -> StepComparison:
    """The comparison that the verb makes, for the CPU."""
    return StepComparison.model_validate_json(run(*arguments, "--target", "cpu", "--quiet", "--json", "-")[1])


def test_one_model_with_another_option(own: str) -> None:
    comparison = compared(own, "--input", "4x8", "--with", "precision=bf16", "--with", "input=16x8")
    assert (comparison.before.step.precision, comparison.after.step.precision) == (None, "bf16")
    assert [side.inputs[0].shape for side in (comparison.before, comparison.after)] == [(4, 8), (16, 8)]


def test_settings_of_the_second_replace_those_of_the_first(own: str) -> None:
    comparison = compared(
        own,
        "--input",
        "4x8",
        "--set",
        "width=16",
        "--with",
        "set=width=32",
        "--with",
        "set=norm=true",
        "--with",
        "channels-last",
    )
    # From 8 x 16 and 16 x 8 to 8 x 32 and 32 x 8, biases, and a norm of 32 with a bias.
    assert comparison.params_bytes == QuantityChange(before=4 * (2 * 128 + 16 + 8), after=4 * (2 * 256 + 32 + 8 + 64))
    assert [(row.before_path, row.after_path) for row in comparison.modules[1:]] == [
        ("0", "0"),
        (None, "1"),
        ("1", "2"),
    ]


def test_a_report_and_a_model(own: str, saved: tuple[str, str]) -> None:
    comparison = compared(saved[0], own, "--input", "4x8")
    assert (comparison.before.model, comparison.after.model) == ("Deep", own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own.py:build"], "expected a second REPORT.json or MODEL to compare with, or --with OPTION=VALUE"),
        (["own.py:build", "b.json", "--with", "batch=2"], "expected --with for a model, but 'b.json' is a report"),
        (["-", "-"], "expected stdin (-) for one of the two"),
        (
            ["own.py:build", "--with", "colour=red"],
            "--with colour=red: expected an option of the step; see fxmem compare --help",
        ),
        (
            ["own.py:build", "--with", "precision=fp8"],
            "expected --precision to be one of bf16, fp16; got 'fp8', did you mean --quantize fp8?; see fxmem compare",
        ),
        (
            ["a.json", "b.json", "--fail-over", "2 percent"],
            "expected --fail-over as 0, as a share of the peak before (2%), or as bytes (8589934592) or with a unit",
        ),
        (["a.json", "b.json", "--top", "-1"], "expected --top of at least 0, got -1"),
    ],
)
def test_what_the_verb_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        run(*arguments)


def test_options_of_the_first_are_left_as_they_were(own: str) -> None:
    parser = Parser(prog="fxmem compare").add_arguments(verb.ARGUMENTS)
    options: argparse.Namespace = parser.parse_args(
        [own, "--input", "4x8", "--with", "input=2x8", "--with", "set=width=4"]
    )
    options.parser = parser
    other = verb._second_options(options)
    assert (options.input, options.settings, other.input, other.settings) == (["4x8"], [], ["2x8"], ["width=4"])
