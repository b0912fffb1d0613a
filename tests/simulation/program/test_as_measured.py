"""Programs of rarer kinds take on the CPU what a real run of them takes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem._torch import kernels as torch_kernels
from fxmem.records.pause_gc import freeze_gc
from fxmem.simulation.recording.error_advice import describe_end
from fxmem.validation.measure_cpu import quiet_profiler
from fxmem.validation.profiler_log import live_bytes, read_events


def train(parameters: Iterable[Tensor], loss: Callable[[], Tensor], steps: int = 2) -> None:
    """Steps of a loop."""
    optimizer = torch.optim.SGD(list(parameters), 0.1)
    for _ in range(steps):
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def net(*widths: int) -> nn.Sequential:
    """Layers of these widths."""
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def values_of_a_sparse_tensor() -> None:
    numbers, values = torch.arange(3000) * 7, nn.Parameter(torch.rand(3000))
    places = torch.stack([numbers // 200, numbers % 200])

    def loss() -> Tensor:
        edges = torch.sparse_coo_tensor(places, values, (200, 200), check_invariants=False)
        scored = torch.sparse.softmax(edges, 1)
        return (torch.sparse.mm(edges, torch.randn(200, 64)) + torch.sparse.mm(scored, torch.randn(200, 64))).sum()

    train([values], loss)


def hessians_in_chunks() -> None:
    made = net(24, 64, 1)
    hessian = torch.func.vmap(torch.func.hessian(lambda x: made(x).tanh().squeeze()), chunk_size=16)
    train(made.parameters(), lambda: hessian(torch.randn(48, 24)).square().mean())


class Scaled(Tensor):
    """Whole numbers with a scale; its shape alone is a tensor's."""

    whole: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, whole.shape, device=whole.device)
        made.whole = whole
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def read(value: Any) -> Any:
            return value.whole.float() if isinstance(value, Scaled) else value

        return func(*map(read, args), **(kwargs or {}))


def a_wrapper_of_a_class_of_its_own() -> None:
    weight, head = Scaled(torch.full((400, 64), 3, dtype=torch.int8)), net(400, 100)
    train(head.parameters(), lambda: head(F.linear(torch.randn(100, 64), weight)).square().mean())


def gradients_that_are_retained() -> None:
    made = net(64, 200, 200, 8)

    def loss() -> Tensor:
        kept = [torch.randn(100, 64)]
        for layer in made:
            kept.append(layer(kept[-1]))
            kept[-1].retain_grad()
        return kept[-1].square().mean()

    train(made.parameters(), loss)


def layers_that_learn_their_sizes() -> None:
    made = nn.Sequential(nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(8))
    with torch.no_grad():
        made(torch.randn(1, 3, 16, 16))
    train(made.parameters(), lambda: made(torch.randn(8, 3, 16, 16)).square().mean())


def what_was_exported() -> None:
    exported = torch.export.export(net(64, 200, 200, 8), (torch.randn(100, 64),)).module()
    train(exported.parameters(), lambda: exported(torch.randn(100, 64)).square().mean())


def numbers_of_learnt_scales() -> None:
    made, scales = net(64, 200), [nn.Parameter(torch.full((size,), 0.05)) for size in (1, 200)]

    def loss() -> Tensor:
        hidden, zeros = made(torch.randn(100, 64)), [torch.zeros(1), torch.zeros(200)]
        whole = torch._fake_quantize_learnable_per_tensor_affine(hidden, scales[0], zeros[0], -128, 127)
        of_each = torch._fake_quantize_learnable_per_channel_affine(hidden, scales[1], zeros[1], 1, -128, 127)
        return (whole + of_each).square().mean()

    train([*made.parameters(), *scales], loss)


class Learner(nn.Module):
    """Trains as it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(64, 200, 8)

    def forward(self, x: Tensor) -> None:
        train(self.net.parameters(), lambda: self.net(x).square().mean())


def a_forward_that_trains() -> None:
    Learner()(torch.randn(100, 64))


PROGRAMS = [
    pytest.param(hessians_in_chunks, marks=pytest.mark.truth),
    a_wrapper_of_a_class_of_its_own,
    gradients_that_are_retained,
    layers_that_learn_their_sizes,
    pytest.param(what_was_exported, marks=pytest.mark.truth),
    numbers_of_learnt_scales,
    a_forward_that_trains,
    values_of_a_sparse_tensor,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_takes_what_a_real_run_takes(program: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lazy modules and sparse tensors, about themselves
        with freeze_gc(), quiet_profiler(), torch_kernels.profiler() as profiled:
            program()
        with fxmem.record("cpu") as run:
            program()
    measured = max(live_bytes(0, read_events(profiled), {}))
    steps = (*run.rounds, *([run.setup] if run.setup else []))
    assert max(each.requested_bytes for each in steps) == pytest.approx(measured, rel=1e-4)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters_get_their_shape_where_they_were_moved() -> None:
    with fxmem.record("h100"):
        layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()).cuda().half()
        before = list(layers.parameters())
        layers(torch.randn(4, 16, device="cuda", dtype=torch.half))
        tensors = [*layers.parameters(), *layers.buffers()]
        assert [id(each) for each in before] == [id(each) for each in layers.parameters()]
        assert {each.device.type for each in tensors} == {"cuda"}
        assert [tuple(each.shape) for each in tensors] == [(8, 16), (8,), (8,), (8,), (8,), (8,), ()]
        assert {each.dtype for each in tensors} == {torch.half, torch.int64}


class Fails(torch.autograd.Function):
    """Keeps a tensor and raises."""

    kept: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Fails.kept = [x + 1]
        raise ValueError("no such kernel")


def test_a_call_that_raises_may_keep_what_it_made() -> None:
    with pytest.raises(ValueError, match="no such kernel"), fxmem.record("h100") as run:  # noqa: PT012
        layer = nn.Linear(64, 64).cuda()
        train(layer.parameters(), lambda: layer(torch.randn(8, 64, device="cuda")).sum(), 1)
        Fails.apply(layer(torch.randn(8, 64, device="cuda")))  # type: ignore[no-untyped-call]
    assert len(run.rounds) == 1


def test_a_package_without_rows_is_said_with_what_may_stand_in_its_place() -> None:
    error = ModuleNotFoundError("No module named 'inplace_abn'", name="inplace_abn")
    assert "its kernels are not known to fxmem, installed or not: nn.BatchNorm2d" in describe_end(error)
