"""`CompiledProgramRecording`: what a program compiles is compiled for the target where it is first called.

Nothing is observed while the compiler is at work: on the card it allocates nothing. What it made runs in the place of
the code it was made from, and every operator and launch is observed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.records.parts import CompileRecord, CompileSettings
from fxmem.records.profile import Target
from fxmem.simulation.compiled.compiler import Compiler, differentiate_joint_graphs
from fxmem.simulation.compiled.launches import LaunchLog, LaunchRecorder
from fxmem.simulation.observe.fx_tracer import Listener
from fxmem.simulation.program.compiled.program_kernels import ProgramKernels
from fxmem.simulation.program.program_log import ProgramLog
from fxmem.simulation.program.program_recorder import ProgramRecorder
from fxmem.simulation.program.program_run import ProgramRecording


class _ProgramLaunchLog(LaunchLog, ProgramLog):
    saves_by_launch = False


class _ProgramLaunchRecorder(LaunchRecorder, ProgramRecorder):  # type: ignore[no-untyped-call]
    _frames_to_caller = 3
    _kernels: Callable[[], ProgramKernels]

    def _follows(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._kernels().runs_compiled and self._border.is_targets(func, types, args, kwargs)


class CompiledProgramRecording(ProgramRecording):
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
        self._compiler = Compiler(target, settings)
        self._is_compiling = False
        self._around_call = contextlib.ExitStack()
        """What a call of compiled code is inside; left where the call ends."""
        super().__init__(target, **further)
        self.rounds.compiles = True

    def _make_log(self) -> ProgramLog:
        return _ProgramLaunchLog(self.device, self.memory)

    def _make_recorder(self, *arguments: Any) -> ProgramRecorder:
        return _ProgramLaunchRecorder(lambda: self.kernels, self._border, self.notes, self.memory, *arguments)

    def attach(self, root: torch.nn.Module) -> None:
        """Trace whatever the program calls, and follow the launches of what it compiled."""
        super().attach(root)
        self.kernels = self._compiler.kernels = ProgramKernels(self.tracer, self.roots, self.log)
        self.engine.around_compiled = lambda: torch_common.without_function_modes(Listener)

    def begin(self) -> None:
        """Forget the last round."""
        super().begin()
        self.kernels.restart()

    def describe(self) -> CompileRecord:
        """What came of it so far."""
        return self._compiler.describe()

    # --- compiled code ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """As of every program; what dynamo is to trace into is looked up before any is replaced."""
        functional: Any = torch.nn.functional
        plain = ((torch.nn.Module, "__call__"), (torch.overrides, "has_torch_function"), (functional, "linear"))
        self._plain = [(owner, name, getattr(owner, name)) for owner, name in plain]
        self._plain.append((functional, "scaled_dot_product_attention", torch_inductor.SDPA))
        with super().environment():
            yield

    @contextlib.contextmanager
    def _observe_compiled(self) -> Iterator[None]:
        with (
            self._compiler.surroundings(self._make_buffer),
            torch_inductor.without_graph_task(self.engine.release_unpacked, lambda: self.engine.keeps_graph),
            torch_inductor.no_device_guard() if self.memory is not None else contextlib.nullcontext(),
            torch_dynamo.observe_compiled_calls(self._enter_call, self._leave_call, self._compiling, self._unpatched),
            self._around_call,
        ):
            yield

    def _enter_call(self) -> None:
        if not self.tracer.path:
            self.rounds.function_called()
        stack = self._around_call
        stack.enter_context(torch_common.without_function_modes(Listener))
        stack.enter_context(self._unpatched())
        stack.enter_context(torch_common.patch(torch.Tensor, "register_hook", self._noting_hooks))
        self.kernels.is_inside = self.log.saves_by_launch = True

    def _noting_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Tensor.register_hook` where no listener is: a module compiled in place runs its own hooks, such as FSDP2's,
        inside the call."""

        def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            handle = original(tensor, hook)
            self._note_tensor_method("register_hook", tensor)
            return handle

        return register_hook

    def _leave_call(self) -> None:
        self.kernels.is_inside = self.log.saves_by_launch = False
        self._around_call.close()

    @contextlib.contextmanager
    def _unpatched(self) -> Iterator[None]:
        """What dynamo traces into is torch's own."""
        with contextlib.ExitStack() as stack:
            for owner, name, plain in self._plain:
                stack.enter_context(torch_common.patch(owner, name, _put(plain)))
            yield

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        before, self._is_compiling = self._is_compiling, True
        observed = torch_common.keep_modes()
        try:
            with (
                torch_common.no_modes(),
                self.fakes,
                differentiate_joint_graphs(),
                self._compiler.answers(),
                torch_dynamo.observe_optimizer_state(observed),
            ):
                yield
        finally:
            self._is_compiling = before

    def _make_buffer(self, size: Any, stride: Any, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A buffer of compiled code; on the host, whose kernels do not run either, with zeros."""
        self._border.making_buffers = True
        try:
            made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        finally:
            self._border.making_buffers = False
        return made if isinstance(made, torch_common.FakeTensor) else made.zero_()

    def _call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        calls = self.kernels if self.kernels.is_inside else self.tracer
        return calls.call_function(cls, args, apply)

    def _note_trace(self) -> None:
        if not self._is_compiling:
            super()._note_trace()


def _put(value: Any) -> Callable[[Any], Any]:
    return lambda _: value
