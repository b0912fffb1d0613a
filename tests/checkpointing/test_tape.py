"""Single results recomputed: what could go wrong, each case with its care and, where the care can be switched off,
without it."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.checkpointing import apply, recompute, record_survey, uncheckpoint
from fxmem.checkpointing.tape import recorder as tape
from fxmem.checkpointing.tape import values as tape_values
from fxmem.cli.specs import build_model
from fxmem.errors import PlanWarning
from fxmem.records.plan import Plan, Region, Result
from fxmem.records.profile import SourceLine
from fxmem.records.units import Application
from fxmem.whatif import plan_search, verified_plan
from tests.checkpointing.test_regions import IMAGES, blocks, region, same, trained
from tests.random_models import BATCH, WIDTH, RandomModel
from tests.remade import regions_of, results, seen
from tests.remade import remaking as everything

pytestmark = pytest.mark.usefixtures("others_frozen")

OPERATORS = Application.OPERATORS


@pytest.mark.parametrize(("dropout_p", "compared"), [(0.0, False), (0.1, True), (None, False)])
def test_the_seed_of_attention_without_dropout_is_never_written_and_not_compared(
    dropout_p: float | None, compared: bool
) -> None:
    """A card's kernel allocates it and leaves in it what was there before; 0 is what `dropout_p` is by default."""
    func = torch.ops.aten._scaled_dot_product_efficient_attention.default
    args = (None, None, None, None, True) if dropout_p is None else (None, None, None, None, True, dropout_p)
    op = tape_values.TapedOp(func, (args, {}), (), frozenset(), None)
    need = tape_values.Need(())
    value = tape_values.TapedValue((str(func), 0, 0), op, need)
    seed, result = torch.tensor(7), torch.ones(3)
    assert (tape_values.SavedStandIn(value, need, seed, checked=True).sums is not None) == compared
    assert tape_values.SavedStandIn(value, need, result, checked=True).sums is not None


def alike(model: nn.Module, *args: Any, holds: Callable[[Any], bool] = lambda _: False, **options: Any) -> bool:
    """Whether a copy of the model, of which nothing is held, leaves behind what the model does."""
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    apply(planned, everything(model, *args, holds=holds), OPERATORS)
    return same(trained(plain, *args, **options), trained(planned, *args, **options))


class Of(nn.Module):
    """A function with a weight, as a model."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.lin(x))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

# --- statistics, random numbers, modes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "shows"),
    [
        (lambda: nn.BatchNorm2d(4), True),
        (
            lambda: nn.BatchNorm2d(4, momentum=None),
            False,
        ),  # the average of equal batches is the same after any number of them
        (lambda: nn.SyncBatchNorm(4), True),
        (lambda: BatchNormAct2d(4), True),
        (lambda: nn.InstanceNorm2d(4, track_running_stats=True), False),  # writes to a copy of its own
    ],
    ids=["batch", "cumulative", "sync", "timm", "instance"],
)
def test_running_statistics_are_updated_once(
    norm: Callable[[], nn.Module], shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = blocks(norm(), nn.Tanh(), nn.Conv2d(4, 4, 1))
    assert alike(model, IMAGES)
    monkeypatch.setattr(tape, "_statistics", lambda *_: [])
    assert not (shows and alike(model, IMAGES))


def test_statistics_of_a_frozen_norm_are_read() -> None:
    model = blocks(nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 1))
    model[1][1].eval()  # type: ignore[index]
    model[1][1].running_mean.fill_(0.3)  # type: ignore[index, union-attr]
    seen(model, IMAGES)  # `train()` is called there
    model[1][1].eval()  # type: ignore[index]
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    survey = record_survey(planned)
    planned(IMAGES)
    regions = regions_of(*survey.finish(), holds=lambda _: False)
    uncheckpoint(planned)
    apply(planned, regions, OPERATORS)
    assert same(trained(plain, IMAGES), trained(planned, IMAGES))


def test_dropout_draws_the_same_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks(nn.Dropout(0.5), nn.Conv2d(4, 4, 1), nn.Dropout(0.2), nn.Conv2d(4, 4, 1))
    assert alike(model, IMAGES)
    monkeypatch.setattr(recompute.Generators, "replay", lambda _: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="is not what it was"):  # the first step looks
        alike(model, IMAGES)


def test_a_mode_changed_between_forward_and_backward_changes_nothing() -> None:
    model = blocks(nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 1))
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    apply(planned, everything(model, IMAGES), OPERATORS)

    def switched(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def loss(out: torch.Tensor) -> torch.Tensor:
            model.eval()
            model.zero_grad()
            return out.square().sum()

        return loss

    assert same(
        trained(plain, IMAGES, steps=1, loss=switched(plain)), trained(planned, IMAGES, steps=1, loss=switched(planned))
    )


def test_backward_within_autocast_makes_again_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid())
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    apply(planned, everything(model, X), OPERATORS)

    def gradients(model: nn.Module) -> list[Any]:
        model.zero_grad()
        out = model(X)
        with torch.autocast("cpu"):
            out.sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(plain)
    assert all(map(torch.equal, expected, gradients(planned)))
    monkeypatch.setattr(tape_values, "_no_autocast", contextlib.nullcontext)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):  # half as large as what was recorded
        gradients(planned)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_casts_of_autocast_are_made_again(precision: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.LayerNorm(6))
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    with torch.autocast("cpu", precision):
        regions = everything(model, X)
    apply(planned, regions, OPERATORS)

    def gradients(model: nn.Module) -> list[Any]:
        with torch.autocast("cpu", precision):
            out = model(X)
        out.float().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(plain), gradients(planned)))


# --- writes -----------------------------------------------------------------------------------------------------------


def written_after_use(y: torch.Tensor) -> torch.Tensor:
    a = y.sigmoid()
    b = y.mul_(2).tanh()
    return a * b


def test_a_write_in_place_made_again_leaves_alone_what_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert alike(Of(written_after_use), X)
    monkeypatch.setattr(tape_values, "_is_shared", lambda _: False)
    with pytest.raises(RuntimeError, match="is not what it was"):
        alike(Of(written_after_use), X)


def test_writes_through_views_and_into_parts() -> None:
    def parts(y: torch.Tensor) -> torch.Tensor:
        y = y.exp()
        z = y * 1
        z[:, :2].mul_(3)
        z[0] = y[1]
        return (z.sigmoid() + z.view(-1)[:4].cos().sum()).transpose(0, 1).contiguous().tanh()

    assert alike(Of(parts), X)


def test_what_the_model_reads_must_be_as_it_was() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)
            self.register_buffer("shift", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.lin(x) + self.shift).tanh().sigmoid()

    model = Reads()
    apply(model, everything(model, X), OPERATORS)
    out = model(X)
    model.shift.zero_()  # type: ignore[operator]
    with pytest.raises(
        RuntimeError,
        match=r"what the model reads \(\(6,\) torch.float32\) has been written to, or freed, before backward",
    ):
        out.sum().backward()
    out = model(X)
    model.shift.untyped_storage().resize_(0)  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match="what the model reads"):
        out.sum().backward()


def test_what_is_held_must_be_as_it_was() -> None:
    model = Of(lambda y: y.exp().sigmoid().tanh())
    regions = everything(model, X, holds=lambda value: value.storage[0] == "aten.exp.default")
    kept: list[torch.Tensor] = []
    model.function = lambda y: (kept.append(y.exp()) or kept[0]).sigmoid().tanh()  # type: ignore[func-returns-value]
    apply(model, regions, OPERATORS)
    out = model(X)
    with torch.no_grad():
        kept[0].zero_()
    with pytest.raises(RuntimeError, match=r"what aten\.exp\.default made, which the plan keeps"):
        out.sum().backward()


def test_what_was_allocated_empty_is_not_taken_for_made() -> None:
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(y)
            out.numpy()[:] = y.detach().numpy() * 3  # as a kernel does that is given an address
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * ctx.saved_tensors[0]

    assert alike(Of(lambda y: Kernel.apply(y.exp()).tanh()), X)


def test_a_write_that_the_dispatcher_does_not_see_is_noticed_in_the_first_step() -> None:
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(y)
            out.numpy()[:] = y.detach().numpy() * 3
            ctx.save_for_backward(out)
            return out * 1

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * ctx.saved_tensors[0]

    with pytest.raises(RuntimeError, match=r"recomputed, what aten.* gave .* is not what it was"):
        alike(Of(lambda y: Kernel.apply(y.exp()).tanh()), X)


# --- what is never run again ------------------------------------------------------------------------------------------


def test_operators_of_others_and_generators_of_the_callers_run_once() -> None:
    ran: list[str] = []

    @torch.library.custom_op("fxmem_tests::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        ran.append("thrice")
        return x * 3

    thrice.register_autograd(lambda ctx, gradient: gradient * 3)
    generator = torch.Generator().manual_seed(3)

    def function(y: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(3)
        noise = torch.rand(y.shape, generator=generator)
        return (thrice(y.exp()) * noise).tanh().sigmoid()

    model = Of(function)
    calls, _ = seen(model, X)
    assert not {"aten.rand.generator", "fxmem_tests.thrice.default"} & {call.name for call in calls}
    apply(model, everything(model, X), OPERATORS)
    ran.clear()
    model(X).sum().backward()
    assert ran == ["thrice"]
    model.function = lambda y: (y.exp() * 1j).conj().imag.tanh()
    assert alike(uncheckpoint(model), X)


def test_python_runs_once() -> None:
    ran: list[int] = []
    model = Of(lambda y: (ran.append(1) or y).exp().tanh().sigmoid())  # type: ignore[func-returns-value]
    apply(model, everything(model, X), OPERATORS)
    ran.clear()
    model(X).sum().backward()
    assert ran == [1]


# --- backward in other ways -------------------------------------------------------------------------------------------


def test_backward_twice_and_of_second_order() -> None:
    model = Of(lambda y: y.exp().tanh().mul(2).sigmoid())
    planned, twice = copy.deepcopy(model), copy.deepcopy(model)
    apply(planned, everything(model, X), OPERATORS)
    apply(twice, _with_stretches(everything(model, X), model, X, random.Random(0)), OPERATORS)
    found = []
    for each in (model, planned, twice):
        out = each(X)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        weight = each.lin.weight
        (gradient,) = torch.autograd.grad(each(X).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), weight)
        found.append((weight.grad, gradient, second))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_another_batch_size_and_inputs_that_need_gradients() -> None:
    model = blocks(nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 1))
    planned = copy.deepcopy(model)
    apply(planned, everything(model, IMAGES), OPERATORS)
    found = []
    for each in (model, planned):
        x = torch.cat([IMAGES, IMAGES]).requires_grad_()
        each(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in each.parameters())])
    assert all(map(torch.equal, *found))


def test_without_gradients_or_in_eval_the_model_is_its_own() -> None:
    model = Of(lambda y: y.exp().tanh())
    apply(model, everything(model, X), OPERATORS)
    assert model(X).grad_fn is not None
    with torch.no_grad():
        assert model(X).grad_fn is None
    packed: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append("ours") or tensor, lambda tensor: tensor
    ):  # type: ignore[func-returns-value]
        model.eval()(X)
        assert packed
        packed.clear()
        model.train()(X)
        assert not packed


def test_the_model_is_the_same_object_and_copies_do_alike() -> None:
    model = blocks(nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 1))
    cls, keys = type(model), list(model.state_dict())
    assert apply(model, everything(model, IMAGES), OPERATORS) is model
    assert isinstance(model, cls)
    assert list(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(IMAGES).sum().backward()
        assert all(parameter.grad is not None for parameter in copied.parameters())
        assert type(uncheckpoint(copied)) is cls
    assert all(parameter.grad is None for parameter in model.parameters())


def test_wrapped_for_distributed_training_afterwards(tmp_path: Any) -> None:
    model = blocks(nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 1))
    plain, planned = copy.deepcopy(model), apply(copy.deepcopy(model), everything(model, IMAGES), OPERATORS)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert same(*(trained(nn.parallel.DistributedDataParallel(one), IMAGES) for one in (plain, planned)))
    finally:
        dist.destroy_process_group()


def test_under_the_compiler_it_does_nothing_and_warns() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    plain, planned = copy.deepcopy(model), apply(copy.deepcopy(model), everything(model, X), OPERATORS)
    with pytest.warns(PlanWarning, match="does nothing in a model under torch.compile"):
        torch.compile(planned, backend="aot_eager", fullgraph=True)(X).square().sum().backward()
    plain(X).square().sum().backward()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_checkpoint_of_the_models_own_stays_what_it_is() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        z = checkpoint(lambda v: v.exp().tanh().sigmoid(), y, use_reentrant=False)
        assert isinstance(z, torch.Tensor)
        return z.cos().tanh()

    assert alike(Of(function), X)


def test_what_raises_leaves_nothing_on() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    model = Of(lambda y: y.tanh())
    apply(model, everything(model, X), OPERATORS)
    model.function = function
    with pytest.raises(ValueError, match="no"):
        model(X)
    out = (X.clone().requires_grad_() * 2).exp()
    assert out.grad_fn is not None
    assert out.grad_fn._saved_result.shape == out.shape  # type: ignore[attr-defined]
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.truth
def test_nothing_is_held_for_longer_than_it_is_needed() -> None:
    alive: list[weakref.ref[Any]] = []

    def function(y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            y = y.exp().tanh()
            alive.append(weakref.ref(y.untyped_storage()))
        return y.sum()

    model = Of(function)
    apply(model, everything(model, X), OPERATORS)
    alive.clear()
    gc.collect()
    others = {
        id(each)
        for each in gc.get_objects()
        if type(each) in (tape_values.TapedOp, tape_values.TapedValue, tape_values.Need)
    }
    gc.disable()  # reference counts alone have to do it
    try:
        out = model(X)
        assert [each() is None for each in alive] == [True, True, True]
        out.backward()
        del out
        assert not [
            each
            for each in gc.get_objects()
            if type(each) in (tape_values.TapedOp, tape_values.TapedValue, tape_values.Need) and id(each) not in others
        ]
    finally:
        gc.enable()


def test_later_forwards_record_only_what_leads_to_a_dropped_result(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    made: list[weakref.ref[Any]] = []

    class Counted(tape_values.TapedOp):
        def __init__(self, func: Any, *rest: Any) -> None:
            super().__init__(func, *rest)
            recorded.append(func)

    def once(y: torch.Tensor) -> torch.Tensor:
        y = y.exp()
        made.append(weakref.ref(y.untyped_storage()))
        return y.tanh().sigmoid()

    monkeypatch.setattr(tape, "TapedOp", Counted)
    plain = Of(once)
    planned = copy.deepcopy(plain)
    exps = tuple(Result(operator="aten.exp.default", number=number, outputs=(0,)) for number in (0, 1))
    apply(planned, [Region(first_node=0, last_node=1, remakes=exps)], OPERATORS)
    found: list[tuple[int, list[bool]]] = []
    for times in (1, 1, 2, 2, 2, 1):
        for model in (plain, planned):
            model.function = once if times == 1 else lambda y: once(once(y))
            recorded.clear()
            made.clear()
            out = model(X)
            found += [(len(recorded), [each() is not None for each in made])] if model is planned else []
            out.sum().backward()
        assert torch.equal(*(model.lin.weight.grad for model in (plain, planned)))  # type: ignore[arg-type]
    # An addmm, and for each time exp, tanh and sigmoid. The third forward is new, so the fourth is recorded whole.
    kept = [[False], [False], [False, True], [False, False], [False, False], [False]]
    assert found == list(zip([4, 2, 2, 7, 5, 4], kept, strict=True))


class _Storages(TorchDispatchMode):
    """Of the tensors made meanwhile, the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        self._seen += [weakref.ref(each.untyped_storage()) for each in made if isinstance(each, torch.Tensor)]
        return result

    def alive(self) -> int:
        gc.collect()
        return self._count()

    def _count(self) -> int:
        return len({id(storage) for each in self._seen if (storage := each()) is not None})


def _skipped(loss: torch.Tensor, middle: torch.Tensor) -> None:
    assert loss.isfinite()


def _retained(loss: torch.Tensor, middle: torch.Tensor) -> None:
    loss.backward(retain_graph=True)


def _partial(loss: torch.Tensor, middle: torch.Tensor) -> None:
    torch.autograd.grad(loss, middle)


def _interrupted(loss: torch.Tensor, middle: torch.Tensor) -> None:
    def stop(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    middle.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()


@pytest.mark.parametrize("application", list(Application))
@pytest.mark.parametrize("use", [_skipped, _retained, _partial, _interrupted])
def test_a_graph_that_backward_does_not_walk_is_freed(
    application: Application, use: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Operators that save their own results would otherwise keep themselves alive through what a plan saves of them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Of(lambda y: y.relu().sigmoid().exp())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            middle = self.first(x)
            y = middle.tanh().sqrt()
            return nn.functional.scaled_dot_product_attention(y, y, y).log_softmax(-1).sum(), middle

    model = Model()
    regions = {
        OPERATORS: _with_stretches(
            everything(model, X, holds=lambda value: bool(value.call % 2)), model, X, random.Random(0)
        ),
        Application.MODULES: [region("first")],
        Application.GRAPH: [region("tanh", "sqrt", of=Application.GRAPH)],
    }
    apply(model, regions[application], application)
    alive = []
    with _Storages() as storages:
        for _ in range(2):
            use(*model(X))
            model.zero_grad()
            alive.append(storages.alive())
    assert alive[0] == alive[1]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs(first: int) -> None:
    def left_behind(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        results = model(torch.randn(BATCH, WIDTH))
        sum(result.square().sum() for result in (results if isinstance(results, tuple) else (results,))).backward()  # type: ignore[union-attr]
        return [torch.get_rng_state(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]

    for seed in range(first, first + 10):
        torch.manual_seed(seed)
        model = RandomModel(seed).train()
        chance = random.Random(seed)
        try:
            expected = left_behind(copy.deepcopy(model))
        except RuntimeError:  # a program that autograd itself refuses
            continue
        x = torch.randn(BATCH, WIDTH)
        for holds in (lambda _: False, lambda _: chance.random() < 0.4):  # noqa: B023
            regions = everything(model, x, holds=holds)
            if seed % 2:
                regions = _with_stretches(regions, model, x, chance)
            planned = apply(copy.deepcopy(model), regions, OPERATORS)
            assert all(map(torch.equal, expected, left_behind(planned))), seed


def _with_stretches(
    regions: Sequence[Region], model: nn.Module, x: torch.Tensor, chance: random.Random
) -> list[Region]:
    """The regions, with each call in a stretch, or in one of two within it, or in none."""
    found = []
    for one in results(*seen(model, x)):
        path = (chance.randrange(3), chance.randrange(2))[: chance.randrange(3)]
        found += [one.model_copy(update={"stretch": path})] if path else []
    return [region.model_copy(update={"frees": tuple(found)}) for region in regions]


class _Counted(_Storages):
    """How often an operator runs meanwhile, and the most storages alive of what it makes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.runs, self.most = name, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) != self.name:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.runs += 1
        self.most = max(self.most, self._count())
        return result


def _sines(*stretches: tuple[int, ...]) -> tuple[Result, ...]:
    """The first sines, each in a stretch."""
    return tuple(
        Result(operator="aten.sin.default", number=number, stretch=path)
        for number, path in enumerate(stretches)
        if path
    )


A, B, C, D = (0, 0), (0, 1), (1, 0), (1, 1)


@pytest.mark.truth
@pytest.mark.parametrize(
    ("frees", "runs", "most"),
    [
        (_sines(), 15, 15),  # what the last of the 16 reads: from the first, all stay
        # For the last of the 16 all run: of each four stays the last, and of the last four all: 3 + 3, and one that is
        # read. Then the three that are gone of each of the other fours, with those that are left of what stayed.
        (_sines((0,), (0,), (0,), (), (1,), (1,), (1,), (), (2,), (2,), (2,), (), (3,), (3,), (3,)), 15 + 9, 6),
        # Halves of fours: of the first half stays the last alone. Its second four runs when backward comes to it, for
        # which its first four runs as well.
        (_sines(A, A, A, (0,), B, B, B, (), C, C, C, (1,), D, D, D), 15 + 3 + 7 + 3, 5),
    ],
)
def test_what_is_recomputed_for_another_stretch_is_freed_and_recomputed_twice(
    frees: tuple[Result, ...], runs: int, most: int
) -> None:
    def sines(y: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            y = y.sin()
        return y

    model = Of(sines)
    planned = copy.deepcopy(model)
    regions = [one.model_copy(update={"frees": frees}) for one in everything(model, X)]
    apply(planned, regions, OPERATORS)
    model(X).sum().backward()
    for _ in range(2):  # the second forward records only what is needed
        out = planned(X).sum()
        with _Counted("aten.sin.default") as counted:
            out.backward()
        assert (counted.runs, counted.most, counted.alive()) == (runs, most, 0)
        assert torch.equal(planned.lin.weight.grad, model.lin.weight.grad)
        planned.zero_grad()


def test_a_write_in_place_that_runs_twice_reads_what_it_read_before() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        return (y + 1).mul_(0.5).sin().sin().sin().sin()

    frees = (Result(operator="aten.mul_.Tensor", number=0, stretch=(0,)), *_sines((0,), (), (1,)))
    model = Of(function)
    planned = copy.deepcopy(model)
    apply(planned, [one.model_copy(update={"frees": frees}) for one in everything(model, X)], OPERATORS)
    assert same(trained(model, X), trained(planned, X))


# --- a program that has changed ---------------------------------------------------------------------------------------


class _Attending(nn.Module):
    """Attention that a plan can be made for and that can change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.0
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)
            x = nn.functional.gelu(layer(x)).sigmoid()
        return x


ATTENDED = torch.randn(2, 2, 32, 16, generator=torch.Generator().manual_seed(0))


def attending_plan(**options: Any) -> Plan:
    step = {"target": "cpu", "optimizer": None, "keep_outputs": False, **options}
    return fxmem.plan(fxmem.analyze(_Attending(), ATTENDED, **step), "mincut", budget=0.85)


def test_a_changed_program_is_warned_of_once() -> None:
    model = fxmem.checkpoint(_Attending(), attending_plan())
    model.dropout = 0.1
    results = sum(len(region.remakes) for region in attending_plan().regions)
    with pytest.warns(
        PlanWarning, match=rf"of the {results} results .* 0 aten._scaled_dot_product_flash_attention_for_cpu.default"
    ):
        model(ATTENDED)
    model(ATTENDED)  # warnings are errors


def test_a_plan_for_autocast_is_warned_of_without_it() -> None:
    model = fxmem.checkpoint(_Attending(), attending_plan(precision="bf16"))
    with pytest.warns(PlanWarning, match=r"0 aten\._to_copy\.default where the plan has \d"):
        model(ATTENDED)


def test_checks_of_the_first_step_do_not_shift_the_count_of_operators() -> None:
    """Under autocast the program's own casts are among the operators that the plan counts."""
    plan = attending_plan(precision="bf16")
    assert plan.operators["aten._to_copy.default"]
    model = fxmem.checkpoint(_Attending(), plan)
    with torch.autocast("cpu", torch.bfloat16):
        model(ATTENDED)  # warnings are errors


def test_a_plan_of_another_model_is_refused() -> None:
    model = _Attending()
    model.layers.append(nn.Linear(16, 16))
    with pytest.raises(fxmem.errors.UsageError, match="_Attending of 1,088 parameters, but this _Attending has 1,360"):
        fxmem.checkpoint(model, attending_plan())


def test_a_plan_made_by_another_release_of_torch_is_warned_of() -> None:
    plan = attending_plan().model_copy(update={"torch_version": "2.3.1"})
    with pytest.warns(PlanWarning, match=r"names operators of torch 2\.3\.1"):
        fxmem.checkpoint(_Attending(), plan)


def test_a_model_that_is_compiled_already_is_refused_with_the_remedy() -> None:
    with pytest.raises(fxmem.errors.UsageError, match="checkpoint the model first and compile"):
        fxmem.checkpoint(torch.compile(_Attending(), backend="eager"), attending_plan())


def test_a_model_on_two_devices_is_refused() -> None:
    model = _Attending()
    model.layers[1].to("meta")
    with pytest.raises(fxmem.errors.UsageError, match=r"on one device .* got parameters on cpu, meta; plan with"):
        fxmem.checkpoint(model, attending_plan())


def test_a_plan_names_files_relatively(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = SourceLine(file=str(tmp_path / "net.py"), line=4)
    plan = attending_plan()
    region = plan.regions[0].model_copy(update={"source": source})
    monkeypatch.chdir(tmp_path)
    text = plan.model_copy(update={"regions": (region,)}).to_json()
    assert str(tmp_path) not in text
    assert Plan.model_validate_json(text).regions[0].source == source.model_copy(update={"file": "net.py"})


# --- plans ------------------------------------------------------------------------------------------------------------


def test_the_plan_survives_its_file(tmp_path: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)))
    x = torch.randn(512, 64)
    plan = fxmem.plan(fxmem.analyze(model, x, target="cpu", optimizer=None), "mincut", budget=0.6)
    assert plan.application is OPERATORS
    plan.to_json(tmp_path / "plan.json")
    assert fxmem.load_plan(tmp_path / "plan.json") == plan
    planned = fxmem.checkpoint(copy.deepcopy(model), fxmem.load_plan(str(tmp_path / "plan.json")))
    assert fxmem.analyze(planned, x, target="cpu", optimizer=None).peak.requested_bytes == plan.after.requested_bytes
    assert 'fxmem.load_plan("plan.json")' in plan.to_code()
    assert same(trained(model, x), trained(planned, x))


def test_dropout_on_a_card_that_is_not_there() -> None:
    small = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
    ids = torch.zeros(32, 256, dtype=torch.long)
    analysis = fxmem.analyze(
        build_model("hf:GPT2LMHeadModel", small).module,
        {"input_ids": ids, "labels": ids},
        target="h100",
        optimizer=None,
    )
    calls, values = verified_plan.survey(analysis)
    assert any(
        values[number].saved for call in calls if call.name == "aten.native_dropout.default" for number in call.values
    )
    after = plan_search.apply_regions(analysis, regions_of(calls, values, holds=lambda _: False), OPERATORS)
    again = sum(op.name == "aten.native_dropout.default" for op in after.profile.ops)
    assert again == 2 * sum(op.name == "aten.native_dropout.default" for op in analysis.profile.ops)


def test_an_application_that_a_strategy_does_not_have_is_refused() -> None:
    analysis = fxmem.analyze(Of(torch.tanh), X, target="cpu")
    with pytest.raises(
        fxmem.errors.UsageError, match="expected application 'operators' with strategy 'mincut', got 'graph'"
    ):
        fxmem.plan(analysis, "mincut", 0.9, application="graph")
    with pytest.raises(
        fxmem.errors.UsageError, match="expected application 'modules' or 'graph' with strategy 'flat', got 'operators'"
    ):
        fxmem.plan(analysis, "flat", 0.9, application="operators")
