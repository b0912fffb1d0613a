"""An autograd engine in Python, for gradients that exist only as FakeTensors.

Definition. Given the `grad_fn` graph that C++ autograd recorded, `AutogradEngine.run_backward` calls its nodes in the
order of torch/csrc/autograd/engine.cpp, and keeps and frees gradients and saved tensors at its moments. The allocations
and frees are therefore those of a real backward.

Why not the C++ engine: it refuses CUDA tensors on a machine with no GPU, and it never adds gradients of tensor
subclasses in place, which over-counts residual networks.

The rules stand where they are followed: `graph_task` (order, sums of gradients), `leaf_gradients` (`.grad`),
`backward_hooks`, `saved_tensors`. Here: a returned gradient is summed to its input's shape and cast to its dtype while
the node's own inputs are alive (engine.cpp, `validate_outputs` within `call_function`); after that the inputs are
freed, then what the node saved.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import common as torch_common
from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.code.source_lines import program_place
from fxmem.simulation.kernels.streams import Streams
from fxmem.simulation.recording.observe.backward_hooks import BackwardHooks, SavedTensors, accumulate_gradient
from fxmem.simulation.recording.observe.graph_task import GraphTask, NodeClock, fit_gradient
from fxmem.simulation.recording.observe.observer import Observer
from fxmem.simulation.recording.observe.plain_formulas import FORMULAS

_OF_VIEWS: Final = frozenset(
    f"{name}Backward0"
    for name in "Alias AsStrided Diagonal Expand Permute Select Slice T Transpose Unfold Unsqueeze View".split()
) | {"SqueezeBackward1"}
"""Nodes of views."""
_ALLOCATE = frozenset({"SliceBackward0", "SelectBackward0", "DiagonalBackward0", "UnfoldBackward0"})
"""Nodes of views whose backward allocates a tensor of zeros itself."""


_NO_TENSOR, _IN_THE_GRAPH = "no tensor", "in the graph"
"""What an output of a Function is that is no tensor without a gradient."""
_COMPILED: Final = "CompiledFunctionBackward"
"""Node of a graph that AOTAutograd compiled."""
_OF_FUNCTION: Final = torch.autograd.function.BackwardCFunction
"""Nodes of an `autograd.Function`."""
Call = Callable[[type, tuple[Any, ...], Callable[..., Any]], Any]
"""Runs an `autograd.Function`: its class, its arguments, and what applies it to them."""


class AutogradEngine:
    """The autograd of one program. Use `route()` around everything that may call backward.

    Args:
        observer: of saved tensors and nodes.
        program: of backwards, and of what these call of the program.
        streams: of the card, if there is one.
        on_card: whether backward runs in a thread of its own, as it does on a card.
    """

    def __init__(
        self,
        observer: Observer,
        program: Observer | None = None,
        streams: Streams | None = None,
        *,
        on_card: bool = False,
    ) -> None:
        self._observer = observer
        self._clock, self._on_card = NodeClock(), on_card
        self._program = program or Observer()
        self._streams = streams or Streams()
        self._saved = SavedTensors(observer, self._program)
        self.hooks = BackwardHooks(self._run)
        self.keeps_graph = False
        """Whether the backward that runs leaves what is saved for another."""
        self.cycle_at = ""
        """The program's line of the last backward that leaves gradients with their graph in `.grad`: a cycle."""
        self._tasks: list[tuple[int, GraphTask]] = []
        """Backwards under way by their numbers, each begun within the one before."""
        self._running: list[Any] = []
        """Nodes, each called within the one before."""
        self._next_task = 1 << 40  # far from the C++ engine's own small numbers
        self._callbacks: list[Callable[[], None]] = []
        self._keeps_none: set[int] = set()
        self._undifferentiable: dict[int, list[tuple[tuple[int, ...], torch.dtype, torch.device] | str]] = {}

    # --- what autograd records ----------------------------------------------------------------------------------------

    def route(self, call: Call) -> AbstractContextManager[None]:
        """Record what is saved, and run every backward, on this thread. `call(cls, args, apply)` runs an
        `autograd.Function`."""
        observed = torch_autograd.observe_saved_tensors(self._saved.pack, self._saved.unpack)
        return torch_common.nested(observed, self.route_backward(call))

    def route_backward(self, call: Call = lambda _, args, apply: apply(*args)) -> AbstractContextManager[None]:
        """Run every backward on this thread, without a record of what is saved: the compiler allows no hooks."""
        return torch_common.nested(
            torch_autograd.route_engine(
                self.run_backward,
                lambda: self._tasks[-1][0] if self._tasks else -1,
                lambda: self._running[-1] if self._running else None,
                lambda node: self._tasks[-1][1].will_execute(node) if self._tasks else None,
                self._queue_callback,
                self._program.takes_backward,
            ),
            torch_autograd.observe_function_calls(lambda *made: self._note_outputs(call(*made)), self._note_keeps_none),
            self.hooks.observe(),
        )

    def find_saved(self) -> Iterator[tuple[int, Any]]:
        """What the nodes of autograd still keep for a backward, with their numbers."""
        return self._saved.find_kept()

    def release_unpacked(self) -> None:
        """Free what the node that runs has unpacked: it has its arguments by now."""
        self._saved.release_unpacked()

    def _note_outputs(self, outputs: Any) -> Any:
        """Note the shapes of a Function's outputs that it marked non-differentiable: autograd's graph has none of them,
        and backward receives zeros of these shapes. For what is no tensor it receives None."""
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        makers = [each.grad_fn for each in values if isinstance(each, torch.Tensor)]
        nodes = [each for each in makers if isinstance(each, _OF_FUNCTION)]
        if nodes and len(nodes) < len(values):
            self._undifferentiable[torch_autograd.sequence_number(nodes[0])] = [
                _NO_TENSOR
                if not isinstance(t, torch.Tensor)
                else _IN_THE_GRAPH
                if t.grad_fn is not None
                else (tuple(t.shape), t.dtype, t.device)
                for t in values
            ]
        return outputs

    def _note_keeps_none(self, ctx: Any) -> None:
        """Note that a Function's backward receives None, not zeros, where there is no gradient."""
        self._keeps_none.add(torch_autograd.sequence_number(ctx))

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function of the program."""
        with self._program.observe_backward_function():
            return function(*args)

    # --- one backward -------------------------------------------------------------------------------------------------

    def run_backward(
        self,
        roots: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = True,
        accumulate_grad: bool = True,
    ) -> tuple[torch.Tensor | None, ...]:
        """Accumulate gradients into the leaves, or return those of `inputs`: `torch._C._EngineBase.run_backward`."""
        for index, root in enumerate(roots):  # in the words of torch/csrc/autograd/python_engine.cpp
            if isinstance(root, torch.Tensor) and not root.requires_grad:
                raise RuntimeError(f"element {index} of tensors does not require grad and does not have a grad_fn")
        if create_graph and accumulate_grad:
            self.cycle_at = program_place(sys._getframe(1))
        is_inner = torch_autograd.is_inner_backward(create_graph=create_graph)
        with self._program.observe_backward(roots, accumulates=accumulate_grad, is_inner=is_inner):
            task = GraphTask(roots, inputs, accumulate_grad=accumulate_grad, made_at=self._clock.read)
            if not accumulate_grad and not allow_unreachable:
                task.check_inputs_are_used()
            task.start(gradients)
            self.keeps_graph = retain_graph
            with self._current_task(task), self._thread_of_backward(), torch.set_grad_enabled(create_graph):
                walk = functools.partial(self._walk, task, retain_graph, create_graph)
                with self._streams.keep():
                    if inputs or len(self._tasks) > 1:  # what another backward leaves out must not count here
                        torch_autograd.run_for_gradients(task.wanted_nodes(), walk, create_graph=create_graph)
                    else:
                        walk()
                self._run_callbacks()
            return tuple(task.captured)

    def _walk(self, task: GraphTask, retain_graph: bool, create_graph: bool) -> None:
        """Run the nodes of a task, each when its gradients are complete."""
        while task.has_ready():
            node, received = task.pop()
            self.hooks.run_tensor_hooks(node, received)
            task.capture(node, received)
            if not task.executes(node):
                continue
            if torch_autograd.is_accumulate_grad(node):
                self.hooks.run_pre_hooks(node, received)
                if received[0] is not None:
                    self._streams.enter_backward_node(None)
                    accumulate_gradient(node.variable, received, create_graph=create_graph)
                    self.hooks.run_accumulation_hooks(node.variable)
                self.hooks.run_post_hooks(node, [], received)
                del received  # freed before the next node runs
                continue
            results = self._evaluate(node, received, retain_graph=retain_graph)
            del received
            task.deliver(node, results)

    @contextlib.contextmanager
    def _thread_of_backward(self) -> Iterator[None]:
        """On a card, nodes are made by another thread inside."""
        begin, is_outermost = torch_autograd.next_sequence_number(), len(self._tasks) == 1
        yield
        if self._on_card and is_outermost:
            self._clock.note_backward(begin, torch_autograd.next_sequence_number())

    @contextlib.contextmanager
    def _current_task(self, task: GraphTask) -> Iterator[None]:
        """A number for the backward that runs, which checkpoint asks for."""
        self._tasks.append((self._next_task, task))
        self._next_task += 1
        try:
            yield
        finally:
            self._tasks.pop()

    def _queue_callback(self, callback: Callable[[], None]) -> bool:
        if not self._tasks:
            return False
        self._callbacks.append(callback)
        return True

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._run(callback)

    # --- one node -----------------------------------------------------------------------------------------------------

    def _evaluate(
        self, node: Any, received: list[torch.Tensor | None], *, retain_graph: bool
    ) -> list[torch.Tensor | None]:
        """Run one node with its hooks; gradients for its `next_functions`, in the shapes and dtypes these take.

        The node's own inputs die after that, then what it saved (engine.cpp, `call_function`)."""
        number = torch_autograd.sequence_number(node)
        self._observer.on_backward_node(number)
        self._streams.enter_backward_node(number)
        self.hooks.run_pre_hooks(node, received)
        self._saved.begin_node()
        self._running.append(node)
        try:
            results = self._call(node, number, received)
            if type(node).__name__ not in _ALLOCATE and _is_rebuilt_view(node, number) and results[0] is not None:
                results[0] = torch.zeros_like(results[0], memory_format=torch.contiguous_format).copy_(results[0])
            results = self.hooks.run_post_hooks(node, results, received)
            _validate(node, results)
            received.clear()
        finally:
            self._running.pop()
            unpacked = self._saved.end_node()
        if not retain_graph:
            self._saved.release(number, unpacked)
        return results

    def _call(self, node: Any, number: int, received: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        name = type(node).__name__
        if (
            name in _OF_VIEWS
            and isinstance(received[0], torch_common.FakeTensor)
            and _is_above_a_rebuilt_view(node, number)
        ):
            shape = torch_autograd.input_metadata(node.next_functions[0][0])[0].shape
            return [received[0].as_strided(shape, (0,) * len(shape))]  # nothing of its own
        if not isinstance(node, _OF_FUNCTION):
            # A `CopySlices` calls the node of the op that wrote to the view, which may be the program's.
            formula = FORMULAS.get(name)
            if formula is not None and received[0] is not None and not torch_wrappers.is_transformed(received[0]):
                made = formula(node, received[0])
                return made if isinstance(made, list) else [made]
            with self._program.observe_backward_function() if name == "CopySlices" else contextlib.nullcontext():
                outputs = node(*received)
            return list(outputs) if isinstance(outputs, tuple) else [outputs]
        self._fill_missing(node, number, received)
        program = self._program
        with program.observe_compiled_backward() if name == _COMPILED else program.observe_backward_function():
            outputs = torch_autograd.apply_function(node, received, keeps=self.hooks.has_post_hooks(node))
        results = list(outputs) if isinstance(outputs, tuple) else [outputs]
        # backward returns one gradient per argument of forward; the graph has an edge per tensor argument, empty where
        # none is wanted.
        wanted = iter([gradient for gradient, needed in zip(results, node.needs_input_grad, strict=False) if needed])
        return [None if consumer is None else next(wanted) for consumer, _ in node.next_functions]

    def _fill_missing(self, node: Any, number: int, received: list[torch.Tensor | None]) -> None:
        """Put zeros for the gradients that a Function did not receive, unless it accepts None."""
        if number in self._keeps_none:
            return
        known = self._undifferentiable.get(number, [])
        for index, (gradient, wants) in enumerate(zip(received, torch_autograd.input_metadata(node), strict=False)):
            look = known[index] if index < len(known) else _IN_THE_GRAPH
            if gradient is None and look != _NO_TENSOR:
                of_edge = tuple(wants.shape), wants.dtype, wants.device
                shape, dtype, device = of_edge if isinstance(look, str) else look
                received[index] = torch.zeros(shape, dtype=dtype, device=device)


def _is_rebuilt_view(node: Any, number: int) -> bool:
    """Whether autograd rebuilt this node for a view that was written in place. It runs right after the `CopySlices` of
    the write.

    For a tensor subclass, such as a FakeTensor, it does so by repeating the view; for a plain tensor by `as_strided`
    (torch/csrc/autograd/variable.cpp, `grad_fn`), whose backward puts the gradient into a new tensor of zeros.
    """
    below = node.next_functions[0][0] if node.next_functions else None
    return type(below).__name__ == "CopySlices" and torch_autograd.sequence_number(below) == number - 1


def _is_above_a_rebuilt_view(node: Any, number: int) -> bool:
    """Whether autograd rebuilt this node for a view of a view: for a plain tensor both are one `as_strided`."""
    below = node.next_functions[0][0]
    if type(below).__name__ not in _OF_VIEWS or torch_autograd.sequence_number(below) != number - 1:
        return False
    return _is_rebuilt_view(below, number - 1) or _is_above_a_rebuilt_view(below, number - 1)


def _validate(node: Any, results: list[torch.Tensor | None]) -> None:
    """Sum and cast each gradient to what its consumer takes (engine.cpp, `validate_outputs`)."""
    for position, (consumer, index) in enumerate(node.next_functions):
        gradient = results[position] if position < len(results) else None
        if consumer is None or gradient is None:
            continue
        results[position] = fit_gradient(gradient, consumer, index)


NODE_CALL: Final = AutogradEngine._call.__code__
"""The frame from which autograd's nodes in C++ are called: an operator dispatched straight from it is one they run
themselves."""
