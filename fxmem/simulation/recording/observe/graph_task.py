"""`GraphTask`: one call of backward as the nodes that run, in their order, and the gradients each receives.

The rules, with their source in torch/csrc/autograd:
- Order (engine.cpp, `CompareNodeTaskTime`): among the nodes whose gradients are complete, the one that was made last
  runs first, by the count of the thread that made it (`NodeClock`); `AccumulateGrad` before all.
- The second gradient for an input is added in place when the first is dense and has no other owner (input_buffer.cpp,
  `can_accumulate_inplace`), into a new tensor otherwise. Sparse gradients, those that a transform of torch.func wraps
  and zeros without memory are always added out of place.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch import wrappers as torch_wrappers
from fxmem.simulation.recording.observe.backward_hooks import is_dense


class NodeClock:
    """When each node was made, by the thread that makes it.

    Each thread counts its own nodes (`at::sequence_number`, thread-local). On a card backward runs in a thread of its
    own, so what `create_graph` makes there is counted apart: backward of a backward takes the nodes in another order
    than on the CPU, where one thread makes all. Here one thread makes all as well, and this counts for two, both from
    where it begins: a process of the program's own begins so.
    """

    def __init__(self) -> None:
        self._first = torch_autograd.next_sequence_number()
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._before: list[int] = []
        """Nodes that earlier backwards made, by backward."""

    def note_backward(self, begin: int, end: int) -> None:
        """The nodes of these numbers, the last left out, were made by a backward."""
        if begin < end:
            made = self._before[-1] + self._ends[-1] - self._begins[-1] if self._begins else 0
            self._begins.append(begin)
            self._ends.append(end)
            self._before.append(made)

    def read(self, node: Any) -> int:
        """What its thread had counted when a node was made."""
        number = torch_autograd.sequence_number(node)
        if torch_autograd.is_accumulate_grad(node):
            return number
        at = bisect.bisect_right(self._begins, number) - 1
        if at < 0:
            return number - self._first
        begin, end, before = self._begins[at], self._ends[at], self._before[at]
        return before + number - begin if number < end else number - self._first - before - (end - begin)


class GraphTask:
    """The nodes between the roots and the leaves, or the inputs whose gradients are captured.

    Args:
        roots: tensors or gradient edges where backward starts.
        inputs: tensors or gradient edges whose gradients are captured; without any, every node runs.
        accumulate_grad: whether gradients go into the leaves' `.grad` rather than into `captured`.
        made_at: when a node was made.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        inputs: Sequence[Any],
        *,
        accumulate_grad: bool,
        made_at: Callable[[Any], int] = torch_autograd.sequence_number,
    ) -> None:
        self._made_at = made_at
        self._roots = [_find_edge(root) for root in roots]
        self._captures = {_find_edge(tensor): position for position, tensor in enumerate(inputs)}
        self._accumulate_grad = accumulate_grad
        self.captured: list[torch.Tensor | None] = [None] * len(inputs)
        """The gradients of `inputs`, as far as they are known."""
        producers = _producers([node for node, _ in self._roots])
        self._reached = {node for node, _ in self._roots} | producers.keys()
        self._missing = Counter({node: len(before) for node, before in producers.items()})
        """How many gradients each node still waits for."""
        self._needed: set[Any] | None = None
        self._executed: set[Any] = set()
        if self._captures:
            self._restrict(producers)
        self._root_gradients: list[torch.Tensor | None] = []
        self._buffers: dict[Any, list[Any]] = {}
        self._ready: list[tuple[int, int, Any]] = []
        self._pushed = 0

    def _restrict(self, producers: dict[Any, list[Any]]) -> None:
        """Keep to the nodes that lead to a captured input."""
        needed = {node for node, _ in self._captures} & self._reached
        stack = list(needed)
        while stack:
            new = set(producers.get(stack.pop(), ())) - needed
            needed |= new
            stack += new
        self._missing = Counter()
        for node in needed:
            following = [each for each, _ in node.next_functions if each in needed]
            self._missing.update(following)
            if following or (torch_autograd.is_accumulate_grad(node) and self._accumulate_grad):
                self._executed.add(node)
        self._needed = needed

    def wanted_nodes(self) -> Iterable[Any]:
        """The nodes that a gradient is computed for; none where that is all of them."""
        return self._needed or ()

    def check_inputs_are_used(self) -> None:
        """Raise torch's RuntimeError for an input that no root depends on."""
        for (node, _), position in self._captures.items():
            if self._needed is not None and node not in self._needed:
                what = f"One of the differentiated Tensors (number {position})"
                raise RuntimeError(f"{what} appears to not have been used in the graph.")

    def start(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give the roots their gradients; those that wait for no other node are ready.

        The gradients, as they were cast, live until backward ends (engine.cpp, `Engine::execute`: `validate_outputs`
        writes into the caller's vector, which python_engine.cpp frees last).
        """
        self._root_gradients = [
            None if gradient is None else fit_gradient(gradient, node, index)
            for (node, index), gradient in zip(self._roots, gradients, strict=True)
        ]
        for (node, index), gradient in zip(self._roots, self._root_gradients, strict=True):
            self._add(node, index, gradient)
        for node in dict.fromkeys(node for node, _ in self._roots):
            if not self._missing[node]:
                self._push(node)

    def has_ready(self) -> bool:
        """Whether a node waits to run."""
        return bool(self._ready)

    def pop(self) -> tuple[Any, list[torch.Tensor | None]]:
        """The node that runs next, and the gradients of its outputs."""
        node = heapq.heappop(self._ready)[2]
        return node, self._buffers.pop(node)

    def capture(self, node: Any, received: list[torch.Tensor | None]) -> None:
        """Keep what `inputs` asks for of the gradients that a node received."""
        if self._accumulate_grad and torch_autograd.is_accumulate_grad(node):
            return
        for (captured, index), position in self._captures.items():
            if captured is node:
                self.captured[position] = received[index]

    def will_execute(self, node: Any) -> bool:
        """Whether a node of any graph is run by this, or has its gradients captured."""
        return node in (self._reached if self._needed is None else self._needed)

    def executes(self, node: Any) -> bool:
        """Whether a node runs, or only has its gradients captured."""
        return self._needed is None or node in self._executed

    def deliver(self, node: Any, results: list[torch.Tensor | None]) -> None:
        """Hand a node's results on to the nodes that follow; empties `results`.

        What is added to another gradient is freed when all are handed on (engine.cpp, `evaluate_function`: only an
        empty buffer takes the gradient out of `outputs`).
        """
        for position, (consumer, index) in enumerate(node.next_functions):
            if consumer is None or (self._needed is not None and consumer not in self._needed):
                continue
            gradient = results[position] if results else None
            is_first = self._add(consumer, index, gradient)
            gradient = None  # the buffer is to be its only owner when the next one is added
            if results and is_first:
                results[position] = None
            self._missing[consumer] -= 1
            if not self._missing[consumer]:
                self._push(consumer)
        results.reverse()  # a list frees its last element first, a C++ vector its first
        results.clear()

    def _push(self, node: Any) -> None:
        heapq.heappush(self._ready, (-self._made_at(node), self._pushed, node))
        self._pushed += 1

    def _add(self, node: Any, index: int, gradient: torch.Tensor | None) -> bool:
        """Put a gradient into a node's buffer; whether it is the first there, and kept as it is."""
        slots = self._buffers.get(node)
        if slots is None:
            slots = self._buffers[node] = [None] * max(1, len(torch_autograd.input_metadata(node)))
        if gradient is None:
            return False
        if slots[index] is None:
            slots[index] = gradient
            return True
        if _is_reusable(slots, index):
            slots[index].add_(gradient)
        elif slots[index].is_sparse:
            slots[index] = gradient + slots[index]
        else:
            slots[index] = slots[index] + gradient
        return False


def _is_reusable(slots: list[Any], index: int) -> bool:
    return (
        not torch.is_grad_enabled()
        and not slots[index].is_sparse
        and not torch_wrappers.is_transformed(slots[index])
        and not torch_autograd.is_zero(slots[index])
        and is_dense(slots[index])
        and torch_autograd.is_sole_owner(slots, index, storage=True)
    )


def fit_gradient(gradient: torch.Tensor, node: Any, index: int) -> torch.Tensor:
    """A gradient summed and cast to what a node takes; roots' are too (engine.cpp, `validate_outputs`)."""
    wants = torch_autograd.input_metadata(node)[index]
    shape = tuple(wants.shape)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    dtype = torch_autograd.accepted_dtype(node, wants.dtype)
    return gradient if dtype in (None, gradient.dtype) else gradient.to(dtype)


def _find_edge(tensor: Any) -> tuple[Any, int]:
    edge = torch_autograd.gradient_edge(tensor)
    return edge.node, edge.output_nr


def _producers(roots: Sequence[Any]) -> dict[Any, list[Any]]:
    """The nodes that hand a gradient to each node, once for each gradient."""
    producers: dict[Any, list[Any]] = {}
    seen, stack = set(roots), list(roots)
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            producers.setdefault(following, []).append(node)
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return producers
