"""Which node of the symbolic graph each node of a profile is.

Both list the calls of one program, the profile as they ran, the symbolic graph as `torch.fx` foresaw them. So the
symbolic graph is run on FakeTensors under the tracer that wrote the profile; where both then list the same calls in the
same order, each call's node is known. Where they do not, `torch.fx` has fixed a branch that the program took otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import nn

from fxmem._torch import common as torch_common
from fxmem.checkpointing import subclass
from fxmem.checkpointing.fx_trace import Symbolic, trace
from fxmem.errors import FxmemError, UsageError
from fxmem.records.profile import Node, Profile
from fxmem.simulation.processes.process_guard import postpone_interrupts, process_unchanged
from fxmem.simulation.recording.error_advice import user_code_error
from fxmem.simulation.recording.observe.fx_tracer import ProgramTracer
from fxmem.simulation.recording.observe.observer import Observer
from fxmem.simulation.step.model.fake_model import fake_inputs, fake_model, shadow_model
from fxmem.simulation.step.step import set_training

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
    ours = [(i, _target(node.op, node.target)) for i, node in enumerate(profile.nodes) if _has_run(node)]
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
    has_result = bool(node.outputs) or node.op == "call_module" or _target(node.op, node.target) == "setitem"
    return node.op in _CALLS and has_result


def _target(op: str, target: Any) -> str:
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
        found += [(_target(node.op, node.target), name if node is calls[-1] else None) for node in calls]
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._ops += not (func.is_view or str(func) == "aten.detach.default")
        return func(*args, **(kwargs or {}))

    def op_count(self) -> int:
        """How many ops have run that compute."""
        return self._ops
