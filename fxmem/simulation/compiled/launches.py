"""What is logged while compiled code runs: each operator, and each saved tensor, belongs to a launch."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.simulation.compiled.tracer import KernelTracer
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.observe.op_recorder import OpRecorder


class LaunchLog(StepLog):
    """A storage that autograd saves belongs to the launch that made it: a whole graph is one node of autograd."""

    saves_by_launch = True
    """Whether compiled code runs."""

    def on_save(self, value: Any, handle: weakref.ref[Any]) -> None:
        """A node saves these tensors for backward."""
        if not self.saves_by_launch:
            super().on_save(value, handle)
            return
        for tensor in torch_common.iterate_tensors(value):
            index = self.note_storage(tensor)
            node = None if index is None else self.node_of[index]
            if node is None:
                continue
            before = self.current_call()
            self.resume_call(node)
            super().on_save(tensor, handle)
            self.resume_call(before)


class LaunchRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Says which launch of a wrapper an operator is for; dynamo runs compiled code under it.

    Args:
        kernels: who follows the launches, asked for at each operator.
        further: those of the recorder it extends.
    """

    _frames_to_caller = 2
    supports_higher_order_operators = True

    def __init__(self, kernels: Callable[[], KernelTracer], *further: Any) -> None:
        super().__init__(*further)
        self._kernels = kernels

    def _follows(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator may be for a launch."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo skips every frame under other dispatch modes (torch/_dynamo/convert_frame.py)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch_inductor.HigherOrderOperator):
            with self:
                return torch_inductor.run_with_state(func, args, kwargs or {})
        if (
            func is torch.ops.prim.device.default
            or self._log.setting_up
            or not self._follows(func, types, args, kwargs or {})
        ):
            return super().__torch_dispatch__(func, types, args, kwargs)
        tracer, resume = self._kernels(), torch_dynamo.pause_tracing()
        try:
            call = tracer.place(sys._getframe(1))
            tracer.begin_op(call)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            tracer.end_op(call, torch_common.op_name(func), (args, kwargs), result)
        finally:
            resume()
        return result
