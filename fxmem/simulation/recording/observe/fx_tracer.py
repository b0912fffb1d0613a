"""Writes the `torch.fx.Graph` of a model while the model itself runs.

`ProgramTracer` is a `torch.fx.Tracer` whose graph is not made from proxies but noted down: a `TorchFunctionMode` sees
each torch call of the running program, and torch.fx's own leaf-module rule decides which module calls are nodes. The
values are whatever the program is run with, FakeTensors as a rule, so the Python of the model decides its own control
flow and keeps its own references.

What equals `torch.fx.symbolic_trace` on every model it accepts: the sequence of `call_module` nodes and of calls that
produce tensors. What differs by construction: `x + y` is written as the method the interpreter calls (`add`) where the
two cannot be distinguished; shapes and other numbers are constants of this run; functions marked with `torch.fx.wrap`
are looked into.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from fxmem._torch import checkpoint as torch_checkpoint
from fxmem._torch import common as torch_common
from fxmem.records.profile import ModuleCall, RecomputedRegion, SourceLine
from fxmem.simulation.code.source_lines import calling_line, calling_lines
from fxmem.simulation.recording.observe.backward_hooks import assigns_to_a_tensor, call_unheld
from fxmem.simulation.recording.observe.fx_writer import GraphWriter, as_node, has_tensor, named_apply
from fxmem.simulation.recording.observe.observer import Observer

_METADATA_METHODS = frozenset(
    """size stride dim ndimension numel nelement storage_offset is_contiguous element_size data_ptr untyped_storage
    get_device""".split()
)
_METADATA_ATTRIBUTES = frozenset(
    "shape dtype device layout ndim requires_grad is_leaf is_quantized is_sparse is_cuda is_meta".split()
)
_WATCHED = ("tracing", "recomputing", "repeating")
"""States in which the program's calls are looked at: the first run, a checkpointed region that runs again, the second
run."""


CALLED_FROM = "called_from"
"""The key of a node's `meta` with the program's own line, where a package's code makes the call and no module's call
has that line."""


class _TorchCall(NamedTuple):
    """What a torch function is, whoever calls it."""

    is_metadata: bool
    """Whether it only tells what a tensor is like: two of three calls of a program do."""
    is_noted: bool
    """Whether others are told that it was called."""
    replacement: Callable[..., Any] | None
    """What runs in its place."""
    frees: bool
    """Whether it may free an argument that the caller has given away."""


class ProgramTracer(torch.fx.Tracer):
    """Traces one call of `root`, which the caller makes inside `observe_calls()`.

    Args:
        root: the module whose first call becomes the graph.
        observer: told at every border of a node.
        program: told of calls that matter to others; knows what to run in the place of a torch function.
        writes_anew: whether each run is written anew, as of code whose runs are not alike.
    """

    def __init__(
        self, root: torch.nn.Module, observer: Observer, program: Observer | None = None, *, writes_anew: bool = False
    ) -> None:
        super().__init__()
        self.root = root
        self._observer = observer
        self._program = program or Observer()
        self.writes_anew = writes_anew
        self._start_graph()
        self._thread = threading.get_ident()
        self._lines: list[SourceLine | None] = []
        """The lines of the module calls that are under way."""
        self._names = {module: name for name, module in root.named_modules()}
        self._named_apply = functools.cache(named_apply)
        self._torch_calls: dict[Any, _TorchCall] = {}
        self._inside = 0
        self._state = "before"
        self._cursor = 0
        self._writes_no_graph = False

    def _start_graph(self) -> None:
        """Begin an empty graph of the root."""
        observer = self._observer

        def on_value(node: int, value: Any) -> None:
            observer.on_result(node, observer.op_count(), value)

        self.writer = GraphWriter(self.root, type(self), on_value, self._is_input)
        """Writes the graph."""
        self.writer.find_name = observer.find_name
        self.graph, self.nodes, self.sources = self.writer.graph, self.writer.nodes, self.writer.sources
        """What the writer makes; `on_call` counts its nodes."""
        self.calls: list[ModuleCall] = []
        """Calls of modules that are not leaves, as they end; those without a node are left out."""
        self.recomputed: list[RecomputedRegion] = []
        """Regions under `torch.utils.checkpoint`, as they end."""
        self.constants, self.opaque = self.writer.constants, self.writer.opaque
        """What the graph reads from attributes, and what it can only name: a graph with any of that cannot be run."""

    def _is_input(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that no call made is an input, and not a constant."""
        return False

    @property
    def path(self) -> str:
        """The module whose call is under way; empty for none and for the root."""
        return self.writer.stack[-1][0] if self.writer.stack else ""

    @property
    def writes(self) -> bool:
        """Whether what is called now becomes a node of its own."""
        return self._state == "tracing" and not self._inside

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """As torch.fx has it, but modules of torch.nn that run layers, or the program's model, are looked into."""
        return not isinstance(m, torch_common.CONTAINERS) and super().is_leaf_module(m, module_qualified_name)

    # --- running ------------------------------------------------------------------------------------------------------

    def observe_calls(self) -> AbstractContextManager[None]:
        """Watch this thread's torch and module calls. The first call of `root` inside is the one traced."""
        return torch_common.nested(
            torch_common.patch(torch.nn.Module, "__call__", self._make_module_call),
            Listener(self),
            torch_checkpoint.checkpoint_regions(self._checkpoint_region, self._own_work),
        )

    def observe_backward_calls(self) -> AbstractContextManager[None]:
        """Observe what backward recomputes: `Tensor.backward` is itself an observed call, during which the observer is
        off."""
        return contextlib.nullcontext() if torch_common.is_function_mode_active() else Listener(self)

    def restart(self) -> None:
        """Between two runs of the same program: attribute the next call of `root` to the graph already written."""
        if self.writes_anew:
            self._start_graph()
        self._state = "after" if self._writes_no_graph else "before"
        self._cursor = 0

    def write_no_graph(self) -> None:
        """Let the runs from here on be like what follows the call of `root`: no call becomes a node."""
        self._writes_no_graph = True

    def _make_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # A leaf's own frames must not outlive the call, and its arguments must not be held longer than the program
        # holds them.
        def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            if module is self.root and self._state == "before":
                return self._trace_root(original, args, kwargs)
            name = self._names.get(module)
            if name is None or self._state not in _WATCHED:
                return original(module, *args, **kwargs)
            if module is self.root or not self.is_leaf_module(module, name):
                return self._call_inner(name, module, lambda: original(module, *args, **kwargs))
            return self._call("call_module", name, args, kwargs, lambda: original(module, *args, **kwargs))

        return call_module

    def _call_inner(self, name: str, module: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """A module that is looked into; a step that ends within the call begins another graph, outside of it."""
        tracing, nodes, stack, lines = self._state == "tracing", self.nodes, self.writer.stack, self._lines
        source, first = calling_line() if tracing else None, len(nodes)
        stack.append((name, type(module)))
        lines.append(source)
        result: Any = None
        try:
            result = run()
            return result
        finally:
            stack.pop()
            lines.pop()
            if tracing and nodes is self.nodes and len(nodes) > first:
                found = ModuleCall(
                    module=name,
                    first_node=first,
                    last_node=len(nodes),
                    source=source,
                    leads_to_gradients=_leads_to_gradients(result),
                    skips_checkpoint=getattr(module, "gradient_checkpointing", None) is True and not module.training,
                )
                self.calls.append(found)
            del result

    def _trace_root(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = not self.nodes
        self._state = "tracing" if first else "repeating"
        if first:
            with self._own_work():
                for name, value in named_arguments(self.root, args, kwargs):
                    self.writer.placeholder(name, value)
        self.writer.stack.append(("", type(self.root)))
        try:
            result = original(self.root, *args, **kwargs)
        finally:
            self.writer.stack.pop()
            self._state = "after"
        if first:
            with self._own_work():
                self.writer.output(result)
        self._observer.on_result(len(self.nodes) - 1, self._observer.op_count(), result)
        return result

    def call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        """An `autograd.Function.apply` the program makes: one node; reentrant checkpointing, which is one, is looked
        into."""
        if self._inside or self._state not in _WATCHED or cls is torch.utils.checkpoint.CheckpointFunction:
            return apply(*args)
        return self._call("call_function", self._named_apply(cls), args, {}, lambda: apply(*args))

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function or method the program calls."""
        known = self._know(function)
        run = known.replacement or function
        if known.is_metadata:  # these, too, if they are replaced
            return run(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if known.is_noted and args and isinstance(args[0], torch.Tensor):
            result = run(*args, **kwargs)
            self._program.on_tensor_method(name, args[0])
            return result
        if self._inside or self._state not in _WATCHED:
            return call_unheld(run, args, kwargs) if known.frees else run(*args, **kwargs)
        op, target, shown = as_node(function, name, args)
        if op is None:
            return run(*args, **kwargs)
        if known.frees:
            return self._call(op, target, shown, kwargs, lambda: call_unheld(run, args, kwargs), frees=True)
        return self._call(op, target, shown, kwargs, lambda: run(*args, **kwargs))

    def _know(self, function: Any) -> _TorchCall:
        """What a torch function is, looked up once."""
        try:
            return self._torch_calls[function]
        except (KeyError, TypeError):  # not hashable
            name, attribute = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        replacement, is_metadata = self._program.find_replacement(function), name in _METADATA_METHODS
        if name == "__get__" and type(attribute) is types.GetSetDescriptorType:
            is_metadata = attribute.__name__ in _METADATA_ATTRIBUTES and replacement is None
        frees = replacement is None and assigns_to_a_tensor(function)
        known = _TorchCall(is_metadata, name in ("register_hook", "retain_grad"), replacement, frees)
        with contextlib.suppress(TypeError):
            self._torch_calls[function] = known
        return known

    def _call(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
        *,
        frees: bool = False,
    ) -> Any:
        """Run one leaf call and, if it made or changed a tensor, write it down; of one that `frees` its arguments, what
        these are is written first."""
        if self._state != "tracing":
            return self._repeat_call(op, target, run)
        lifted = self.writer.lift(args, kwargs) if frees else None
        first_op = self._observer.op_count()
        self._observer.on_call(len(self.nodes))
        self._inside += 1
        try:
            result = run()
            if self._observer.op_count() == first_op and not has_tensor(result):
                return result
            # Written only now, so that asking a tensor for its shape leaves no trace of the tensor.
            source, own = calling_lines()
            index = self.writer.call(op, target, lifted or self.writer.lift(args, kwargs), result, source)
            if own is not None and own not in self._lines:
                self.nodes[index].meta[CALLED_FROM] = own
        except Exception:
            if self._observer.op_count() > first_op:  # what ran until then is its own, as where it runs out of memory
                lifted, source = lifted or self.writer.lift(args, kwargs), calling_lines()[0]
                self._observer.on_result(self.writer.call(op, target, lifted, None, source), first_op, None)
            raise
        finally:
            self._inside -= 1
        self._observer.on_result(index, first_op, result)
        return result

    def _repeat_call(self, op: str, target: Any, run: Callable[[], Any]) -> Any:
        """Run a call that was written down before: in a region that is recomputed, or as the whole program is run a
        second time."""
        repeating, first_op = self._state == "repeating", self._observer.op_count()
        index = self._find_first_run(op, target)
        self._observer.on_call(index)
        with self._own_work():
            result = run()
        if repeating and (self.nodes[index].op, self.nodes[index].target) == (op, target):
            self._observer.on_result(index, first_op, result)
        return result

    # --- checkpointed regions -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _own_work(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _checkpoint_region(self) -> tuple[Callable[[Callable[..., Any]], Callable[..., Any]], Callable[[], None]]:
        tracing = self._state == "tracing"
        start = self._cursor if self._state in ("recomputing", "repeating") else len(self.nodes)
        stack = list(self.writer.stack)

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def recompute(*args: Any, **kwargs: Any) -> Any:
                outer, interrupted = (self._state, self._cursor, self.writer.stack), self._observer.current_call()
                self._state, self._cursor, self.writer.stack = "recomputing", start, list(stack)
                try:
                    with self._observer.observe_recomputation():
                        return function(*args, **kwargs)
                finally:
                    self._state, self._cursor, self.writer.stack = outer
                    self._observer.resume_call(interrupted)

            return recompute

        def end_call() -> None:
            if tracing and len(self.nodes) > start:
                self.recomputed.append(RecomputedRegion(first_node=start, last_node=len(self.nodes)))

        return wrap, end_call

    def _find_first_run(self, op: str, target: Any) -> int:
        """The node written for this call when it first ran: the next one like it."""
        for index in range(self._cursor, len(self.nodes)):
            node = self.nodes[index]
            if node.op == op and node.target == target:
                self._cursor = index + 1
                return index
        return min(self._cursor, len(self.nodes) - 1)


class Listener(TorchFunctionMode):
    """Hands every torch call of the program to a tracer."""

    def __init__(self, tracer: ProgramTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.call_torch(func, args, kwargs or {})


def _leads_to_gradients(result: Any) -> bool:
    """Whether a tensor among what a module returned, or in the containers there, has a graph behind it."""
    if isinstance(result, torch.Tensor):
        return result.requires_grad
    if isinstance(result, Mapping):
        return any(map(_leads_to_gradients, result.values()))
    return isinstance(result, list | tuple) and any(map(_leads_to_gradients, result))


def named_arguments(root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments of `root(*args, **kwargs)` with the names its forward gives them."""
    code = getattr(type(root).forward, "__code__", None)
    names = [n for n in code.co_varnames[1 : code.co_argcount] if n not in kwargs] if code is not None else []
    return [*((names[i] if i < len(names) else f"input_{i}", value) for i, value in enumerate(args)), *kwargs.items()]
