"""`PartKernels`: the launches of compiled parts are nodes of the graph of the program around them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxmem.records.profile import Phase
from fxmem.simulation.compiled.tracer import KernelTracer
from fxmem.simulation.observe.fx_tracer import ProgramTracer
from fxmem.simulation.observe.node_ledger import NodeLedger


class PartKernels(KernelTracer):
    """Writes launches among the nodes of a program.

    Args:
        around: the tracer of what is not compiled.
        find_class: the class of the module with a path; None for none.
        nodes: the program's ledger.
    """

    def __init__(
        self, around: ProgramTracer, find_class: Callable[[str], type[torch.nn.Module] | None], nodes: NodeLedger
    ) -> None:
        self._around = around
        self._class_of = find_class
        super().__init__(torch.nn.Module(), nodes)

    def restart(self) -> None:
        """Begin another graph, which the tracer around has begun."""
        super().restart()
        writer = self._around.writer
        self.graph, self.nodes, self.sources = writer.graph, writer.nodes, writer.sources
        writer.find_maker = self._find_launch

    @property
    def runs_compiled(self) -> bool:
        """Whether compiled code runs, or a backward, which may be its own."""
        return self.is_inside or self._log.phase is Phase.BACKWARD

    def _writes_nodes(self) -> bool:
        return self.is_inside and self._around.writes and self._log.phase in (Phase.FORWARD, Phase.EVALUATION)

    def _find_class(self, path: str) -> type[torch.nn.Module] | None:
        return self._class_of(path)

    @property
    def _path(self) -> str:
        return self._around.path

    def _known_module(self, path: str) -> str:
        return super()._known_module(".".join(part for part in (self._path, path) if part))

    def _find_launch(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        storage = self._log.note_storage(tensor)
        return None if storage is None else self._maker.get(storage)

    def _find_maker(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        return self._around.writer.find_node(tensor) or self._find_launch(tensor)
