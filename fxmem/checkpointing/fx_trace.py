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
from fxmem.errors import FxmemError, UsageError, one_line
from fxmem.records.profile import Node, Profile
from fxmem.simulation.processes.process_guard import postpone_interrupts, process_unchanged
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.recording.observe.fx_tracer import ProgramTracer
from fxmem.simulation.recording.observe.observer import Observer
from fxmem.simulation.step.fake_model import fake_inputs, fake_model, shadow_model
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
        is_container = isinstance(m, torch_common.CONTAINERS)
        return isinstance(m, torch_common.NormBase) or (
            not is_container and super().is_leaf_module(m, module_qualified_name)
        )


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
    return Symbolic(graph, constants, names, frozenset(left_out), _modes(shadow, graph, left_out), frozenset(bypassed))


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


# --- which node of the symbolic graph each node of a profile is -------------------------------------------------------
# Both list the calls of one program, the profile as they ran, the symbolic graph as `torch.fx` foresaw them. So the
# symbolic graph is run on FakeTensors under the tracer that wrote the profile; where both then list the same calls in
# the same order, each call's node is known. Where they do not, `torch.fx` has fixed a branch that the program took
# otherwise.


_CALLS = ("call_module", "call_function", "call_method")


def graph_names(
    model: nn.Module, profile: Profile, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str | None, ...]:
    """For each node of a model's profile, its name in the graph of the regions.

    `args` and `kwargs` are those the profile was taken with. None: the graph has no node of its own for it (what takes
    a tuple apart, what reads an attribute, loss and optimizer; all but the last call inside a function marked with
    `torch.fx.wrap`, or inside a module with running statistics that is not torch's own).

    Raises:
        UsageError: `torch.fx` cannot trace the model, or its trace takes another way than the model did.
    """
    symbolic = trace(model)
    given = symbolic.find_given(args, kwargs)
    if given is not None:
        raise UsageError(
            f"{type(model).__name__} cannot be rewritten as a graph: it is given {given!r}, and torch.fx cannot "
            f"follow `{given} is None`"
        )
    ours = [(i, _named_target(node.op, node.target)) for i, node in enumerate(profile.nodes) if _has_run(node)]
    theirs = _calls(model, symbolic, args, kwargs)
    for (i, target), (other, _) in zip(ours, theirs, strict=False):
        if target != other:
            raise UsageError(_disagreement(profile.nodes[i], other))
    if len(ours) != len(theirs):
        missing = profile.nodes[ours[len(theirs)][0]] if len(ours) > len(theirs) else None
        raise UsageError(_disagreement(missing, "nothing" if missing else theirs[len(ours)][0]))
    names = {i: name for (i, _), (_, name) in zip(ours, theirs, strict=True)}
    return tuple(names.get(i) for i in range(len(profile.nodes)))


def _has_run(node: Node) -> bool:
    """Whether a profile's node is a call of the program. Packing or unpacking a container is none."""
    has_result = bool(node.outputs) or node.op == "call_module" or _named_target(node.op, node.target) == "setitem"
    return node.op in _CALLS and has_result


def _named_target(op: str, target: Any) -> str:
    """The module's path, or the function's own name."""
    if op == "call_module":
        return str(target)
    name = str(target if isinstance(target, str) else getattr(target, "__qualname__", target))
    return name.removesuffix(".apply").removesuffix("_apply").rpartition(".")[2]


def _disagreement(node: Node | None, other: str) -> str:
    at = f" at {node.source.file}:{node.source.line}" if node is not None and node.source is not None else ""
    ran = f"{node.target}{at}" if node is not None else "nothing"
    return (
        f"the model cannot be rewritten as a graph: torch.fx fixes a branch; where the program runs {ran}, its "
        f"trace has {other}"
    )


def _calls(
    model: nn.Module, symbolic: Symbolic, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, str | None]]:
    """Yield the symbolic graph's calls under a profile's names, with the graph's node of each. None for all but the
    last of a node's."""
    torch_common.keep_device_guard()
    mode = torch_common.FakeTensorMode(allow_non_fake_inputs=True)
    cpu = torch.device("cpu")
    fake = fake_model(shadow_model(model), mode, cpu)
    set_training(fake, "train")
    args, kwargs = fake_inputs((args, kwargs), mode, cpu)
    kwargs = {name: value for name, value in kwargs.items() if name not in symbolic.left_out}
    observer = _Observer()
    tracer = ProgramTracer(fake, observer)
    running = _Running(symbolic, lambda: len(tracer.nodes))
    subclass.become(fake, running)
    try:
        with (
            postpone_interrupts(),
            process_unchanged(),
            mode,
            observer,
            tracer.observe_calls(),
            torch_common.silence_fake_kernels(),
        ):
            fake(*args, **kwargs)
    except FxmemError:
        raise
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be rewritten as a graph: {user_code_error(error, 'the graph of torch.fx')}"
        ) from error
    found = []
    for first, last, name in running.spans:
        # As `_has_run`, of nodes that the tracer has just written: it notes what calls return.
        calls = [node for node in tracer.nodes[first:last] if node.op in _CALLS and "tensor_meta" in node.meta]
        found += [(_named_target(node.op, node.target), name if node is calls[-1] else None) for node in calls]
    return found


class _Running:
    """Makes a module run its symbolic graph; see `subclass.Way`."""

    def __init__(self, symbolic: Symbolic, count: Callable[[], int]) -> None:
        self._symbolic = symbolic
        self._count = count
        self.spans: list[tuple[int, int, str]] = []
        """For each node, how many calls had been seen before it and after it, and its name."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph in place of the forward."""
        positional, known = list(args), dict[torch.fx.Node, Any]()
        for node in self._symbolic.graph.nodes:
            before = self._count()
            if node.op == "placeholder":
                known[node] = _argument(node, positional, kwargs)
            elif node.op == "get_attr":
                constants = self._symbolic.constants
                known[node] = (
                    constants[node.target] if node.target in constants else operator.attrgetter(node.target)(module)
                )
            elif node.op == "output":
                return _substitute(node.args[0], known)
            else:
                known[node] = _call(module, node, _substitute(node.args, known), _substitute(node.kwargs, known))
            self.spans.append((before, self._count(), node.name))
        raise AssertionError("a graph without an output")


def _argument(node: torch.fx.Node, positional: list[Any], kwargs: dict[str, Any]) -> Any:
    name = str(node.target)
    if name.startswith("**"):
        return kwargs
    if name.startswith("*"):
        return tuple(positional)
    if positional:
        return positional.pop(0)
    return kwargs[name] if name in kwargs else node.args[0]


def _call(module: nn.Module, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _substitute(value: Any, known: dict[torch.fx.Node, Any]) -> Any:
    """An argument with the nodes' results in it; torch.fx freezes its containers, and a function may write to what it
    is given."""
    if isinstance(value, torch.fx.Node):
        return known[value]
    if isinstance(value, slice):
        return slice(*(_substitute(part, known) for part in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        items = [_substitute(item, known) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_substitute(item, known) for item in value]
    if isinstance(value, dict):
        return {key: _substitute(item, known) for key, item in value.items()}
    return value


class _Observer(torch_common.DispatchMode, Observer):  # type: ignore[no-untyped-call]
    """Counts ops for the tracer, and looks at nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ops += not (func.is_view or str(func) == "aten.detach.default")
        return func(*args, **(kwargs or {}))

    def op_count(self) -> int:
        """How many ops have run that compute."""
        return self._ops
