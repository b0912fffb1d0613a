"""The hooks of tensors and of nodes, before and after these: the engine runs them, and not the node."""

from __future__ import annotations

import ctypes
import dis
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.overrides

import fxmem
from fxmem._torch import autograd as torch_autograd
from fxmem._torch import wrappers as torch_wrappers
from fxmem._torch.autograd import is_sole_owner
from fxmem._torch.common import contiguous_strides
from fxmem.simulation.recording.observe.observer import Observer

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


# --- calls of torch's functions in Python that hold their arguments no longer than the functions do -------------------
# Where calls are observed, a function such as `gaussian_nll_loss` runs twice: once up to `handle_torch_function`, and
# within that for good. The first run and whatever is between hold the arguments until the call returns. A real run
# has one frame, which frees what it assigns to anew (`var = var.clone()`), if the caller gave it away.


_BETWEEN: Final = (os.path.dirname(fxmem.__file__) + os.sep, torch.overrides.__file__)
"""Where the frames between the two runs are from."""
_HELD_AS: Final = frozenset({"args", "kwargs", "shown", "relevant_args", "overloaded_args"})
"""Their variables that hold the arguments."""


def assigns_to_a_tensor(function: Any) -> bool:
    """Whether a function in Python assigns to one of its own arguments that may be a tensor."""
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tensors = {name for name in arguments if "Tensor" in str(function.__annotations__.get(name))}
    return any(not tensors.isdisjoint(_find_stored(each)) for each in dis.get_instructions(code))


def _find_stored(instruction: dis.Instruction) -> list[str]:
    """The variables that an instruction stores to; of Python 3.13 on are some of two, as `STORE_FAST_LOAD_FAST`."""
    if not instruction.opname.startswith("STORE_FAST"):
        return []
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return [name for part, name in zip(instruction.opname.split("_FAST"), names, strict=False) if "STORE" in part]


def call_unheld(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function from within `handle_torch_function`; neither its own first run nor we hold its arguments."""
    code = function.__code__
    frames = [sys._getframe(1)]
    while frames[-1].f_code is not code and frames[-1].f_code.co_filename.startswith(_BETWEEN) and frames[-1].f_back:
        frames.append(frames[-1].f_back)
    if frames[-1].f_code is not code:
        return function(*args, **kwargs)
    given = [*args, *kwargs.values()][::-1]
    call = _make_call(len(args), tuple(kwargs))
    del args, kwargs
    while frames:
        _drop(frames.pop(), code)
    return call(function, given)


def _drop(frame: types.FrameType, code: types.CodeType) -> None:
    """Set what holds arguments in a frame to None; in a run of `code`, all it has."""
    variables = frame.f_locals
    variables.update(dict.fromkeys(set(variables) if frame.f_code is code else _HELD_AS.intersection(variables)))
    if sys.version_info < (3, 13):  # from there on `f_locals` writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


@functools.cache
def _make_call(count: int, names: tuple[str, ...]) -> Callable[[Any, list[Any]], Any]:
    """Make `lambda function, given: function(given.pop(), ..., name=given.pop())`, whose arguments go to the function's
    frame. Of `function(*given)` the tuple stays as well."""
    arguments = ["given.pop()"] * count + [f"{name}=given.pop()" for name in names]
    made: Callable[[Any, list[Any]], Any] = eval(f"lambda function, given: function({', '.join(arguments)})")
    return made


# --- the tensors that autograd's nodes save for backward, and when they are freed -------------------------------------
# A node's saved tensors are packed under its number and freed when the node has run, unless the graph is retained
# (torch/csrc/autograd/saved_variable.h, `SavedVariable::reset_data`).


class SavedHandle:
    """One saved tensor in the autograd graph; empty once its node has run."""

    __slots__ = ("__weakref__", "hooks", "value")

    def __init__(self, value: Any, hooks: torch_autograd.Hooks) -> None:
        self.value: Any = value
        self.hooks: torch_autograd.Hooks | None = hooks

    def release(self) -> None:
        """Free the tensor, as C++ does when the node has run."""
        self.value = self.hooks = None


class SavedTensors:
    """The saved tensors of one thread's graph.

    Args:
        observer: told what is saved, and what the program's own unpack hooks return.
        program: around these hooks; knows the newest node when an op ran last.
    """

    def __init__(self, observer: Observer, program: Observer) -> None:
        self._observer, self._program = observer, program
        self._saved_by: dict[int, list[weakref.ref[SavedHandle]]] = {}
        self._unpacked: list[list[SavedHandle]] = []
        self._unpacking = 0

    def pack(self, hooks: torch_autograd.Hooks, tensor: torch.Tensor) -> SavedHandle:
        """The handle that autograd keeps for `tensor`, which the newest node saves."""
        # A node takes its number when it is made, just before it saves.
        number = torch_autograd.next_sequence_number() - 1
        if tensor.grad_fn is not None and self._is_output(tensor, number):
            number = torch_autograd.sequence_number(tensor.grad_fn)
            number = _saver_of_output(tensor.grad_fn) if torch_autograd.is_view(tensor) else number
            if hooks.change_nothing:
                # A node's own output: kept as it is, the node would keep itself alive. C++ keeps it without its
                # grad_fn; a hook of the program's gets it as it is (saved_variable.cpp), and may make such a cycle.
                tensor = torch_autograd.share_without_history(tensor)
        handle = SavedHandle(hooks.pack(tensor), hooks)
        reference = weakref.ref(handle)
        self._saved_by.setdefault(number, []).append(reference)
        self._observer.on_save(handle.value, reference)
        return handle

    def _is_output(self, tensor: torch.Tensor, newest: int) -> bool:
        """Whether what is packed is an output that its maker saves itself.

        The maker then is the newest node, or has made newer ones while it ran: those of the tangents in forward mode,
        those of an inner transform of torch.func. The newest has run then, while a node saves its inputs before it
        runs.
        """
        if torch_autograd.sequence_number(tensor.grad_fn) == newest:
            return True
        several = torch_autograd.is_forward_mode() or torch_wrappers.is_transformed(tensor)
        return several and self._program.newest_node_that_ran() == newest

    def unpack(self, handle: SavedHandle) -> Any:
        """The tensor, or what the program's own hook makes of what it saved.

        Raises:
            RuntimeError: as torch does, where the tensor has been freed.
        """
        # What an unpack hook itself unpacks (checkpoint's inputs) is another node's, and that one's to release.
        if self._unpacked and not self._unpacking:
            self._unpacked[-1].append(handle)
        if handle.hooks is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, after its saved tensors have been freed. "
                "Specify retain_graph=True."
            )
        self._unpacking += 1
        try:
            if handle.hooks.change_nothing:
                return handle.value
            with self._program.observe_unpack():
                found = handle.hooks.unpack(handle.value)
            self._observer.on_unpack(found)
            return found
        finally:
            self._unpacking -= 1

    def find_kept(self) -> Iterator[tuple[int, Any]]:
        """What is saved and not freed, with the number of its node; graphs that are no more are forgotten."""
        for number, references in list(self._saved_by.items()):
            handles = [handle for reference in references if (handle := reference()) is not None]
            if not handles:
                del self._saved_by[number]
            yield from ((number, handle.value) for handle in handles)

    def begin_node(self) -> None:
        """From here on, one node of the backward unpacks."""
        self._unpacked.append([])

    def end_node(self) -> list[SavedHandle]:
        """What the node that began last has unpacked."""
        return self._unpacked.pop()

    def release_unpacked(self) -> None:
        """Free what the node that began last has unpacked so far."""
        for handle in self._unpacked[-1] if self._unpacked else ():
            handle.release()

    def release(self, number: int, unpacked: list[SavedHandle]) -> None:
        """Free what the node with this number saved, and what it unpacked."""
        for handle in unpacked:
            handle.release()
        for reference in self._saved_by.pop(number, ()):
            kept = reference()
            if kept is not None:
                kept.release()


def _saver_of_output(maker: Any) -> int:
    """The number under which a node saves its own output, which `maker` made last.

    An in-place op on a view saves after autograd has rebuilt the view's `grad_fn` on top of the op's own node, a
    `CopySlices` (torch/csrc/autograd/variable.cpp, `grad_fn` and `rebase_history`).
    """
    last = number = torch_autograd.sequence_number(maker)
    while type(maker).__name__ != "CopySlices":
        maker, number = maker.next_functions[0][0] if maker.next_functions else None, number - 1
        if maker is None or torch_autograd.sequence_number(maker) != number:
            return last
    return number
