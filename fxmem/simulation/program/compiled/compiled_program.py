"""`CompiledProgramRecording`: a program whose compiled parts are compiled for the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem.records.parts import CompileSettings
from fxmem.records.profile import Target
from fxmem.simulation.compiled.compiled_calls import CompiledCalls
from fxmem.simulation.compiled.launches import LaunchLog, LaunchRecorder
from fxmem.simulation.compiled.part_kernels import PartKernels
from fxmem.simulation.program.program_log import ProgramLog
from fxmem.simulation.program.program_recorder import ProgramRecorder
from fxmem.simulation.program.program_run import ProgramRecording


class _ProgramLaunchLog(LaunchLog, ProgramLog):
    saves_by_launch = False


class _ProgramLaunchRecorder(LaunchRecorder, ProgramRecorder):  # type: ignore[no-untyped-call]
    _frames_to_caller = 3
    _kernels: Callable[[], PartKernels]

    def _follows(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._kernels().runs_compiled and self._border.is_targets(func, types, args, kwargs)


class CompiledProgramRecording(CompiledCalls, ProgramRecording):
    """A recording of a program whose compiled parts are compiled for the target.

    Args:
        target: the machine to pretend.
        settings: of the compiler; `as_is`, for a program says itself what it compiles.
        further: those of `ProgramRecording`.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """

    log: _ProgramLaunchLog

    def __init__(self, target: Target, settings: CompileSettings, **further: Any) -> None:
        super().__init__(target, settings, **further)
        self.rounds.compiles = True

    def _make_log(self) -> ProgramLog:
        return _ProgramLaunchLog(self.device, self.memory)

    def _make_recorder(self, *arguments: Any) -> ProgramRecorder:
        return _ProgramLaunchRecorder(lambda: self.kernels, self._border, self.notes, self.memory, *arguments)

    def _find_class(self, path: str) -> type[torch.nn.Module] | None:
        return self.roots.find_class(path)

    def _enter_call(self) -> None:
        if not self.tracer.path:
            self.rounds.function_called()
        super()._enter_call()

    def _make_buffer(self, size: Any, stride: Any, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A buffer of compiled code; on the host, whose kernels do not run either, with zeros."""
        self._border.making_buffers = True
        try:
            made = super()._make_buffer(size, stride, dtype=dtype, device=device)
        finally:
            self._border.making_buffers = False
        return made if isinstance(made, torch_common.FakeTensor) else made.zero_()
