"""`CompiledRecording`: a step is compiled in a first run that is not recorded, and recorded in the second."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import triton as torch_triton
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.records.parts import CompileRecord, CompileSettings
from fxmem.records.profile import Target
from fxmem.simulation.compiled.compiler import Compiler, differentiate_joint_graphs
from fxmem.simulation.compiled.launches import LaunchLog, LaunchRecorder
from fxmem.simulation.compiled.tracer import KernelTracer
from fxmem.simulation.observe.autograd_engine import AutogradEngine
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.observe.op_recorder import OpRecorder
from fxmem.simulation.observers import Recording


class CompiledRecording(Recording):
    """The observers of a compiled step.

    Raises:
        EnvironmentLacksError: what the compiler needs is not installed.
    """

    def __init__(self, target: Target, settings: CompileSettings) -> None:
        self._compiler = Compiler(target, settings)
        super().__init__(target)
        self._compiling = True

    def _make_log(self) -> StepLog:
        return LaunchLog(self.device)

    def _make_recorder(self, *arguments: Any) -> OpRecorder:
        return LaunchRecorder(lambda: self.kernels, *arguments)

    def attach(self, root: torch.nn.Module) -> None:
        """Follow the launches of this module."""
        self.root = root
        self.kernels = self._compiler.kernels = KernelTracer(root, self.log)
        self.tracer: Any = self.kernels
        self.engine = AutogradEngine(self.log, newest_that_ran=lambda: self.recorder.newest_node)

    def wrap(self, model: torch.nn.Module) -> Any:
        """The compiled model, which the step calls in the place of the model."""
        compiler, settings = self._compiler, self._compiler.settings
        if not settings.as_is:
            options = {**torch_inductor.mode_options(settings.mode), **settings.options}
            return _Root(model, compiler.compile_module(model, options), self)
        called: Any = model
        for path, chosen in settings.parts.items():
            if not path:
                called = compiler.compile_module(model, chosen or {})
            else:
                backend = functools.partial(compiler.compile, options=chosen or {})
                torch_dynamo.compile_part(model.get_submodule(path), backend, in_place=chosen is None)
        return _Root(model, called, self)

    def describe(self) -> CompileRecord:
        """What came of it."""
        return self._compiler.describe()

    # --- what the step runs inside ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _observe(self) -> Iterator[None]:
        """The compiler's surroundings; operators are observed in `observe_run`."""
        with self._compiler.answers(), self._compiler.surroundings():
            yield

    @contextlib.contextmanager
    def observe_run(self) -> Iterator[None]:
        """The first run compiles, and nothing is recorded; later ones are."""
        if self._compiling:
            with (
                differentiate_joint_graphs(),
                self.log.setup(),
                self.recorder,  # eager code between graphs, and the optimizer's, may ask for numbers that are known
                torch_dynamo.observe_compiled_calls(_nothing, _nothing, self._compile, contextlib.nullcontext),
            ):
                yield
            self._compiling = False
            self._compiler.note_numbers(self.log, collects=True)
            return
        with (
            self.recorder,
            self.engine.route(self.tracer.call_function),
            torch_inductor.without_graph_task(self.engine.release_unpacked),
            torch_triton.observe_launches(self._note_launch),
            torch_common.patch(torch, "clear_autocast_cache", self.log.free_in_order),
        ):
            yield

    @contextlib.contextmanager
    def _compile(self) -> Iterator[None]:
        """Dynamo traces, and nothing follows what it calls."""
        with torch_common.no_modes(), self.fakes:
            yield

    @property
    def is_compiled(self) -> bool:
        """Whether the run that compiles is over."""
        return not self._compiling


def _nothing() -> None:
    pass


class _Root:
    """The compiled model as the step calls it."""

    def __init__(self, model: torch.nn.Module, compiled: Callable[..., Any], recording: CompiledRecording) -> None:
        self._model, self._compiled, self._recording = model, compiled, recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._recording.is_compiled:
            return self._compiled(*args, **kwargs)
        return self._recording.kernels.call_root(self._compiled, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none=set_to_none)
