"""Whose each storage of a program is."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fxmem._torch import common as torch_common
from fxmem.records.profile import Kind, SourceLine
from fxmem.records.units import format_bytes
from fxmem.simulation.card.card_memory import LiveBytes
from fxmem.simulation.card.card_thread import Roots
from fxmem.simulation.recording.observe.fx_tracer import CALLED_FROM, named_arguments
from fxmem.simulation.recording.recording import Recording
from fxmem.simulation.recording.residents import (
    Holders,
    Place,
    Places,
    find_variables,
    name_modules,
    name_optimizer_state,
)


class OwnerNames:
    """Names the owners of a program's storages.

    Args:
        recording: of the program.
        roots: its modules.
    """

    def __init__(self, recording: Recording, roots: Roots) -> None:
        self._recording, self._log, self._roots = recording, recording.log, roots
        self.holders = Holders(recording.log)
        self._arguments: Callable[[], Iterable[Place]] = list

    @contextlib.contextmanager
    def holding(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Inside, these arguments of a call are what the program holds, too: no variable may have them."""
        self._arguments = lambda: named_arguments(module, args, kwargs)
        try:
            yield
        finally:
            self._arguments = list

    def name_residents(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Name what modules and optimizers keep, as far as the program has made it."""
        self._roots.adopt_moved()
        name_optimizer_state(self._log, list(optimizers), name_modules(self._log, self._roots))

    def name_held(self) -> Sequence[SourceLine | None]:
        """Name what else the program keeps: what it calls it, or the line that made it. Return the lines of the round's
        nodes: the program's own, where an installed package's is known to be called from one."""
        tracer, log = self._recording.tracer, self._log
        for index in self.holders.search(self.places, self.find_saved()):
            node = log.storages[index].node
            if node is not None and node >= 0:
                log.storages[index].holder = tracer.describe_node(node)
        return [node.meta.get(CALLED_FROM, source) for node, source in zip(tracer.nodes, tracer.sources, strict=False)]

    @property
    def places(self) -> Places:
        """Where the program keeps what is no module's, as of `Holders.search`."""
        return (self._arguments, Kind.INPUT), (find_variables, None)

    def find_saved(self) -> dict[int, int]:
        """By storage that autograd keeps, the number of its node."""
        return self._recording.nodes.find_kept(self._recording.engine.find_saved())


# --- what is in reference cycles when a step is over: only Python's garbage collector frees it ------------------------


class Cycles:
    """Frees what is in reference cycles after each round, and counts it.

    Python collects after so many objects, which are not those of a real run. Where the program has switched that off,
    nothing is freed here either. What was there before a round is looked at where as much is not alive as before it,
    and after every eighth.

    Args:
        live: the bytes that are alive.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self.are_freed = True
        """Whether the program lets Python collect."""
        self.most_bytes = 0
        """Freed at once."""
        self._collected = self._alive = 0

    def collect(self) -> None:
        """A round is over."""
        if self.are_freed:
            before = self._live.now
            gc.collect(1)  # a loaded model library and the record of some rounds are hundreds of thousands of objects
            if self._live.now != self._alive or not self._collected % 8:
                gc.collect()
            self._collected, self._alive = self._collected + 1, self._live.now
            self.most_bytes = max(self.most_bytes, before - self._live.now)

    def explain(self, peak_bytes: int) -> Iterator[str]:
        """Say what is taken for granted where it may move a peak by a hundredth."""
        if 100 * self.most_bytes >= peak_bytes:
            yield (
                f"{format_bytes(self.most_bytes)} that a step leaves in reference cycles (an object whose hook or "
                "closure leads to it) are freed when it is over; Python's collector may come some steps later, each "
                "of which adds as much"
            )

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, the program switches the collector on and off for `collect` alone: it is off throughout."""

        def switch(*, on: bool) -> None:
            self.are_freed = on

        with (
            torch_common.wrap(gc, "disable", lambda _: switch(on=False), here=True),
            torch_common.wrap(gc, "enable", lambda _: switch(on=True), here=True),
            torch_common.wrap(gc, "isenabled", lambda _: self.are_freed, here=True),
        ):
            yield
