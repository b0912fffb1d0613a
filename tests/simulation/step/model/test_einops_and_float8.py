"""Models written with einops, and products in float8: held against real CPU runs, and what a card would run."""

from __future__ import annotations

from collections.abc import Callable

import einops
import pytest
import torch
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fxmem import analyze
from fxmem.errors import AnalysisError
from fxmem.records.profile import Kind, Profile
from tests.simulation.step.model.test_other_models import assert_as_measured

EXAMPLE = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0))


class Woven(nn.Module):
    def __init__(self, weave: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.weave = nn.Linear(64, 64), nn.Linear(64, 64), weave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weave(self.a(x), self.b(x))


def packed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    both, shapes = einops.pack([a, b], "b * d")
    first, second = einops.unpack(both.relu(), shapes, "b * d")
    return first * second


@pytest.mark.parametrize(
    "weave",
    [
        lambda a, b: (
            einops.rearrange(a, "b s (h d) -> b h s d", h=4) @ einops.rearrange(b, "b s (h d) -> b h d s", h=4)
        ),
        lambda a, b: einops.reduce(a * b, "b s d -> b d", "mean"),
        lambda a, b: einops.repeat(a, "b s d -> b s (r d)", r=3) + einops.repeat(b, "b s d -> b s (d r)", r=3),
        lambda a, b: einops.einsum(a, b, "b i d, b j d -> b i j").softmax(-1),
        packed,
    ],
)
def test_functions_of_einops(weave: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    assert_as_measured(Woven(weave), EXAMPLE)


def test_layers_of_einops() -> None:
    image, pooled = Rearrange("b (h w) d -> b d h w", h=8), Reduce("b d (h p) (w q) -> b d h w", "max", p=2, q=2)
    mixed = EinMix("b s (h c) -> b s (h e)", weight_shape="h c e", bias_shape="h e", h=4, c=16, e=32)
    assert_as_measured(
        nn.Sequential(nn.Linear(64, 64), image, pooled, Rearrange("b d h w -> b (d h w)"), nn.Linear(1024, 8)), EXAMPLE
    )
    assert_as_measured(nn.Sequential(nn.Linear(64, 64), mixed), EXAMPLE)


# --- float8 -----------------------------------------------------------------------------------------------------------


class ScaledProduct(nn.Module):
    """An input scaled to float8, times a float8 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(256, 256).to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.bfloat16)
        scale = (x.abs().amax().float() / 448).clamp(min=1e-12)
        return torch._scaled_mm(
            (x / scale).to(torch.float8_e4m3fn),
            self.weight.t(),
            scale_a=scale,
            scale_b=torch.ones_like(scale),
            out_dtype=torch.bfloat16,
        )


def in_float8(recipe: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(torch.bfloat16)
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def products(profile: Profile) -> list[int | None]:
    return [op.flops for op in profile.ops if op.name == "aten._scaled_mm.default"]


def test_a_float8_product_takes_one_byte_per_number() -> None:
    x = torch.randn(512, 256)
    assert_as_measured(ScaledProduct(), x, modes=("infer",))
    profile = analyze(ScaledProduct(), x, mode="infer").profile
    assert {storage.name: storage.nbytes for storage in profile.storages if storage.kind is Kind.BUFFER} == {
        "weight": 256 * 256
    }
    assert products(profile) == [2 * 512 * 256 * 256]


def test_a_float8_product_has_no_derivative_in_torch() -> None:
    with pytest.raises(AnalysisError, match="derivative for aten::_scaled_mm is not implemented"):
        analyze(nn.Sequential(nn.Linear(256, 256), ScaledProduct()), torch.randn(512, 256))


def test_training_in_float8() -> None:
    assert_as_measured(lambda: in_float8("tensorwise"), torch.randn(512, 256).bfloat16())


@pytest.mark.parametrize(("recipe", "in_half"), [("tensorwise", 0), ("rowwise", 0), ("rowwise_with_gw_hp", 2)])
def test_recipes_of_float8_on_a_card(recipe: str, in_half: int) -> None:
    """The CPU has no scales by row. Forward, the input's gradient and the weight's, of each layer; the last in bfloat16
    with the third recipe."""
    profile = analyze(lambda: in_float8(recipe), torch.randn(512, 256).bfloat16()).profile
    assert products(profile) == [2 * 512 * 256 * 512] * (6 - in_half)
