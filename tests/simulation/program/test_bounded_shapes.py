"""Shapes that depend on data are upper bounds at their largest: a verdict that they decide is not known."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import fxmem
from fxmem.hardware.context import give_room
from fxmem.memory.budget import Budget
from fxmem.records.fits import Fits, Point, Space
from fxmem.records.profile import Kind, Phase, Profile
from fxmem.show import text as reporting
from fxmem.show.facts import find_fit
from fxmem.show.text.fits import describe_verdict, fits_table
from fxmem.simulation.code.profiled_step import ReallocatedStep
from fxmem.simulation.program.recorded_program import RecordedProgram
from fxmem.whatif.fits import judge
from tests.profiles import CPU, TINY_CARD, Log
from tests.verbs import report_of

MIB = 1 << 20
ROWS = 1 << 14


def run_masks(parts: int, certain_bytes: int = 0) -> RecordedProgram:
    """Points that `parts` masks share among them: each mask counts with all points, 64 MiB of 16384 x 1024 float32."""
    with contextlib.suppress(torch.cuda.OutOfMemoryError), fxmem.record("2GiB") as recorded:
        place = torch.rand(ROWS, device="cuda")
        weight = torch.rand(1024, device="cuda", requires_grad=True)
        kept = torch.zeros(certain_bytes, dtype=torch.uint8, device="cuda") if certain_bytes else None
        loss = torch.zeros((), device="cuda")
        for part in range(parts):
            inside = place[place > part / parts]
            loss = loss + (weight[:, None] * inside).exp().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD([weight], 0.1).step()
        del kept
    return recorded


def said_of(recorded: RecordedProgram) -> tuple[str, int, bool | None]:
    fit = find_fit(recorded.profile, recorded.peak)
    return fit.verdict, fit.exit_code, fit.is_fitting


def test_where_upper_bounds_decide_it_is_not_known() -> None:
    recorded = run_masks(32)
    peak = recorded.peak
    assert peak.least_bytes is not None
    assert peak.least_bytes < 66 * MIB  # the workspace of cuBLAS at most, and what has one row
    assert 32 * 64 * MIB <= peak.requested_bytes < 34 * 64 * MIB
    said, code, is_fitting = said_of(recorded)
    assert (code, is_fitting, peak.at_least) == (1, None, False)
    assert said.startswith("not known: between ")
    assert " and at most 2." in said
    assert said.endswith(", as shapes depend on data")
    told = " ".join(reporting.overview(recorded.profile, recorded.timeline).split())
    assert "To know --value FILE:LINE=mask.pt gives the values that decide at " in told


def test_a_bound_that_fits_does() -> None:
    said, code, is_fitting = said_of(run_masks(2))
    assert (code, is_fitting) == (0, True)
    assert said.startswith("fits: at most 1")


def test_what_is_certain_and_too_large_is_refused() -> None:
    said, code, is_fitting = said_of(run_masks(2, 2 << 30))
    assert (code, is_fitting) == (4, False)
    assert said.startswith("does NOT fit: at least 2.00 GiB of ")


def test_a_gradient_is_as_large_as_its_parameter() -> None:
    with fxmem.record("h100") as recorded:
        net = torch.nn.Linear(64, 1 << 16).cuda()
        x = torch.rand(8, 64, device="cuda")
        net(x)[torch.rand(8, device="cuda") > 0.5].sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
    gradients = [each for each in recorded.profile.storages if each.kind is Kind.GRADIENT]
    assert gradients
    assert not any(each.is_bounded for each in gradients)
    assert any(each.is_bounded for each in recorded.profile.storages)
    assert (recorded.peak.least_bytes or 0) >= 2 * 64 * (1 << 16) * 4


def bounded(room: int) -> Profile:
    """60 MiB are certain, 40 depend on data, on a card of which a context leaves so many MiB."""
    log = Log(target=give_room(TINY_CARD, room * MIB))
    node = log.node("fc")
    log.resident(60 * MIB, Kind.PARAMETER, name="w")
    with log.phase(Phase.FORWARD), log.op("aten.index", node, Phase.FORWARD):
        log.allocate(40 * MIB, Kind.TEMPORARY)
    profile = log.profile()
    storages = [each.model_copy(update={"is_bounded": each.op is not None}) for each in profile.storages]
    return profile.model_copy(update={"storages": tuple(storages)})


@pytest.mark.parametrize(("room", "said", "code"), [(50, "does NOT fit: between", 4), (90, "not known: between", 1)])
def test_the_certain_part_decides(room: int, said: str, code: int) -> None:
    profile = bounded(room)
    report = report_of(profile, fits=False, reserved_bytes=100 * MIB)
    assert report.peak.least_bytes == 60 * MIB
    fit = find_fit(profile, report.peak)
    assert fit.verdict.startswith(f"{said} 60.0 MiB and at most 100.0 MiB of ")
    assert fit.exit_code == code
    sure = report_of(profile.model_copy(update={"target": CPU}))
    assert find_fit(sure, sure.peak).exit_code == 0


@pytest.mark.parametrize(
    ("room", "fits", "said", "code"),
    [
        (50, False, "does NOT keep the budget of 50.0 MiB: ", 4),
        (90, None, "not known to keep the budget of 90.0 MiB: between 60.0 MiB and at most 100.0 MiB allocated", 1),
        (110, True, "keeps the budget of 110.0 MiB: ", 0),
    ],
)
def test_budgets_cards_and_sizes_know_as_little(room: int, fits: bool | None, said: str, code: int) -> None:
    step = ReallocatedStep(bounded(1024), {})
    fit = find_fit(step.profile, step.peak, Budget(room * MIB))
    assert fit.verdict.startswith(said)
    assert (fit.keeps_budget, fit.exit_code) == (fits, code)
    found = judge(step, step.within(room * MIB).peak)
    assert (found["fits"], found["obstacle"].startswith("Sizes depend on data")) == (fits, fits is None)
    head: dict[str, Any] = step.profile.heading() | {"cards": (step.profile.target,), "analyses": 1}
    space = Space(question="largest", is_budget=True, limit=1)
    point = Point(card=step.profile.target.name, size=1, room_bytes=room * MIB, **found)
    told = fits_table(Fits(**head, space=space, points=(point,), largest=1 if fits else None))
    assert ("may not fit" in told, "maybe " in told) == (fits is None, fits is None)
    assert ("tried, does not fit" in told) == (fits is False)
    card = point.model_copy(update={"reserved_bytes": room * MIB})
    assert describe_verdict(card) == {True: "yes", False: "no", None: "maybe"}[fits]
