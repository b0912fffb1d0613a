"""What kernels that are written in terms of other kernels allocate inside one call."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxmem import analyze
from fxmem.records.profile import Kind
from fxmem.records.validation import Quantity
from fxmem.validation.validate import validate

ROWS, COLUMNS = 64, 256
BYTES = ROWS * COLUMNS * 4


class Called(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.call(x, y)


SAME = [
    (F.mse_loss, BYTES),
    (F.smooth_l1_loss, BYTES),
    (F.huber_loss, BYTES),
    (F.binary_cross_entropy_with_logits, 2 * BYTES),
    (lambda a, b: F.binary_cross_entropy_with_logits(a, b, pos_weight=b[0]), 2 * BYTES + COLUMNS * 4),
    (lambda a, b: F.binary_cross_entropy_with_logits(a, b, reduction="none"), BYTES),
    (lambda a, b: a.logsumexp(1), BYTES + ROWS * 4),
    (torch.dist, BYTES),
    (torch.cdist, 2 * (BYTES + 2 * ROWS * 4)),
    (lambda a, b: torch.complex(a, b).abs(), 2 * BYTES),
    (lambda a, b: F.unfold(a.view(4, 16, 16, 16), 3, padding=1), BYTES),
]


@pytest.mark.parametrize(("call", "workspace"), SAME)
def test_temporaries_within_a_kernel_are_counted_on_both_devices(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], workspace: int
) -> None:
    inputs = torch.rand(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS)
    found = validate(lambda: Called(call), inputs, mode="infer")
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    assert abs(errors[Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH]) <= 2 * ROWS * 4
    assert found.predicted.by_kind[Kind.WORKSPACE] == workspace
    held = analyze(Called(call), inputs, mode="infer", target="h100").profile.storages
    assert max(s.nbytes for s in held if s.kind is Kind.WORKSPACE and s.birth) >= BYTES
