"""The traced program of a model, cut into one function per region. Regions within regions are functions they call.

A region's arguments are the values from before it that its nodes read, its results those that later nodes read. Every
function frees a value after its last use, as `torch.fx`'s generated code does. Parameters and buffers are no
arguments: the code that needs one reads it from the model.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from fxmem._torch import common as torch_common
from fxmem._torch import modules as torch_modules
from fxmem.checkpointing.fx_trace import IN_PLACE, Symbolic, trace
from fxmem.checkpointing.recompute import Recomputation
from fxmem.errors import UsageError, closest
from fxmem.records.plan import Region

_NOT_THE_USERS = __file__ + ":"
"""Begins the file name of generated code, so that nothing looks for the user's lines there."""


class Rewritten:
    """How a model runs that a GRAPH plan was applied to. Copies share the code; a pickle keeps the regions, and traces
    again."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self._regions = regions
        self._code: _Code | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Rewritten, (self._regions,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        copied = Rewritten(self._regions)
        copied._code = self._code
        return copied

    def prepare(self, model: nn.Module) -> _Code:
        """Trace the model and cut it. Raises UsageError if it cannot be traced or is not the one the regions are of."""
        if self._code is None:
            self._code = _code(model, self._regions)
        return self._code

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `subclass.Way`."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(module, *args, **kwargs)
        return self.prepare(module)(module, args, kwargs)


@dataclass(frozen=True)
class _Code:
    """A model's program."""

    main: Callable[..., Any]
    symbolic: Symbolic
    """What it was made from."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it on the parameters of `model`. Raises UsageError for a call where the model might take another way than
        when it was traced."""
        for path, training in self.symbolic.modes.items():
            if model.get_submodule(path).training != training:
                mode = "train()" if training else "eval()"
                raise UsageError(
                    f"expected {path} in {mode}, as when the plan was applied, for its program depends on it; "
                    f"fxmem.uncheckpoint(model), then apply anew"
                )
        for path, module in model.named_modules():
            if path in self.symbolic.bypassed and (torch_modules.has_hooks(module) or "forward" in vars(module)):
                raise UsageError(
                    f"expected {path} without hooks and a forward of its own, for a plan with application 'graph' "
                    "does not call it but what is inside it; plan with application='operators' or 'modules'"
                )
        given = self.symbolic.find_given(args, kwargs)
        if given is not None:
            raise UsageError(
                f"expected argument {given!r} to be left out, for the plan was made without it; a plan with "
                f"application 'modules' takes it"
            )
        taken = {name: value for name, value in kwargs.items() if name not in self.symbolic.left_out}
        return self.main(model, model, *args, **taken)


# --- cutting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """Nodes `[first, last)` of the traced graph that are a region."""

    first: int
    last: int
    region: Region
    cuts: tuple[_Cut, ...]


def _code(model: nn.Module, regions: Sequence[Region]) -> _Code:
    symbolic = trace(model)
    nodes = list(symbolic.graph.nodes)
    positions = {node.name: i for i, node in enumerate(nodes) if node.op not in ("placeholder", "output")}
    cuts = _cuts(regions, positions, type(model).__name__)
    return _Code(_Cutter(nodes, model, symbolic.constants).function(0, len(nodes), cuts, None), symbolic)


def _cuts(regions: Iterable[Region], positions: Mapping[str, int], model: str) -> tuple[_Cut, ...]:
    found: list[_Cut] = []
    for region in regions:
        names = [name for name in region.nodes if name in positions]
        unknown = [name for name in region.nodes if name not in positions]
        if unknown or not names:
            missing = "nothing of a region without nodes"
            if unknown:
                missing = f"no node {unknown[0]!r}{closest(unknown[0], positions)}"
            raise UsageError(f"this plan is for another model: the graph of {model} has {missing}")
        first, last = positions[names[0]], positions[names[-1]] + 1
        inner = _cuts(region.regions, positions, model)
        if first >= last or any(cut.first < first or cut.last > last for cut in inner):
            raise UsageError(
                f"this plan is for another model: in the graph of {model}, {names[0]} to {names[-1]} are not in "
                "the plan's order"
            )
        found.append(_Cut(first, last, region, inner))
    found.sort(key=lambda cut: cut.first)
    for one, other in itertools.pairwise(found):
        if one.last > other.first:
            raise UsageError(
                f"the regions from {one.region.nodes[0]} and from {other.region.nodes[0]} overlap; regions lie "
                f"beside or within one another"
            )
    return tuple(found)


class _Cutter:
    """Makes the functions."""

    def __init__(self, nodes: list[torch.fx.Node], model: nn.Module, constants: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._model = model
        self._constants = constants
        self._position = {node: i for i, node in enumerate(nodes)}

    def function(
        self, first: int, last: int, cuts: tuple[_Cut, ...], results: list[torch.fx.Node] | None
    ) -> Callable[..., Any]:
        """The program of nodes `[first, last)`, to be called with the model twice: as its `self`, and to be handed on
        to regions within.

        `results` None: it is the whole program, with its own placeholders and output.
        """
        graph = torch.fx.Graph()
        model = graph.placeholder("_fxmem_model")
        known: dict[torch.fx.Node, torch.fx.Node] = {}

        def load(node: torch.fx.Node) -> torch.fx.Node:
            if node not in known:  # a read of an attribute; wherever it stood, each function makes its own
                name = str(node.target)
                if name in self._constants:
                    known[node] = graph.call_function(_Constant(self._constants[name]))
                else:
                    known[node] = graph.create_node("get_attr", name, name=node.name)
            return known[node]

        if results is not None:
            for node in self._arguments(first, last):
                known[node] = graph.placeholder(node.name)
        at = first
        for cut in (*cuts, None):
            for node in self._nodes[at : last if cut is None else cut.first]:
                if node.op != "get_attr":
                    known[node] = self._out_of_place(graph, node, load, first) or graph.node_copy(node, load)
            if cut is not None:
                self._call(graph, cut, known, model)
                at = cut.last
        if results is not None:
            returned = [known[node] for node in results]
            graph.output(returned[0] if len(returned) == 1 else tuple(returned))
        return _compile(graph)

    def _call(
        self, graph: torch.fx.Graph, cut: _Cut, known: dict[torch.fx.Node, torch.fx.Node], model: torch.fx.Node
    ) -> None:
        results = self._results(cut.first, cut.last)
        called = (str(node.target) for node in self._nodes[cut.first : cut.last] if node.op == "call_module")
        where = f"region {cut.region.nodes[0]} to {cut.region.nodes[-1]}"
        recomputation = Recomputation(where, cut.region.random, cut.region.keeps)
        function = self.function(cut.first, cut.last, cut.cuts, results)
        region = _region(function, tuple(dict.fromkeys(called)), recomputation)
        call = graph.call_function(region, (model, *(known[node] for node in self._arguments(cut.first, cut.last))))
        if len(results) == 1:
            known[results[0]] = call
        else:
            known.update({node: graph.call_function(operator.getitem, (call, i)) for i, node in enumerate(results)})

    def _out_of_place(
        self, graph: torch.fx.Graph, node: torch.fx.Node, load: Callable[[torch.fx.Node], torch.fx.Node], first: int
    ) -> torch.fx.Node | None:
        """The out-of-place form of a node that would overwrite its region's input.

        None if it does not, or something else might want it to.
        """
        written = node.args[0] if node.args else None
        if (
            not isinstance(written, torch.fx.Node)
            or self._position[written] >= first
            or len(written.users) > 1
            or not self._is_new(written)
        ):
            return None
        if node.op == "call_function" and node.target in IN_PLACE:
            args = torch.fx.node.map_arg(node.args, load)
            return graph.create_node("call_function", IN_PLACE[node.target], args, name=node.name)
        if node.op == "call_function" and node.kwargs.get("inplace") is True:
            copied = graph.node_copy(node, load)
            copied.kwargs = {**copied.kwargs, "inplace": False}
            return copied
        if node.op == "call_module" and getattr(self._module(node), "inplace", False) is True:
            args = graph.create_node("get_attr", node.target), *torch.fx.node.map_arg(node.args, load)
            return graph.create_node("call_function", _call_out_of_place, args, name=node.name)
        if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
            rest, options = torch.fx.node.map_arg((node.args[1:], node.kwargs), load)
            copied = graph.call_method("clone", (load(written),))
            return graph.create_node("call_method", node.target, (copied, *rest), options, name=node.name)
        return None

    def _module(self, node: torch.fx.Node) -> nn.Module:
        return self._model.get_submodule(str(node.target))

    def _is_new(self, node: torch.fx.Node) -> bool:
        """Whether a result is surely nothing's view and no older tensor that something still reads."""
        if node.op == "call_module" and isinstance(self._module(node), _MAKE_NEW):
            return True
        if node.op in ("call_function", "call_method") and node.target in _ARE_NEW:
            return True
        given = node.args[0] if node.args else None
        if not isinstance(given, torch.fx.Node) or len(given.users) != 1:
            return False
        return self._may_pass_through(node) and self._is_new(given)

    def _may_pass_through(self, node: torch.fx.Node) -> bool:
        """Whether a result may be the argument, or a view of it, and nothing else."""
        if node.op == "call_module":
            return isinstance(self._module(node), nn.Identity) or hasattr(self._module(node), "inplace")
        return node.target in IN_PLACE or node.target is operator.getitem or "inplace" in node.kwargs

    def _arguments(self, first: int, last: int) -> list[torch.fx.Node]:
        read = {node for user in self._nodes[first:last] for node in user.all_input_nodes if node.op != "get_attr"}
        return sorted((node for node in read if self._position[node] < first), key=self._position.__getitem__)

    def _results(self, first: int, last: int) -> list[torch.fx.Node]:
        own = (node for node in self._nodes[first:last] if node.op != "get_attr")
        return [node for node in own if any(self._position[user] >= last for user in node.users)]


_MAKE_NEW = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.LayerNorm, nn.GroupNorm, torch_common.NormBase),
)
"""Modules that return a tensor of their own."""
_ARE_NEW = (operator.add, torch.add, torch.cat, "add", "clone", "new_empty", "new_zeros", "new_ones", "new_full")
"""Functions and methods that do."""


def _call_out_of_place(module: nn.Module, *args: Any) -> Any:
    settings: Any = module
    settings.inplace = False
    try:
        return module(*args)
    finally:
        settings.inplace = True


def _region(function: Callable[..., Any], modules: tuple[str, ...], recomputation: Recomputation) -> Callable[..., Any]:
    """What generated code calls for a region: `function` on the model it is given, recomputed in backward."""

    def region(model: nn.Module, *args: Any) -> Any:
        return recomputation(
            lambda: [model.get_submodule(path) for path in modules], functools.partial(function, model, model), args, {}
        )

    return region


class _Constant:
    """A function that returns a tensor the graph keeps."""

    __name__ = __qualname__ = "constant"

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


def _compile(graph: torch.fx.Graph) -> Callable[..., Any]:
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, f"{_NOT_THE_USERS}{id(graph)}", "exec"), scope)
    function: Callable[..., Any] = scope["forward"]
    return function
