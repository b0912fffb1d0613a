"""`CompiledCalls`: what a program compiles is compiled for the target where it is first called.

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
from fxmem.simulation.compiled.launches import LaunchLog
from fxmem.simulation.compiled.part_kernels import PartKernels
from fxmem.simulation.observe.fx_tracer import Listener
from fxmem.simulation.observers import Recording


class CompiledCalls(Recording):
    """A recording in which compiled code is called, alone or beside eager code.

    Args:
        target: the machine to pretend.
        settings: of the compiler.
        further: those of the recording it extends.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """

    log: LaunchLog
    kernels: PartKernels

    def __init__(self, target: Target, settings: CompileSettings, **further: Any) -> None:
        self._compiler = Compiler(target, settings)
        self._is_compiling = False
        self._around_call = contextlib.ExitStack()
        """What a call of compiled code is inside; left where the call ends."""
        super().__init__(target, **further)

    def attach(self, root: torch.nn.Module) -> None:
        """Trace the program, and follow the launches of what it compiled."""
        super().attach(root)
        self.kernels = self._compiler.kernels = PartKernels(self.tracer, self._find_class, self.log)
        self.engine.around_compiled = lambda: torch_common.without_function_modes(Listener)

    def _find_class(self, path: str) -> type[torch.nn.Module] | None:
        """The class of the module with this path; None for none."""
        raise NotImplementedError

    def begin(self) -> None:
        """Forget the last round."""
        super().begin()
        self.kernels.restart()

    def describe(self) -> CompileRecord:
        """What came of it so far."""
        return self._compiler.describe()

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
            torch_inductor.no_device_guard() if self.target.device == "cuda" else contextlib.nullcontext(),
            torch_dynamo.observe_compiled_calls(self._enter_call, self._leave_call, self._compiling, self._unpatched),
            self._around_call,
        ):
            yield

    def _enter_call(self) -> None:
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
                self._compiler.note_numbers(self.log)  # here, where nothing observes how they are found
        finally:
            self._is_compiling = before

    def _make_buffer(self, size: Any, stride: Any, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A buffer of compiled code."""
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def _call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        calls = self.kernels if self.kernels.is_inside else self.tracer
        return calls.call_function(cls, args, apply)

    def _note_trace(self) -> None:
        if not self._is_compiling:
            super()._note_trace()


def _put(value: Any) -> Callable[[Any], Any]:
    return lambda _: value
