"""`CompiledModel`: the model of a step is compiled in a first run that is not recorded, and recorded in the second."""

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
from fxmem.simulation.recording.compiled.compiled_code import CompiledCode, differentiate_joint_graphs
from fxmem.simulation.recording.compiled.tracer import KernelTracer


class CompiledModel(CompiledCode):
    """A step whose nodes are the launches of its compiled model."""

    streams = None
    is_compiling = True

    def make_tracer(self, root: torch.nn.Module) -> KernelTracer:
        """The tracer that follows the launches of this module."""
        self.recording.nodes.saves_by_launch = True
        self.kernels = KernelTracer(root, self.recording.nodes)
        return self.kernels

    def wrap(self, model: torch.nn.Module) -> Any:
        """The compiled model, which the step calls in the place of the model."""
        if not self._settings.as_is:
            return _Root(model, self.compile_module(model, self._options), self)
        called: Any = model
        for path, chosen in self._settings.parts.items():
            if not path:
                called = self.compile_module(model, chosen or {})
            else:
                backend = functools.partial(self.compile, options=chosen or {})
                torch_dynamo.compile_part(model.get_submodule(path), backend, in_place=chosen is None)
        return _Root(model, called, self)

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """The compiler's surroundings; operators are observed in `observe_run`."""
        with self.answers(), self.surroundings():
            yield

    @contextlib.contextmanager
    def observe_run(self) -> Iterator[None]:
        """The first run compiles, and nothing is recorded; later ones are."""
        recording, log = self.recording, self.recording.log
        if self.is_compiling:
            with (
                differentiate_joint_graphs(),
                log.setup(),
                recording.recorder,  # eager code between graphs, and the optimizer's, may ask for known numbers
                torch_dynamo.observe_compiled_calls(lambda: None, lambda: None, self._compile, contextlib.nullcontext),
            ):
                yield
            self.is_compiling = False
            self.note_numbers(collects=True)
            return
        with (
            recording.recorder,
            recording.engine.route(self.kernels.call_function),
            torch_inductor.without_graph_task(recording.engine.release_unpacked),
            torch_triton.observe_launches(recording.on_launch, recording.packages.timed.add),
            torch_common.patch(torch, "clear_autocast_cache", log.free_in_order),
        ):
            yield

    @contextlib.contextmanager
    def _compile(self) -> Iterator[None]:
        """Dynamo traces, and nothing follows what it calls."""
        with torch_common.no_modes(), self.recording.fakes:
            yield

    def observe_recomputation(self) -> contextlib.AbstractContextManager[None]:
        """What a compiled graph recomputes is in the graph."""
        return contextlib.nullcontext()


class _Root:
    """The compiled model as the step calls it."""

    def __init__(self, model: torch.nn.Module, compiled: Callable[..., Any], compilation: CompiledModel) -> None:
        self._model, self._compiled, self._compilation = model, compiled, compilation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compilation.is_compiling:
            return self._compiled(*args, **kwargs)
        return self._compilation.kernels.call_root(self._compiled, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none=set_to_none)
