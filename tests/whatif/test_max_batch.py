"""The largest size and the cards a step fits: the search by itself, against pencil and paper, and against fresh
analyses."""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxmem
from fxmem.cli.output import check_output
from fxmem.cli.parser import Parser
from fxmem.cli.verbs import cards as cards_command
from fxmem.cli.verbs import max_batch as max_batch_command
from fxmem.errors import AnalysisError, ExceededError, UsageError
from fxmem.hardware import catalogue
from fxmem.hardware.context import room_bytes
from fxmem.memory import allocator
from fxmem.records.fits import NEAR_BEST, Fits, Point, Space, find_enough
from fxmem.records.profile import Phase, StepTime
from fxmem.records.units import format_bytes
from fxmem.show.facts import find_fit
from fxmem.show.plots import sizes_svg
from fxmem.show.text.fits import fits_table
from fxmem.simulation.program import Launch
from fxmem.simulation.step.analysis import Analysis, analyze
from fxmem.testing import guard
from fxmem.whatif import card_fit, max_batch, plan_search, sweep, verified_plan
from fxmem.whatif.program_step import ProgramCommand
from fxmem.whatif.source import find_resizing
from tests.cores import two_cores

MIB = 1 << 20


def linear() -> nn.Module:
    return nn.Linear(1000, 1000, bias=False)


def meta(*shape: int, **settings: Any) -> torch.Tensor:
    return torch.empty(shape, device="meta", **settings)


# --- the search by itself ---------------------------------------------------------------------------------------------


def sized(size: int, **fields: Any) -> Point:
    return Point(card="rtx4090", size=size, room_bytes=0, **fields)


class Bench:
    """Sizes measured by a formula, and how many of them."""

    def __init__(self, largest: int, *, reserved: int = 1100, allocated: int = 1000, constant: int = 0) -> None:
        self.largest, self.reserved, self.allocated, self.constant = largest, reserved, allocated, constant
        self.asked: list[int] = []

    def __call__(self, size: int) -> Point:
        assert size not in self.asked
        self.asked.append(size)
        return sized(
            size=size,
            requested_bytes=self.constant + self.allocated * size,
            allocated_bytes=self.constant + self.allocated * size,
            reserved_bytes=self.constant + self.reserved * size,
            phase=Phase.BACKWARD,
            fits=size <= self.largest,
        )


@given(
    st.integers(0, 3000),
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(900, 4000),
    st.integers(0, 10**7),
    st.integers(0, 10**8),
    st.sampled_from([1, 32]),
)
def test_the_search_ends_with_a_size_that_fits_beside_one_that_does_not(
    largest: int, start: int, limit: int, reserved: int, constant: int, memory: int, unit: int
) -> None:
    # The line may be right or far off: it may cost analyses, never the answer.
    bench = Bench(largest, reserved=reserved, constant=constant)
    measured = max_batch.search(bench, memory, start=min(start, limit), limit=limit, unit=unit)
    points = {point.size: point.fits for point in measured}
    found = max((size for size, fits in points.items() if fits), default=0)
    assert found == min(largest, limit)
    assert found == limit or points[found + 1] is False
    # Up: a doubling in three steps at least. Then between the two: a halving in two.
    assert len(bench.asked) <= 5 * limit.bit_length() + 2


@given(st.integers(2, 60_000), st.integers(1, 64))
def test_where_the_line_is_right_five_analyses_are_enough(largest: int, start: int) -> None:
    memory = 1000 * largest + 999
    bench = Bench(largest, reserved=1000)
    max_batch.search(bench, memory, start=start, limit=65536)
    assert len(bench.asked) <= 5


def test_the_side_of_an_image_is_searched_by_its_square_and_in_multiples_of_32() -> None:
    asked: list[int] = []

    def measure(side: int) -> Point:
        asked.append(side)
        if side % 4 and side > 8:  # as where halves of an odd side are joined with the whole
            return sized(side, fits=False, obstacle="cannot run")
        return sized(side, requested_bytes=10**7 + 1600 * side**2, phase=Phase.FORWARD, fits=side <= 2500)

    points = max_batch.search(measure, 10**7 + 1600 * 2500**2, start=8, limit=65536, unit=32)
    assert max(each.size or 0 for each in points if each.fits) == 2500
    assert asked[:3] == [8, 32, 256]
    assert max(asked) < 4 * 2500
    assert len(asked) <= 12


def test_an_interrupted_search_says_what_it_has_found() -> None:
    def measure(size: int) -> Point:
        if size > 100:
            raise KeyboardInterrupt
        return sized(size, requested_bytes=size, phase=Phase.FORWARD, fits=True)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        max_batch.search(measure, 1000, start=8, limit=65536)
    assert interrupted.value.__notes__ == ["so far 16 fits"]


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.data())
def test_whatever_fits_the_answer_has_a_neighbour_that_does_not(fits: list[bool], data: st.DataObject) -> None:
    limit, start = len(fits), data.draw(st.integers(1, len(fits)))

    def measure(size: int) -> Point:
        return sized(size=size, requested_bytes=size, phase=Phase.FORWARD, fits=fits[size - 1])

    points = {point.size: point.fits for point in max_batch.search(measure, 100, start=start, limit=limit)}
    found = max((size for size, fits in points.items() if fits), default=0)
    assert found == limit or points[found + 1] is False


def test_a_size_at_which_the_model_cannot_run_bounds_the_search_from_either_side() -> None:
    def measure(size: int) -> Point:
        if not 3 <= size <= 37:
            return sized(size=size, fits=False, obstacle="cannot run")
        return sized(size=size, requested_bytes=size, phase=Phase.FORWARD, fits=size <= memory)

    for memory, expected in ((1000, 37), (20, 20), (3, 3), (2, None)):
        points = max_batch.search(measure, memory, start=8, limit=65536)
        assert max((point.size for point in points if point.fits), default=None) == expected


def test_the_line_is_the_least_squares_one_through_the_points_near_the_largest() -> None:
    def point(size: int, nbytes: int) -> Point:
        return sized(size=size, requested_bytes=nbytes, phase=Phase.FORWARD, fits=True)

    # Slope 5 through (10, 51), (12, 59), (14, 71); mean size 12, mean bytes 181/3; intercept 181/3 - 60 = 1/3. (1, 999)
    # is too far away.
    points = [point(1, 999), point(10, 51), point(12, 59), point(14, 71)]
    assert max_batch.fit_line(points, 14) == (5, 0, 1)
    assert max_batch.fit_line(points[:2], 1) == (round((51 - 999) / 9), 999 + 105, 0)
    assert max_batch.fit_line(points[:1], 1) is None
    # Slope 0 through (10, 100), (11, 80), (12, 100), off by 13; a tenth of the most is 10. With 90 it is off by 7.
    assert max_batch.fit_line([point(10, 100), point(11, 80), point(12, 100)], 12) is None
    assert max_batch.fit_line([point(10, 100), point(11, 90), point(12, 100)], 12) == (0, 97, 7)


def test_a_line_that_is_none_is_left_out(curve: Fits) -> None:
    none = dict.fromkeys(("per_sample_bytes", "constant_bytes", "line_error_bytes"))
    assert "\nLine " in fits_table(curve)
    assert "\nLine " not in fits_table(curve.model_copy(update=none))


# --- against pencil and paper -----------------------------------------------------------------------------------------


def test_on_the_cpu_the_largest_batch_is_what_a_pencil_says() -> None:
    # Inference: the weight of 1000 x 1000 x 4, and per sample 1000 x 4 in and out each.
    settings = {"target": "cpu", "budget": 8_000_000, "mode": "infer"}
    curve = max_batch.max_batch(linear, meta(3, 1000), **settings)
    assert (curve.largest, curve.per_sample_bytes, curve.constant_bytes, curve.line_error_bytes) == (
        500,
        8000,
        4_000_000,
        0,
    )
    assert curve.monotone is True
    assert curve.at_largest is not None
    assert curve.at_largest.requested_bytes == 8_000_000
    assert curve.next_above is not None
    assert (curve.next_above.size, curve.next_above.requested_bytes) == (501, 8_008_000)
    assert {point.size for point in curve.points} == {3, 6, 125, 250, 375, 500, 501}
    # And what went out the time before.
    kept = max_batch.max_batch(linear, meta(3, 1000), keep_outputs=True, **settings)
    assert (kept.largest, kept.per_sample_bytes, kept.constant_bytes) == (333, 12_000, 4_000_000)


def test_one_byte_less_and_one_sample_less_fits() -> None:
    assert max_batch.max_batch(linear, meta(3, 1000), target="cpu", budget=7_999_999, mode="infer").largest == 499
    assert max_batch.max_batch(linear, meta(3, 1000), target="cpu", budget=7_991_999, mode="infer").largest == 498


@pytest.mark.truth
def test_on_a_card_the_size_found_fits_by_a_fresh_analysis_and_the_next_does_not() -> None:
    def built() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 28 * 28, 10),
        )

    limit = 300 * MIB
    curve = max_batch.max_batch(built, meta(4, 3, 32, 32), target="rtx4090", budget="300MiB")
    assert curve.largest is not None
    found = [analyze(built, meta(size, 3, 32, 32), target="rtx4090") for size in (curve.largest, curve.largest + 1)]
    short = [allocator.replay(each.profile, capacity_bytes=limit).shortage for each in found]
    assert [shortage is None for shortage in short] == [True, False]
    pair = [point.allocated_bytes for point in curve.points if point.size in (curve.largest, curve.largest + 1)]
    assert pair == [each.peak.allocated_bytes for each in found]
    assert curve.next_above is not None
    assert "runs out in" in curve.next_above.obstacle
    # Just below where the reserved bytes pass the budget everything fits; where the allocated ones do, nothing.
    assert all(point.fits for point in curve.points if (point.reserved_bytes or 0) <= limit)
    assert not any(point.fits for point in curve.points if (point.allocated_bytes or 0) > limit)


def test_nothing_fits() -> None:
    curve = max_batch.max_batch(linear, meta(16, 1000), target="cpu", budget=4_000_000, mode="infer")
    assert curve.largest is None
    assert curve.at_largest is None
    assert curve.points[0].size == 1
    assert curve.next_above == curve.points[0]
    assert "more" in curve.points[0].obstacle


def test_the_limit_of_the_search_is_kept() -> None:
    curve = max_batch.max_batch(linear, meta(16, 1000), target="cpu", budget="1GiB", limit=10, mode="infer")
    assert curve.largest == 10
    assert curve.next_above is None
    assert max(point.size for point in curve.points) == 10


class Picky(nn.Module):
    """Takes from 2 to 37 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not 2 <= len(x) <= 37:
            raise ValueError(f"cannot take {len(x)}")
        return x * self.weight


def test_where_the_model_raises_the_size_does_not_fit_and_the_curve_says_why() -> None:
    curve = max_batch.max_batch(Picky, meta(8, 10), target="cpu", budget="1GiB")
    assert curve.largest == 37
    assert curve.next_above is not None
    assert curve.next_above.counted_bytes is None
    assert "cannot take 38" in curve.next_above.obstacle
    assert "cannot run" in fits_table(curve)


def test_a_limit_below_the_size_given_is_where_the_search_begins() -> None:
    assert [
        point.size for point in max_batch.max_batch(Picky, meta(8, 10), target="cpu", budget="1GiB", limit=4).points
    ] == [1, 2, 3, 4]
    with pytest.raises(AnalysisError, match="cannot take 1"):
        max_batch.max_batch(Picky, meta(8, 10), target="cpu", budget="1GiB", limit=1)


def test_where_the_model_raises_at_the_given_size_that_is_the_error() -> None:
    with pytest.raises(AnalysisError, match="cannot take 40"):
        max_batch.max_batch(Picky, meta(40, 10), target="cpu", budget="1GiB")


def test_what_is_done_to_the_step_counts_at_every_size() -> None:
    analysis = analyze(linear, meta(3, 1000), target="cpu", mode="infer")

    def half(sized: Analysis) -> Analysis:
        return sized.vary(linear().to("meta", torch.float16), args=(sized.request.args[0].half(),))

    halved = max_batch.max_batch(analysis, budget=8_000_000, change=half)
    # Half of everything: 2,000,000 of weight, and per sample 2000 in and out.
    assert (halved.largest, halved.per_sample_bytes, halved.constant_bytes) == (1500, 4000, 2_000_000)


# --- the dimension that varies ----------------------------------------------------------------------------------------

TEXT = [
    ("input_ids", meta(4, 16, dtype=torch.int64)),
    ("attention_mask", meta(4, 16)),
    ("labels", meta(4, 16, dtype=torch.int64)),
    ("scale", meta(4)),
]


@pytest.mark.parametrize(
    ("arguments", "dim", "names", "size"),
    [
        (TEXT, "batch", ("input_ids:0", "attention_mask:0", "labels:0", "scale:0"), 4),
        (TEXT, "seq", ("input_ids:1", "attention_mask:1", "labels:1"), 16),
        (TEXT, 1, ("input_ids:1", "attention_mask:1", "labels:1"), 16),
        (TEXT, "1", ("input_ids:1", "attention_mask:1", "labels:1"), 16),
        (TEXT, "input_ids:1, labels:-1", ("input_ids:1", "labels:1"), 16),
        ([("x", meta(2, 3, 8, 8))], "x:2,x:3", ("x:2", "x:3"), 8),
        ([("images", [meta(2, 3), meta(2, 5)]), ("y", meta(7))], "batch", ("images.0:0", "images.1:0"), 2),
        ([("flag", True), ("images", [meta(2, 3), meta(4, 3)])], "images.1:0", ("images.1:0",), 4),
    ],
)
def test_a_dimension_is_found(
    arguments: list[tuple[str, Any]], dim: str | int, names: tuple[str, ...], size: int
) -> None:
    found = find_resizing(arguments, dim)
    assert (found.names, found.size) == (names, size)


@pytest.mark.parametrize(
    ("arguments", "dim", "message"),
    [
        (
            TEXT,
            "width",
            (
                "expected a dimension as batch, seq, a number or NAME:AXIS.*got 'width'; the inputs are input_ids 4x16 "
                "int64"
            ),
        ),
        (TEXT, 2, "expected a dimension that the first input has, got 2"),
        (TEXT, -1, "expected a dimension that the first input has, got -1"),
        (TEXT, True, "expected a dimension as batch"),
        (TEXT, "tokens:1", "expected NAME:AXIS.*got 'tokens:1'"),
        (TEXT, "labels:x", "expected NAME:AXIS.*got 'labels:x'"),
        (TEXT, "labels:2", "expected an axis of labels from 0 to 1, got 2"),
        (TEXT, "labels:0,labels:1", "expected dimensions of one size above 0, got 4, 16"),
        ([("x", meta(2, 3, 8, 8))], "seq", "expected a 2-d integer input"),
        ([("flag", True)], "batch", "expected inputs with a tensor"),
        ([("x", meta(0, 3))], "batch", "expected dimensions of one size above 0, got 0"),
    ],
)
def test_a_dimension_that_is_not_there_is_refused_in_one_line(
    arguments: list[tuple[str, Any]], dim: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        find_resizing(arguments, dim)
    assert "\n" not in str(refused.value)


def test_tensors_keep_all_but_their_size() -> None:
    image = (
        meta(2, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)
        .detach()
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    turned, mask = meta(2, 5, 7).transpose(1, 2), torch.ones(3)
    kwargs = {"pair": (image, turned), "mask": mask}
    _, changed = find_resizing(list(kwargs.items()), "batch").resize((), kwargs, 6)
    sized, other = changed["pair"]
    assert sized.shape == (6, 3, 8, 8)
    assert (sized.dtype, sized.requires_grad, sized.is_contiguous(memory_format=torch.channels_last)) == (
        torch.bfloat16,
        True,
        True,
    )
    assert (other.shape, other.stride()) == ((6, 7, 5), (35, 1, 7))
    assert changed["mask"] is mask


def test_a_tensor_that_is_passed_twice_stays_one() -> None:
    x = meta(2, 3)
    (one, two), _ = find_resizing([("x", x), ("y", x)], "batch").resize((x, x), {}, 5)
    assert one is two
    assert one.shape == (5, 3)


def test_a_size_no_tensor_can_have_is_one_at_which_the_model_cannot_run() -> None:
    with pytest.raises(AnalysisError, match="no tensor can be as large as"):
        find_resizing([("x", meta(2, 1 << 31))], "batch").resize((meta(2, 1 << 31),), {}, 1 << 40)


class Embedder(nn.Module):
    config = argparse.Namespace(max_position_embeddings=8)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 250)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(input_ids)


def test_a_sequence_beyond_the_positions_of_a_model_is_pointed_out() -> None:
    curve = max_batch.max_batch(
        Embedder, {"input_ids": meta(1, 4, dtype=torch.int64)}, target="cpu", budget=20_080, dim="seq", mode="infer"
    )
    # 10 x 250 x 4 of weight; per token 8 of input and 250 x 4 of output.
    assert curve.largest == 10
    assert [assumption.topic for assumption in curve.assumptions] == ["size"]
    text = fits_table(curve, width=300)
    assert "has 8 positions; if" in text
    assert "--set max_position_embeddings=10 has more" in text
    table = fits_table(curve.model_copy(update={"positions": 7}), width=300)
    assert table.startswith("Largest     seq 7, the model's positions; memory allows 10\n")


# --- a program --------------------------------------------------------------------------------------------------------


def train(size: int) -> None:
    """4,000,000 bytes of weight, as many of gradient; 8,000 a sample, in and out."""
    model = linear().to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.zeros(size, 1000).to(model.weight.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.truth
def test_a_function_is_run_at_every_size() -> None:
    def train_thousands(size: int) -> None:
        train(1000 * size)

    curve = max_batch.max_batch(train_thousands, target="rtx4090", budget="100MiB", steps=1)
    found, above = curve.at_largest, curve.next_above
    assert found is not None
    assert above is not None
    assert above.size == found.size + 1
    with fxmem.record("rtx4090", steps=1) as recorded:
        train_thousands(found.size)
    assert (found.allocated_bytes, found.reserved_bytes) == (
        recorded.peak.allocated_bytes,
        100 * MIB,  # what is cached goes back
    )
    assert recorded.peak.reserved_bytes is not None
    assert recorded.peak.reserved_bytes > 100 * MIB
    assert (curve.model.rpartition(".")[2], curve.space.dim, curve.space.resized) == ("train_thousands", "size", ())
    assert curve.step.program is None
    assert curve.target.memory_bytes != curve.points[0].room_bytes == 100 * MIB


@pytest.mark.truth
def test_a_function_that_raises_bounds_the_search_and_one_that_stands_still_is_said_so() -> None:
    def train_at_most_9(size: int) -> None:
        if size > 9:
            raise ValueError("more than there is")
        train(size)

    settings: dict[str, Any] = {"target": "cpu", "budget": "1GiB", "steps": 1}
    curve = max_batch.max_batch(train_at_most_9, **settings)
    assert curve.largest == 9
    assert "ValueError: more than there is" in curve.points[-1].obstacle
    assert not curve.assumptions
    curve = max_batch.max_batch(lambda size: train(8), limit=16, **settings)
    assert [assumption.text for assumption in curve.assumptions] == [
        "the peak does not grow from 4 on: the program has no more data, or does not use the size"
    ]
    with pytest.raises(AnalysisError, match="the program raised ValueError: more than there is"):
        max_batch.max_batch(lambda size: train_at_most_9(10), **settings)
    with pytest.raises(UsageError, match="expected the inputs of a module"):
        max_batch.max_batch(linear())


@pytest.mark.truth
def test_what_is_done_before_the_first_step_counts() -> None:
    def load_and_train(size: int) -> None:
        torch.zeros(size, 100_000)
        train(size)

    curve = max_batch.max_batch(load_and_train, target="cpu", budget=12_000_000, steps=1)
    assert curve.largest == 30
    assert curve.next_above is not None
    assert "before its first step" in curve.next_above.obstacle


SCRIPT = """
import sys
import torch

size = int(sys.argv[2])
print("size", size)
if size > 2:
    raise ValueError("too large")
model = torch.nn.Linear(1000, 1000).cuda()
model(torch.zeros(size, 1000, device="cuda")).sum().backward()
"""


@pytest.mark.truth
def test_max_batch_of_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    program = ("--run", str(script), "--size", "{}")
    code, text = command(max_batch_command, "--target", "rtx4090", "--batch", "2", *program)
    assert code == 0
    assert "--size {}" in text
    assert "size 2\n" in text
    err = capfd.readouterr().err
    assert "--size 2: " in err
    assert "--size 3: cannot run" in err
    assert "ValueError: too large" in err
    for wrong, message in (
        ((*program[:2], "--size", "3"), "expected {} among the program's arguments"),
        (("--dim", "seq", *program), "expected --run without --dim"),
        (("--mode", "infer", *program), "expected --run without --mode"),
        (("--steps", "0", *program), "expected steps of at least 1"),
        (("--batch", "0", *program), "expected --batch of at least 1"),
        (("--run",), "expected a program after --run"),
        (("--run", "no.py", "{}"), "no.py"),
        (("own:build", *program), "one of the two"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            command(max_batch_command, "--target", "rtx4090", *wrong)


SIDES = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--height", type=int)
parser.add_argument("--width", type=int)
sides = parser.parse_args()
net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 1), torch.nn.ReLU(), torch.nn.Conv2d(32, 3, 1)).cuda()
with torch.no_grad():
    net(torch.zeros(1, 3, sides.height, sides.width, device="cuda"))
"""


@pytest.mark.truth
def test_how_far_one_size_goes_beside_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sides.py").write_text(SIDES)
    program = ("--run", str(tmp_path / "sides.py"), "--height", "{h=256}", "--width", "{w=512}")
    words = ("--target", "rtx4090", "--budget", "1GiB", "--json", str(tmp_path / "fits.json"))
    code, text = command(max_batch_command, *words, *program)
    assert code == 0
    assert "--height 256 --width 512: " in capfd.readouterr().err
    fits = Fits.model_validate_json((tmp_path / "fits.json").read_text())
    assert (fits.space.dim, fits.space.other) == ("--height {h=256}", "--width {w=512}")
    assert len(fits.border) == 5
    pixels = (1 << 30) // (2 * 32 * 4)  # before and after the ReLU, less the input and the allocator's rounding
    for best, above in fits.border:
        assert above is not None
        assert best.size is not None
        assert best.length is not None
        assert (best.size % 32, best.length % 32) == (0, 0)
        assert above.size in (best.size + 32, best.size)
        assert f"h {best.size} with w {best.length}; {above.size} with {above.length} does not fit" in text
        assert best.size * best.length < pixels < 1.2 * (above.size or 0) * (above.length or 0)
    squares = {each.size * 2 == each.length for each, _ in fits.border if each.size == fits.largest}
    assert squares == {True}
    with pytest.raises(UsageError, match="expected --svg with one size that varies"):
        command(max_batch_command, "--svg", str(tmp_path / "curve.svg"), *words[:2], *program)


def test_the_places_of_sizes_have_names(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")

    def program(*arguments: str) -> ProgramCommand:
        launch = Launch(str(tmp_path / "own.py"), arguments)
        return ProgramCommand(launch, catalogue.target("t4"), steps=1)

    sides = program("--side={side}", "--area", "{side}x{side}", "--frames", "{n=16}")
    assert sides.starts == {"side": 256, "n": 16}
    assert sides.varied == ("--side={side}", "--frames {n=16}")
    assert sides.at_sizes([8, 9], sides.target).launch.arguments == ("--side=8", "--area", "8x8", "--frames", "9")
    own_braces = program("--size", "{}", "--out", "{step}.png")
    assert own_braces.starts == {"": None}
    assert own_braces.at_sizes([8], own_braces.target).launch.arguments == ("--size", "8", "--out", "{step}.png")
    with pytest.raises(UsageError, match="expected one or two sizes that vary, got a, b, c"):
        _ = program("{a}", "{b}", "{c}").starts


# --- budgets and cards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "cpu"}, "expected a budget such as 16GiB, because the memory of target 'cpu' is not known"),
        ({"budget": "60%"}, "expected a budget in bytes or with a unit"),
        ({"budget": "lots"}, "expected a budget as bytes"),
        ({"limit": 0}, "expected a limit of at least 1, got 0"),
        ({"target": "rtx9999"}, "unknown target 'rtx9999'"),
        ({"target": "cpu", "budget": "1GiB", "dim": "depth"}, "expected a dimension"),
    ],
)
def test_what_cannot_be_understood_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        max_batch.max_batch(linear, meta(2, 1000), **settings)


CARDS = ("l4", "rtx4090", "t4", "rtx3080")


def wide() -> nn.Module:
    """For 3 x 2^15 samples, 6 GiB of output that the ReLU replaces by as much, and as much again that comes back: more
    than a small card has."""
    return nn.Sequential(nn.Linear(16, 1 << 14), nn.ReLU())


@pytest.fixture(scope="module")
def fits() -> Fits:
    with two_cores():
        return card_fit.cards(wide, meta(3 << 15, 16), names=CARDS, optimizer=None)


def test_a_card_is_judged_as_by_an_analysis_for_it(fits: Fits) -> None:
    assert [card.card for card in fits.points] == ["rtx3080", "t4", "l4", "rtx4090"]
    assert fits.analyses == 3  # l4 and rtx4090 are of one compute capability
    for card in fits.points:
        peak = analyze(wide, meta(3 << 15, 16), target=card.card, optimizer=None).peak
        assert (card.requested_bytes, card.allocated_bytes, card.reserved_bytes) == (
            peak.requested_bytes,
            peak.allocated_bytes,
            peak.reserved_bytes,
        )
        assert (card.fits, card.obstacle) == (peak.fits, peak.shortage)
        assert card.headroom_bytes == card.room_bytes - (peak.reserved_bytes or 0)
    assert {card.fits for card in fits.points} == {True, False}


def test_every_verdict_leaves_a_context_its_share(tmp_path: Path) -> None:
    """A step that has room on the whole card, and none beside a context."""
    inputs, name = meta(1 << 16, 1000), str(tmp_path / "between.json")
    reserved = analyze(linear, inputs, target="l4", optimizer=None).peak.reserved_bytes or 0
    card = catalogue.target("l4").model_copy(update={"name": "between", "memory_bytes": reserved + 100 * MIB})
    room = room_bytes(card)
    assert room == reserved - 66 * MIB
    Path(name).write_text(card.model_dump_json())
    analysis = analyze(linear, inputs, target=card, optimizer=None)
    assert (analysis.peak.fits, analysis.peak.room_bytes) == (False, room)
    curve = max_batch.max_batch(linear, inputs, target=card, optimizer=None)
    assert (curve.largest or 0) < 1 << 16
    assert (curve.points[0].room_bytes, (curve.at_largest or curve.points[0]).fits) == (room, True)
    (fit,) = card_fit.cards(analysis, names=[name]).points
    assert (fit.fits, fit.room_bytes, fit.headroom_bytes) == (False, room, -66 * MIB)
    (point,) = sweep.sweep(analysis, grid=Space(card=[name])).points
    assert (point.fits, point.room_bytes) == (False, room)
    assert find_fit(analysis.profile, analysis.peak).exit_code == 4
    with pytest.raises(ExceededError, match=rf"{format_bytes(room)} that between has"):
        guard(analysis)


def test_a_step_that_was_analysed_takes_no_options() -> None:
    step = analyze(linear, meta(2, 1000), target="l4")
    for ask in (fxmem.max_batch, fxmem.cards):
        with pytest.raises(UsageError, match="expected no inputs and no optimizer of a step that was analysed"):
            ask(step, optimizer="sgd")
    with pytest.raises(UsageError, match="expected no inputs and no options of a step that was analysed"):
        fxmem.sweep(step, meta(2, 1000), grid={"batch": (1, 2)})


def test_a_convolution_takes_the_same_on_all_cards_of_one_capability() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 64, 7, stride=2), nn.ReLU(), nn.Conv2d(64, 128, 3))

    found = card_fit.cards(net, meta(8, 3, 64, 64), names=("rtx4090", "l4", "l40s"))
    peaks = [analyze(net, meta(8, 3, 64, 64), target=card.card).peak.allocated_bytes for card in found.points]
    assert [card.allocated_bytes for card in found.points] == peaks


NO_CARDS = [
    (["cpu"], "expected cards whose memory is known, got 'cpu'"),
    (["rtx1"], "unknown target"),
    ([], "at least one card"),
]


@pytest.mark.parametrize(("names", "message"), NO_CARDS)
def test_what_is_no_card_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        card_fit.cards(linear, meta(2, 1000), names=names)


# --- cards that are too small, with checkpoints -----------------------------------------------------------------------


def deep() -> nn.Module:
    """For 3 x 2^17 samples, 1.5 GiB for each of 16 results; a checkpointed half is there only while it is needed."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())))


@pytest.fixture(scope="module")
def planned() -> Fits:
    return card_fit.cards(deep, meta(3 << 17, 1024), names=("h100", "a10", "l4", "t4", "rtx3080"), plans=True)


@pytest.mark.truth
def test_a_card_that_is_too_small_gets_the_cheapest_plan_that_fits_it(planned: Fits) -> None:
    by_name = {card.card: card for card in planned.points}
    assert by_name["h100"].fits
    assert by_name["h100"].plan is None
    for name in ("a10", "l4", "t4"):
        card, analysis = by_name[name], analyze(deep, meta(3 << 17, 1024), target=name)
        assert not card.fits
        assert card.plan is not None
        assert card.plan.target == catalogue.target(name)
        alone = verified_plan.plan(analysis, budget=card.room_bytes)
        # Of plans that cost the same, the search for several cards may find another one.
        assert card.plan.extra_flops == alone.extra_flops
        carried_out = plan_search.apply_regions(analysis, card.plan.regions, card.plan.application)
        assert carried_out.peak.fits
        assert (analysis.peak.model_dump(), carried_out.peak.model_dump()) == (
            card.plan.before.model_dump(),
            card.plan.after.model_dump(),
        )
        assert card.plan.before_seconds == pytest.approx(alone.before_seconds)
        assert card.plan.after_seconds == pytest.approx(alone.after_seconds)
    extra = [by_name[name].plan for name in ("t4", "l4")]
    assert (extra[0].extra_flops or 0) > (extra[1].extra_flops or 0) > 0  # type: ignore[union-attr]


@pytest.mark.truth
def test_cards_on_which_the_step_is_the_same_share_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    search = verified_plan.plan_budgets

    def counted(analysis: Analysis, nbytes: list[int], **rest: Any) -> Any:
        asked.append(sorted(nbytes))
        return search(analysis, nbytes, **rest)

    monkeypatch.setattr(verified_plan, "plan_budgets", counted)
    together = card_fit.cards(deep, meta(3 << 17, 1024), names=("h100", "a10", "l4"), plans=True)
    # Products take the same workspace on compute capabilities 8.6 and 8.9; the third card is large enough.
    assert asked == [sorted(card.room_bytes for card in together.points if card.card in ("a10", "l4"))]
    singly = [card_fit.cards(deep, meta(3 << 17, 1024), names=[name], plans=True) for name in ("a10", "l4")]
    assert 0 < together.plan_analyses < sum(each.plan_analyses for each in singly)


def test_no_plan_makes_weights_smaller() -> None:
    found = card_fit.cards(lambda: nn.Linear(40_000, 40_000), meta(4, 40_000), names=("t4",), plans=True)
    assert not found.points[0].fits
    assert found.points[0].plan is None
    assert found.fitting == ()


def test_plans_as_text_and_json(planned: Fits) -> None:
    assert Fits.model_validate_json(planned.model_dump_json()) == planned
    text = fits_table(planned, width=80)
    assert max(map(len, text.splitlines())) <= 80
    verdicts = {
        line.split()[0]: line.split()[-1]
        for line in text.partition("Plans")[0].splitlines()
        if line.startswith(("t4", "l4", "a10", "h100"))
    }
    assert verdicts == {"t4": "plan", "l4": "plan", "a10": "plan", "h100": "yes"}
    plan = next(card.plan for card in planned.points if card.card == "l4")
    assert plan is not None
    row = next(line for line in text.partition("Plans")[2].splitlines() if line.split()[:1] == ["l4"])
    assert f"{100 * (plan.extra_fraction or 0):+.1f} %" in row
    assert "Plans" not in fits_table(
        planned.model_copy(update={"points": tuple(card for card in planned.points if card.plan is None)})
    )


def test_at_inference_there_is_nothing_to_plan() -> None:
    with pytest.raises(UsageError, match="nothing to checkpoint"):
        card_fit.cards(linear, meta(4, 1000), names=("t4",), plans=True, mode="infer")
    with pytest.raises(UsageError, match="expected --plan with a training step"):
        command(cards_command, "torchvision:resnet18", "--mode", "infer", "--plan")


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curve() -> Fits:
    with two_cores():
        return max_batch.max_batch(
            lambda: nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)),
            meta(64, 64),
            target="rtx4090",
            budget="100MiB",
        )


def test_the_curve_as_text(curve: Fits) -> None:
    text = fits_table(curve, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert f"batch {curve.largest}" in text
    rows = [line.split() for line in text.partition("Curve")[2].splitlines() if re.match(r" +\d+ ", line)]
    assert [int(row[0]) for row in rows] == [point.size for point in curve.points]
    assert {row[8] for row in rows} <= {"yes", "tight", "no"}
    assert "\x1b[" in fits_table(curve, color=True)


def test_the_smallest_size_near_the_best_throughput() -> None:
    def point(size: int, seconds: float, fits: bool = True) -> Point:
        time = StepTime(seconds=seconds, low_seconds=seconds, high_seconds=seconds)
        return sized(size=size, requested_bytes=size, phase=Phase.FORWARD, fits=fits, time=time)

    # 100, 180, 190, 200 and, where it does not fit, 1000 per second.
    points = [point(1, 0.01), point(18, 0.1), point(38, 0.2), point(80, 0.4), point(100, 0.1, fits=False)]
    assert [round(each.per_second or 0) for each in points] == [100, 180, 190, 200, 1000]
    assert find_enough(points) == 38
    assert find_enough([each.model_copy(update={"time": None}) for each in points]) is None


def test_the_goal_of_throughput_narrows_it_to_a_tenth(curve: Fits) -> None:
    found = max_batch.max_batch(
        lambda: nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)),
        meta(64, 64),
        target="rtx4090",
        budget="100MiB",
        goal="throughput",
    )
    assert found.largest == curve.largest
    assert found.enough is not None
    below = max((each for each in found.points if each.size < found.enough), key=lambda each: each.size)
    assert 10 * found.enough <= 11 * below.size
    assert (below.per_second or 0) < NEAR_BEST * (found.best_per_second or 0)
    assert f"batch {found.enough} is the smallest that reaches 95 %" in fits_table(found, width=200)
    with pytest.raises(UsageError, match="rates are known, got 'cpu'"):
        max_batch.max_batch(linear, meta(4, 1000), target="cpu", budget="1GiB", goal="throughput")
    with pytest.raises(UsageError, match="expected the goal memory or throughput"):
        max_batch.max_batch(linear, meta(4, 1000), goal="speed")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="goal='memory' for a function"):
        max_batch.max_batch(linear, goal="throughput")


@pytest.mark.truth
def test_the_cards_by_time() -> None:
    code, text = command(cards_command, "torchvision:resnet18", "--only", "t4,h100,a100", "--time", "--json", "-")
    cards = Fits.model_validate_json(text).points
    assert (code, [card.card for card in cards]) == (0, ["h100", "a100", "t4"])
    seconds = [card.time.seconds for card in cards if card.time]
    assert len(seconds) == 3
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[2]


def test_how_far_a_size_may_fit_by_chance_is_said(curve: Fits) -> None:
    last, above = curve.last_possible, curve.next_above
    assert curve.largest is not None
    assert last is not None
    assert above is not None
    assert (
        last == (curve.points[0].room_bytes - (curve.constant_bytes or 0)) // (curve.per_sample_bytes or 1) > above.size
    )
    assert f"Larger ones up to {last} may fit too" in fits_table(curve, width=200)
    assert curve.model_copy(update={"per_sample_bytes": None}).last_possible is None
    # Requested bytes have no pieces.
    plain = [point.model_copy(update={"allocated_bytes": None, "reserved_bytes": None}) for point in curve.points]
    assert "may fit too" not in fits_table(curve.model_copy(update={"points": tuple(plain)}), width=200)


def test_the_cards_as_text(fits: Fits) -> None:
    text = fits_table(fits, width=80)
    assert max(map(len, text.splitlines())) <= 80
    verdicts = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith(CARDS)}
    assert {name: verdict != "no" for name, verdict in verdicts.items()} == {
        card.card: card.fits for card in fits.points
    }


def test_the_curve_as_a_plot(curve: Fits) -> None:
    name = "<script>&"
    root = ET.fromstring(sizes_svg(curve.model_copy(update={"model": name})))
    circles = root.findall(".//{*}circle")
    assert len(circles) == len(curve.points)
    assert sum(circle.get("class") == "dot" for circle in circles) == sum(point.fits for point in curve.points)
    assert name in "".join(root.itertext())
    assert "no batch fits" in sizes_svg(curve.model_copy(update={"largest": None}))


def test_records_survive_json(curve: Fits, fits: Fits) -> None:
    assert Fits.model_validate_json(curve.model_dump_json()) == curve
    assert Fits.model_validate_json(fits.model_dump_json()) == fits


# --- the commands -----------------------------------------------------------------------------------------------------

MODEL = """
import torch
def build(width=1000): return torch.nn.Linear(width, width, bias=False)
"""


def command(module: Any, *arguments: str) -> tuple[int, str]:
    options = Parser().add_arguments(module.ARGUMENTS).parse_args(arguments)
    check_output(options)
    code, text = module.run(options)
    return int(code), str(text)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path / 'net.py'}:build"


def test_max_batch_from_the_command_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "--input",
        "4x1000",
        "--target",
        "cpu",
        "--mode",
        "infer",
        "--budget",
        "8MB",
        "--svg",
        str(tmp_path / "curve.svg"),
    )
    code, text = command(max_batch_command, model, *settings, "--json", "-")
    assert code == 0
    assert Fits.model_validate_json(text).largest == 500
    assert ET.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")
    assert "batch 501: 7.64 MiB, does not fit 7.63 MiB" in capsys.readouterr().err
    code, text = command(
        max_batch_command, model, *settings, "--json", str(tmp_path / "curve.json"), "--width", "80", "--quiet"
    )
    assert "batch 500" in text
    assert json.loads((tmp_path / "curve.json").read_text())["largest"] == 500
    assert capsys.readouterr().err == ""


def test_max_batch_exits_4_where_nothing_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = command(
        max_batch_command,
        model,
        "--input",
        "4x1000",
        "--target",
        "cpu",
        "--mode",
        "infer",
        "--budget",
        "1MiB",
        "--quiet",
    )
    assert code == 4
    assert "none: batch 1" in text
    assert capsys.readouterr().err == "fxmem: expected a size that fits 1.00 MiB; none does, not even 1\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--budget", "60%"),
        ("--budget", "x"),
        ("--limit", "0"),
        ("--target", "cpu"),
        ("--target", "no"),
        ("--svg", "curve.gif"),
        ("--width", "20"),
    ],
)
def test_wrong_words_are_refused_before_any_work(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_batch_command, "analyze_subject", lambda *_: pytest.fail("analysed"))
    with pytest.raises(UsageError):
        command(max_batch_command, "torchvision:resnet18", *arguments)


def test_cards_from_the_command_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = command(cards_command, model, "--input", "4x1000", "--only", "l4, rtx4090,t4", "--json", "-")
    assert code == 0
    assert [card.card for card in Fits.model_validate_json(text).points] == ["t4", "l4", "rtx4090"]
    assert " of 2, l4, rtx4090: 2 of 2 fit\n" in capsys.readouterr().err
    code, text = command(
        cards_command,
        model,
        "--set",
        "width=100000",
        "--input",
        "4x100000",
        "--only",
        "l4,t4",
        "--quiet",
        "--width",
        "80",
    )
    assert code == 4
    assert "0 of 2 fit" in text
    code, text = command(
        cards_command,
        model,
        "--set",
        "width=100000",
        "--input",
        "4x100000",
        "--only",
        "t4",
        "--quiet",
        "--plan",
        "--json",
        "-",
    )
    assert (code, json.loads(text)["space"]["planned"]) == (4, True)


@pytest.mark.parametrize(
    ("cards", "message"), [("l4,l5", "unknown target 'l5'"), ("l4,cpu", "cards whose memory is known, got 'cpu'")]
)
def test_what_is_no_card_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, cards: str, message: str) -> None:
    monkeypatch.setattr(cards_command, "analyze_subject", lambda *_: pytest.fail("analysed"))
    with pytest.raises(UsageError, match=message):
        command(cards_command, "torchvision:resnet18", "--only", cards)


def test_a_curve_says_what_a_loss_would_add() -> None:
    model = nn.Linear(64, 1000)
    curve = max_batch.max_batch(fxmem.analyze(model, torch.empty(8, 64, device="meta"), target="t4"), limit=64)
    assert [each.text[:17] for each in curve.assumptions if each.topic == "loss"] == ["no loss was given"]
