"""Writes the graph of one round of a program: calls of its modules, and of torch between them.

The program is the root, a module without a class of its own, whose children come as they are moved to the card or
called there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from fxmem._torch import common as torch_common
from fxmem._torch import programs as torch_programs
from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.card.card_thread import Roots, has_target_tensors
from fxmem.simulation.recording.observe.fx_tracer import ProgramTracer
from fxmem.simulation.recording.observe.node_ledger import NodeLedger
from fxmem.simulation.recording.observe.observer import Observer, PendingCall


class ProgramRoot(torch.nn.Module):
    """The program, whose children are its modules; while it runs, none, for it may drop them."""


class RoundTracer(ProgramTracer):
    """Traces a program round by round.

    Args:
        roots: the program's modules.
        nodes: the program's ledger.
        everything_is_targets: whether calls without a FakeTensor count as well, as on the CPU.
        program: told before each call of a root, and when a call outside every node gave what needs a gradient.
    """

    def __init__(self, roots: Roots, nodes: NodeLedger, program: Observer, *, everything_is_targets: bool) -> None:
        self._roots = roots
        self._ledger, self._log = nodes, nodes.log
        self._everything = everything_is_targets
        self._depth: int | None = None
        """Modules whose calls were under way when the backward that runs now began; None outside of any."""
        super().__init__(ProgramRoot(), nodes, program, writes_anew=True)
        self.restart()

    def restart(self) -> None:
        """Begin the graph of another round."""
        self._roots.begin_round()
        self._start_graph()
        self.writer.find_maker = self._find_node
        self._names = {}
        self._noted = set[str]()
        self._note_roots()
        self._state = "tracing"
        self._cursor = 0

    def _is_input(self, tensor: torch.Tensor) -> bool:
        on_target = torch_common.device_type(tensor) == self._log.device_type
        return not (on_target and isinstance(tensor, torch_common.FakeTensor))

    def write_nothing(self) -> contextlib.AbstractContextManager[None]:
        """Run what is no part of a step: parameters that move to the card."""
        return self._own_work()

    def _find_node(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """The node that made what a tensor lies in, in this round: a view that is no call of the program's."""
        index = None if torch_wrappers.is_transformed(tensor) else self._log.find_storage(tensor)
        node = None if index is None else self._log.storages[index].node
        # What a rank gathers for a node is a parameter to the program, not a result of the node.
        results = self._ledger.results.get(node, ()) if node is not None else ()
        if node is None or node >= len(self.nodes) or all(storage != index for _, _, storage in results):
            return None
        return self.nodes[node]

    def describe_node(self, node: int) -> str:
        """What a node calls, and the line that calls it; empty for a call that raised before it was written."""
        if node >= len(self.nodes):
            return ""
        target, source = self.nodes[node].target, self.sources[node]
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        return name if source is None else f"{name} at {source.place}"

    def pause(self) -> None:
        """Write no node until `resume`: what runs is the optimizer's."""
        if self._state == "tracing":
            self._state = "after"

    def resume(self) -> None:
        """Write nodes again."""
        if self._state == "after":
            self._state = "tracing"

    def _make_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread or isinstance(module, torch.jit.ScriptModule):
                return original(module, *args, **kwargs)
            name = self._find_path(module, args, kwargs)
            if name is None:
                return original(module, *args, **kwargs)
            if self._state not in ("tracing", "after") or self.writer.stack:
                return self._run_module(original, module, name, args, kwargs)
            self._program.on_module_call(module, args, kwargs)
            call = PendingCall(
                *(module, args, kwargs),
                run=lambda: self._run_module(original, module, name, args, kwargs),
                as_node=lambda run: self._call("call_module", name, args, kwargs, run),
            )
            return self._program.run_module(call)

        return call_module

    def _run_module(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._state not in ("tracing", "recomputing"):
            return original(module, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            if self._is_backward():
                stack.callback(self._ledger.resume_call, self._ledger.current_call())
            compiled = torch_wrappers.wrapped_module(module)
            if compiled is not None or not self.is_leaf_module(module, name):
                return self._call_inner(name, compiled or module, lambda: original(module, *args, **kwargs))
            return self._call("call_module", name, args, kwargs, lambda: original(module, *args, **kwargs))

    def _find_path(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        path = self._roots.find_path(module)
        if path is not None:
            return path
        on_target = self._everything or has_fake(args) or has_fake(kwargs)
        if not on_target and not has_target_tensors(module, self._log.device_type):
            return None
        with self._own_work():
            path = self._roots.adopt(module)
            self._note_roots()
        return path

    def _note_roots(self) -> None:
        """Let the graph name the tensors of roots that have just come."""
        there = {name: module for module, name in self._roots}
        for name in self._noted - there.keys():
            self.writer.forget_attributes(name)
        for name in there.keys() - self._noted:
            self.writer.note_attributes(there[name], name)
        self._noted = set(there)

    @contextlib.contextmanager
    def observe_backward_calls(self) -> Iterator[None]:
        """As that of a step; what the backward of an `autograd.Function` calls outside modules is no node but belongs
        to that of its forward."""
        with super().observe_backward_calls(), torch_common.replace(self, "_depth", len(self.writer.stack)):
            yield

    def call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        """An `autograd.Function.apply` that the program makes."""
        return apply(*args) if self._is_backward() else super().call_function(cls, args, apply)

    def _is_backward(self) -> bool:
        """Whether what is called now is called by a backward, and not by a module."""
        return self._depth == len(self.writer.stack) and self._state == "tracing"

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function or method that the program calls."""
        on_target = self._everything or _names_card(function, args, kwargs) or has_fake(args) or has_fake(kwargs)
        is_none = function in _NO_CALLS or (not self.writer.stack and function in _BETWEEN)
        if not on_target or is_none or self._is_backward():
            run = self._program.find_replacement(function) or function
            return run(*args, **kwargs)
        if not self._inside:
            self._program.on_torch_call()
        result = super().call_torch(function, args, kwargs)
        if self._state == "after" and not self._inside and needs_gradient(result):
            self._program.on_gradient()
        return result


_NO_CALLS: Final[tuple[Any, ...]] = (torch.Tensor.backward, torch.Tensor.__deepcopy__)
"""What is no node of the graph: a copy's second argument is all that was copied before it."""

_BETWEEN: Final = frozenset({torch_programs.GET_GRAD, torch_programs.GET_DATA})
"""Reads that are no computation of the program's own, outside its modules: of what is not a call's result."""


def _names_card(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call says that its result is to be on a card: `torch.zeros(3, device="cuda")`, `x.to(0)`."""
    if function is torch.Tensor.cuda:
        return True
    where = kwargs.get("device")
    if where is None and function is torch.Tensor.to and len(args) > 1:
        where = args[1]
    if isinstance(where, str):
        return where.startswith("cuda")
    return (isinstance(where, torch.device) and where.type == "cuda") or type(where) is int


def has_fake(value: Any, depth: int = 0) -> bool:
    """Whether a FakeTensor of the card, or a wrapper of one, is among nested arguments."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch_common.FakeTensor):
            return value.fake_device.type != "cpu"
        # A wrapper's parts are asked for only where there are wrappers: they are rare on the host.
        return type(value) not in (torch.Tensor, torch.nn.Parameter)
    if depth > 3:
        return False
    if isinstance(value, (list, tuple)):
        return any(has_fake(each, depth + 1) for each in value)
    return isinstance(value, dict) and any(has_fake(each, depth + 1) for each in value.values())


def needs_gradient(value: Any) -> bool:
    """Whether a tensor that some gradient leads to was returned."""
    return torch.is_grad_enabled() and isinstance(value, torch.Tensor) and value.grad_fn is not None


def is_within_module(node: torch.fx.Node) -> bool:
    """Whether a call is a module's, or was made by a module's code."""
    return node.op == "call_module" or bool(node.meta["nn_module_stack"])
