"""The graph that regions of a GRAPH plan are cut from: `torch.fx`'s symbolic trace.

It differs from `torch.fx.symbolic_trace(model).graph` in three ways, all towards what the program does. Buffers are
read when the graph runs, and so is what is computed from them; symbolic_trace would keep the result as a constant of
today's device and values. `x += y` stays in place. And every module with running statistics is a node, other libraries'
included.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem.checkpointing import subclass
from fxmem.errors import UsageError, one_line
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.step.model.fake_model import shadow_model
from fxmem.simulation.step.step import set_training


@dataclass(frozen=True)
class Symbolic:
    """A traced model."""

    graph: torch.fx.Graph
    constants: dict[str, Any]
    """What the graph reads that the model does not have, by name: tensors its forward makes from nothing."""
    names: tuple[str, ...]
    """Of the arguments that may be given by position."""
    left_out: frozenset[str]
    """Arguments that default to None; the graph is of a call that leaves them out, for `is None` cannot be traced."""
    modes: dict[str, bool]
    """Modules whose forward the graph has followed, and whether they were in `train()`; empty if that makes no
    difference to it."""
    bypassed: frozenset[str]
    """Modules that the graph does not call: it calls what is inside them."""

    def find_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The first argument that a call gives though the graph leaves it out."""
        given = (*zip(self.names, args, strict=False), *kwargs.items())
        return next((name for name, value in given if value is not None and name in self.left_out), None)


def _make_in_place(name: str) -> Callable[[Any, Any], Any]:
    # Not operator.iadd itself: torch.fx writes that as the statement `x += y`, which would rename x where x is a
    # number.
    function = getattr(operator, name)

    def in_place(left: Any, right: Any) -> Any:
        return function(left, right)

    in_place.__name__ = in_place.__qualname__ = name
    return in_place


_NAMES = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "ixor")
IN_PLACE: dict[Any, Callable[[Any, Any], Any]] = {_make_in_place(name): getattr(operator, name[1:]) for name in _NAMES}
"""What stands for `x += y` and its like, and the same out of place."""


class _Proxy(torch.fx.Proxy):
    """Keeps in-place operators, which a plain proxy turns into the others."""


def _method(target: Any) -> Callable[[_Proxy, Any], torch.fx.Proxy]:
    def method(self: _Proxy, other: Any) -> torch.fx.Proxy:
        made: torch.fx.Proxy = self.tracer.create_proxy("call_function", target, (self, other), {})
        return made

    return method


for _target in IN_PLACE:
    setattr(_Proxy, f"__{_target.__name__}__", _method(_target))


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Tracer(torch.fx.Tracer):
    proxy_buffer_attributes = True

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Looked into, its momentum would be a constant and its counter a node of its own; whole, it can be told to
        # leave its statistics alone.
        return isinstance(m, torch_common.NormBase) or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module) -> Symbolic:
    """The model's graph when it trains; the model is left alone.

    Raises UsageError where `torch.fx` cannot follow the program, or would fix what the program decides anew in each
    run.
    """
    name = type(model).__name__
    bypassed = _find_followed(model)
    hooked = next((path for path, module in bypassed.items() if torch_modules.has_hooks(module)), None)
    if hooked is not None:
        raise UsageError(
            f"{name} cannot be rewritten as a graph: module {hooked!r} has hooks, and in the graph nothing calls "
            "it as a whole"
        )
    try:
        shadow = shadow_model(model)
    except Exception as error:
        raise UsageError(f"{name} cannot be rewritten as a graph: it cannot be copied ({one_line(error)})") from error
    for module in shadow.modules():
        subclass.restore(module)
    set_training(shadow, "train")
    parameters = inspect.signature(inspect.unwrap(type(shadow).forward)).parameters.values()
    left_out = [parameter.name for parameter in parameters if parameter.default is None]
    before = random.getstate(), torch.get_rng_state()
    try:
        graph = _Tracer().trace(shadow, dict.fromkeys(left_out) or None)
    except Exception as error:
        raise UsageError(
            f"{name} cannot be rewritten as a graph: {user_code_error(error, 'torch.fx.symbolic_trace')}"
        ) from error
    drew = random.getstate() != before[0] or not torch.equal(torch.get_rng_state(), before[1])
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    if drew:
        raise UsageError(
            f"{name} cannot be rewritten as a graph: its forward draws random numbers that torch.fx would keep for good"
        )
    read = (node.target for node in graph.nodes if node.op == "get_attr")
    constants = {path: operator.attrgetter(path)(shadow) for path in read if not _has(model, path)}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in parameters if parameter.kind in by_position)[1:]
    modes = _modes(shadow, graph, left_out)
    return Symbolic(graph, constants, names, frozenset(left_out), modes, frozenset(bypassed))


def _modes(shadow: nn.Module, graph: torch.fx.Graph, left_out: list[str]) -> dict[str, bool]:
    """The modes of the traced modules, if other modes would change the graph. The model's own is left aside."""
    followed = {path: each for path, each in _find_followed(shadow).items() if not isinstance(each, _CONTAINERS)}
    modes = {path: module.training for path, module in followed.items()}
    for module in followed.values():
        module.training = not module.training
    try:
        other = _Tracer().trace(shadow, dict.fromkeys(left_out) or None)
    except Exception:  # whatever it is: in other modes the model does something else
        return modes
    return {} if list(map(_describe_node, graph.nodes)) == list(map(_describe_node, other.nodes)) else modes


def _describe_node(node: torch.fx.Node) -> tuple[str, str, str, str]:
    return node.op, str(node.target), str(node.args), str(node.kwargs)


def _find_followed(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward is followed, by path."""
    is_leaf = _Tracer().is_leaf_module
    return {path: module for path, module in model.named_modules() if path and not is_leaf(module, path)}


def _has(model: nn.Module, path: str) -> bool:
    try:
        operator.attrgetter(path)(model)
    except AttributeError:
        return False
    return True
