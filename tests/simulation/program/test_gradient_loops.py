"""Steps of loops whose gradients are returned, without a module and without an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

import fxmem

Weights = dict[str, Tensor]
Keep = Callable[[Any], Any]
NBYTES = 2 * 256 * 256 * 4
"""Of the gradients of a step."""


def make_weights(**settings: Any) -> Weights:
    return {name: torch.zeros(256, 256, device="cuda", **settings) for name in ("first", "second")}


def find_loss(weights: Weights, x: Tensor) -> Tensor:
    return (torch.tanh(x @ weights["first"]) @ weights["second"]).square().mean()


def update(weights: Weights, gradients: Weights) -> Weights:
    return {name: each - 0.1 * gradients[name] for name, each in weights.items()}


def of_a_transform(keep: Keep, steps: int) -> None:
    weights = make_weights()
    for _ in range(steps):
        gradients, _ = grad_and_value(find_loss)(weights, torch.ones(64, 256, device="cuda"))
        weights = update(weights, gradients)
        keep(gradients)


def of_each_item(keep: Keep, steps: int) -> None:
    def step(weights: Weights) -> Weights:
        each = vmap(grad(find_loss), in_dims=(None, 0))(weights, torch.ones(4, 16, 256, device="cuda"))
        gradients = {name: of_items.mean(0) for name, of_items in each.items()}
        keep(gradients)
        return update(weights, gradients)

    weights = make_weights()
    for _ in range(steps):
        weights = step(weights)


def of_autograd(keep: Keep, steps: int) -> None:
    weights, step = make_weights(requires_grad=True), 0
    while step < steps:
        loss = find_loss(weights, torch.ones(64, 256, device="cuda"))
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for each, gradient in zip(weights.values(), gradients, strict=True):
                each -= 0.1 * gradient
        keep(gradients)
        step += 1


@pytest.mark.parametrize("train", [of_a_transform, of_each_item, of_autograd])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_loop_of_gradients_has_steps_that_may_grow(train: Callable[[Keep, int], None], keeps: bool) -> None:
    history: list[Any] = []
    newest: dict[str, Any] = {}
    with fxmem.record("h100", steps=4) as recorded:
        train(history.append if keeps else functools.partial(newest.__setitem__, "newest"), 100)
    assert recorded.program.growth_bytes == (NBYTES if keeps else 0)
    assert len(recorded.rounds) == 4
    assert [each.nbytes for each in recorded.program.grown] == [NBYTES] * keeps


def test_gradients_that_an_optimizer_steps_by_begin_no_steps_of_their_own() -> None:
    with fxmem.record("h100", steps=2) as recorded:
        weights = make_weights(requires_grad=True)
        optimizer = torch.optim.SGD(list(weights.values()))
        while True:
            for _ in range(3):  # a penalty on gradients, of as many parts
                x = torch.ones(64, 256, device="cuda", requires_grad=True)
                (slope,) = torch.autograd.grad(find_loss(weights, x), [x], create_graph=True)
                slope.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(recorded.rounds) == 2
    assert recorded.rounds[0].operators > 60
