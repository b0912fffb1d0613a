"""The hooks of tensors and nodes, which the engine runs and not the node: tensor pre-hooks, node pre- and post-hooks.

Not seen: hooks that a program puts on C++ nodes it fetched itself (`y.grad_fn.register_hook`); they are kept in C++,
and Python cannot list them.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from fxmem._torch import autograd as torch_autograd

_KEYS: Final = {kind: ("fxmem", kind) for kind in ("tensors", "register_prehook", "register_hook")}
_NONE: Final[Mapping[int, Any]] = types.MappingProxyType({})


class BackwardHooks:
    """The hooks of one thread's graph.

    Args:
        run: `(function, *args) -> result`, runs a function of the program.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._retains_grad: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}

    def note_tensor_hook(self, tensor: torch.Tensor) -> None:
        """Note that `tensor.register_hook` was called; a leaf keeps its hooks itself."""
        if tensor.grad_fn is not None:
            kept = _table(tensor.grad_fn, "tensors")
            kept[torch_autograd.output_number(tensor)] = torch_autograd.tensor_hooks(tensor)

    def note_retain_grad(self, tensor: torch.Tensor) -> None:
        """Note that `tensor.retain_grad` was called."""
        if tensor.grad_fn is not None:
            key = torch_autograd.sequence_number(tensor.grad_fn), torch_autograd.output_number(tensor)
            self._retains_grad[key] = weakref.ref(tensor)

    def note_node_hook(self, node: Any, kind: str, hook: Callable[..., Any]) -> None:
        """Note that the method `kind` of a node, `register_hook` or `register_prehook`, was called."""
        kept = _table(node, kind)
        kept[len(kept)] = hook

    def run_tensor_hooks(self, node: Any, received: list[torch.Tensor | None]) -> None:
        """Run the hooks of the tensors whose gradients a node received; the hooks may replace these."""
        for index, gradient in enumerate(received):
            if gradient is not None:
                received[index] = self._run_hooks(node, index, gradient)

    def run_pre_hooks(self, node: Any, received: list[torch.Tensor | None]) -> None:
        """Run what is to run before a node; the hooks may replace its gradients."""
        for hook in _find_hooks(node, "register_prehook").values():
            replaced = self._run(hook, tuple(received))
            if replaced is not None:
                received[:] = replaced if isinstance(replaced, tuple) else (replaced,)

    def has_post_hooks(self, node: Any) -> bool:
        """Whether a hook is to see what a node received after it has run."""
        return bool(_find_hooks(node, "register_hook"))

    def run_post_hooks(
        self, node: Any, results: list[torch.Tensor | None], received: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Run what is to run after a node; its results, as the hooks leave them."""
        for hook in _find_hooks(node, "register_hook").values():
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
            hooks = _find_hooks(node, "tensors").get(index)
            retaining = self._retains_grad.get((torch_autograd.sequence_number(node), index))
            tensor = retaining() if retaining is not None else None
            if tensor is not None:
                tensor.grad = gradient
        for hook in list((hooks or {}).values()):
            replaced = self._run(hook, gradient)
            if replaced is not None:
                gradient = replaced
        return gradient


def _table(node: Any, kind: str) -> dict[int, Any]:
    """A node's hooks of one kind, in a table that is freed with the node. C++ frees them so."""
    found: dict[int, Any] = node.metadata.setdefault(_KEYS[kind], {})
    return found


def _find_hooks(node: Any, kind: str) -> Mapping[int, Any]:
    """As `_table`, to be read."""
    found: Mapping[int, Any] = node.metadata.get(_KEYS[kind], _NONE)
    return found
