"""`KernelTracer`: the nodes of a compiled step are its launches, in the order of forward.

A launch belongs to the operator of the program that it computes last. What runs in backward belongs to the launch of
forward for the same line of the same module, else to the last one of the same module.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.compiler import dynamo as torch_dynamo
from fxmem._torch.compiler import inductor as torch_inductor
from fxmem.records.profile import Kind, ModuleCall, Phase, RecomputedRegion, SourceLine
from fxmem.records.units import GRAPH_INPUT, GRAPH_POOL
from fxmem.simulation.asked import known_values
from fxmem.simulation.code.source_lines import calling_line, user_line
from fxmem.simulation.recording.flops import size_of_tensors
from fxmem.simulation.recording.observe.backward_hooks import SavedHandle
from fxmem.simulation.recording.observe.event_log import LOSS
from fxmem.simulation.recording.observe.fx_tracer import named_arguments
from fxmem.simulation.recording.observe.node_ledger import NodeLedger

_UNNOTED = frozenset({"empty_strided", "empty", "as_strided", "detach", "select", "view"})


class KernelTracer:
    """Writes down the launches of one run of `root`; stands where `ProgramTracer` does for eager code."""

    writes_anew = False
    path = ""
    """The module that runs, which is not known of compiled code."""

    def __init__(self, root: torch.nn.Module, nodes: NodeLedger) -> None:
        self.root = root
        self._log, self._ledger = nodes.log, nodes
        classes = {name: type(module) for name, module in root.named_modules()}
        self._find_class: Callable[[str], type[torch.nn.Module] | None] = classes.get
        """The class of the module with a path; None for none."""
        self._residents: dict[int, str] = {}
        self.wrappers: dict[str, torch_inductor.Wrapper] = {}
        """By file."""
        self.restart()

    def restart(self) -> None:
        """Begin an empty graph."""
        self.graph = torch.fx.Graph()
        self.nodes: list[torch.fx.Node] = []
        self.sources: list[SourceLine | None] = []
        self.calls: list[ModuleCall] = []
        self.recomputed: list[RecomputedRegion] = []
        self.constants: dict[str, torch.Tensor | None] = {}
        self.opaque: list[str] = ["compiled kernels"]
        self.launches = 0
        self._maker: dict[int, torch.fx.Node] = {}
        self._by_place: dict[tuple[str, str, str, int], int] = {}
        self._by_module: dict[tuple[str, str], int] = {}
        self._called_in: dict[int, str] = {}
        """By number of autograd's node of a compiled graph, the module that was called."""
        self.first_op: int | None = None
        """The first operator of the next node, once one has run."""
        self.is_inside = False
        """Whether compiled code is being called."""
        self._copies_inputs = False

    # --- the root -----------------------------------------------------------------------------------------------------

    def call_root(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled root, whose launches become the graph."""
        for name, value in itertools.chain(self.root.named_parameters(), self.root.named_buffers()):
            for part in torch_wrappers.parts(value):
                index = self._log.note_storage(part)
                if index is not None:
                    self._residents.setdefault(index, name)
        for name, value in named_arguments(self.root, args, kwargs):
            self._append(self.graph.placeholder(_identifier(name)), None, "", value)
        with torch_common.replace(self, "is_inside", True):
            out = run(*args, **kwargs)
        self._append(self.graph.output(self._find_makers(out)), None, "", out)
        return out

    # --- CUDA graphs --------------------------------------------------------------------------------------------------

    def make_random_state(self) -> list[torch.Tensor]:
        """Seed and offset that CUDA graphs read (`CUDAGeneratorState::register_graph`, cuda/CUDAGeneratorImpl.cpp)."""
        with self._log.streams.graph_stream():
            made = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]
            for name, tensor in zip(("seed", "offset"), made, strict=True):
                self._log.rename(tensor, f"{name} of CUDA graphs", Kind.BUFFER)
        return made

    def is_in_graph_pool(self, tensor: torch.Tensor) -> bool:
        """Whether a CUDA graph has allocated a tensor."""
        index = self._log.note_storage(tensor)
        return index is not None and self._log.storages[index].stream == GRAPH_POOL

    def copy_inputs(self, inputs: list[Any], moving: list[int]) -> None:
        """Put copies in the place of a CUDA graph's arguments; no launch makes them."""
        with torch_common.replace(self, "_copies_inputs", True):
            torch_dynamo.copy_inputs(inputs, moving)
        for position in moving:
            index = self._log.note_storage(inputs[position])
            if index is not None:
                self._log.storages[index].name = GRAPH_INPUT

    # --- launches -----------------------------------------------------------------------------------------------------

    def place(self, frame: Any) -> torch_inductor.KernelCall | None:
        """The launch that a frame runs for; None outside of what inductor wrote."""
        found = None if self._copies_inputs else torch_inductor.wrapper_frame(frame, self.wrappers)
        return None if found is None else found[0].find_call(found[1])

    def begin_op(self, call: torch_inductor.KernelCall | None) -> None:
        """Announce an operator, of a launch in a wrapper or of eager code."""
        if self._writes_nodes():
            if self.first_op is None:
                self.first_op = self._ledger.op_count()
            self._ledger.on_call(len(self.nodes))
        elif call is not None and self._log.phase is Phase.BACKWARD:
            self._ledger.resume_call(self._find_forward(call))

    def _writes_nodes(self) -> bool:
        """Whether launches are nodes of the graph."""
        return self._log.phase is Phase.FORWARD and self.is_inside

    def end_op(self, call: torch_inductor.KernelCall | None, name: str, args: Any, result: Any) -> None:
        """Note an operator that has run."""
        if call is not None and name not in _UNNOTED:
            self.launches += 1
        if not self._writes_nodes() or name in _UNNOTED or self._ledger.op_count() == self.first_op:
            return
        if call is None:
            self._note_node(name, "", calling_line(), args, result)
        else:
            self._note_call(call._replace(name=name), args, result)

    def launched(self, kernel: torch_inductor.StubKernel, args: tuple[Any, ...]) -> None:
        """A kernel that inductor wrote is launched."""
        written = [args[position] for position in kernel.outputs if isinstance(args[position], torch.Tensor)]
        for tensor in written:
            known_values.forget(tensor)
        if self._log.setting_up:
            return
        call = self.place(sys._getframe(1)) or torch_inductor.KernelCall(kernel.name, torch_inductor.Origin())
        if kernel.name != "cpp":
            call = call._replace(name=kernel.name)
        self.begin_op(call)
        self._log.note_call(call.name, size_of_tensors(args))
        self.launches += 1
        if self._writes_nodes():
            self._note_call(call, args, written)

    def _note_call(self, call: torch_inductor.KernelCall, args: Any, outputs: Any) -> None:
        origin = call.origin
        source = user_line(origin.file, origin.line, origin.function) if origin.file else None
        index = self._note_node(call.name, self._known_module(origin.module), source, args, outputs)
        self._by_place[self._path, *origin[:3]] = index
        self._by_module[self._path, origin.module] = index

    def _note_node(self, name: str, module: str, source: SourceLine | None, args: Any, outputs: Any) -> int:
        given = tuple(dict.fromkeys(self._find_makers(args)))
        node = self.graph.create_node("call_function", _named(name), given, {}, name=_identifier(name))
        index = self._append(node, source, module, outputs, self.first_op)
        self.first_op = None
        return index

    def _append(
        self, node: torch.fx.Node, source: SourceLine | None, module: str, outputs: Any, first_op: int | None = None
    ) -> int:
        found = self._find_class(module)
        node.meta["nn_module_stack"] = {} if found is None else {module: (module, found)}
        self.nodes.append(node)
        self.sources.append(source)
        index = len(self.nodes) - 1
        self._ledger.on_result(index, self._ledger.op_count() if first_op is None else first_op, outputs)
        for tensor in torch_common.iterate_tensors(outputs) if node.op != "output" else ():
            storage = self._log.note_storage(tensor)
            if storage is not None:
                self._maker[storage] = node
        return index

    def _find_makers(self, value: Any) -> tuple[torch.fx.Node, ...]:
        return tuple(node for node in map(self._find_maker, torch_common.iterate_tensors(value)) if node is not None)

    def _find_maker(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """Find the node that a tensor comes from; one of the root's own is written now."""
        storage = self._log.note_storage(tensor)
        if storage is None:
            return None
        if storage not in self._maker and storage in self._residents:
            self._append(self.graph.create_node("get_attr", self._residents[storage], (), {}), None, "", tensor)
        return self._maker.get(storage)

    @property
    def _path(self) -> str:
        """The module whose call is under way, where several are compiled by themselves."""
        return ""

    def _known_module(self, path: str) -> str:
        while path and self._find_class(path) is None:
            path = path.rpartition(".")[0]
        return path

    def _find_forward(self, call: torch_inductor.KernelCall) -> int:
        """The node of forward that a launch of backward is for."""
        outer = self._called_in.get(self._ledger.backward_node, "")
        found = self._by_place.get((outer, *call.origin[:3]))
        path = call.origin.module
        while found is None:
            found = self._by_module.get((outer, path))
            if not path:
                break
            path = path.rpartition(".")[0]
        return LOSS if found is None else found

    # --- what `ProgramTracer` has -------------------------------------------------------------------------------------

    observe_calls = observe_backward_calls = contextlib.nullcontext
    """Nothing of a compiled program is called that is not seen already."""

    def call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        """An `autograd.Function.apply`, such as a compiled graph is."""
        outputs = apply(*args)
        node, stashed = torch_inductor.stashed_tensors(outputs)
        if node is not None:
            self._called_in[torch_autograd.sequence_number(node)] = self._path
        if stashed:
            node._fxmem_stashed = [SavedHandle(tensor, torch_autograd.NO_HOOKS) for tensor in stashed]
            for handle in node._fxmem_stashed:
                self._ledger.on_save(handle.value, weakref.ref(handle))
        return outputs


def _named(name: str) -> Callable[..., Any]:
    """A function of this name, which the graph can only name."""

    def launch(*args: Any) -> None:
        raise NotImplementedError(name)

    launch.__module__, launch.__name__, launch.__qualname__ = "inductor", name, name
    return launch


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
