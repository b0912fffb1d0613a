"""Copies that kernels make of arguments that are not contiguous."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxmem import analyze
from fxmem.records.profile import Kind, Phase
from fxmem.records.validation import Quantity
from fxmem.validation.validate import validate

TOKENS = torch.arange(4 * 128).reshape(4, 128) % 50
LOGITS = 4 * 128 * 5000 * 4
IMAGES = 8 * 32 * 16 * 16 * 4


class Language(nn.Module):
    """Its loss reads the logits with the classes in the middle, as `cross_entropy` wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 5000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).transpose(1, 2), ids)


class OverChannels(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def images() -> nn.Module:
    """`flatten` copies, so that the gradient comes back with the channels in front."""
    return nn.Sequential(nn.Conv2d(32, 32, 1), OverChannels(32), nn.Flatten())


def probabilities() -> nn.Module:
    return nn.Sequential(nn.Sigmoid(), nn.Softmax(1))


@pytest.mark.parametrize(
    ("build", "x", "mode", "copied"),
    [
        (Language, TOKENS, "infer", LOGITS),
        (images, torch.ones(8, 32, 16, 16), "infer", IMAGES),
        (images, torch.ones(8, 32, 16, 16), "train", 2 * IMAGES),
        (probabilities, torch.ones(8, 32, 16, 16).to(memory_format=torch.channels_last), "infer", IMAGES),
    ],
)
def test_on_the_cpu_the_copies_are_those_of_a_real_run(
    build: Callable[[], nn.Module], x: torch.Tensor, mode: str, copied: int
) -> None:
    found = validate(build, x, mode=mode, optimizer="sgd")  # type: ignore[arg-type]
    errors = {each.quantity: each.predicted_bytes - each.measured_bytes for each in found.comparisons}
    # The sums of a layer norm's backward by thread, of one channel each, are the machine's.
    assert abs(errors[Quantity.REQUESTED_WITHOUT_KERNEL_SCRATCH]) <= 32 * 4 * 2 * torch.get_num_threads()
    assert found.predicted.by_kind[Kind.WORKSPACE] == copied


class Segments(nn.Module):
    """Reduces rows in segments; their gradient is one number seen from everywhere."""

    def __init__(self, reduce: str, *, transposed: bool) -> None:
        super().__init__()
        self.reduce = reduce
        self.rows = nn.Parameter(torch.ones(50, 60).t() if transposed else torch.ones(60, 50))
        self.register_buffer("lengths", torch.tensor([10, 20, 30]))

    def forward(self) -> torch.Tensor:
        return torch.segment_reduce(self.rows, self.reduce, lengths=self.lengths, unsafe=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_segments_are_copied_as_in_a_real_run(reduce: str, transposed: bool) -> None:
    found = validate(lambda: Segments(reduce, transposed=transposed), (), optimizer=None, tolerance=0)
    assert found.within_tolerance
    assert found.predicted.by_kind[Kind.WORKSPACE] == (3 + 60 * transposed) * 50 * 4


def test_on_a_card_the_copies_stand_where_its_kernels_make_them() -> None:
    """SoftMax.cu: after the result. layer_norm_kernel.cu: the input before the results, the gradient after them."""
    profile = analyze(Language(), TOKENS, target="h100").profile
    (loss,) = (i for i, op in enumerate(profile.ops) if op.name == "aten._log_softmax.default")
    assert [(s.kind is Kind.WORKSPACE, s.nbytes) for s in profile.storages if s.op == loss] == [
        (False, LOGITS),
        (True, LOGITS),
    ]
    profile = analyze(images(), torch.ones(8, 32, 16, 16), target="h100").profile
    norms = [(i, op.phase) for i, op in enumerate(profile.ops) if op.name.startswith("aten.native_layer_norm")]
    assert [phase for _, phase in norms] == [Phase.FORWARD, Phase.BACKWARD]
    for index, phase in norms:
        of_op = sorted((s for s in profile.storages if s.op == index and s.nbytes == IMAGES), key=lambda s: s.birth)
        large = [s.kind is Kind.WORKSPACE for s in of_op]
        assert large == ([True, False] if phase is Phase.FORWARD else [True, False, True])


def test_contiguous_arguments_are_not_copied() -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (16,)).softmax(1)

    for target in ("cpu", "h100"):
        profile = analyze(Same(), torch.ones(8, 32, 16, 16), target=target, mode="infer").profile
        assert not [s for s in profile.storages if s.kind is Kind.WORKSPACE]
