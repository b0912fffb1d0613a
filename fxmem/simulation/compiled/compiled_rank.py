"""`CompiledRank`: the step of a rank whose blocks are compiled and then sharded.

FSDP2 gathers and reduces in hooks around a block's graph, so that inductor sees plain tensors. The first run of the
step compiles; it is recorded like every other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.simulation.compiled.compiled_calls import CompiledCalls
from fxmem.simulation.compiled.launches import LaunchLog, LaunchRecorder
from fxmem.simulation.compiled.part_kernels import PartKernels
from fxmem.simulation.observe.event_log import StepLog
from fxmem.simulation.observe.fx_tracer import ProgramTracer
from fxmem.simulation.observe.op_recorder import OpRecorder
from fxmem.simulation.ranks import find_blocks


class _RankTracer(ProgramTracer):
    """Writes each run of the step anew: its launches have no likes in the run before, which compiled."""

    def restart(self) -> None:
        """Begin another graph."""
        self._start_graph()
        super().restart()


class _RankLog(LaunchLog):
    saves_by_launch = False


class _RankRecorder(LaunchRecorder):  # type: ignore[no-untyped-call]
    _kernels: Callable[[], PartKernels]

    def _follows(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._kernels().runs_compiled


class CompiledRank(CompiledCalls):
    """The observers of a rank's step, parts of which are compiled."""

    _tracer_class = _RankTracer

    def _make_log(self) -> StepLog:
        return _RankLog(self.device)

    def _make_recorder(self, *arguments: Any) -> OpRecorder:
        return _RankRecorder(lambda: self.kernels, *arguments)

    def attach(self, root: torch.nn.Module) -> None:
        """Trace this module's step."""
        self._classes = {name: type(module) for name, module in root.named_modules()}
        super().attach(root)

    def _find_class(self, path: str) -> type[torch.nn.Module] | None:
        return self._classes.get(path)

    def begin(self) -> None:
        """Forget the last run."""
        self.log.results = {}  # of nodes of another graph
        super().begin()

    def prepare(self, model: torch.nn.Module) -> None:
        """Compile what its author has compiled, or else the repeated blocks; of a model without any, the whole."""
        settings = self._compiler.settings
        options = {**torch_inductor.mode_options(settings.mode), **settings.options}
        parts = {path: (chosen or {}, chosen is None) for path, chosen in settings.parts.items()}
        if not settings.as_is:
            names = {module: path for path, module in model.named_modules()}
            parts = {names[block]: (options, True) for block in find_blocks(model) or [model]}
        backends: dict[str, Callable[..., Any]] = {}  # of one, dynamo compiles blocks that are alike once
        for path, (chosen, in_place) in parts.items():
            made = functools.partial(self._compiler.compile, options=chosen)
            backend = backends.setdefault(repr(chosen), made)
            part = model.get_submodule(path)
            torch_dynamo.compile_part(part, backend, in_place=in_place, dynamic=settings.dynamic)
