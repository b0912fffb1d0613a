"""An optimizer that steps within backward: each gradient is applied and freed as soon as it is accumulated.

The private names of torch used here: `Optimizer._optimizer_step_pre_hooks` and what `Optimizer.profile_hook_step` wraps
(since 2.0), `Tensor._make_wrapper_subclass` (since 1.10).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fxmem.errors import UsageError

_NOT_WHOLE = (
    "expected nobody to read gradients after backward, but this optimizer has applied and freed each within it "
    "(fxmem.release_gradients); clipping by global norm, GradScaler and accumulation need all of them at once: call "
    "remove() on what release_gradients returned"
)


def release_gradients(optimizer: Optimizer) -> GradientRelease:
    """Make an optimizer step within backward, and free each gradient at once.

    Parameters are stepped one at a time. The loop stays as it is: `optimizer.step()` finds nothing left to do, and is
    where a step ends. Parameters after the step are those of the ordinary loop, bit for bit, in each form of the
    optimizer (for-loop, foreach, fused): all of torch's but LBFGS update each parameter by itself. The `state_dict`s,
    `param_groups` and learning rate schedulers are as before. Parameters added or unfrozen later are stepped as usual.

    What needs all gradients at once is refused: clipping by global norm, `GradScaler` and accumulation raise a
    UsageError where they read the first gradient.

    Returns:
        A handle, whose `remove()` undoes it between two steps.

    Raises:
        UsageError: the optimizer steps within backward already, has nothing to train or needs a closure. In backward:
            it keeps numbers for several parameters together.
    """
    return GradientRelease(optimizer)


class GradientRelease:
    """The optimizer steps within backward until `remove()`."""

    def __init__(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if steps_in_backward(optimizer):
            raise UsageError(f"expected an ordinary optimizer; this {name} steps within backward already")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(f"optimizer {name} calls the model again from inside step(), which backward cannot")
        self._optimizer = optimizer
        self._hooks: list[Any] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    step = functools.partial(self._step, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(step))
        if not self._hooks:
            raise UsageError(f"expected a parameter that requires a gradient in this {name}, found none")
        self._hooks.append(optimizer.register_step_pre_hook(self._end_step))

    def remove(self) -> None:
        """Make it an ordinary optimizer again."""
        self._end_step()
        for hook in self._hooks:
            hook.remove()

    def _step(self, index: int, parameter: torch.Tensor) -> None:
        """Step one parameter, with the settings and the state that the optimizer has now."""
        group = self._optimizer.param_groups[index]
        alone = {**group, "params": [parameter]}
        _step_group(self._optimizer, alone)
        changed = [key for key in group if key != "params" and alone[key] is not group[key]]
        if changed:
            raise UsageError(
                f"optimizer {type(self._optimizer).__name__} cannot step within backward, one parameter at a time: its "
                f"step changes {changed[0]!r} of all parameters together"
            )
        parameter.grad = _Released(parameter.shape, parameter.dtype, parameter.device)

    def _end_step(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter.grad, _Released):
                    parameter.grad = None


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Whether the optimizer's gradients are released."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {})  # a wrapper may leave out `Optimizer.__init__`
    return any(isinstance(getattr(hook, "__self__", None), GradientRelease) for hook in hooks.values())


def _step_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Step one group with the optimizer's state; not what is to run once a step: hooks, a scheduler's count."""
    alone: Optimizer = object.__new__(type(optimizer))
    vars(alone).update(vars(optimizer), param_groups=[group])
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(alone)


class _Released(torch.Tensor):
    """Stands in `.grad` for a gradient that has been applied and freed. It has no memory; what reads it is refused."""

    @staticmethod
    def __new__(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> _Released:
        made: _Released = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise UsageError(_NOT_WHOLE)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, torch.device]]:
        return [], (self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[torch.dtype, torch.device], size: Sequence[int], stride: Any
    ) -> _Released:
        return _Released(size, *context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<gradient of {tuple(self.shape)}, applied and freed>"
