"""What C++ autograd nodes do in place on real tensors is in place on fakes, too."""

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
