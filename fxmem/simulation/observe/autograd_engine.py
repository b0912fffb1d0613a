"""An autograd engine in Python, for gradients that exist only as FakeTensors.

Definition. Given the `grad_fn` graph the C++ autograd recorded, `Engine.run_backward` calls its nodes in the order,
and keeps and drops gradients and saved tensors at the moments, of torch/csrc/autograd/engine.cpp, so that the
allocations and frees it causes are those of a real backward.

Why not the C++ engine: it refuses CUDA tensors on a machine with no GPU, and it never adds gradients of tensor
subclasses in place, which over-counts residual networks.

The rules, with their source in torch/csrc/autograd:
- Order (engine.cpp, `CompareNodeTaskTime`): among the nodes whose gradients are complete, the one made last in
  forward goes first; `AccumulateGrad` before all.
- A returned gradient is summed to its input's shape and cast to its dtype while the node's own inputs are still
  alive (`validate_outputs` within `call_function`); after that the inputs die, then what the node saved.
- The second gradient for an input is added in place when the first is dense and seen by nobody else
  (input_buffer.cpp, `accumulate`), into a new tensor otherwise.
- `AccumulateGrad` takes the gradient itself when `.grad` is None, nobody else sees it and its strides obey the
  parameter's layout; copies it otherwise; adds in place to an existing `.grad` (functions/accumulate_grad.h).
- The engine, not the node, runs hooks: tensor pre-hooks, node pre- and post-hooks, post-accumulate-grad hooks,
  and the callbacks queued for the end.

Not seen: hooks a program puts on C++ nodes it fetched itself (`y.grad_fn.register_hook`); they are kept in C++ and
Python cannot list them. Sparse gradients are accumulated out of place.
"""

from __future__ import annotations

import contextlib
import heapq
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem.simulation.observe.saved_tensors import Saved, SavedTensors

__all__ = ["NODE_CALL", "Engine", "Observer"]


_ALLOCATE = frozenset({"SliceBackward0", "SelectBackward0", "DiagonalBackward0", "UnfoldBackward0"})
"""Nodes of views whose backward makes a tensor of zeros itself."""


class Observer(Protocol):
    """Who is told what autograd does."""

    def on_save(self, value: Any, handle: weakref.ref[Saved]) -> None:
        """A node in the making keeps `value` (a tensor, or whatever the program's own pack hook made of it); it is gone
        when `handle` is dead or empty."""

    def on_unpack(self, tensor: torch.Tensor) -> None:
        """The program's own unpack hook gives this to the node that runs."""

    def on_backward_node(self, sequence_number: int) -> None:
        """The node with this number is about to run; numbers are those of `_torch_autograd.next_sequence_number` at its
        making."""


class Engine:
    """One per analysis. Use `routed()` around everything that may call backward.

    What the program itself runs in a backward runs inside `around()`, its unpack hooks inside `unpacking()`.
    """

    def __init__(
        self,
        observer: Observer,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        unpacking: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._observer = observer
        self._around = around
        self._saved = SavedTensors(observer.on_save, observer.on_unpack, unpacking)
        self._tasks: list[int] = []
        self._next_task = 1 << 40  # far from the C++ engine's own small numbers
        self._callbacks: list[Callable[[], None]] = []
        self._tensor_hooks: dict[tuple[int, int], Any] = {}
        self._retains_grad: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}
        self._node_hooks: dict[int, dict[str, list[Callable[..., Any]]]] = {}
        self._raw_none: set[int] = set()
        self._undifferentiable: dict[int, list[tuple[tuple[int, ...], torch.dtype, torch.device] | None]] = {}

    # --- what autograd records ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def routed(self, call: Callable[[type, tuple[Any, ...], Callable[..., Any]], Any]) -> Iterator[None]:
        """Record what is saved, and run every backward, on this thread. `call(cls, args, apply)` runs an
        `autograd.Function`."""
        with (
            torch_autograd.saved_tensors_seen_by(self._saved.pack, self._saved.unpack),
            torch_autograd.engine_routed_to(
                self.run_backward, lambda: self._tasks[-1] if self._tasks else -1, self._queue_callback
            ),
            torch_autograd.function_calls_seen_by(
                lambda *made: self._noted(call(*made)), self._note_node_hook, self._note_raw_none
            ),
        ):
            yield

    def _noted(self, outputs: Any) -> Any:
        """What a Function returned; of those it marked non-differentiable autograd's graph keeps no shape, and zeros of
        it are what backward is given."""
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        nodes = [
            t.grad_fn
            for t in tensors
            if isinstance(t, torch.Tensor) and isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction)
        ]
        if nodes and len(nodes) < len(tensors):
            looks = [
                (tuple(t.shape), t.dtype, t.device) if isinstance(t, torch.Tensor) and t.grad_fn is None else None
                for t in tensors
            ]
            self._undifferentiable[torch_autograd.sequence_number(nodes[0])] = looks
        return outputs

    def note_tensor_hook(self, tensor: torch.Tensor) -> None:
        """Tell the engine that `tensor.register_hook` was called; a leaf keeps its hooks itself."""
        if tensor.grad_fn is not None:
            key = torch_autograd.sequence_number(tensor.grad_fn), torch_autograd.output_number(tensor)
            self._tensor_hooks[key] = torch_autograd.tensor_hooks(tensor)

    def note_retain_grad(self, tensor: torch.Tensor) -> None:
        """Tell the engine that `tensor.retain_grad` was called."""
        if tensor.grad_fn is not None:
            key = torch_autograd.sequence_number(tensor.grad_fn), torch_autograd.output_number(tensor)
            self._retains_grad[key] = weakref.ref(tensor)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Code of the program's own."""
        with self._around():
            return function(*args)

    def _note_node_hook(self, node: Any, kind: str, hook: Callable[..., Any]) -> None:
        self._node_hooks.setdefault(torch_autograd.sequence_number(node), {}).setdefault(kind, []).append(hook)

    def _note_raw_none(self, ctx: Any) -> None:
        self._raw_none.add(torch_autograd.sequence_number(ctx))

    def _queue_callback(self, callback: Callable[[], None]) -> bool:
        if not self._tasks:
            return False
        self._callbacks.append(callback)
        return True

    # --- the walk -----------------------------------------------------------------------------------------------------

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
        """Same contract as `torch._C._EngineBase.run_backward`: accumulate into leaves, or return the gradients of
        `inputs`."""
        edges = [_edge(t) for t in roots]
        captures = {_edge(t): i for i, t in enumerate(inputs)}
        dependencies, wanted = _plan([node for node, _ in edges], {node for node, _ in captures})
        if wanted is not None and not accumulate_grad and not allow_unreachable:
            for (node, _), position in captures.items():
                if node not in wanted:
                    raise RuntimeError(
                        f"One of the differentiated Tensors (number {position}) appears to not have been used in "
                        f"the "
                        f"graph."
                    )
        running = (
            None
            if wanted is None
            else {
                n
                for n in wanted
                if torch_autograd.is_accumulate_grad(n) or any(f in wanted for f, _ in n.next_functions)
            }
        )
        captured: list[torch.Tensor | None] = [None] * len(inputs)
        pending: dict[Any, list[torch.Tensor | None]] = {}
        for (node, index), gradient in zip(edges, gradients, strict=True):
            self._add(pending, node, index, gradient)
        ready: list[tuple[int, int, Any]] = []
        pushed = 0
        for node in dict.fromkeys(node for node, _ in edges):
            if not dependencies.get(node):
                heapq.heappush(ready, (-torch_autograd.sequence_number(node), pushed, node))
                pushed += 1
        self._tasks.append(self._next_task)
        self._next_task += 1
        try:
            with torch.set_grad_enabled(create_graph):
                while ready:
                    node = heapq.heappop(ready)[2]
                    received = pending.pop(node)
                    for index in range(len(received)):
                        received[index] = self._tensor_pre_hooks(node, index, received[index])
                    for (where, index), position in captures.items():
                        if where is node and not (accumulate_grad and torch_autograd.is_accumulate_grad(node)):
                            captured[position] = received[index]
                    if running is not None and node not in running:
                        continue
                    results = self._evaluate(node, received, retain_graph, create_graph, accumulate_grad)
                    del received
                    for position, (consumer, index) in enumerate(node.next_functions):
                        if consumer is None or (wanted is not None and consumer not in wanted):
                            continue
                        gradient = results[position] if results else None
                        if results:
                            results[position] = None
                        self._add(pending, consumer, index, gradient)
                        gradient = None
                        dependencies[consumer] -= 1
                        if not dependencies[consumer]:
                            heapq.heappush(ready, (-torch_autograd.sequence_number(consumer), pushed, consumer))
                            pushed += 1
                callbacks, self._callbacks = self._callbacks, []
                for callback in callbacks:
                    self._run(callback)
        finally:
            self._tasks.pop()
        return tuple(captured)

    def _evaluate(
        self, node: Any, received: list[torch.Tensor | None], retain_graph: bool, create_graph: bool, accumulate: bool
    ) -> list[torch.Tensor | None]:
        """Run one node with its hooks; gradients for its `next_functions`, validated."""
        if torch_autograd.is_accumulate_grad(node):
            if accumulate and received[0] is not None:
                self._accumulate_leaf(node.variable, received, create_graph)
            return []
        number = torch_autograd.sequence_number(node)
        self._observer.on_backward_node(number)
        hooks = self._node_hooks.get(number, {})
        for hook in hooks.get("register_prehook", ()):
            replaced = self._run(hook, tuple(received))
            if replaced is not None:
                received[:] = replaced if isinstance(replaced, tuple) else (replaced,)
        self._saved.node_begins()
        try:
            results = self._call(node, number, received)
            if type(node).__name__ not in _ALLOCATE and _is_remade_view(node, number) and results[0] is not None:
                results[0] = torch.zeros_like(results[0], memory_format=torch.contiguous_format).copy_(results[0])
            for hook in hooks.get("register_hook", ()):
                replaced = self._run(hook, tuple(results), tuple(received))
                if replaced is not None:
                    results = list(replaced) if isinstance(replaced, tuple) else [replaced]
            _validate(node, results)
            received.clear()
        finally:
            unpacked = self._saved.node_ended()
        if not retain_graph:
            self._saved.release(number, unpacked)
        return results

    def _call(self, node: Any, number: int, received: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            # A `CopySlices` calls the node of the op that wrote to the view, which may be the program's.
            with self._around() if type(node).__name__ == "CopySlices" else contextlib.nullcontext():
                outputs = node(*received)
            return list(outputs) if isinstance(outputs, tuple) else [outputs]
        if number not in self._raw_none:
            known = self._undifferentiable.get(number, [])
            for index, (gradient, wants) in enumerate(zip(received, torch_autograd.input_metadata(node), strict=False)):
                if gradient is None:
                    look = known[index] if index < len(known) else None
                    shape, dtype, device = look or (tuple(wants.shape), wants.dtype, wants.device)
                    received[index] = torch.zeros(shape, dtype=dtype, device=device)
        with self._around():
            outputs = node.apply(*received)  # type: ignore[no-untyped-call]
        results = list(outputs) if isinstance(outputs, tuple) else [outputs]
        # backward returns one gradient per argument of forward; the graph has an edge per tensor argument, empty where
        # none is wanted.
        wanted = iter([gradient for gradient, needed in zip(results, node.needs_input_grad, strict=False) if needed])
        return [None if consumer is None else next(wanted) for consumer, _ in node.next_functions]

    def _tensor_pre_hooks(self, node: Any, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        if torch_autograd.is_accumulate_grad(node):
            hooks = torch_autograd.tensor_hooks(node.variable)
        else:
            key = torch_autograd.sequence_number(node), index
            hooks = self._tensor_hooks.get(key)
            retaining = self._retains_grad.get(key)
            tensor = retaining() if retaining is not None else None
            if tensor is not None:
                tensor.grad = gradient
        for hook in list((hooks or {}).values()):
            replaced = self._run(hook, gradient)
            if replaced is not None:
                gradient = replaced
        return gradient

    def _accumulate_leaf(self, variable: torch.Tensor, received: list[Any], create_graph: bool) -> None:
        sparse = received[0].is_sparse
        if variable.grad is not None:
            if create_graph or sparse or variable.grad.is_sparse:
                variable.grad = variable.grad + received[0]
            else:
                variable.grad.add_(received[0])
        elif sparse or (
            not create_graph
            and _obeys_layout(received[0], variable)
            and torch_autograd.is_sole_owner(received, 0, storage=False)
        ):
            variable.grad = received[0].detach()
        elif create_graph:
            variable.grad = received[0].clone()
        else:
            strides = variable.stride() if _is_dense(variable) else _contiguous_strides(variable.shape)
            variable.grad = torch.empty_strided(
                variable.shape, strides, dtype=received[0].dtype, device=received[0].device
            ).copy_(received[0])
        for hook in torch_autograd.accumulation_hooks(variable):
            self._run(hook, variable)

    def _add(self, pending: dict[Any, list[Any]], node: Any, index: int, gradient: torch.Tensor | None) -> None:
        slots = pending.get(node)
        if slots is None:
            slots = pending[node] = [None] * max(1, len(torch_autograd.input_metadata(node)))
        if gradient is None:
            return
        if slots[index] is None:
            slots[index] = gradient
        elif _is_reusable(slots, index) and not gradient.is_sparse:
            slots[index].add_(gradient)
        else:
            slots[index] = slots[index] + gradient


def _is_reusable(slots: list[Any], index: int) -> bool:
    return (
        not torch.is_grad_enabled()
        and not slots[index].is_sparse
        and _is_dense(slots[index])
        and torch_autograd.is_sole_owner(slots, index, storage=True)
    )


def _is_remade_view(node: Any, number: int) -> bool:
    """Whether autograd made this node anew for a view that was written to in place, right after the `CopySlices` of the
    write.

    For a tensor subclass, such as a FakeTensor, it does so by repeating the view; for a plain tensor by `as_strided`
    (torch/csrc/autograd/variable.cpp, `grad_fn`), whose backward puts the gradient into a new tensor of zeros.
    """
    below = node.next_functions[0][0] if node.next_functions else None
    return type(below).__name__ == "CopySlices" and torch_autograd.sequence_number(below) == number - 1


def _edge(tensor: Any) -> tuple[Any, int]:
    edge = (
        tensor
        if isinstance(tensor, torch.autograd.graph.GradientEdge)
        else torch.autograd.graph.get_gradient_edge(tensor)
    )
    return edge.node, edge.output_nr


def _plan(roots: list[Any], captured: set[Any]) -> tuple[dict[Any, int], set[Any] | None]:
    """How many gradients each node waits for; and, when only some inputs are asked for, the nodes that lead to them."""
    dependencies: dict[Any, int] = {}
    consumers: dict[Any, list[Any]] = {}
    seen, stack = set(roots), list(roots)
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            dependencies[following] = dependencies.get(following, 0) + 1
            consumers.setdefault(following, []).append(node)
            if following not in seen:
                seen.add(following)
                stack.append(following)
    if not captured:
        return dependencies, None
    wanted, stack = set(captured & seen), list(captured & seen)
    while stack:
        for node in consumers.get(stack.pop(), ()):
            if node not in wanted:
                wanted.add(node)
                stack.append(node)
    dependencies = {}
    for node in wanted:
        for following, _ in node.next_functions:
            if following in wanted:
                dependencies[following] = dependencies.get(following, 0) + 1
    return dependencies, wanted


def _validate(node: Any, results: list[torch.Tensor | None]) -> None:
    """Sum and cast each gradient to what its consumer takes (engine.cpp, `validate_outputs`)."""
    for position, (consumer, index) in enumerate(node.next_functions):
        gradient = results[position] if position < len(results) else None
        if consumer is None or gradient is None:
            continue
        wants = torch_autograd.input_metadata(consumer)[index]
        shape = tuple(wants.shape)
        if tuple(gradient.shape) != shape:
            gradient = gradient.sum_to_size(shape)
        if gradient.dtype != wants.dtype:
            gradient = gradient.to(wants.dtype)
        results[position] = gradient


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(int(size), 1))
    return tuple(reversed(strides)) if len(shape) else ()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: its elements fill one stretch of memory, in some order of the dimensions."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _obeys_layout(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    """The gradient layout contract (torch/csrc/autograd/utils/grad_layout_contract.h)."""
    if not _is_dense(variable):
        return gradient.is_contiguous()
    return all(n == 1 or a == b for n, a, b in zip(variable.shape, gradient.stride(), variable.stride(), strict=True))


NODE_CALL: Final = Engine._call.__code__
"""The frame from which autograd's nodes in C++ are called: an operator dispatched straight from it is one they run
themselves."""
