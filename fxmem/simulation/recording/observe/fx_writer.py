"""How a program's calls and values are spelled in a `torch.fx.Graph`.

What torch.fx would make of them as `symbolic_trace` records proxies, from tensors instead: a tensor stands for the node
that returned it, or for the attribute of the module it is kept in. Nodes carry torch.fx's `nn_module_stack`,
`stack_trace` and `tensor_meta`.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakTensorKeyDictionary

from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem._torch import wrappers as torch_wrappers
from fxmem.records.profile import SourceLine

_OPERATORS: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in """add sub mul matmul truediv floordiv mod pow neg pos abs invert and or xor lshift rshift
    eq ne lt le gt ge getitem setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift""".split()
}
_REFLECTED = {f"__r{name[2:]}": function for name, function in _OPERATORS.items()}
_WRAPPED_OPERATORS = {torch.Tensor.__pow__: operator.pow, torch.Tensor.__ipow__: operator.ipow}
"""Python functions of torch/_tensor.py whose names are not the operators'."""
_PYTHONS = (int, float, bool, complex, str, bytes, type(None), type(...), enum.Enum)
_CONSTANTS = (*_PYTHONS, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclasses.dataclass
class _Element:
    """A tensor inside what a node returned; its `read`, of an item or an attribute, is written when something asks."""

    parent: torch.fx.Node | _Element
    key: Any
    read: Callable[..., Any] = operator.getitem
    node: torch.fx.Node | None = None


class GraphWriter:
    """Writes the calls of one run of `root` as the nodes of a `torch.fx.Graph`.

    Args:
        root: whose parameters, buffers and other tensors are read by their names.
        tracer_cls: whom the graph says it was made by.
        returned: called with index and value of a node that is no call: an input, or a tensor of the module.
        is_input: whether a tensor that neither a call nor the module made comes in from outside.

    What it asks of a tensor are torch calls that are not the program's.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        tracer_cls: type[torch.fx.Tracer],
        returned: Callable[[int, Any], None],
        is_input: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self.graph = torch.fx.Graph(tracer_cls=tracer_cls)
        self.nodes: list[torch.fx.Node] = []
        """The graph's nodes in order."""
        self.sources: list[SourceLine | None] = []
        self.stack: list[tuple[str, type]] = []
        """Path and class of the modules whose calls are under way, outermost first."""
        self.constants: dict[str, torch.Tensor | None] = {}
        """Tensors the program used that neither a call nor the module made, by the attribute the graph reads them
        from."""
        self.opaque: list[str] = []
        """Arguments the graph can only name, not hold; a graph with any cannot be run."""
        self.find_maker: Callable[[torch.Tensor], torch.fx.Node | None] = lambda tensor: None
        """The node of a tensor that no call here made; None for none."""
        self.find_name: Callable[[torch.Tensor], str] = lambda tensor: ""
        """What a tensor is called that was there before; empty for no name."""
        self._returned = returned
        self._is_input = is_input
        self._attributes = _tensor_attributes(root)
        self._node_of = WeakTensorKeyDictionary()
        self._tensor_metas: dict[tuple[Any, ...], Any] = {}
        self._stacks: dict[tuple[tuple[str, type], ...], dict[str, tuple[str, type]]] = {}

    def note_attributes(self, module: torch.nn.Module, name: str) -> None:
        """Let the tensors of a further child of the root be read by their names."""
        for key, path in _tensor_attributes(module).items():
            self._attributes.setdefault(key, f"{name}.{path}")

    def forget_attributes(self, name: str) -> None:
        """Forget the tensors of a child that is no more: others may have their identity."""
        self._attributes = {key: path for key, path in self._attributes.items() if not path.startswith(f"{name}.")}

    def placeholder(self, name: str, value: Any) -> None:
        """Write down an input."""
        node = self.graph.placeholder(name)
        index = self._append(node, None)
        self._bind(node, value)
        if isinstance(value, torch.Tensor):
            node.meta["tensor_meta"] = self._tensor_meta(value)
        self._returned(index, value)

    def lift(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments as those of its node; what has no node yet gets one."""
        return self._lift(args), self._lift(kwargs)

    def call(
        self,
        op: str,
        target: Any,
        lifted: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
        source: SourceLine | None,
    ) -> int:
        """Write down a call, of arguments that `lift` returned, whose result is `result`; the node's index."""
        node = self.graph.create_node(op, target, *lifted)
        index = self._append(node, source)
        if target is not operator.setitem:
            self._bind(node, result)
        node.meta["tensor_meta"] = self._describe_tensors(result)
        return index

    def find_node(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """The node of a tensor that a call here made, or the module has; None for none."""
        return self._lift_tensor(tensor) if tensor in self._node_of or id(tensor) in self._attributes else None

    def output(self, result: Any) -> int:
        """Write down what `root` returned; the node's index, which is the last."""
        return self._append(self.graph.output(self._lift(result)), None)

    def _append(self, node: torch.fx.Node, source: SourceLine | None) -> int:
        self.nodes.append(node)
        self.sources.append(source)
        node.meta["nn_module_stack"] = self._describe_stack()
        if source is not None:
            place = f'File "{source.file}", line {source.line}, in {source.function}'
            node.meta["stack_trace"] = f"  {place}\n    {source.code}"
        return len(self.nodes) - 1

    def _describe_stack(self) -> dict[str, tuple[str, type]]:
        """torch.fx's record of the calls under way, one for all nodes that were made within the same."""
        calls = tuple(self.stack)
        known = self._stacks.get(calls)
        if known is None:
            known = self._stacks[calls] = {path: (path, cls) for path, cls in calls}
        return known

    def _describe_tensors(self, result: Any) -> Any:
        """What a node returned with metadata in its tensors' places; None without any."""
        if isinstance(result, torch.Tensor):
            return self._tensor_meta(result)
        if isinstance(result, PackedSequence):  # takes tensors alone
            return tuple(map(self._describe_tensors, result))
        if not has_tensor(result):
            return None
        kinds = (torch.Tensor, PackedSequence)
        return torch_common.tree_map_only(
            kinds, self._describe_tensors, result, is_leaf=lambda value: isinstance(value, PackedSequence)
        )

    def _tensor_meta(self, tensor: torch.Tensor) -> Any:
        """torch.fx's record of a tensor's metadata; most tensors are like one before."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return torch_common.tensor_metadata(tensor)
        key = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
        known = self._tensor_metas.get(key)
        if known is None:
            known = self._tensor_metas[key] = torch_common.tensor_metadata(tensor)
        return known

    def _bind(self, node: torch.fx.Node | _Element, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._node_of[result] = node
        elif isinstance(result, dict):
            for key, value in result.items():
                self._bind(_Element(node, key), value)
        elif dataclasses.is_dataclass(result):
            for field in dataclasses.fields(result):
                self._bind(_Element(node, field.name, getattr), getattr(result, field.name))
        elif isinstance(result, (tuple, list)):
            for position, value in enumerate(result):
                self._bind(_Element(node, position), value)

    def _lift(self, value: Any) -> Any:
        """A program's value as an argument of a torch.fx node."""
        if isinstance(value, torch.Tensor):
            return self._lift_tensor(value)
        if isinstance(value, _CONSTANTS):
            return value
        if isinstance(value, tuple):
            lifted = tuple(self._lift(v) for v in value)
            return self._write_construction(type(value), lifted, {}) if hasattr(value, "_fields") else lifted
        if isinstance(value, list):
            return [self._lift(v) for v in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            lifted_fields = {k: self._lift(v) for k, v in fields.items() if v is not None}
            return self._write_construction(type(value), (), lifted_fields)
        if isinstance(value, dict):
            return {k: self._lift(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(self._lift(value.start), self._lift(value.stop), self._lift(value.step))
        if isinstance(value, (range, types.FunctionType, types.BuiltinFunctionType, type)):
            return value
        self.opaque.append(type(value).__qualname__)
        return f"<{type(value).__qualname__}>"

    def _write_construction(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
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
        if name is None and (maker := self.find_maker(tensor)) is not None:
            return maker
        wrapped = torch_wrappers.unwrap_transforms(tensor)
        if wrapped is not None and wrapped in self._node_of:
            self.opaque.append("a tensor that a transform wraps")
            return self._lift_tensor(wrapped)
        if name is None and self._is_input(tensor):
            self.placeholder("host_tensor", tensor)
            return self.nodes[-1]
        if name is None:
            # Only a real tensor can be a constant of the graph; a fake one must not be kept alive here.
            is_fake = isinstance(tensor if wrapped is None else wrapped, torch_common.FakeTensor)
            name = (is_fake and self.find_name(tensor)) or f"_tensor_constant{len(self.constants)}"
            self.constants[name] = None if is_fake else tensor
            if is_fake:
                self.opaque.append("a tensor no traced call made")
        node = self.graph.create_node("get_attr", name, (), {})
        index = self._append(node, None)
        self._node_of[tensor] = node
        node.meta["tensor_meta"] = self._tensor_meta(tensor)
        self._returned(index, tensor)
        return node

    def _getitem(self, element: _Element) -> torch.fx.Node:
        if element.node is None:
            parent = element.parent if isinstance(element.parent, torch.fx.Node) else self._getitem(element.parent)
            element.node = self.graph.create_node("call_function", element.read, (parent, element.key), {})
            self._append(element.node, None)
        return element.node


def as_node(function: Any, name: str, args: tuple[Any, ...]) -> tuple[str | None, Any, tuple[Any, ...]]:
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


def named_apply(cls: Any) -> Callable[..., Any]:
    """`cls.apply` under a name generated code can tell from other functions' `apply`."""

    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__module__, apply.__name__ = cls.__module__, f"{cls.__name__}_apply"
    apply.__qualname__ = f"{cls.__qualname__}.apply"
    return apply


def has_tensor(value: Any) -> bool:
    """Whether there is a tensor in a nested value."""
    return isinstance(value, torch.Tensor) or any(True for _ in torch_common.iterate_tensors(value))


def _tensor_attributes(root: torch.nn.Module) -> dict[int, str]:
    """Qualified name of every tensor a module holds, registered or not; the first name of a shared one."""
    names: dict[int, str] = {}
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        for holder in (torch_modules.own_parameters(module), torch_modules.own_buffers(module), vars(module)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    names.setdefault(id(value), prefix + name)
    return names
