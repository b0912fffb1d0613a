"""`OpInspector`: FLOPs, bytes moved, and the memory that no tensor shows, of each call of an operator."""

from __future__ import annotations

from typing import Any

from fxmem._torch import common as torch_common
from fxmem.hardware.workspaces import Collector, CpuCollector, HiddenMemory, Seen, copy_in_memory
from fxmem.simulation.kernels.inner_ops import inner_memory
from fxmem.simulation.recording import flops
from fxmem.simulation.recording.collectives import Collectives
from fxmem.simulation.recording.observe.op_cache import OpFacts


class OpInspector:
    """Inspects the calls of one program.

    Args:
        collector: of the target's hidden memory.
        collectives: told of each call that communicates.
        fakes: the mode the program runs in.
        device_type: of the target.
    """

    def __init__(
        self,
        collector: Collector | CpuCollector,
        collectives: Collectives,
        fakes: torch_common.FakeTensorMode,
        device_type: str,
    ) -> None:
        self._collector = collector
        self._collectives = collectives
        self._fakes = fakes
        self._device_type = device_type

    def inspect(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpFacts:
        """The facts of a call that gave `result`."""
        moved = flops.moved_bytes(func, args, kwargs, result)
        if self._collectives.note_call(name, args, kwargs, result):
            # Memory hides where FSDP2 copies gradients into the buffer that it reduces.
            memory = copy_in_memory(name, args, kwargs.get("out"), on_card=isinstance(self._collector, Collector))
            seen = None if memory is None else Seen(name, multiplies=False, multiplies_lt=False, memory=memory)
            return OpFacts(0, moved, hidden=seen)
        counted, host = flops.op_flops(func, args, kwargs, result), flops.host_bytes(name, args, result)
        return OpFacts(counted, moved, host, self._look(func, name, args, kwargs, result))

    def _look(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Seen | None:
        """What a call hides, with what the operators hide that its kernel calls."""
        seen = self._collector.find_hidden(name, args, result)
        if seen is not None and seen.memory is not None:
            return seen
        calls = [seen] if seen is not None else []

        def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> HiddenMemory | None:
            inner = self._look(func, str(func), args, kwargs, result)
            calls.extend([inner] if inner is not None else [])
            return None if inner is None else inner.memory

        memory = inner_memory(func, args, kwargs, self._fakes, self._device_type, look)
        if memory is None and not calls:
            return None
        multiplies, multiplies_lt = any(call.multiplies for call in calls), any(call.multiplies_lt for call in calls)
        call = seen.call if seen is not None and memory is None else None
        return Seen(name, multiplies=multiplies, multiplies_lt=multiplies_lt, memory=memory, call=call)
