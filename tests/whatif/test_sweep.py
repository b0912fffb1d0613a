"""A step over a grid of settings: each point is what an analysis of it says, whether it was analysed or not."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxmem
from fxmem.cli.verbs import analyze as analyze_verb
from fxmem.cli.verbs import sweep as verb
from fxmem.errors import UsageError
from fxmem.hardware import catalogue
from fxmem.memory.lengths import POWERS
from fxmem.memory.lengths.forms import find_sum
from fxmem.records.fits import Fits, Point, Space
from fxmem.records.profile import StepTime
from fxmem.show.plots import sweep_svg
from fxmem.show.text.fits import fits_table
from fxmem.whatif.fits import choose_samples
from tests.cores import two_cores
from tests.verbs import called

BLOCKS = """
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.outer(self.inner(x).tanh())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
GRID = {"batch": (2, 4, 6, 8, 12), "length": (16, 32, 48, 64)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(self.norm(x)).chunk(3, dim=-1)
        return x + torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(50, 32),
            nn.ModuleList([Attention(), Attention()]),
            nn.Linear(32, 50),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Moody(nn.Module):
    """Computes otherwise where there are many."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu() if len(x) > 10 else self.inner(x)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def by_size(found: Fits) -> dict[tuple[Any, ...], Point]:
    return {(each.card, each.size, each.length, each.precision, each.checkpoints): each for each in found.points}


def test_points_that_were_not_analysed_are_what_analyses_say() -> None:
    cards = ("rtx4090", "l4")
    with two_cores():
        found = fxmem.sweep(Model, tokens(4, 16), grid={**GRID, "precision": ("none", "bf16"), "card": cards})
    points = by_size(found)
    assert len(points) == 5 * 4 * 2 * 2
    assert found.analyses == 2 * 8  # both cards are of one compute capability
    assert sum(each.is_analysed for each in found.points) == 2 * 8 * 2
    for size in ((4, 48), (8, 32), (8, 16)):
        for precision in ("none", "bf16"):
            given = None if precision == "none" else "bf16"
            analysis = fxmem.analyze(Model, tokens(*size), target="l4", precision=given)
            point = points["l4", *size, precision, "none"]
            assert not point.is_analysed
            assert point.requested_bytes == analysis.peak.requested_bytes
            assert point.allocated_bytes == analysis.peak.allocated_bytes
            assert point.reserved_bytes == analysis.peak.reserved_bytes
            assert point.time == analysis.estimate_time()


def test_lengths_that_are_few_have_forms_of_their_own() -> None:
    found = fxmem.sweep(Model, tokens(4, 16), grid={**GRID, "length": (16, 48), "card": ("l4",)})
    assert found.analyses == 2 * 4
    (point,) = (each for each in found.points if (each.size, each.length) == (8, 48))
    assert not point.is_analysed
    assert point.reserved_bytes == fxmem.analyze(Model, tokens(8, 48), target="l4").peak.reserved_bytes


def test_an_analysis_checkpoints_blocks_as_a_sweep_does(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BLOCKS)
    subject = (f"{tmp_path / 'model.py'}:Model", "--input", "8192x64", "--target", "l4", "--quiet")
    (tmp_path / "out").mkdir()
    kept = []
    for words in ((), ("--checkpoints", "blocks")):
        called(analyze_verb, *subject, *words, "--json", str(tmp_path / "out" / "report.json"))
        kept.append(json.loads((tmp_path / "out" / "report.json").read_text()))
    _, text = called(verb, *subject, "--over", "batch=8192", "--over", "checkpoints=none,blocks", "--json", "-")
    peaks = {each["checkpoints"]: each["allocated_bytes"] for each in json.loads(text)["points"]}
    plain, checkpointed = (each["peak"]["allocated_bytes"] for each in kept)
    assert (plain, checkpointed) == (peaks["none"], peaks["blocks"])
    assert checkpointed < plain
    assert any("--checkpoints blocks" in each["text"] for each in kept[1]["assumptions"])


def test_blocks_are_checkpointed() -> None:
    found = fxmem.sweep(Model, tokens(4, 16), grid={"checkpoints": ("none", "blocks"), "batch": (512,)}, target="l4")
    plain, planned = found.points
    assert (planned.requested_bytes or 0) < (plain.requested_bytes or 0)
    assert planned.time is not None
    assert plain.time is not None
    assert planned.time.seconds > plain.time.seconds


def test_each_size_is_analysed_where_operators_differ() -> None:
    found = fxmem.sweep(Moody, torch.empty(2, 8, device="meta"), grid={"batch": (2, 4, 6, 8, 12, 16)}, target="l4")
    assert all(each.is_analysed for each in found.points)
    assert found.notes == (
        "l4: each size analysed, as the operators, or the order of their allocations, differ from size to size",
    )


def test_what_is_kept_is_not_analysed_again() -> None:
    grid = {"batch": (2, 4), "card": ("l4",), "prices": {"l4": 1.0}}
    states: list[Fits] = []
    first = fxmem.sweep(Model, tokens(4, 16), grid=grid, keep=states.append)
    assert states[-1].points == first.points
    wider = fxmem.sweep(Model, tokens(4, 16), grid={**grid, "batch": (2, 4, 8), "prices": {"l4": 3.0}}, kept=first)
    assert (wider.kept, wider.analyses) == (2, 1)
    assert [each.cost for each in wider.points[:2]] == [3 * (each.cost or 0) for each in first.points]
    other = fxmem.sweep(Model, tokens(4, 16), grid=grid, optimizer="sgd", kept=first)
    assert (other.kept, other.analyses) == (0, 2)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12, unique=True),
    st.lists(st.integers(1, 200), max_size=9, unique=True),
)
def test_samples_determine_every_product(batches: list[int], lengths: list[int]) -> None:
    sizes = [(batch, *length) for batch in batches for length in ([(each,) for each in lengths] or [()])]
    samples = choose_samples(sizes)
    if samples is None:
        return
    assert set(samples.points) <= set(sizes)
    assert not any(1 in each for each in samples.points)
    powers = POWERS[len(sizes[0])]
    values = [(at, sum((n + 2) * _product(each, at) for n, each in enumerate(powers))) for at in samples.points]
    form = find_sum(values, powers, (1,) * len(sizes[0]))
    assert form is not None
    assert [factor for _, factor in form.terms] == [Fraction(n + 2) for n in range(len(powers))]


def _product(powers: tuple[int, ...], at: tuple[int, ...]) -> int:
    product = 1
    for power, length in zip(powers, at, strict=True):
        product *= length**power
    return product


def test_a_length_that_the_samples_round_is_not_asked_for() -> None:
    samples = choose_samples([(each,) for each in (1, 8, 16, 24, 32, 40, 41)])
    assert samples is not None
    assert not samples.covers((1,))
    assert samples.covers((40,)) is (samples.steps == [1] or 40 % samples.steps[0] == 0)
    padded = choose_samples([(each,) for each in (64, 128, 192, 256, 320, 384)])
    assert padded is not None
    assert padded.covers((320,))
    assert not padded.covers((321,))


def point(nbytes: int, seconds: float, batch: int = 1, **changes: Any) -> Point:
    fields: dict[str, Any] = {
        "card": "l4", "size": batch, "length": None, "precision": "none", "checkpoints": "none", "mesh": "none",
        "is_analysed": True, "room_bytes": 100, "requested_bytes": nbytes, "fits": True, "samples": batch,
        "time": StepTime(seconds=seconds, low_seconds=seconds, high_seconds=seconds),
    }  # fmt: skip
    return Point(**{**fields, **changes})


def swept(*points: Point) -> Fits:
    step = fxmem.analyze(nn.Linear(2, 2), torch.empty(1, 2, device="meta"), target="l4").profile
    return Fits(**step.heading(), space=Space(), cards=[step.target], points=points, analyses=0)


def test_the_front_is_what_none_beats_in_both() -> None:
    slow, mid, beaten, fast, misfit = (
        point(10, 9.0),
        point(20, 4.0),
        point(30, 5.0),
        point(40, 6.0, 2),
        point(5, 1.0, fits=False),
    )
    found = swept(fast, beaten, slow, misfit, mid)
    assert found.front == (slow, mid, fast)  # 3 seconds a sample
    assert found.by_case == (fast,)
    assert sweep_svg(found).count('class="dot"') == 3
    assert found._repr_html_().count('class="dot"') == 3


def test_prices_are_of_a_million_samples_and_of_a_thousand_steps() -> None:
    text = fits_table(swept(point(10, 9.0, cost=0.002, batch=4), point(20, 1.0, cost=0.001, batch=1)), full=True)
    assert "batch 4: 500 for a million samples, 2 for 1,000 steps" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("l4")]
    assert [row[-3:-1] for row in rows] == [["500", "2"], ["1e+03", "1"]]
    unsized = point(10, 9.0).model_copy(update={"size": None})
    assert "Batch" not in fits_table(swept(unsized))


def test_a_price_goes_by_any_name_of_its_card_and_is_said_to_come_to_nothing_without_a_time() -> None:
    grid = {"batch": (2, 4), "card": ("24GiB", "L4"), "prices": {"24gib": 0.5, "L4": 0.8}}
    found = fxmem.sweep(Model, tokens(4, 16), grid=grid)
    assert {each.card for each in found.points if each.cost is not None} == {"l4"}
    said = " ".join(fits_table(found).split())
    assert "Cost not known on 24GiB: no time is estimated there, but on a card of the catalogue" in said


@pytest.mark.parametrize(
    ("words", "meshes"),
    [
        ("none,fsdp=2,fsdp=8", ["none", "fsdp=2", "fsdp=8"]),
        ("fsdp=8,tp=2,fsdp=4,tp=4,none", ["fsdp=8,tp=2", "fsdp=4,tp=4", "none"]),
        ("replicate=2,fsdp=4", ["replicate=2,fsdp=4"]),
    ],
)
def test_a_mesh_of_a_list_begins_where_a_dimension_comes_again(words: str, meshes: list[str]) -> None:
    assert [*verb._read_values("mesh", words)] == meshes


def test_the_verb_writes_goes_on_and_says_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, written, grid = tmp_path / "own.py", tmp_path / "sweep.json", tmp_path / "grid.toml"
    own.write_text("from tests.whatif.test_sweep import Model\n")
    grid.write_text('card = ["l4"]\nprecision = ["none", "bf16"]\n[prices]\nl4 = 0.8\n')
    words = (f"{own}:Model", "--input", "4x16:int64", "--grid", str(grid), "--json", str(written))
    code, text = called(verb, *words, "--over", "batch=2..4", "--full", "--svg", str(tmp_path / "front.svg"))
    assert code == 0
    assert "4 of 4 fit" in text
    assert "ids 4x16 int64; batch varies\n" in text
    first = Fits.model_validate_json(written.read_text())
    assert [each.size for each in first.points] == [2, 4, 2, 4]
    assert all(
        each.cost
        == pytest.approx((each.time or StepTime(seconds=0, low_seconds=0, high_seconds=0)).seconds * 0.8 / 3600)
        for each in first.points
    )
    assert "a sample" in (tmp_path / "front.svg").read_text()
    code, text = called(verb, *words, "--over", "batch=2,4", "--over", "batch=100000000")
    assert code == 0
    assert "4 points kept" in text
    card = tmp_path / "small.json"
    small = catalogue.target("l4").model_copy(update={"name": "small", "memory_bytes": 1 << 20})
    card.write_text(small.model_dump_json())
    code, _ = called(verb, f"{own}:Model", "--input", "4x16:int64", "--over", f"card={card}", "--quiet", "--json", "-")
    assert code == 4


def test_a_table_for_a_readme_leaves_the_rest_as_it_is(tmp_path: Path) -> None:
    own, readme, other = tmp_path / "own.py", tmp_path / "README.md", tmp_path / "other.md"
    own.write_text("from tests.whatif.test_sweep import Model\n")
    readme.write_text("Before\n<!-- fxmem -->old<!-- /fxmem -->\nAfter\n")
    other.write_text("no such lines\n")
    words = (f"{own}:Model", "--input", "4x16:int64", "--over", "card=l4,t4", "--quiet", "--markdown")
    for _ in range(2):  # the second finds its own
        code, text = called(verb, *words, str(readme))
        assert code == 0
        before, table, after = readme.read_text().partition("<!-- fxmem -->\n\n| Card | ")
        assert before == "Before\n"
        assert table
        assert after.count("\n| `l4` |") == after.count("\n| `t4` |") == 1
        assert after.endswith("within the room. Times are estimates.\n\n<!-- /fxmem -->\nAfter\n")
        assert f"with torch {torch.__version__}. " in after
        assert " 4x16 int64`, train" in after
        assert "autocast: off" in after
    assert not text.startswith("|")
    assert "times are estimates" in text
    new = tmp_path / "new.md"
    for _ in range(2):  # a new file, and the same again
        assert called(verb, *words, str(new))[0] == 0
        assert re.fullmatch(r"<!-- fxmem -->\n\n\| Card .*\n<!-- /fxmem -->\n", new.read_text(), re.DOTALL)
    varied = called(verb, *words, "-", "--over", "precision=none,bf16")[1]
    assert varied.startswith("| Card | Room | Precision |")
    assert "autocast" not in varied
    assert varied.count("`float32`") == 2  # without autocast
    assert called(verb, *words, "-", "--over", "card=NVIDIA L4")[1].count("\n| `NVIDIA L4` |") == 1
    assert [line.split("|")[5].strip() for line in varied.splitlines() if "`t4`" in line and "`bf16`" in line] == [
        "unknown"
    ]
    with pytest.raises(UsageError, match="the lines <!-- fxmem --> and <!-- /fxmem --> once"):
        called(verb, *words, str(other))
    assert other.read_text() == "no such lines\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected something to vary"),
        (("--over", "size=3"), "got 'size=3'"),
        (("--over", "batch=0"), "got '0' for batch"),
        (("--over", "precision=int8"), "got 'int8' for precision.0"),
        (("--over", "card=nocard"), "nocard"),
        (("--over", "batch=1", "--price", "l4"), "expected --price as CARD=NUMBER"),
        (("--over", "batch=2", "--price", "l4=1", "--over", "card=h100"), "expected prices of the cards h100"),
        (("--over", "checkpoints=some"), "expected checkpoints none, blocks or a plan"),
        (("--over", "mesh=pp=2"), "pipeline"),
        (("--over", "batch=1,1"), "expected each batch once"),
        (("--over", "batch=8..4"), "got '8..4' for batch"),
        (("--over", "bach=1"), "closest: batch"),
        (("--grid", "nowhere.toml"), "expected --grid to name a file of TOML"),
        (("--grid", "misspelt.toml"), "got 'bach'; closest: batch"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.py"
    own.write_text("from tests.whatif.test_sweep import Model\n")
    monkeypatch.chdir(tmp_path)
    Path("misspelt.toml").write_text("bach = [1]\n")
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        called(verb, f"{own}:Model", "--input", "4x16:int64", "--quiet", *words)


@pytest.mark.truth
def test_a_program_runs_at_each_size_on_each_card(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(64, 64).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.ones(int(sys.argv[1]), 64, device='cuda')).sum().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
    )
    written = tmp_path / "sweep.json"
    words = (
        "--over",
        "batch=4096,8192",
        "--over",
        "card=t4,h100",
        "--json",
        str(written),
        "--quiet",
        "--run",
        str(program),
        "{}",
    )
    code, _ = called(verb, *words)
    assert code == 0
    found = json.loads(written.read_text())["points"]
    assert [(each["card"], each["size"]) for each in found] == [
        ("t4", 4096),
        ("t4", 8192),
        ("h100", 4096),
        ("h100", 8192),
    ]
    assert found[1]["requested_bytes"] - found[0]["requested_bytes"] >= 4096 * 64 * 4
