"""While compiled code runs, each operator belongs to a launch."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.simulation.compiled.tracer import KernelTracer
from fxmem.simulation.observe.op_recorder import OpRecorder, Run


class CompiledOpRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Says which launch of a wrapper an operator is for; dynamo runs compiled code under it.

    Args:
        kernels: who follows the launches, asked for at each operator.
        follows: whether an operator, as it is dispatched, may be for a launch.
        further: those of `OpRecorder`.
    """

    supports_higher_order_operators = True

    def __init__(self, kernels: Callable[[], KernelTracer], follows: Callable[..., bool], *further: Any) -> None:
        super().__init__(*further)
        self._kernels = kernels
        self._follows = follows
        self._run_unplaced: Run = self._run_op
        self._run_op = self._place

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo skips every frame under other dispatch modes (torch/_dynamo/convert_frame.py)."""
        return True

    def _place(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: types.FrameType
    ) -> Any:
        if isinstance(func, torch_inductor.HigherOrderOperator):
            with self:
                return torch_inductor.run_with_state(func, args, kwargs)
        if (
            func is torch.ops.prim.device.default
            or self._log.setting_up
            or not self._follows(func, types, args, kwargs)
        ):
            return self._run_unplaced(func, types, args, kwargs, caller)
        tracer, resume = self._kernels(), torch_dynamo.pause_tracing()
        try:
            call = tracer.place(caller)
            tracer.begin_op(call)
            result = self._run_unplaced(func, types, args, kwargs, caller)
            tracer.end_op(call, torch_common.op_name(func), (args, kwargs), result)
        finally:
            resume()
        return result
