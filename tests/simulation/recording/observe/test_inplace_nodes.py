"""What C++ autograd nodes and kernels do to real tensors and not to fakes, in place or beside their results, is counted
all the same."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxmem import analyze
from fxmem.records.profile import Kind
from fxmem.records.validation import Quantity
from fxmem.validation.validate import validate


class Indexes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("every_fourth", torch.arange(0, 512, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        gathered = y.gather(1, torch.zeros(4, 128, 64, dtype=torch.long, device=x.device))
        chosen = (
            y[:, self.every_fourth],
            y.index_select(1, self.every_fourth),
            gathered,
            y.sort(dim=1)[0],
            y.max(dim=1)[0],
            y.topk(5, dim=1)[0],
        )
        return torch.stack([tensor.sum() for tensor in chosen]).sum()


def test_gradients_of_what_was_indexed_take_one_tensor_each() -> None:
    found = validate(Indexes(), torch.ones(4, 512, 64), optimizer="sgd", tolerance=0.0001)
    assert found.within_tolerance


class Written(nn.Module):
    """What a layer made, written to through a view."""

    def __init__(self, through: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.through = nn.Linear(64, 64), through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(self.linear(x))


@pytest.mark.parametrize(
    "through",
    [
        lambda y: y.view(-1, 8, 64).add_(1),
        lambda y: y.t().relu_().t(),
        lambda y: y.unsqueeze(0).expand(1, -1, -1).mul_(2),
        lambda y: y[:, :32].mul_(2),
        lambda y: y[:, :32].unflatten(1, (4, 8)).mul_(2),
    ],
)
def test_the_gradient_of_a_view_that_was_written_to_goes_into_a_tensor_of_its_own(
    through: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The sum's gradient is one number seen from everywhere, so that this tensor is the first of its size."""
    assert validate(Written(through), torch.ones(512, 64), tolerance=0.0001).within_tolerance


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("trained", [True, False])
def test_the_backward_of_batch_norm_makes_its_input_s_gradient_twice(
    layout: torch.memory_format, trained: bool
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(32), nn.Tanh(), nn.BatchNorm2d(32), nn.Sigmoid()).to(memory_format=layout)
    model[2].requires_grad_(trained)
    found = validate(model, torch.ones(16, 32, 16, 16).to(memory_format=layout))
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    assert errors == {
        Quantity.REQUESTED: 0,
        Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH: 0,
        Quantity.REQUESTED_WITHOUT_SCRATCH: 0,
    }
    assert found.predicted.by_kind[Kind.WORKSPACE] == 16 * 32 * 16 * 16 * 4


def test_where_layouts_differ_batch_norm_makes_it_once() -> None:
    class Mixed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                super()
                .forward(x.contiguous(memory_format=torch.channels_last))
                .contiguous(memory_format=torch.contiguous_format)
            )

    found = validate(Mixed(nn.Linear(16, 16), nn.BatchNorm2d(32)), torch.ones(16, 32, 16, 16))
    assert Kind.WORKSPACE not in found.predicted.by_kind
    assert abs(found.comparisons[0].error) < 1e-4


class Formula(nn.Module):
    """A layer, and what autograd differentiates by another formula where it sees a subclass."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(64, 64), function
        self.register_buffer("target", torch.rand(512, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x), self.target)


bce = nn.functional.binary_cross_entropy_with_logits


@pytest.mark.parametrize(
    "function",
    [
        lambda y, t: bce(y, t),
        lambda y, t: bce(y, t, weight=t),
        lambda y, t: bce(t, y),
        lambda y, t: bce(y, t, weight=t, pos_weight=t[0]),
        lambda y, t: (y + 9).prod(1),
        lambda y, t: (y + 9).prod(0, keepdim=True) * y,
        lambda y, t: (y * 0.01 + 1).prod(),
        lambda y, t: y.take((t.flatten() * 9).long()),
        lambda y, t: y.max(),
        lambda y, t: y.median() * y,
        lambda y, t: y.clamp(t - 1, t),
        lambda y, t: y.clamp(y * 2, y + 1),
        lambda y, t: (y + 9).cumprod(-1),
        lambda y, t: (y @ t.t())[:, :512].trace(),
        lambda y, t: nn.functional.binary_cross_entropy(t, y - y.detach() + t),
        lambda y, t: y.scatter_reduce(0, (t * 9).long(), y * 2, "amax"),
        lambda y, t: y.index_fill(0, torch.arange(300), y.sum()),
    ],
)
def test_formulas_of_plain_tensors(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    found = validate(Formula(function), torch.ones(512, 64), optimizer=None)
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    assert abs(errors[Quantity.REQUESTED_WITHOUT_SCRATCH]) <= 16
    assert abs(errors[Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH]) <= 32


def test_the_gradient_of_a_filling_value_is_picked_by_the_mask() -> None:
    model = Formula(lambda y, t: y.masked_fill(t > 0.5, y.sum()))
    profile = analyze(model, torch.ones(512, 64), target="cpu").profile
    assert "aten.masked_select.default" in {op.name for op in profile.ops}
    assert any("masked_select: every element" in each.text for each in profile.assumptions)
    assert "temporaries of several threads of aten.masked_select.default" in {each.what for each in profile.unknowns}
