"""What C++ autograd nodes do in place on real tensors is in place on fakes, too."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxmem.validation import validate


class Indexes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("every_fourth", torch.arange(0, 512, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        gathered = y.gather(1, torch.zeros(4, 128, 64, dtype=torch.long, device=x.device))
        chosen = (y[:, self.every_fourth], y.index_select(1, self.every_fourth), gathered, y.sort(dim=1)[0], y.max(dim=1)[0], y.topk(5, dim=1)[0])
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
def test_the_gradient_of_a_view_that_was_written_to_goes_into_a_tensor_of_its_own(through: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The sum's gradient is one number seen from everywhere, so that this tensor is the first of its size."""
    assert validate(Written(through), torch.ones(512, 64), tolerance=0.0001).within_tolerance
