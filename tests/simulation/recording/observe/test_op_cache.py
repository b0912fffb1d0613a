"""A call that looks like one before it comes out as that one did; what cannot be told by its looks is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem._torch import common as torch_common
from fxmem._torch import fakes as torch_fakes
from fxmem._torch.kernels import override_fake_kernels
from fxmem.errors import AnalysisError
from fxmem.simulation.recording.observe.op_cache import CHECK, CachedCall, FreshOutput, OpCache
from fxmem.simulation.recording.observe.op_recorder import OpRecorder, OpTraits
from tests.random_models import BATCH, WIDTH, RandomModel

aten = torch.ops.aten


@pytest.fixture
def fakes() -> Iterator[torch_common.FakeTensorMode]:
    with torch_common.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def learn(cache: OpCache, func: object, *args: object, **kwargs: object) -> CachedCall | None:
    """A call of a kind that has been run once."""
    call = cache.call(func, args, kwargs)
    if call is not None:
        cache.learn(call, func, args, kwargs, func(*args, **kwargs))  # type: ignore[operator]
    return cache.call(func, args, kwargs)


def x(*shape: int, **options: object) -> Tensor:
    return torch.empty(*(shape or (4, 6)), **options)  # type: ignore[call-overload, no-any-return]


CALLS: dict[str, tuple[object, Callable[[], tuple[object, ...]], tuple[str, ...]]] = {
    "elementwise": (aten.add.Tensor, lambda: (x(), x(6)), ("FreshOutput",)),
    "scalar": (aten.mul.Tensor, lambda: (x(), 2.0), ("FreshOutput",)),
    "transposed": (aten.mul.Tensor, lambda: (x().t(), x().t()), ("FreshOutput",)),
    "in place": (aten.add_.Tensor, lambda: (x(), x()), ("_Same",)),
    "view": (aten.view.default, lambda: (x(), [3, 8]), ("_View",)),
    "slice": (aten.slice.Tensor, lambda: (x(), 0, 1, 3), ("_View",)),
    "unsafe view": (aten._unsafe_view.default, lambda: (x(), [24]), ("_View",)),
    "several views": (aten.split.Tensor, lambda: (x(), 2), ("_View", "_View")),
    "several tensors": (
        aten.native_layer_norm.default,
        lambda: (x(), [6], x(6), x(6), 1e-5),
        ("FreshOutput", "FreshOutput", "FreshOutput"),
    ),
    "none among them": (
        aten.native_layer_norm_backward.default,
        lambda: (x(), x(), [6], x(4, 1), x(4, 1), x(6), x(6), [True, False, True]),
        ("FreshOutput", "NoneType", "FreshOutput"),
    ),
    "lists": (aten._foreach_sqrt.default, lambda: ([x(), x(3)],), ("FreshOutput", "FreshOutput")),
    "a new tensor": (
        aten.empty_like.default,
        lambda: (x(2, 3, 4, 5).to(memory_format=torch.channels_last),),
        ("FreshOutput",),
    ),
    "no tensor": (aten.empty.memory_format, lambda: ([3, 5],), ("FreshOutput",)),
    "another dtype": (aten._to_copy.default, lambda: (x(),), ("FreshOutput",)),
    "numbers among them": (
        aten._scaled_dot_product_flash_attention.default,
        lambda: tuple(x(2, 3, 5, 8, dtype=torch.float16, device="cuda") for _ in range(3)),
        (
            "FreshOutput",
            "FreshOutput",
            "NoneType",
            "NoneType",
            "_Plain",
            "_Plain",
            "FreshOutput",
            "FreshOutput",
            "FreshOutput",
        ),
    ),
    "no elements": (aten.cat.default, lambda: ([x(0), x(0)],), ("FreshOutput",)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_is_made_as_the_first_came_out(fakes: torch_common.FakeTensorMode, name: str) -> None:
    func, args, kinds = CALLS[name]
    cache = OpCache(fakes)
    learn(cache, func, *args())
    arguments = args()
    call = cache.call(func, arguments, {})
    assert call is not None
    assert call.replay is not None
    assert tuple(type(output).__name__ for output in call.replay.outputs) == kinds
    ours, theirs = cache.make(call.replay, call.tensors), func(*arguments)  # type: ignore[operator]
    assert type(ours) is type(theirs)
    listed = isinstance(ours, list | tuple)
    for a, b in zip(ours if listed else [ours], theirs if listed else [theirs], strict=True):
        assert type(a) is type(b)
        if not isinstance(a, Tensor):
            assert a == b
            continue
        assert a is b or torch_fakes.is_same(a, b)
        assert (a is arguments[0]) == (b is arguments[0])
        assert (torch_common.storage_key(a) in map(torch_common.storage_key, call.tensors)) == (
            torch_common.storage_key(b) in map(torch_common.storage_key, call.tensors)
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda: (x(4, 7), x(7)),
        lambda: (x(6, 4).t(), x(6)),
        lambda: (x(dtype=torch.float64), x(6)),
        lambda: (x(device="cuda"), x(6, device="cuda")),
        lambda: (x(5, 6)[1:], x(6)),
        lambda: (x(), 2),
        lambda: (x(), 2.0),
        lambda: (x(), True),
    ],
)
def test_a_call_that_looks_different_is_another(
    fakes: torch_common.FakeTensorMode, change: Callable[[], tuple[object, ...]]
) -> None:
    cache = OpCache(fakes)
    assert learn(cache, aten.add.Tensor, x(), x(6)).replay is not None  # type: ignore[union-attr]
    learn(cache, aten.add.Tensor, x(), 1)
    call = cache.call(aten.add.Tensor, change(), {})
    assert call is not None
    assert call.replay is None


def test_the_default_dtype_tells_calls_apart(fakes: torch_common.FakeTensorMode) -> None:
    cache, ints = OpCache(fakes), x(3, dtype=torch.int64)
    first = learn(cache, aten.div.Tensor, ints, 2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        second = learn(cache, aten.div.Tensor, ints, 2)
    finally:
        torch.set_default_dtype(before)
    dtypes = [
        call.replay.outputs[0].dtype
        for call in (first, second)
        if call and call.replay and isinstance(call.replay.outputs[0], FreshOutput)
    ]
    assert dtypes == [torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add.out, lambda: (x(), x())),
        (aten.squeeze_.default, lambda: (x(1, 4),)),
        (aten.resize_.default, lambda: (x(), [2])),
        (aten.nonzero.default, lambda: (x(),)),
        (aten._local_scalar_dense.default, lambda: (x(1),)),
        (aten.add.Tensor, lambda: (torch.tensor([1.0]), x())),
        (aten.mul.Tensor, lambda: (x().to_sparse(), 2)),
    ],
)
def test_what_looks_do_not_tell_is_not_replayed(
    fakes: torch_common.FakeTensorMode, func: object, args: Callable[[], tuple[object, ...]]
) -> None:
    assert OpCache(fakes).call(func, args(), {}) is None


def test_a_result_that_may_be_either_argument_teaches_nothing(fakes: torch_common.FakeTensorMode) -> None:
    cache, both = OpCache(fakes), x()
    call = learn(cache, aten.mul_.Tensor, both, both)
    assert call is not None
    assert call.replay is None
    known = learn(cache, aten.mul_.Tensor, x(), x())
    assert known is not None
    assert known.replay is not None


def test_switched_off(fakes: torch_common.FakeTensorMode) -> None:
    assert OpCache(fakes, "0").call(aten.add.Tensor, (x(), x()), {}) is None


class Counts(nn.Module):
    """Decides by values that metadata do not tell."""

    def forward(self, h: Tensor) -> Tensor:
        for i in range(4):
            if bool((torch.ones(3, dtype=torch.int64, device=h.device) * i).sum() > 4):
                h = h * 2
        return h


def test_known_values_are_followed_through_calls_that_look_the_same() -> None:
    nodes = analyze(Counts(), torch.empty(4, 6), mode="infer", target="h100").profile.nodes
    assert sum(node.target == "mul" and node.outputs[0].shape == (4, 6) for node in nodes) == 2


@pytest.mark.parametrize("seed", range(0, 40, 4))
@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_reports_are_the_same_to_the_byte(monkeypatch: pytest.MonkeyPatch, seed: int, target: str) -> None:
    reports = set()
    for check in ("0", "", "1"):
        monkeypatch.setenv(CHECK, check)
        torch.manual_seed(seed)
        reports.add(analyze(RandomModel(seed), torch.empty(BATCH, WIDTH), target=target, optimizer="adam").to_json())
    assert len(reports) == 1


class Roots(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch._foreach_sqrt([h])[0] + torch._foreach_sqrt([h])[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", ["1", "0"])
def test_a_difference_is_an_error_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    sizes = iter((6, 1))

    def fickle(mode: torch_common.FakeTensorMode, func: object, tensors: list[Tensor]) -> list[Tensor]:
        with mode:
            return [tensors[0].new_empty(2, next(sizes))]

    monkeypatch.setenv(CHECK, check)
    with override_fake_kernels({aten._foreach_sqrt.default: fickle}):
        if check == "0":
            assert analyze(Roots(), torch.empty(2, 6), mode="infer", target="cpu").profile.storages[-1].shape == (2, 6)
            return
        with pytest.raises(AnalysisError, match=r"_foreach_sqrt\.default gave another result"):
            analyze(Roots(), torch.empty(2, 6), mode="infer", target="cpu")


def test_what_autocast_lets_go_at_once_goes_in_the_order_of_birth() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)))
    storages = analyze(model, torch.empty(2, 16), mode="infer", precision="bf16", target="h100").profile.storages
    casts = [storage for storage in storages if storage.shape == (16, 16) and storage.dtype == "bfloat16"]
    assert len(casts) == 12
    first = casts[0].death
    assert [storage.death for storage in casts] == list(range(first, first + 12))


def test_views_in_inference_mode_are_others(fakes: torch_common.FakeTensorMode) -> None:
    cache, base = OpCache(fakes), x()
    learn(cache, aten.split.Tensor, base, 2)
    with torch.inference_mode():
        again = cache.call(aten.split.Tensor, (base, 2), {})
        assert again is not None
        assert again.replay is None
    model, batch = nn.Linear(WIDTH, WIDTH), torch.zeros(BATCH, WIDTH)

    class Inferring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.register_buffer("table", torch.zeros(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode(not self.training):
                first, second = self.table[:, :5].unbind(0)
                return self.model(x) + (first + second).sum()  # type: ignore[no-any-return]

    for mode in ("train", "infer"):
        analyze(Inferring(), batch, mode=mode, target="cpu")


def test_calls_of_another_context_or_of_another_kernel_are_others(fakes: torch_common.FakeTensorMode) -> None:
    learn(OpCache(fakes, context=lambda: "a"), aten.add.Tensor, x(), x())
    for context, known in ((lambda: "a", True), (lambda: "b", False), (None, False)):
        call = OpCache(fakes, context=context).call(aten.add.Tensor, (x(), x()), {})
        assert call is not None
        assert (call.replay is not None) == known
    with override_fake_kernels({aten.add.Tensor: lambda *_: NotImplemented}):
        call = OpCache(fakes, context=lambda: "a").call(aten.add.Tensor, (x(), x()), {})
        assert call is not None
        assert call.replay is None


def test_few_contexts_are_remembered(fakes: torch_common.FakeTensorMode) -> None:
    first = torch_fakes.shared_tables("first")
    assert torch_fakes.shared_tables("first") is first
    for other in range(4):
        torch_fakes.shared_tables(other)
    assert torch_fakes.shared_tables("first") is not first


# --- numbers ----------------------------------------------------------------------------------------------------------


def lifted(mode: torch_common.FakeTensorMode, real: Tensor) -> Tensor:
    """What the mode itself makes of a number, then what is made of it here: the same, however it is asked."""
    with torch_common.no_modes():
        real = real.clone()
    theirs, ours = aten.lift_fresh.default(real), OpCache(mode).number(aten.lift_fresh.default, (real,))
    assert ours is not None
    assert torch_fakes.is_same(theirs, ours)
    return ours


@pytest.mark.parametrize("value", [0.0, -1.5, float("nan")])
def test_a_number_is_made_as_fake_tensor_mode_makes_it(fakes: torch_common.FakeTensorMode, value: float) -> None:
    with torch_common.no_modes():
        real = torch.tensor(value)
    assert repr(lifted(fakes, real).item()) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_in_half_precision_and_empty_lists_of_them_are_made_so_too(
    fakes: torch_common.FakeTensorMode, dtype: torch.dtype
) -> None:
    with torch_common.no_modes():
        one, none = torch.tensor(1.5, dtype=dtype), torch.tensor([], dtype=dtype)
    assert lifted(fakes, one).item() == 1.5
    assert (lifted(fakes, none) + 1).tolist() == []


def test_a_number_keeps_its_value_until_it_is_written_to_with_what_is_not_known(
    fakes: torch_common.FakeTensorMode,
) -> None:
    with torch_common.no_modes():
        real = torch.tensor(3.0)
    number = lifted(fakes, real)
    more = number + 1
    number.add_(2)
    assert (number.item(), more.item(), (number * more).item()) == (5.0, 4.0, 20.0)
    assert torch_common.storage_key(number.view(1)) == torch_common.storage_key(number)
    with torch_common.no_modes():
        assert real.item() == 3.0
    number.add_(torch.empty(()))
    assert number.constant is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "real",
    [
        torch.zeros(2),
        torch.tensor(1),
        torch.tensor(1.0).double(),
        torch.zeros(1),
        torch.zeros(0, 2),
        torch.zeros((), requires_grad=True),
        torch.zeros((), device="meta"),
    ],
)
def test_what_is_not_one_plain_number_is_left_to_fake_tensor_mode(
    fakes: torch_common.FakeTensorMode, real: Tensor
) -> None:
    assert OpCache(fakes).number(aten.lift_fresh.default, (real,)) is None


def test_only_new_numbers_are(fakes: torch_common.FakeTensorMode) -> None:
    assert OpCache(fakes).number(aten.neg.default, (torch.tensor(1.0),)) is None
    assert OpCache(fakes, "0").number(aten.lift_fresh.default, (torch.tensor(1.0),)) is None


def test_a_number_that_comes_out_otherwise_is_an_error(
    fakes: torch_common.FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch_common.no_modes():
        one, two = torch.tensor(1.0), torch.tensor(2.0)
    cache, make = OpCache(fakes, "1"), torch_fakes.Maker.number
    assert cache.number(aten.lift_fresh.default, (one,)) is not None
    monkeypatch.setattr(torch_fakes.Maker, "number", lambda maker, _: make(maker, two))
    with pytest.raises(AnalysisError, match="another result than a call before it"):
        cache.number(aten.lift_fresh.default, (one,))


# --- groups of tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [True, False])
@pytest.mark.parametrize(
    ("others", "asks_cpp"),
    [
        ({}, False),
        ({"device": "cpu"}, False),
        ({"device": "cpu", "dtype": torch.float64}, True),
        ({"dtype": torch.float16}, True),
        (None, True),
    ],
)
def test_tensors_are_grouped_as_torch_does(
    fakes: torch_common.FakeTensorMode, others: dict[str, object] | None, asks_cpp: bool, indices: bool
) -> None:
    asked: list[object] = []

    def original(*args: object) -> object:
        asked.append(args)
        return torch._C._group_tensors_by_device_and_dtype(*args)  # type: ignore[attr-defined]

    def group(find: Callable[..., Any]) -> object:
        """The groups, tensors as numbers; or the error."""
        try:
            found = find([first, second, []], indices)
        except RuntimeError as error:
            return str(error)
        return {
            key: ([[id(t) for t in tensors] for tensors in lists], places) for key, (lists, places) in found.items()
        }

    first = [x(device="cuda") for _ in range(3)]
    second = [None if others is None else x(**{"device": "cuda", **others}) for _ in first]
    assert group(functools.partial(torch_fakes.group_tensors, original)) == group(original)
    assert len(asked) == 1 + asks_cpp


def test_several_groups_are_left_to_torch(fakes: torch_common.FakeTensorMode) -> None:
    several = [[x(), x(dtype=torch.float64)]]
    assert torch_fakes.group_tensors(lambda *_: "several", several) == "several"
    assert torch_fakes.group_tensors(lambda *_: "none", [[]]) == "none"


def test_views_and_pointwise_operators_are_replayed_whatever_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions: known numbers, which meet unknown ones in each layer."""
    runs: list[str] = []
    run = OpRecorder._run

    def note(recorder: OpRecorder, op: OpTraits, *args: Any, **kwargs: Any) -> Any:
        runs.append(op.name)
        return run(recorder, op, *args, **kwargs)

    class Rotates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(6, device=x.device)
            for _ in range(5):
                column = places.unsqueeze(1) + 0
                if column.max().item() != 5:
                    raise ValueError("expected to know the places")
                x = x * column
            return x

    monkeypatch.setattr(OpRecorder, "_run", note)
    analyze(Rotates(), torch.empty(7, 6, 11), mode="infer", target="h100")
    counts = [runs.count(f"aten.{name}") for name in ("unsqueeze.default", "mul.Tensor", "add.Tensor")]
    assert max(counts) <= 1, counts
