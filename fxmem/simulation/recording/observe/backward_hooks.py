"""The hooks of tensors and of nodes, before and after these: the engine runs them, and not the node."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from fxmem._torch import autograd as torch_autograd
from fxmem._torch.autograd import is_sole_owner
from fxmem._torch.common import contiguous_strides

_KEY: Final = ("fxmem", "tensors")


class BackwardHooks:
    """The hooks of one thread's graph.

    Args:
        run: `(function, *args) -> result`, runs a function of the program.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._retains_grad: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}
        self._are_on_nodes = False
        """Whether the program has put hooks on nodes."""

    def observe(self) -> AbstractContextManager[None]:
        """The program puts its hooks on nodes inside."""
        return torch_autograd.observe_node_hooks(self._note_node_hook)

    def note_tensor_hook(self, tensor: torch.Tensor) -> None:
        """Note that `tensor.register_hook` was called; a leaf keeps its hooks itself."""
        if tensor.grad_fn is not None:
            node: Any = tensor.grad_fn
            kept: dict[int, Any] = node.metadata.setdefault(_KEY, {})  # freed with the node
            kept[torch_autograd.output_number(tensor)] = torch_autograd.tensor_hooks(tensor)

    def note_retain_grad(self, tensor: torch.Tensor) -> None:
        """Note that `tensor.retain_grad` was called."""
        if tensor.grad_fn is not None:
            key = torch_autograd.sequence_number(tensor.grad_fn), torch_autograd.output_number(tensor)
            self._retains_grad[key] = weakref.ref(tensor)

    def _note_node_hook(self) -> None:
        self._are_on_nodes = True

    def _of_node(self, node: Any, kind: str) -> list[Callable[..., Any]]:
        return torch_autograd.node_hooks(node, kind) if self._are_on_nodes else []

    def run_tensor_hooks(self, node: Any, received: list[torch.Tensor | None]) -> None:
        """Run the hooks of the tensors whose gradients a node received; the hooks may replace these."""
        for index, gradient in enumerate(received):
            if gradient is not None:
                received[index] = self._run_hooks(node, index, gradient)

    def run_pre_hooks(self, node: Any, received: list[torch.Tensor | None]) -> None:
        """Run what is to run before a node; the hooks may replace its gradients."""
        for hook in self._of_node(node, "register_prehook"):
            replaced = self._run(hook, tuple(received))
            if replaced is not None:
                received[:] = replaced if isinstance(replaced, tuple) else (replaced,)

    def has_post_hooks(self, node: Any) -> bool:
        """Whether a hook is to see what a node received after it has run."""
        return bool(self._of_node(node, "register_hook"))

    def run_post_hooks(
        self, node: Any, results: list[torch.Tensor | None], received: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Run what is to run after a node; its results, as the hooks leave them."""
        for hook in self._of_node(node, "register_hook"):
            replaced = self._run(hook, tuple(results), tuple(received))
            if replaced is not None:
                results = list(replaced) if isinstance(replaced, tuple) else [replaced]
        return results

    def run_accumulation_hooks(self, leaf: torch.Tensor) -> None:
        """Run the hooks of a leaf whose `.grad` has just received a gradient."""
        for hook in torch_autograd.accumulation_hooks(leaf):
            self._run(hook, leaf)

    def _run_hooks(self, node: Any, index: int, gradient: torch.Tensor) -> torch.Tensor:
        if torch_autograd.is_accumulate_grad(node):
            hooks = torch_autograd.tensor_hooks(node.variable)
        else:
            hooks = node.metadata.get(_KEY, {}).get(index)
        for hook in list((hooks or {}).values()):
            replaced = self._run(hook, gradient)
            if replaced is not None:
                gradient = replaced
        retaining = self._retains_grad.get((torch_autograd.sequence_number(node), index))
        if (tensor := retaining() if retaining is not None else None) is not None:
            # A copy of its own, once the other hooks have run (torch/csrc/autograd/variable.cpp, `retain_grad`).
            tensor.grad = _copy(gradient) if tensor.grad is None else tensor.grad + gradient
        return gradient


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone() if gradient.is_sparse else gradient.clone(memory_format=torch.contiguous_format)


# --- how a gradient arrives in a leaf's `.grad`, as `AccumulateGrad` does it ------------------------------------------
# `AccumulateGrad` takes the gradient itself when `.grad` is None, the gradient has no other owner and its strides
# obey the leaf's layout; it copies the gradient otherwise, and adds in place to an existing `.grad`
# (torch/csrc/autograd/functions/accumulate_grad.h).


def accumulate_gradient(leaf: torch.Tensor, received: list[Any], *, create_graph: bool) -> None:
    """Put the only gradient of `received` into `leaf.grad`; the list is to be its only owner in Python."""
    is_sparse = received[0].is_sparse
    if leaf.grad is not None:
        if create_graph:
            leaf.grad = leaf.grad + received[0]
        elif leaf.grad.is_sparse and not is_sparse:
            leaf.grad = received[0] + leaf.grad
        else:
            leaf.grad.add_(received[0])
    elif (
        not create_graph
        and (is_sparse or _obeys_layout(received[0], leaf))
        and is_sole_owner(received, 0, storage=False)
    ):
        leaf.grad = received[0].detach()
    elif is_sparse:
        leaf.grad = received[0].clone()
    else:
        strides = leaf.stride() if is_dense(leaf) else contiguous_strides(leaf.shape)
        made = torch.empty_strided(leaf.shape, strides, dtype=received[0].dtype, device=received[0].device)
        leaf.grad = made.copy_(received[0])


def is_dense(tensor: torch.Tensor) -> bool:
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


def _obeys_layout(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """The gradient layout contract (torch/csrc/autograd/utils/grad_layout_contract.h)."""
    if not is_dense(leaf):
        return gradient.is_contiguous()
    return all(n == 1 or a == b for n, a, b in zip(leaf.shape, gradient.stride(), leaf.stride(), strict=True))
