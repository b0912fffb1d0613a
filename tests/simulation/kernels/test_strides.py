"""Strides of dimensions of size 1, which say whether a tensor has its channels last, and operators that come whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxmem


def as_image(tokens: Tensor) -> Tensor:
    """A sequence of a batch of one, as attention leaves it, made an image again: its channels are last, and torch does
    not take it to have them last."""
    batch, length, channels = tokens.shape
    side = int(length**0.5)
    return tokens.transpose(1, 2).reshape(batch, channels, side, side)


KEEPS = {
    "as it is": lambda x: x,
    "a sum": lambda x: x + torch.zeros(x.shape, device=x.device),
    "a quotient": lambda x: x / 2.0,
    "a product": lambda x: x * 2,
    "a sum with a number": lambda x: x + 1,
    "a number less it": lambda x: 1 - x,
    "a rest": lambda x: x % 2,
    "a residual": lambda x: (x + torch.zeros(x.shape, device=x.device)) / 1.0,
    "one like it": torch.empty_like,
    "zeros like it": torch.zeros_like,
    "a copy": torch.clone,
    "half": lambda x: x.half(),
    "an activation": F.silu,
    "two of it": lambda x: x + x,
    "upsampled": lambda x: F.interpolate(x / 1.0, scale_factor=2.0),
    "convolved": lambda x: F.conv2d(x / 1.0, torch.zeros(8, 8, 3, 3, device=x.device)),
    "a sequence again": lambda x: x.view(1, 8, 16),
}


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_strides_are_those_of_a_real_run(target: str, keep: Callable[[Tensor], Tensor]) -> None:
    real = keep(as_image(torch.zeros(1, 16, 8))).stride()
    with fxmem.record(target):
        device = "cpu" if target == "cpu" else "cuda"
        assert keep(as_image(torch.zeros(1, 16, 8, device=device))).stride() == real


def make_image(x: Tensor) -> Tensor:
    """One of as many elements, its channels last."""
    return x.view(3, 2, 2, 4).contiguous(memory_format=torch.channels_last)


VIEWS = {
    "split": lambda x: x.t().view(2, 4, 6),
    "joined": lambda x: x.view(2, 3, 8)[:, :2].view(-1, 8),
    "in the way": lambda x: x.t()[:5].view(-1),
    "across": lambda x: x[:, ::2].view(3, 8),
    "an image, channels last": lambda x: make_image(x).view(3, -1),
    "channels of an image": lambda x: make_image(x).view(3, 2, -1),
}


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_is_no_view_raises_what_torch_does(target: str, view: Callable[[Tensor], Tensor]) -> None:
    """Others catch that error, and make a copy."""

    def outcome(device: str) -> object:
        try:
            return view(torch.zeros(6, 8, device=device)).stride()
        except RuntimeError as error:
            return str(error)

    real = outcome("cpu")
    with fxmem.record(target):
        assert outcome("cpu" if target == "cpu" else "cuda") == real


COMPOSITE = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, size=(24, 24), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(24, 24), mode="bicubic", antialias=True),
    "product": lambda x: x @ x.transpose(-1, -2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "recurrent": lambda x: torch.nn.LSTM(16, 8, device=x.device)(x[0])[0],
    "spectrum": lambda x: torch.stft(x.reshape(1, -1), 64, return_complex=True),
}


@pytest.mark.parametrize("function", COMPOSITE.values(), ids=COMPOSITE)
def test_inference_mode_allocates_what_no_grad_does(function: Callable[[Tensor], Tensor]) -> None:
    def allocate(mode: Callable[[], torch.no_grad | torch.inference_mode]) -> list[tuple[int, int | None, int | None]]:
        with fxmem.record("h100") as recorded:
            x = torch.zeros(2, 8, 16, 16, device="cuda")
            with mode():
                function(x)
        return [(each.birth, each.death, each.nbytes) for each in recorded.profile.storages]

    assert allocate(torch.inference_mode) == allocate(torch.no_grad)


def test_what_does_not_have_its_channels_last_is_upsampled_dense() -> None:
    with fxmem.record("h100") as recorded:
        F.interpolate(as_image(torch.zeros(1, 16, 8, device="cuda")), scale_factor=2.0)
        F.interpolate(torch.zeros(1, 8, 4, 4, device="cuda").to(memory_format=torch.channels_last), scale_factor=2.0)
    assert [each.nbytes for each in recorded.profile.storages if each.name == "dense input"] == [4 * 4 * 8 * 4]


def test_what_does_not_lie_dense_is_copied_for_the_gradient_too() -> None:
    with fxmem.record("h100") as recorded:
        x = torch.zeros(1, 8, 4, 4, device="cuda", requires_grad=True)
        F.interpolate(x, scale_factor=2.0).sum().backward()
        (F.interpolate(x, scale_factor=2.0) * 2).sum().backward()
    assert [each.nbytes for each in recorded.profile.storages if each.name == "dense gradient"] == [8 * 8 * 8 * 4]
