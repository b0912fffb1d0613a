"""`CompiledCode`: what all code has that is compiled for a target, as a whole or part by part.

While it runs, each operator belongs to a launch, as `CompiledOpRecorder` says.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.records.parts import CompileRecord, CompileSettings
from fxmem.records.profile import Target
from fxmem.simulation.compiled.compiler import Compiler
from fxmem.simulation.compiled.tracer import KernelTracer
from fxmem.simulation.observe.op_recorder import OpRecorder, Run
from fxmem.simulation.recording import EagerCode


class CompiledCode(EagerCode):
    """What becomes of compiled code where it is compiled.

    Args:
        target: the machine to pretend.
        settings: of the compiler.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """

    compiles = True
    kernels: KernelTracer
    """Who follows the launches."""

    def __init__(self, target: Target, settings: CompileSettings) -> None:
        self._compiler = Compiler(target, settings)

    def make_recorder(self, *parts: Any) -> OpRecorder:
        """The recorder of operators, some of them for a launch."""
        return CompiledOpRecorder(self, *parts)

    def follows(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator, as it is dispatched, may be for a launch."""
        return True

    def describe(self) -> CompileRecord:
        """What came of it so far."""
        return self._compiler.describe()

    @property
    def _options(self) -> dict[str, Any]:
        """What inductor is given for all that it compiles."""
        settings = self._compiler.settings
        return {**torch_inductor.mode_options(settings.mode), **settings.options}


class CompiledOpRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Says which launch of a wrapper an operator is for; dynamo runs compiled code under it.

    Args:
        code: what is compiled.
        further: those of `OpRecorder`.
    """

    supports_higher_order_operators = True

    def __init__(self, code: CompiledCode, *further: Any) -> None:
        super().__init__(*further)
        self._code = code
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
        is_apart = func is torch.ops.prim.device.default or self._log.setting_up
        if is_apart or not self._code.follows(func, types, args, kwargs):
            return self._run_unplaced(func, types, args, kwargs, caller)
        tracer, resume = self._code.kernels, torch_dynamo.pause_tracing()
        try:
            call = tracer.place(caller)
            tracer.begin_op(call)
            result = self._run_unplaced(func, types, args, kwargs, caller)
            tracer.end_op(call, torch_common.op_name(func), (args, kwargs), result)
        finally:
            resume()
        return result
