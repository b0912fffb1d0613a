"""Losses whose number stays in the memory of the unreduced loss until it is let go."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxmem import analyze
from fxmem.records.validation import Quantity
from fxmem.validation.validate import validate

X = torch.ones(64, 64, 3)
WHOLE = 64 * 64 * 3 * 4


class Judged(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss, self.weight = loss, nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss((x * self.weight).sigmoid(), x)


KEPT = [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, partial(F.mse_loss, reduction="sum")]
SMALL = [
    F.l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    lambda a, b: F.mse_loss(a, b, reduction="none").mean(),
]


@pytest.mark.parametrize("loss", [*KEPT, *SMALL])
def test_a_loss_takes_until_the_step_s_end_what_it_takes_in_a_real_run(loss: Callable[..., torch.Tensor]) -> None:
    found = validate(Judged(loss), X, optimizer="sgd")
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    assert errors[Quantity.REQUESTED_WITHOUT_SCRATCH] == 0


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_on_a_card_it_is_the_same(target: str) -> None:
    """Loss.cpp's shape function is every device's, cuda/Loss.cu resizes like Loss.cpp."""

    def held(loss: Callable[..., torch.Tensor]) -> int:
        nodes = analyze(Judged(loss), X, target=target, optimizer="sgd").profile.nodes
        return nodes[[node.op for node in nodes].index("output") - 1].output_bytes

    assert [held(loss) for loss in KEPT] == [WHOLE] * len(KEPT)
    assert [held(loss) for loss in SMALL[:2]] == [4, 4]
