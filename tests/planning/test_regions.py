"""Planners against exhaustive search and against the analysis of models that carry the plans out."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from fxmem import analyze
from fxmem.errors import ExceededError, UsageError
from fxmem.planning import STRATEGIES, Planner, register, tuning
from fxmem.planning.regions.candidates import Span
from fxmem.planning.regions.cost_tables import CostTables, Selection
from fxmem.planning.regions.dynamic_programs import Stretch, Tables
from fxmem.planning.regions.plan_text import describe_regions, has_edit, write_edit, write_edits
from fxmem.records.plan import Region
from fxmem.records.profile import Profile, SourceLine
from fxmem.records.units import Application
from fxmem.simulation.step.analysis import Analysis
from fxmem.whatif.plan_search import apply_regions
from tests.planning.legality import is_legal
from tests.random_models import BATCH, WIDTH, RandomModel

UNITS = 7


def random_profile(seed: int) -> Profile:
    model = RandomModel(seed)
    model.statements = [
        (name, places)
        for name, places in model.statements
        if "checkpoint" not in name and name not in ("reentrant", "nested")
    ]
    model.statements = [
        (name, tuple(min(place, at) for place in places)) for at, (name, places) in enumerate(model.statements)
    ]
    return analyze(model, torch.zeros(BATCH, WIDTH, device="meta"), target="cpu", optimizer=None).profile


def tables_of(profile: Profile) -> Tables:
    """Few units, any stretch of which may be a region."""
    nodes = len(profile.nodes)
    units = CostTables(profile, sorted({round(nodes * k / UNITS) for k in range(1, UNITS)}))
    n = units.count
    regions = np.zeros((n + 1, n + 1), dtype=bool)
    for i, j in itertools.combinations(range(n + 1), 2):
        regions[i, j] = is_legal(units, units.cuts[i], units.cuts[j])
    return Tables(units, regions)


def choices(tables: Tables, start: int = 0) -> Iterator[tuple[Stretch, ...]]:
    """Every set of regions that do not overlap, at every level of what they keep."""
    n = tables.units.count
    if start == n:
        yield ()
        return
    yield from choices(tables, start + 1)
    for end in range(start + 1, n + 1):
        if tables.regions[start, end]:
            for rest in choices(tables, end):
                yield from (
                    (Stretch(start, end, level=level), *rest) for level in range(len(tables.selection.thresholds))
                )


def evaluated(tables: Tables, chosen: tuple[Stretch, ...]) -> tuple[float, float]:
    """Peak and cost of a set of regions, event after event."""
    units, kept, peak, cost = tables.units, 0.0, 0.0, 0.0
    inside = {unit: stretch for stretch in chosen for unit in range(stretch.first, stretch.last)}
    for unit in range(units.count):
        stretch = inside.get(unit)
        if stretch is None:
            peak = max(peak, kept + units.backward_peak[unit, unit], kept + units.forward_peak[unit, unit])
            kept += units.keeps[unit]
        elif unit == stretch.first:
            more, stays, costs = of_region(tables, stretch)
            peak, kept, cost = max(peak, kept + more), kept + stays, cost + costs
    return peak, cost


@functools.cache
def of_region(tables: Tables, stretch: Stretch) -> tuple[float, float, float]:
    """Bytes a region needs and bytes that stay of it, beyond what older units keep; its cost."""
    units, i, j = tables.units, stretch.first, stretch.last
    again = units.recompute_peak[i, j] + units.gradients[j]
    backward = max(units.backward_peak[v, i] for v in range(i, j))
    passing = max(units.checkpointed_forward_peak[v, i] for v in range(i, j))
    outputs, inputs = units.outputs[i, j], units.inputs[i, j]
    spared, held, more = results_kept(tables, stretch)
    return (
        max(again + inputs + more, backward + inputs, passing + held),
        outputs + inputs + held,
        units.cost[i, j] - spared,
    )


def results_kept(tables: Tables, stretch: Stretch) -> tuple[float, float, float]:
    """Cost spared by the results that a region keeps, bytes they hold, and those of them that nothing would keep in a
    stored region."""
    units, profile, spared, held, more = tables.units, tables.units.profile, 0.0, 0.0, 0.0
    keeper = {
        storage: unit
        for index in reversed(range(len(profile.nodes)))
        for storage in profile.nodes[index].saved
        for unit in [units.unit_of[index]]
    }
    for _, product in tables.selection.find_kept(units.cuts[stretch.first], units.cuts[stretch.last], stretch.level):
        spared += product.cost
        own = [storage for storage in product.storages if units.last_reader.get(storage, -1) < stretch.last]
        held += sum(profile.storages[storage].nbytes for storage in own)
        more += sum(
            profile.storages[storage].nbytes
            for storage in product.storages
            if keeper.get(storage, stretch.last) >= stretch.last
        )
    return spared, held, more


@pytest.mark.truth
def test_flat_is_as_cheap_as_the_best_of_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxmem.planning.tuning.LEVELS", 2)
    compared = selective = 0
    for seed in range(12):
        tables = tables_of(random_profile(seed))
        known = [evaluated(tables, chosen) for chosen in choices(tables)]
        peaks = sorted({peak for peak, _ in known})
        for budget in peaks[:: max(len(peaks) // 12, 1)]:
            best = min(cost for peak, cost in known if peak <= budget)
            found = tables.flat(budget)
            assert found is not None, (seed, budget)
            peak, cost = evaluated(tables, found)
            assert peak <= budget
            assert cost == pytest.approx(best, rel=1e-9, abs=1), (seed, budget)
            compared, selective = compared + 1, selective + any(stretch.level for stretch in found)
        assert tables.flat(peaks[0] - 1) is None
    assert compared > 100
    assert selective > 5


@pytest.mark.parametrize("seed", range(6))
def test_the_smallest_budget_is_told_without_the_plans_that_keep_it(seed: int) -> None:
    tables = tables_of(random_profile(seed))
    lowest = tables.smallest
    for budget in np.linspace(tables.units.floor * 0.9, tables.units.unplanned_peak * 1.1, 40):
        assert tables._is_reachable(budget) == (tables.flat(budget) is not None)
    assert tables.flat(lowest) is not None
    assert lowest == tables.units.floor or tables.flat(lowest - tables.units.unplanned_peak / 1000) is None


def exhaustive(tables: Tables, i: int, j: int, memory: float) -> float:
    """Least cost of a pass over units and of their backward, in so much memory: every way of splitting, no slots."""
    units, whole, n = tables.units, tables.whole_cost, tables.units.count
    best = math.inf
    if memory >= (tables.stored_peak if j == n else tables.peak)[i, j]:
        best = whole[j] - whole[i] if j == n else units.cost[i, j]
    for k in range(i + 1, j):
        if tables.regions[i, k] and memory >= tables.forward_peak[i, k]:
            rest = exhaustive(tables, k, j, memory - tables.kept_bytes[i, k])
            if rest < math.inf:
                best = min(best, whole[k] - whole[i] + rest + exhaustive(tables, i, k, memory))
        for offer in tables.offers[1:] if j == n else ():
            if offer.regions[i, k] and memory >= offer.need[i, k]:
                best = min(
                    best, whole[k] - whole[i] + offer.cost[i, k] + exhaustive(tables, k, j, memory - offer.kept[i, k])
                )
    if j > i + 1 and memory >= max(units.backward_peak[i, i], units.forward_peak[i, i]):
        best = min(best, whole[i + 1] - whole[i] + exhaustive(tables, i + 1, j, memory - units.keeps[i]))
    if i == 0 and j == n and tables.regions[i, j] and memory >= tables.forward_peak[i, j]:
        best = min(best, whole[j] - whole[i] + best)
    return best


def test_nested_is_as_cheap_as_the_best_recursion_but_for_its_steps_of_memory() -> None:
    compared = 0
    for seed in range(12):
        tables = tables_of(random_profile(seed))
        low, high = tables.units.floor, tables.units.unplanned_peak
        for part in (0.5, 0.7, 0.8, 0.9, 1.0):
            budget = low + (high - low) * part
            found = tables.nested(budget)
            # Bytes are rounded up to steps of a two-hundredth: what fits in a little less must be found.
            tight, loose = (
                exhaustive(tables, 0, tables.units.count, budget * (1 - 4 / 200)),
                exhaustive(tables, 0, tables.units.count, budget),
            )
            if found is None:
                assert tight == math.inf
                continue
            cost = float(_solved_cost(tables, budget))
            assert loose - 1e-6 <= cost <= tight + 1e-6, (seed, part)
            compared += 1
    assert compared > 25


def _solved_cost(tables: Tables, budget: float) -> float:
    from fxmem.planning.regions.dynamic_programs import _Nested

    return float(_Nested(tables, budget).best[0, tables.units.count, tuning.SLOTS])


# --- what the tables say of real models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet() -> Profile:
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    return analyze(model, torch.zeros(32, 3, 128, 128, device="meta"), target="cpu", optimizer=None).profile


def mlp(depth: int = 8) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())))


@pytest.mark.parametrize("application", list(Application))
def test_a_plan_keeps_its_budget_and_costs_less_where_there_is_more(resnet: Profile, application: Application) -> None:
    planner, peak = Planner(resnet, application), analyze_peak(resnet)
    extra = []
    for part in (0.9, 0.8, 0.7):
        plan = planner.plan("flat", int(peak * part))
        assert plan.after.requested_bytes <= peak * part
        assert not plan.analysed
        extra.append(plan.extra_flops or 0)
    assert extra == sorted(extra)
    assert planner.plan("auto", peak).regions == ()


def analyze_peak(profile: Profile) -> int:
    from fxmem.memory.liveness import timeline

    return timeline(profile).peak.requested_bytes


def test_early_stop_makes_the_regions_before_convolutions_nearly_free(resnet: Profile) -> None:
    planner, peak = Planner(resnet, Application.GRAPH), analyze_peak(resnet)
    half, root = planner.plan("flat", peak // 2), planner.plan("sqrt", None)
    forward = sum(node.forward_flops or 0 for node in resnet.nodes)
    assert (half.extra_flops or 0) < 0.3 * forward
    assert (root.extra_flops or 0) > 0.7 * forward


def test_regions_of_modules_are_modules_or_slices_of_a_sequential() -> None:
    analysis = analyze(mlp(), torch.zeros(512, 64), target="cpu", optimizer=None)
    plan = Planner(analysis.profile, Application.MODULES).plan("modules", int(analysis.peak.requested_bytes * 0.6))
    assert plan.regions
    for region in plan.regions:
        numbers = [int(path) for path in region.modules]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert region.last_node - region.first_node == len(numbers)


def test_a_region_says_what_it_frees_where_it_is_and_what_line_to_change(resnet: Profile) -> None:
    plan = Planner(resnet, Application.MODULES).plan("modules", int(analyze_peak(resnet) * 0.7))
    layers = [region for region in plan.regions if region.edit is not None]
    assert layers
    for region in layers:
        assert region.edit is not None
        keeps = f", context_fn=fxmem.keep({', '.join(map(str, region.keeps))})" if region.keeps else ""
        assert (
            f"checkpoint(self.{region.modules[0].rpartition('.')[2]}, x, use_reentrant=False{keeps})"
            in region.edit.after
        )
    for region in plan.regions:
        assert region.freed_bytes > 0
        assert region.extra_flops is not None


@pytest.mark.parametrize(
    ("code", "module", "expected"),
    [
        ("x = self.stem(x)", "stem", "x = checkpoint(self.stem, x, use_reentrant=False)"),
        ("return self.head(x, mask=m)", "model.head", "return checkpoint(self.head, x, mask=m, use_reentrant=False)"),
        (
            "y = self.a(self.b(x)) + self.c(x)",
            "b",
            "y = self.a(checkpoint(self.b, x, use_reentrant=False)) + self.c(x)",
        ),
        ("x = layer(x)", "layers.3", None),
        ("x = self.a(self.a(x))", "a", None),
        ("x = self.block(", "block", None),
    ],
)
def test_the_edit_of_a_line(code: str, module: str, expected: str | None) -> None:
    edit = write_edit(SourceLine(file="net.py", line=3, function="forward", code=code), module)
    assert (edit.after if edit else None) == expected


@pytest.mark.parametrize(
    ("code", "called"),
    [
        ("x = layer(x, self.rope(x))", "x = run_layer(x, self.rope(x))"),
        ("x = norm(self.layers[i](x))", None),  # the name that is called is no item of the list
        ("return sum(layer(x) for layer in self.layers)", None),  # it exists within the statement alone
        ("return torch.stack([layer(x) for layer in self.layers])", None),
        ("for layer in self.layers: x = layer(x)", None),
        ("return list(map(lambda layer: layer(x), self.layers))", None),
    ],
)
def test_the_edit_of_a_loop_over_layers(code: str, called: str | None) -> None:
    source = SourceLine(file="net.py", line=3, function="forward", code=code)
    regions = tuple(Region(first_node=n, last_node=n + 1, modules=(f"layers.{n}",), source=source) for n in (0, 2))
    called_there = {f"layers.{n}" for n in range(3)}
    edits = {region.edit for region in write_edits(regions, {source: called_there})}
    if called is None:
        assert edits == {None}
        return
    (edit,) = edits
    assert edit is not None
    assert edit.after.splitlines() == [
        "run_layer = layer",
        "if any(layer is self.layers[i] for i in (0, 2)):",
        "    run_layer = functools.partial(checkpoint, layer, use_reentrant=False)",
        called,
    ]
    keeping = regions[1].model_copy(update={"keeps": (1,)})
    edit = write_edits((regions[0], keeping), {source: called_there})[0].edit
    assert edit is not None
    assert edit.after.splitlines()[3:] == [
        "if layer is self.layers[2]:",
        "    run_layer = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=fxmem.keep(1))",
        called,
    ]
    assert {region.edit for region in write_edits(regions, {source: {*called_there, "others.0"}})} == {None}


def test_a_line_of_a_block_is_edited_where_the_plan_is_the_same_in_every_block() -> None:
    source = SourceLine(file="net.py", line=3, function="forward", code="x = x + self.attn(self.norm(x))")
    edit = write_edit(source, "attn")
    regions = tuple(
        Region(first_node=n, last_node=n + 1, modules=(f"layers.{n}.attn",), source=source, edit=edit) for n in (0, 1)
    )
    two = {source: {f"layers.{n}.{name}" for n in (0, 1) for name in ("attn", "norm")}}
    assert {region.edit for region in write_edits(regions, two)} == {edit}
    assert {region.edit for region in write_edits(regions[:1], two)} == {None}
    within = Region(first_node=0, last_node=2, modules=("layers",), regions=regions[:1])
    assert write_edits((within,), two)[0].regions[0].edit is None
    assert not has_edit(Span(0, 1, ("layers.0.attn",), source), two)
    assert has_edit(Span(0, 1, ("layers.0.attn",), source), {source: {"layers.0.attn", "layers.0.norm"}})


def test_a_region_that_would_keep_more_than_it_frees_is_none() -> None:
    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.last = nn.Linear(16, 256), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh((self.wide(x) * 2)[:, :16].contiguous()))

    units = CostTables(analyze(Narrowing(), torch.zeros(8, 16), target="cpu").profile, [])
    names = [node.name for node in units.profile.nodes]
    selection = Selection(CostTables(units.profile, [names.index("wide"), names.index("last")]))
    keeping = len(selection.thresholds) - 1
    assert [number for number, _ in selection.find_kept(names.index("wide"), names.index("last"), keeping)] == [0]
    assert describe_regions(selection, [Stretch(0, 1, level=keeping)], {}) == ()


def test_what_is_random_is_known_of_a_region() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
    units = CostTables(analyze(model, torch.zeros(64, 8), target="cpu").profile, [])
    assert not units.draws(1, 4)
    assert units.draws(4, 6)


def test_no_region_holds_what_must_not_run_twice() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            z = self.b(y)
            y.add_(1)
            return self.c(z) * y

    units = CostTables(analyze(Careful(), torch.zeros(4, 16), target="cpu").profile, [])
    names = [node.name for node in units.profile.nodes]
    a, b, add, c = (names.index(name) for name in ("a", "b", "add_", "c"))
    assert not is_legal(units, b, c)  # reads what is written to later
    assert not is_legal(units, add, c)  # writes to what another made
    assert is_legal(units, a, c)
    assert is_legal(units, c, c + 1)


def test_what_checkpoints_already_is_left_alone() -> None:
    model = RandomModel(0)
    model.statements = [("first", (0,)), ("checkpointed", (1,)), ("softmax", (2,)), ("gelu", (3,)), ("second", (4,))]
    analysis = analyze(model, torch.zeros(BATCH, WIDTH), target="cpu", optimizer=None)
    own = analysis.profile.recomputed[0]
    units = CostTables(analysis.profile, [])
    assert not is_legal(units, own.first_node - 1, own.last_node)
    assert not is_legal(units, own.first_node, own.first_node + 1)
    assert is_legal(units, own.last_node, own.last_node + 2)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_strategy_says_what_it_reaches_where_it_cannot(resnet: Profile, strategy: str) -> None:
    with pytest.raises(ExceededError, match=r"strategy [\w-]+ .*reaches .* at the least"):
        Planner(resnet, Application.MODULES).plan(strategy, 100_000_000)  # type: ignore[arg-type]


def test_an_unknown_strategy_is_answered_with_the_known_ones(resnet: Profile) -> None:
    with pytest.raises(UsageError, match=r"one of auto, .*flat, .*mincut"):
        Planner(resnet, Application.GRAPH).plan("cube", None)  # type: ignore[arg-type]


def test_a_strategy_from_outside_plans_like_any_other(resnet: Profile) -> None:
    def everything(tables: Tables, budget: float) -> list[Stretch]:
        return [Stretch(i, j) for i, j in tables.blocks if tables.regions[i, j]]

    register("everything", everything)
    register("illegal", lambda tables, budget: [Stretch(0, tables.units.count)])
    planner, peak = Planner(resnet, Application.MODULES), analyze_peak(resnet)
    plan = planner.plan("everything", None)
    assert plan.strategy == plan.chosen == "everything"
    assert plan.regions
    assert plan.after.requested_bytes < peak
    assert planner.plan("everything", plan.after.requested_bytes).regions == plan.regions
    with pytest.raises(ExceededError, match="strategy everything with modules reaches"):
        planner.plan("everything", plan.after.requested_bytes - 1)
    with pytest.raises(UsageError, match="expected strategy illegal to propose stretches that may be regions"):
        planner.plan("illegal", None)


@pytest.mark.truth
def test_the_curve_begins_unplanned_and_no_plan_on_it_is_higher(resnet: Profile) -> None:
    curve = Planner(resnet, Application.GRAPH).curve()
    assert curve[0].regions == ()
    assert all(plan.after.requested_bytes <= curve[0].after.requested_bytes for plan in curve)
    assert len(curve) > 6
    json.dumps([json.loads(plan.to_json()) for plan in curve])


@pytest.mark.truth
@pytest.mark.parametrize(
    "build",
    [
        lambda: torchvision.models.resnet18(),
        lambda: torchvision.models.vgg11(),
        mlp,
        lambda: torchvision.models.densenet121(),
    ],
)
def test_the_estimate_is_what_the_analysis_of_the_applied_plan_says(build) -> None:
    with torch.device("meta"):
        model = build()
    given = (
        torch.zeros(1024, 64, device="meta")
        if isinstance(model, nn.Sequential)
        else torch.zeros(32, 3, 128, 128, device="meta")
    )
    analysis = analyze(model, given, target="cpu", optimizer=None)
    planner, peak = Planner(analysis.profile, Application.MODULES), analysis.peak.requested_bytes
    checked = 0
    for part in (0.95, 0.9, 0.8, 0.7):
        try:
            plan = planner.plan("flat", int(peak * part))
        except ExceededError:
            continue
        if not plan.regions:
            continue
        real = apply_regions(analysis, plan.regions, Application.MODULES).peak.requested_bytes
        # Too much where several regions read what forward alone needs (DenseNet).
        assert 0.999 * real <= plan.after.requested_bytes <= 1.03 * real, part
        checked += 1
    assert checked


class Residual(nn.Module):
    """Blocks of a transformer's kind: two parts of each read its input, which autograd saves for neither."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))
            for width in range(64, 64 + 4 * depth, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(2 * x)
        return x


@pytest.fixture(scope="module")
def residual() -> Analysis:
    with torch.device("meta"):
        model = Residual(60)
    return analyze(model, torch.zeros(2048, 64, device="meta"), target="cpu", optimizer=None)


@pytest.mark.truth
@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_what_two_parts_of_a_region_read_is_kept_once(residual: Analysis, share: float) -> None:
    planner = Planner(residual.profile, Application.MODULES)
    plan = planner.plan("flat", int(share * residual.peak.requested_bytes))
    real = apply_regions(residual, plan.regions, Application.MODULES).peak.requested_bytes
    assert plan.after.requested_bytes == pytest.approx(real, rel=1e-3)


@functools.cache
def resnet50(target: str, optimizer: str | None) -> Analysis:
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    return analyze(model, torch.zeros(32, 3, 224, 224, device="meta"), target=target, optimizer=optimizer)


@pytest.mark.truth
@pytest.mark.parametrize(("target", "optimizer"), [("cpu", None), ("h100", "adamw")])
@pytest.mark.parametrize("strategy", ["flat", "nested"])
def test_the_estimate_of_regions_is_their_analysis(target: str, optimizer: str | None, strategy: str) -> None:
    """Also where the peak comes after backward has freed what an older part made: a downsampling branch's."""
    analysis = resnet50(target, optimizer)
    planner = Planner(analysis.profile, Application.MODULES)
    for share in (0.8, 0.6):
        plan = planner.plan(strategy, int(share * analysis.peak.requested_bytes))
        real = apply_regions(analysis, plan.regions, Application.MODULES).peak.requested_bytes
        assert plan.after.requested_bytes == pytest.approx(real, rel=1e-3), share


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_fronts_are_long_enough_for_deep_models(
    residual: Analysis, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, budget = Planner(residual.profile, Application.MODULES), int(share * residual.peak.requested_bytes)
    plan = planner.plan("flat", budget)
    monkeypatch.setattr(tuning, "FRONT", 4096)
    best = planner.plan("flat", budget)
    assert plan.extra_flops <= 1.02 * best.extra_flops
