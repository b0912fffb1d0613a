"""`ProgramKernels`: the launches of a program's compiled code are nodes of the graph of its round."""

from __future__ import annotations

import torch

from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.records.profile import Phase
from fxmem.simulation import known_values
from fxmem.simulation.compiled.tracer import KernelTracer
from fxmem.simulation.program.program_log import ProgramLog
from fxmem.simulation.program.roots import Roots
from fxmem.simulation.program.round_tracer import RoundTracer


class ProgramKernels(KernelTracer):
    """Writes launches among the nodes of a round.

    Args:
        rounds: the tracer of what is not compiled.
        roots: the program's modules.
        log: the program's.
    """

    def __init__(self, rounds: RoundTracer, roots: Roots, log: ProgramLog) -> None:
        self._rounds = rounds
        self._roots = roots
        super().__init__(torch.nn.Module(), log)

    def restart(self) -> None:
        """Begin the graph of another round, which the round's tracer has begun."""
        super().restart()
        writer = self._rounds.writer
        self.graph, self.nodes, self.sources = writer.graph, writer.nodes, writer.sources
        writer.find_maker = self._find_launch

    @property
    def runs_compiled(self) -> bool:
        """Whether compiled code runs, or a backward, which may be its own."""
        return self._inside_root or self._log.phase is Phase.BACKWARD

    @property
    def is_inside(self) -> bool:
        """Whether compiled code is being called."""
        return self._inside_root

    @is_inside.setter
    def is_inside(self, inside: bool) -> None:
        self._inside_root = inside
        self._first_op = None

    def _writes_nodes(self) -> bool:
        return self._inside_root and self._rounds.writes and self._log.phase in (Phase.FORWARD, Phase.EVALUATION)

    def launched(self, kernel: torch_inductor.StubKernel, args: tuple[object, ...]) -> None:
        """A kernel that inductor wrote is launched."""
        for position in kernel.outputs:
            written = args[position]
            if isinstance(written, torch.Tensor):
                known_values.forget(written)
        super().launched(kernel, args)

    def _find_class(self, path: str) -> type[torch.nn.Module] | None:
        return self._roots.find_class(path)

    @property
    def _path(self) -> str:
        return self._rounds.path

    def _known_module(self, path: str) -> str:
        return super()._known_module(".".join(part for part in (self._path, path) if part))

    def _find_launch(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        storage = self._log.note_storage(tensor)
        return None if storage is None else self._maker.get(storage)

    def _find_maker(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        return self._rounds.writer.find_node(tensor) or self._find_launch(tensor)
