"""Writes the `torch.fx.Graph` of a model while the model itself runs.

`ProgramTracer` is a `torch.fx.Tracer` whose graph is not made from proxies but noted down: a `TorchFunctionMode` sees each
torch call of the running program, and torch.fx's own leaf-module rule decides which module calls are nodes. The values
are whatever the program is run with, FakeTensors as a rule, so the Python of the model decides its own control flow and
keeps its own references.

What equals `torch.fx.symbolic_trace` on every model it accepts: the sequence of `call_module` nodes and of calls that
produce tensors. What differs by construction: `x + y` is written as the method the interpreter calls (`add`) where the
two cannot be told apart; shapes and other numbers are constants of this run; functions marked with `torch.fx.wrap` are
looked into.

Nodes carry torch.fx's `nn_module_stack`, `stack_trace` and `tensor_meta`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import linecache
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.fx
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fxmem import _torch, _torch_checkpoint
from fxmem.records import ModuleCall, RecomputedRegion, SourceLine

__all__ = ["CallObserver", "ProgramTracer", "innermost_user_line", "named_arguments", "user_frame", "user_line"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_STEP = _HERE + "step.py"
_NOT_THE_USERS = (_TORCH, _HERE, os.path.dirname(contextlib.__file__) + os.sep + "contextlib.py", os.path.dirname(os.__file__) + os.sep + "functools.py")

_OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in (
        *("__add__", "__sub__", "__mul__", "__matmul__", "__truediv__", "__floordiv__", "__mod__", "__pow__", "__neg__", "__pos__", "__abs__", "__invert__"),
        *("__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__getitem__", "__setitem__"),
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__"),
    )
}
_REFLECTED = {f"__r{name[2:]}": function for name, function in _OPERATORS.items()}
_WRAPPED_OPERATORS = {torch.Tensor.__pow__: operator.pow, torch.Tensor.__ipow__: operator.ipow}
"""Python functions of torch/_tensor.py whose names are not the operators'."""
_METADATA_METHODS = frozenset(
    {"size", "stride", "dim", "ndimension", "numel", "nelement", "storage_offset", "is_contiguous", "element_size", "data_ptr", "untyped_storage", "get_device"}
)
_METADATA_ATTRIBUTES = frozenset({"shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_quantized", "is_sparse", "is_cuda", "is_meta"})
_WATCHED = ("tracing", "recomputing", "repeating")
"""States in which the program's calls are looked at: the first run, a checkpointed region that runs again, the second run."""
_CONSTANTS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...), enum.Enum)


class CallObserver(Protocol):
    """Who is told which node the program is working for."""

    def on_call(self, node: int) -> None:
        """Everything from here until the next `on_call` happens for the node with this index in the graph."""

    def on_result(self, node: int, first_op: int, result: Any) -> None:
        """The node with this index returned `result`; it ran the ops from `first_op` on, whatever `on_call` had announced."""

    def op_count(self) -> int:
        """How many ops have run."""

    def current_call(self) -> int:
        """The node announced last, or whatever stands for none."""

    def resume_call(self, node: int) -> None:
        """Go on with what `current_call` told before an interruption."""


@dataclasses.dataclass
class _Element:
    """A tensor inside what a node returned; its `getitem` is written when something reads it."""

    parent: torch.fx.Node | _Element
    key: Any
    node: torch.fx.Node | None = None


class ProgramTracer(torch.fx.Tracer):
    """Traces one call of `root`, made by whoever runs the program inside `listening()`.

    Args:
        root: the module whose first call is written down.
        observer: told about node boundaries as they happen.
        replacement: given a torch function, what to run in its place (or None); always the same answer.
        on_tensor_method: told of `Tensor.register_hook` and `Tensor.retain_grad` calls as `(name, tensor)`.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        observer: CallObserver,
        *,
        replacement: Callable[[Any], Callable[..., Any] | None] = lambda _: None,
        on_tensor_method: Callable[[str, torch.Tensor], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self.root = root
        self.graph = torch.fx.Graph(tracer_cls=type(self))
        self.nodes: list[torch.fx.Node] = []
        """The graph's nodes in order; what `on_call` counts."""
        self.sources: list[SourceLine | None] = []
        self.calls: list[ModuleCall] = []
        """Calls of modules that are not leaves, as they end; those without a node are left out."""
        self.recomputed: list[RecomputedRegion] = []
        """Regions under `torch.utils.checkpoint`, as they end."""
        self.constants: dict[str, torch.Tensor | None] = {}
        """Tensors the program used that neither a call nor the module made, by the attribute the graph reads them from."""
        self.opaque: list[str] = []
        """Arguments the graph can only name, not hold; a graph with any cannot be run."""
        self._observer = observer
        self._replacement = replacement
        self._on_tensor_method = on_tensor_method
        self._thread = threading.get_ident()
        self._names = {module: name for name, module in root.named_modules()}
        self._attributes = _tensor_attributes(root)
        self._node_of = WeakTensorKeyDictionary()
        self._stack: list[tuple[str, type]] = []
        self._applied: dict[type, Callable[..., Any]] = {}
        self._ordinary: dict[Any, bool] = {}
        self._tells: dict[Any, bool] = {}
        self._tensor_metas: dict[tuple[Any, ...], Any] = {}
        self._inside = 0
        self._state = "before"
        self._cursor = 0

    # --- running -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Watch this thread's torch and module calls. The first call of `root` inside is the one traced."""
        with (
            _torch.patched(torch.nn.Module, "__call__", self._make_module_call),
            _Listener(self),
            _torch_checkpoint.checkpoint_regions(self._checkpoint_region, self._own_work),
        ):
            yield

    @contextlib.contextmanager
    def listening_in_backward(self) -> Iterator[None]:
        """`Tensor.backward` is itself a call the listener is shown, and while it is, the listener is off; recomputation needs it on."""
        if _torch.is_function_mode_on():
            yield
        else:
            with _Listener(self):
                yield

    def again(self) -> None:
        """Between two runs of the same program: attribute the next call of `root` to the graph already written."""
        self._state = "before"
        self._cursor = 0

    def _make_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # A leaf's own frames must not outlive the call, and its arguments must not be held longer than the program holds them.
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
        """A module that is looked into."""
        tracing, first = self._state == "tracing", len(self.nodes)
        source = _source_line() if tracing else None
        self._stack.append((name, type(module)))
        try:
            return run()
        finally:
            self._stack.pop()
            if tracing and len(self.nodes) > first:
                self.calls.append(ModuleCall(module=name, first_node=first, last_node=len(self.nodes), source=source))

    def _trace_root(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = not self.nodes
        self._state = "tracing" if first else "repeating"
        if first:
            self._placeholders(args, kwargs)
        self._stack.append(("", type(self.root)))
        try:
            result = original(self.root, *args, **kwargs)
        finally:
            self._stack.pop()
            self._state = "after"
        if first:
            self._append(self.graph.output(self._lift(result)), None)
        self._observer.on_result(len(self.nodes) - 1, self._observer.op_count(), result)
        return result

    def call_function(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        """An `autograd.Function.apply` the program makes: one node; reentrant checkpointing, which is one, is looked into."""
        if self._inside or self._state not in _WATCHED or cls is torch.utils.checkpoint.CheckpointFunction:
            return apply(*args)
        if cls not in self._applied:
            self._applied[cls] = _named_apply(cls)
        return self._call("call_function", self._applied[cls], args, {}, lambda: apply(*args))

    def call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function or method the program calls."""
        if self._is_metadata(function):
            return function(*args, **kwargs)
        idle = self._inside or self._state not in _WATCHED
        if idle and self._is_ordinary(function):
            return function(*args, **kwargs)
        run = self._replacement(function) or function
        name = getattr(function, "__name__", "")
        if name in ("register_hook", "retain_grad") and args and isinstance(args[0], torch.Tensor):
            result = run(*args, **kwargs)
            self._on_tensor_method(name, args[0])
            return result
        if idle or name in _METADATA_METHODS:  # these, too, if they are replaced
            return run(*args, **kwargs)
        op, target, shown = _as_node(function, name, args)
        if op is None:
            return run(*args, **kwargs)
        return self._call(op, target, shown, kwargs, lambda: run(*args, **kwargs))

    def _is_metadata(self, function: Any) -> bool:
        """Whether a torch function only tells what a tensor is like: two of three calls of a program do."""
        try:
            known = self._tells.get(function)
        except TypeError:  # not hashable
            return False
        if known is None:
            name, attribute = getattr(function, "__name__", ""), getattr(function, "__self__", None)
            if name == "__get__" and type(attribute) is types.GetSetDescriptorType:
                tells = attribute.__name__ in _METADATA_ATTRIBUTES
            else:
                tells = name in _METADATA_METHODS
            known = self._tells[function] = tells and self._replacement(function) is None
        return known

    def _is_ordinary(self, function: Any) -> bool:
        """Whether a torch function is run as it is where no calls are written down."""
        try:
            known = self._ordinary.get(function)
        except TypeError:  # not hashable
            return False
        if known is None:
            noted = getattr(function, "__name__", "") in ("register_hook", "retain_grad")
            known = self._ordinary[function] = not noted and self._replacement(function) is None
        return known

    def _call(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run one leaf call and, if it made or changed a tensor, write it down."""
        if self._state != "tracing":
            return self._call_again(op, target, run)
        first_op = self._observer.op_count()
        self._observer.on_call(len(self.nodes))
        self._inside += 1
        try:
            result = run()
        finally:
            self._inside -= 1
        if self._observer.op_count() == first_op and not _has_tensor(result):
            return result
        # Written only now, so that asking a tensor for its shape leaves no trace of the tensor.
        lifted, lifted_kwargs = self._lift(args), self._lift(kwargs)
        node = self.graph.create_node(op, target, lifted, lifted_kwargs)
        index = self._append(node, _source_line())
        if target is not operator.setitem:
            self._bind(node, result)
        node.meta["tensor_meta"] = self._tensor_metas_of(result)
        self._observer.on_result(index, first_op, result)
        return result

    def _call_again(self, op: str, target: Any, run: Callable[[], Any]) -> Any:
        """Run a call that was written down before: in a region that is recomputed, or as the whole program is run a second time."""
        repeating, index, first_op = self._state == "repeating", self._recomputed(op, target), self._observer.op_count()
        self._observer.on_call(index)
        self._inside += 1
        try:
            result = run()
        finally:
            self._inside -= 1
        if repeating and (self.nodes[index].op, self.nodes[index].target) == (op, target):
            self._observer.on_result(index, first_op, result)
        return result

    # --- checkpointed regions ------------------------------------------------------------------------------------------

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
        stack = list(self._stack)

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def recompute(*args: Any, **kwargs: Any) -> Any:
                outer, interrupted = (self._state, self._cursor, self._stack), self._observer.current_call()
                self._state, self._cursor, self._stack = "recomputing", start, list(stack)
                try:
                    return function(*args, **kwargs)
                finally:
                    self._state, self._cursor, self._stack = outer
                    self._observer.resume_call(interrupted)

            return recompute

        def ended() -> None:
            if tracing and len(self.nodes) > start:
                self.recomputed.append(RecomputedRegion(first_node=start, last_node=len(self.nodes)))

        return wrap, ended

    def _recomputed(self, op: str, target: Any) -> int:
        """The node written for this call when it first ran: the next one like it."""
        for index in range(self._cursor, len(self.nodes)):
            node = self.nodes[index]
            if node.op == op and node.target == target:
                self._cursor = index + 1
                return index
        return min(self._cursor, len(self.nodes) - 1)

    # --- writing -------------------------------------------------------------------------------------------------------

    def _append(self, node: torch.fx.Node, source: SourceLine | None) -> int:
        self.nodes.append(node)
        self.sources.append(source)
        node.meta["nn_module_stack"] = {path: (path, cls) for path, cls in self._stack}
        if source is not None:
            node.meta["stack_trace"] = f'  File "{source.file}", line {source.line}, in {source.function}\n    {source.code}'
        return len(self.nodes) - 1

    def _placeholders(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in named_arguments(self.root, args, kwargs):
            self._placeholder(name, value)

    def _placeholder(self, name: str, value: Any) -> None:
        node = self.graph.placeholder(name)
        index = self._append(node, None)
        self._bind(node, value)
        if isinstance(value, torch.Tensor):
            node.meta["tensor_meta"] = self._tensor_meta(value)
        self._observer.on_result(index, self._observer.op_count(), value)

    def _tensor_metas_of(self, result: Any) -> Any:
        """What a node returned with metadata in its tensors' places; None without any."""
        if isinstance(result, torch.Tensor):
            return self._tensor_meta(result)
        return _torch.tree_map_only(torch.Tensor, self._tensor_meta, result) if _has_tensor(result) else None

    def _tensor_meta(self, tensor: torch.Tensor) -> Any:
        """torch.fx's record of a tensor's metadata; most tensors are like one before."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            with self._own_work():
                return _torch.tensor_metadata(tensor)
        key = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
        known = self._tensor_metas.get(key)
        if known is None:
            with self._own_work():
                known = self._tensor_metas[key] = _torch.tensor_metadata(tensor)
        return known

    def _bind(self, node: torch.fx.Node | _Element, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._node_of[result] = node
        elif isinstance(result, dict):
            for key, value in result.items():
                self._bind(_Element(node, key), value)
        elif dataclasses.is_dataclass(result):
            for field in dataclasses.fields(result):
                self._bind(_Element(node, _Attribute(field.name)), getattr(result, field.name))
        elif isinstance(result, (tuple, list)):
            for position, value in enumerate(result):
                self._bind(_Element(node, position), value)

    def _lift(self, value: Any) -> Any:
        """A program's value as an argument of a torch.fx node."""
        if isinstance(value, torch.Tensor):
            return self._lift_tensor(value)
        if isinstance(value, _CONSTANTS):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._made(type(value), tuple(self._lift(v) for v in value), {})
        if isinstance(value, tuple):
            return tuple(self._lift(v) for v in value)
        if isinstance(value, list):
            return [self._lift(v) for v in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return self._made(type(value), (), {k: self._lift(v) for k, v in fields.items() if v is not None})
        if isinstance(value, dict):
            return {k: self._lift(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(self._lift(value.start), self._lift(value.stop), self._lift(value.step))
        if isinstance(value, (range, types.FunctionType, types.BuiltinFunctionType, type)):
            return value
        self.opaque.append(type(value).__qualname__)
        return f"<{type(value).__qualname__}>"

    def _made(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
        node = self.graph.create_node("call_function", cls, args, kwargs)
        self._append(node, None)
        return node

    def _lift_tensor(self, tensor: torch.Tensor) -> torch.fx.Node:
        known = self._node_of.get(tensor)  # type: ignore[no-untyped-call]
        if isinstance(known, torch.fx.Node):
            return known
        if isinstance(known, _Element):
            return self._getitem(known)
        name = self._attributes.get(id(tensor))
        if name is None:
            name = f"_tensor_constant{len(self.constants)}"
            # Only a real tensor can be a constant of the graph; a fake one must not be kept alive here.
            self.constants[name] = None if isinstance(tensor, _torch.FakeTensor) else tensor
            if self.constants[name] is None:
                self.opaque.append("a tensor no traced call made")
        node = self.graph.create_node("get_attr", name, (), {})
        index = self._append(node, None)
        self._node_of[tensor] = node
        node.meta["tensor_meta"] = self._tensor_meta(tensor)
        self._observer.on_result(index, self._observer.op_count(), tensor)
        return node

    def _getitem(self, element: _Element) -> torch.fx.Node:
        if element.node is None:
            parent = element.parent if isinstance(element.parent, torch.fx.Node) else self._getitem(element.parent)
            if isinstance(element.key, _Attribute):
                element.node = self.graph.create_node("call_function", getattr, (parent, element.key.name), {})
            else:
                element.node = self.graph.create_node("call_function", operator.getitem, (parent, element.key), {})
            self._append(element.node, None)
        return element.node


@dataclasses.dataclass(frozen=True)
class _Attribute:
    name: str


class _Listener(TorchFunctionMode):
    def __init__(self, tracer: ProgramTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._tracer.call_torch(func, args, kwargs or {})


def _as_node(function: Any, name: str, args: tuple[Any, ...]) -> tuple[str | None, Any, tuple[Any, ...]]:
    """How torch.fx would write a call: (op, target, args). op None: reading or writing what is no computation."""
    if name == "__get__":
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return "call_function", getattr, (args[0], attribute)
    if name in ("__set__", "__delete__", "__len__", "__bool__", "requires_grad_", "__hash__", "__format__", "__repr__"):
        return None, None, args
    if name in _REFLECTED and len(args) == 2:
        return "call_function", _REFLECTED[name], (args[1], args[0])
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args
    if function in _WRAPPED_OPERATORS:
        return "call_function", _WRAPPED_OPERATORS[function], args
    if getattr(torch.Tensor, name, None) == function and args and isinstance(args[0], torch.Tensor):
        return "call_method", name, args
    public = getattr(torch, name, None)
    return "call_function", public if public == function else function, args


def _named_apply(cls: Any) -> Callable[..., Any]:
    """`cls.apply` under a name generated code can tell from other functions' `apply`."""

    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__module__, apply.__name__, apply.__qualname__ = cls.__module__, f"{cls.__name__}_apply", f"{cls.__qualname__}.apply"
    return apply


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or any(True for _ in _torch.tensors_in(value))


def named_arguments(root: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments of `root(*args, **kwargs)` with the names its forward gives them."""
    code = getattr(type(root).forward, "__code__", None)
    names = [n for n in code.co_varnames[1 : code.co_argcount] if n not in kwargs] if code is not None else []
    return [*((names[i] if i < len(names) else f"input_{i}", value) for i, value in enumerate(args)), *kwargs.items()]


def _tensor_attributes(root: torch.nn.Module) -> dict[int, str]:
    """Qualified name of every tensor a module holds, registered or not; the first name of a shared one."""
    names: dict[int, str] = {}
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    names.setdefault(id(value), prefix + name)
    return names


# --- the user's own lines ---------------------------------------------------------------------------------------------------


def _source_line() -> SourceLine | None:
    frame = user_frame(sys._getframe(2))
    return None if frame is None else user_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost of a frame and its callers that is the user's own code; None where none is."""
    while frame is not None:
        if frame.f_code.co_filename == _STEP:
            return None  # beyond it is whoever asked for the analysis
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return frame
        frame = frame.f_back
    return None


_LINES: dict[tuple[str, int, str], SourceLine] = {}


def user_line(file: str, line: int, function: str) -> SourceLine:
    """The record of a line, its text read once."""
    key = file, line, function
    known = _LINES.get(key)
    if known is None:
        if len(_LINES) > 100_000:
            _LINES.clear()
        known = _LINES[key] = SourceLine(file=file, line=line, function=function, code=linecache.getline(file, line).strip())
    return known


def innermost_user_line(error: BaseException) -> SourceLine | None:
    """Where in the user's own code (neither torch's nor ours) an error came from."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((*_NOT_THE_USERS, "<")):
            found = user_line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found
