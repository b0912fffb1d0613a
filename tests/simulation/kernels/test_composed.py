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
    (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b, reduction="none"),
        2 * BYTES,
    ),  # the CPU's `log_sigmoid` has a buffer
    (lambda a, b: a.logsumexp(1), BYTES + ROWS * 4),
    (torch.dist, BYTES),
    (torch.cdist, 2 * (BYTES + 2 * ROWS * 4)),
    (lambda a, b: torch.complex(a, b).abs(), 2 * BYTES),
    (torch.ldexp, BYTES),
    (lambda a, b: F.bilinear(a, b, a.new_ones(4, COLUMNS, COLUMNS)), BYTES + ROWS * 4),
    (lambda a, b: a.isinf(), BYTES),
    (lambda a, b: a.roll((1, 2), (0, 1)), BYTES),
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


@pytest.mark.parametrize(
    ("call", "scratch"),
    [
        # positions in int64, the mask itself, and a scan's own; then places of three coordinates for the gradient
        (lambda x, m: x.view(4, 16, 256).masked_scatter(m.view(4, 16, 1).expand(4, 16, 256), x), 9 * BYTES // 4 + 1279),
        (lambda x, m: x.masked_select(m.view(ROWS, 1)), BYTES // 4 + 16 * BYTES // 4),
        (lambda x, m: x[m.view(ROWS)], 8 * ROWS),
        (lambda x, m: x.t().contiguous().t()[m.expand(ROWS, COLUMNS)], BYTES // 4 + 16 * BYTES // 4),
        (lambda x, m: m.expand(ROWS, COLUMNS).nonzero(), BYTES // 4),
    ],
)
def test_masks_are_turned_into_places_on_a_card(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], scratch: int
) -> None:
    """As an H200's log has them: `masked_scatter`, `masked_select` and `nonzero` of
    `benchmarks/results/gpu/h200-runs-2026-11-27.json.gz`, and `Nonzero.cu` for masks that are not contiguous."""
    inputs = torch.rand(ROWS, COLUMNS), torch.ones(ROWS, 1, dtype=torch.bool)
    held = analyze(Called(call), inputs, mode="infer", target="h100").profile.storages
    assert sum(s.nbytes for s in held if s.kind is Kind.WORKSPACE and s.birth) == scratch


ON_CPU: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a * (b > 0.5),
    lambda a, b: a.bfloat16() + b,
    lambda a, b: torch.cat((a.bfloat16(), b, b.bfloat16())),
    lambda a, b: (a > 0.5) == b,
    lambda a, b: (a > 0.5).sum(),
    lambda a, b: a.bfloat16().cumsum(0, dtype=torch.float32),
    lambda a, b: a.sort(0)[0],
    lambda a, b: a.kthvalue(3)[0],
    lambda a, b: a.median(),
    lambda a, b: F.batch_norm(a.view(-1, ROWS, 4), None, None, training=True),
    lambda a, b: F.interpolate(a.view(1, 4, 64, 64), scale_factor=2, mode="bilinear"),
    lambda a, b: F.interpolate(a.view(1, 4, 64, 64), scale_factor=0.5, mode="bilinear"),
    lambda a, b: F.interpolate(a.view(1, 4, 64, 64), scale_factor=2, mode="nearest"),
    lambda a, b: F.interpolate(a[:48].view(1, 64, 64, 3).permute(0, 3, 1, 2), scale_factor=2, mode="nearest"),
    lambda a, b: F.fold(a.view(4, 64, 64), (16, 16), 2, stride=2),
    lambda a, b: a.scatter_reduce(0, (b > 0.5).long(), b, "mean"),
    lambda a, b: a.bfloat16().mean(1),
    lambda a, b: a[0].expand(ROWS, COLUMNS).t() @ b,
    lambda a, b: torch.ones(()).expand(4, 64, 64) @ b.view(4, 64, 64),
    lambda a, b: a.masked_select(torch.ones(ROWS, COLUMNS, dtype=torch.bool)),
    lambda a, b: F.layer_norm(a.bfloat16(), (COLUMNS,), b[0], b[1]),
    lambda a, b: F.batch_norm(a.view(-1, ROWS, 4).bfloat16(), None, None, b[0, :ROWS], b[1, :ROWS], training=True),
    lambda a, b: F.group_norm(a.view(-1, ROWS, 4).bfloat16(), 4, b[0, :ROWS], b[1, :ROWS]),
]
SELECTS = pytest.mark.xfail(
    torch.__version__ >= "2.15", strict=True, reason="plain tensors are not sorted since 2.15, FakeTensors are"
)


@pytest.mark.parametrize(
    "call", [*ON_CPU, pytest.param(lambda a, b: torch.quantile(a, 0.5, dim=1), id="quantile", marks=SELECTS)]
)
def test_temporaries_of_the_cpus_kernels_are_counted(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    inputs = torch.rand(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS)
    found = validate(lambda: Called(call), inputs, mode="infer")
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    assert abs(errors[Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH]) <= 16  # single numbers are left out


@pytest.mark.parametrize(
    "last",
    [
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(4),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.ReflectionPad2d(2),
        nn.PixelShuffle(2),
        nn.GELU(),
        nn.Softmax(1),
    ],
)
def test_a_gradient_that_is_not_dense_is_copied_on_the_cpu(last: nn.Module) -> None:
    found = validate(lambda: nn.Sequential(nn.Linear(16, 16), last), torch.rand(4, 8, 16, 16), optimizer=None)
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    assert abs(errors[Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH]) <= 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_group_norm_has_two_sums_for_each_channel_on_the_cpu(dtype: torch.dtype) -> None:
    inputs = torch.rand(8, ROWS, 4).to(dtype)
    found = validate(lambda: nn.GroupNorm(4, ROWS), inputs, loss=lambda out: out.sum(), optimizer=None)
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    assert abs(errors[Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH]) <= 16


def test_a_card_sums_a_mask_over_a_copy_and_half_precision_without() -> None:
    def workspaces(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[int]:
        inputs = torch.rand(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS)
        held = analyze(Called(call), inputs, mode="infer", target="h100").profile.storages
        return [s.nbytes for s in held if s.kind is Kind.WORKSPACE and s.birth and s.nbytes >= BYTES]

    assert workspaces(lambda a, b: (a > 0.5).sum()) == [2 * BYTES]
    assert workspaces(lambda a, b: a.bfloat16().sum(dtype=torch.float32)) == []


@pytest.mark.parametrize("call", [lambda a, _: a.int() & 15, lambda a, _: 15 | a.int()])
def test_a_scalar_that_a_kernel_wraps_leaves_nothing_unknown(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    found = analyze(Called(call), (torch.rand(ROWS, COLUMNS), torch.rand(1)), mode="infer", target="h100").profile
    assert not found.unknowns
    assert not [each for each in found.storages if each.kind is Kind.WORKSPACE]


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_what_a_library_allocates_is_listed_as_unknown(target: str) -> None:
    inputs = torch.rand(ROWS, ROWS), torch.rand(ROWS)
    found = analyze(Called(lambda a, b: torch.linalg.svdvals(a)), inputs, mode="infer", target=target)
    assert "temporaries of aten._linalg_svd.default" in {unknown.what for unknown in found.profile.unknowns}
