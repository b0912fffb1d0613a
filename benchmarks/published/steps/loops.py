"""Benchmark loops as one model: a function of leaves, called several times or trained once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import Peaks, Program, Step

Function = Callable[..., Any]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Make a tensor without data that requires a gradient."""
    return nn.Parameter(meta(*shape, dtype=dtype))


def linear(inner: int, outer: int, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    """Make a linear layer without bias and without data."""
    return nn.Linear(inner, outer, bias=False, dtype=dtype, device="meta")


class Residents(nn.Module):
    """Holds what is on the card: leaves, modules, and tensors as buffers."""

    def __init__(self, residents: dict[str, Any]) -> None:
        super().__init__()
        for name, value in residents.items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)


class RepeatedStep(Residents):
    """Calls a step several times within forward and keeps the gradients between, as a benchmark loop does.

    `before` runs once, first; what it returns stays alive and is given to the step.
    """

    def __init__(self, step: Function, times: int, before: Function | None, residents: dict[str, Any]) -> None:
        super().__init__(residents)
        self.step, self.times, self.before = step, times, before

    def forward(self, empty: torch.Tensor) -> None:
        """Run the loop with gradients enabled."""
        with torch.enable_grad():
            kept = () if self.before is None else (self.before(self),)
            for _ in range(self.times):
                self.step(self, *kept)


class RandomGradient(torch.autograd.Function):
    """A scalar whose backward makes a random gradient of `y`, as `y.backward(torch.randn_like(y))` does."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        """Return an empty scalar."""
        ctx.kept, ctx.like = kept, (y.shape, y.dtype, y.device)
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Make the gradient, which the caller keeps until backward is over."""
        shape, dtype, device = ctx.like
        grad = torch.randn(shape, dtype=dtype, device=device)
        ctx.kept.append(grad)
        return grad, None


class TrainedFunction(Residents):
    """A function of leaves whose backward is the step's own, so that autograd's thread has its cuBLAS workspace.

    `retain` keeps all saved tensors for the whole step, as `retain_graph=True` does.
    """

    def __init__(self, function: Function, retain: bool, residents: dict[str, Any]) -> None:
        super().__init__(residents)
        self.function, self.retain = function, retain

    def forward(self, empty: torch.Tensor) -> dict[str, Any]:
        """Return the function's result and the list of what the caller keeps."""
        kept: list[torch.Tensor] = []
        if not self.retain:
            return {"y": self.function(self), "kept": kept}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return {"y": self.function(self), "kept": kept}


# The one input of both is an empty tensor, which needs no memory.


def repeat_step(step: Function, *, times: int = 2, before: Function | None = None, **residents: Any) -> Step:
    """Make a step of a loop that runs forward and backward itself."""
    return Step(RepeatedStep(step, times, before, residents).to("meta"), (meta(0),), {"mode": "infer"})


def train_function(
    function: Function, *, retain: bool = False, random_gradient: bool = False, accumulate: int = 2, **residents: Any
) -> Step:
    """Make a training step without optimizer: the last of `accumulate` micro-batches, whose gradients are there."""

    def loss(output: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = RandomGradient.apply(output["y"], output["kept"]) if random_gradient else output["y"]
        return result

    model = TrainedFunction(function, retain, residents).to("meta")
    return Step(model, (meta(0),), {"mode": "train", "loss": loss, "optimizer": None, "accumulate": accumulate})


def measure(function: Callable[[], object]) -> Peaks:
    """Call a function; its peaks, as the program reads them."""
    torch.cuda.reset_peak_memory_stats()
    function()
    stats = torch.cuda.memory_stats()
    return {name: stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")}


def last_round(step: Function, rounds: int = 4, **residents: Any) -> Program:
    """Make a program that repeats a step of leaves and modules, gradients kept, and measures the last round.

    Liger's `_test_memory` has ten rounds and takes the median of their peaks.
    """

    def run() -> dict[str, Peaks]:
        module = Residents(residents).to_empty(device="cuda")
        for _ in range(rounds - 1):
            step(module)
        return {"": measure(lambda: step(module))}

    return Program(run, "")


def forward_after_backward(function: Function, **residents: Any) -> Program:
    """Make a program that calls a function of leaves once more after a backward, as scripts do that run others first.

    Autograd's thread then keeps its cuBLAS workspace.
    """

    def run() -> dict[str, Peaks]:
        module = Residents(residents).to_empty(device="cuda")
        y = function(module)
        y.backward(torch.randn_like(y))
        del y
        module.zero_grad()
        return {"": measure(lambda: function(module))}

    return Program(run, "")
